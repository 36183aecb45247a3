"""A small policy of the host with everything in it that goes wrong under sharding, in under ten thousand numbers.

Its pieces, by their names in `named_modules`:

- `embed`, `head`: one tied weight, used at both ends;
- `blocks.*`: ordinary blocks (`ToyBlock`) that are called;
- `joint`: two stacks, as in pi0; a helper calls the leaves of their layers, never a layer. The last prefix layer's
  output is not used, though its keys and values are;
- `unused`: trainable, never gets a gradient; `frozen`: used, does not train; `target`: frozen, moved by `update()`;
- norms (`ToyNorm`) that stay in float32 when the body is bfloat16, and note the dtype that they computed in;
- `scale`, a persistent buffer drawn at random, `offset`, one that no checkpoint has; both change the output;
- `update_count`, an integer buffer without dims; `gain`, a trainable parameter without dims; `small`, 3 rows.

The host finds the classes here by its naming convention: `--policy.type=toy_nasty`.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig
from lerobot.optim.optimizers import SGDConfig
from lerobot.optim.schedulers import CosineDecayWithWarmupSchedulerConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import make_default_pre_post_processors
from torch import Tensor, nn

STATE, ENV, ACTION = "observation.state", "observation.environment_state", "action"
VOCABULARY = 12
DEPTH = 2

TOY_PLAN = {
    "units": ["ToyBlock"],
    "groups": [
        [f"joint.{stack}.{{i}}.{leaf}" for leaf in ("norm", "q", "k", "v", "o", "mlp")]
        for stack in ("prefix", "suffix")
    ],
    "modules": ["unused", "state_proj"],
    "keep_in_root": ["embed", "head"],
    "keep_gathered": [f"joint.prefix.{DEPTH - 1}.*"],
}
"""Which parts form units: class names, groups of leaves ({i} takes every index present), single modules; `embed` and
`head` share a weight, so the root keeps both; the last prefix layer gets no call back in backward."""


@PreTrainedConfig.register_subclass("toy_nasty")
@dataclass
class ToyNastyConfig(PreTrainedConfig):
    """`optimizer` is "adamw" or "sgd"; a number of `scheduler_warmup_steps` switches a cosine schedule on."""

    dim: int = 16
    chunk_size: int = 4
    n_action_steps: int = 2
    body_dtype: str = "float32"
    dropout: float = 0.0
    optimizer: str = "adamw"
    optimizer_lr: float = 1e-2
    optimizer_weight_decay: float = 1e-2
    grad_clip_norm: float = 10.0
    scheduler_warmup_steps: int | None = None
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "STATE": NormalizationMode.MEAN_STD,
            "ENV": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.MEAN_STD,
            "VISUAL": NormalizationMode.IDENTITY,
        }
    )

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> OptimizerConfig:
        config = {"adamw": AdamWConfig, "sgd": SGDConfig}[self.optimizer]
        return config(
            lr=self.optimizer_lr, weight_decay=self.optimizer_weight_decay, grad_clip_norm=self.grad_clip_norm
        )

    def get_scheduler_preset(self) -> LRSchedulerConfig | None:
        if self.scheduler_warmup_steps is None:
            return None
        return CosineDecayWithWarmupSchedulerConfig(
            num_warmup_steps=self.scheduler_warmup_steps,
            num_decay_steps=1000,
            peak_lr=self.optimizer_lr,
            decay_lr=self.optimizer_lr / 10,
        )

    def validate_features(self) -> None:
        if STATE not in (self.input_features or {}) or ENV not in self.input_features:
            raise ValueError(f"toy_nasty needs {STATE} and {ENV}")


class ToyNorm(nn.Module):
    """A layer norm that computes in float32; `seen_dtype` is the dtype that its weight had in the last call."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.seen_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen_dtype = self.weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            y = F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), self.bias.float())
        return y.to(x.dtype)


class ToyBlock(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = ToyNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class ToyJointLayer(nn.Module):
    """Holds the leaves of one layer of one stack; `ToyJoint` calls them, nobody calls this."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = ToyNorm(dim)
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("a joint layer is never called, its leaves are")


class ToyJoint(nn.Module):
    """Two stacks that attend to each other layer by layer; returns the suffix alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.prefix = nn.ModuleList(ToyJointLayer(dim) for _ in range(DEPTH))
        self.suffix = nn.ModuleList(ToyJointLayer(dim) for _ in range(DEPTH))

    def forward(self, prefix: Tensor, suffix: Tensor) -> Tensor:
        for layers in zip(self.prefix, self.suffix, strict=True):
            prefix, suffix = _joint_layer(layers, (prefix, suffix))
        return suffix


def _joint_layer(layers: tuple[ToyJointLayer, ...], streams: tuple[Tensor, ...]) -> list[Tensor]:
    normed = [layer.norm(x) for layer, x in zip(layers, streams, strict=True)]
    q, k, v = (
        torch.cat([getattr(layer, name)(x) for layer, x in zip(layers, normed, strict=True)], dim=1)
        for name in ("q", "k", "v")
    )
    mixed = F.scaled_dot_product_attention(q, k, v).split([x.shape[1] for x in streams], dim=1)
    out = []
    for layer, x, y in zip(layers, streams, mixed, strict=True):
        x = x + layer.o(y)
        out.append(x + layer.mlp(x))
    return out


class ToyNastyPolicy(PreTrainedPolicy):
    """See the module's text. The loss is a mean of fixed-size terms in float32: equal parts average to the whole."""

    config_class = ToyNastyConfig
    name = "toy_nasty"

    def __init__(self, config: ToyNastyConfig, **_: object) -> None:
        super().__init__(config)
        config.validate_features()
        dim, features = config.dim, config.input_features
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.state_proj = nn.Linear(features[STATE].shape[0], dim)
        self.env_proj = nn.Linear(features[ENV].shape[0], dim)
        if config.image_features:
            self.image_proj = nn.Linear(3 * 2 * 2, dim)
        self.blocks = nn.ModuleList(ToyBlock(dim, config.dropout) for _ in range(DEPTH))
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)
        self.unused = nn.Linear(dim, dim)
        self.joint = ToyJoint(dim)
        self.small = nn.Parameter(0.3 * torch.randn(3, dim))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.queries = nn.Parameter(0.5 * torch.randn(config.chunk_size, dim))
        self.out = nn.Linear(dim, config.action_feature.shape[0])
        self.target = nn.Linear(dim, config.action_feature.shape[0]).requires_grad_(False)
        self.target.load_state_dict(self.out.state_dict())
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", 0.5 + torch.rand(dim))
        self.register_buffer("offset", torch.linspace(0.1, 0.9, dim), persistent=False)
        self.register_buffer("update_count", torch.tensor(0))
        self._cast_body(getattr(torch, config.body_dtype))
        self.reset()

    def _cast_body(self, dtype: torch.dtype) -> None:
        norms = {id(p) for m in self.modules() if isinstance(m, ToyNorm) for p in m.parameters()}
        for parameter in self.parameters():
            if id(parameter) not in norms:
                parameter.data = parameter.data.to(dtype)

    def get_optim_params(self) -> list[dict]:
        """Two groups: norms and the gain do not decay."""
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        plain = [name for name in trained if ".norm." in name or name == "gain"]
        return [
            {"params": [p for name, p in trained.items() if name not in plain]},
            {"params": [trained[name] for name in plain], "weight_decay": 0.0},
        ]

    def reset(self) -> None:
        self._queue: deque[Tensor] = deque(maxlen=self.config.n_action_steps)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict]:
        """Returns the loss, mean squared error of the action chunk plus a token loss, and nothing to log."""
        tokens, actions, logits = self._run(batch)
        mse = F.mse_loss(actions.float(), batch[ACTION].float())
        guess = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        return mse + 0.1 * guess, {}

    @torch.no_grad()
    def update(self) -> None:
        """Called after each optimizer step: counts it and moves `target` towards `out`, elementwise."""
        self.update_count += 1
        for mean, parameter in zip(self.target.parameters(), self.out.parameters(), strict=True):
            mean.mul_(0.9).add_(parameter, alpha=0.1)

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor], **_: object) -> Tensor:
        """Actions of shape (batch, chunk, action)."""
        self.eval()
        return self._run(batch)[1].float()

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], **_: object) -> Tensor:
        """The next action of each sample, from a queue that is filled every `n_action_steps` calls."""
        if not self._queue:
            chunk = self.predict_action_chunk(batch)
            self._queue.extend(chunk[:, : self.config.n_action_steps].transpose(0, 1))
        return self._queue.popleft()

    def norm_dtypes(self) -> set[torch.dtype | None]:
        """The dtypes in which norms held their weights in the last forward."""
        return {m.seen_dtype for m in self.modules() if isinstance(m, ToyNorm)}

    def _run(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens (batch, state), actions (batch, chunk, action) and logits (batch, state, vocabulary)."""
        tokens = (batch[STATE].float() * 3).floor().long() % VOCABULARY
        x = torch.cat([self.embed(tokens), *self._observe(batch)], dim=1)
        x = x * self.scale.to(x.dtype) + self.offset.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        x = x + self.gain * self.frozen(x.to(self.frozen.weight.dtype))
        small = self.small.to(x.dtype)
        x = x + torch.tanh(x @ small.T) @ small
        queries = self.queries.to(x.dtype).expand(x.shape[0], -1, -1)
        logits = self.head(x[:, : tokens.shape[1]].to(self.head.weight.dtype))
        return tokens, self.out(self.joint(x, queries)), logits

    def _observe(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """One token of shape (batch, 1, dim) for the state, the environment and each camera."""
        dtype = self.state_proj.weight.dtype
        parts = [self.state_proj(batch[STATE].to(dtype)), self.env_proj(batch[ENV].to(dtype))]
        for key in self.config.image_features:
            pooled = F.adaptive_avg_pool2d(batch[key].float(), 2).flatten(1)
            parts.append(self.image_proj(pooled.to(dtype)))
        return [part[:, None] for part in parts]


def make_toy_nasty_pre_post_processors(config: ToyNastyConfig, dataset_stats: dict | None = None) -> tuple:
    """The host's default pipelines, found by this name."""
    return make_default_pre_post_processors(config, dataset_stats, normalizer_device=config.device)


def make_toy(seed: int = 0, **config: object) -> ToyNastyPolicy:
    """Builds the policy on CPU with weights that follow from the seed alone; the caller's generator is untouched."""
    cfg = ToyNastyConfig(
        device="cpu",
        push_to_hub=False,
        input_features={
            STATE: PolicyFeature(FeatureType.STATE, (6,)),
            ENV: PolicyFeature(FeatureType.ENV, (4,)),
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (6,))},
        **config,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ToyNastyPolicy(cfg)


def toy_batch(n: int, seed: int = 0, chunk_size: int = 4) -> dict[str, Tensor]:
    """`n` samples as the preprocessor would hand them over; slice every value for a rank's part."""
    draw = torch.Generator().manual_seed(seed)
    return {
        STATE: torch.randn(n, 6, generator=draw),
        ENV: torch.randn(n, 4, generator=draw),
        ACTION: torch.randn(n, chunk_size, 6, generator=draw),
    }
