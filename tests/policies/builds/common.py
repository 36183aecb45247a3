"""What all tiny builds are made of: features, random batches, stand-ins for what the hub would give."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from torch import Tensor, nn

STATE, ACTION, PAD, CAMERA = "observation.state", "action", "action_is_pad", "observation.images.top"
WRIST = "observation.images.wrist"
TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"
WIDTH, CHUNK = 6, 4
WINDOW = {"chunk_size": CHUNK, "n_action_steps": CHUNK}
PADDED = {**WINDOW, "max_state_dim": 8, "max_action_dim": 8}
"""For policies that pad state and actions to a fixed width."""
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
"""A small transformer, in the words of its library."""
FOLDERS = "TINY_MODELS"
"""The variable with the directory for tiny model folders."""

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One policy in a small build, and what must come out of it.

    Attributes:
        policy: the host's type, the key of the plan.
        build: makes the policy; random numbers from torch's global generator.
        batch: `(size, seed)` to a training batch; `observe` to an inference batch, where it differs.
        units, dtensors: expected numbers of units besides the root and of sharded parameters, both counted once
            by hand from the policy's printed structure.
        infer: methods compared with the unsharded policy.
        tolerance: largest difference of a parameter after two updates; 0 is bit-equal.
        samples: of a rank's training batch.
        bf16_build: `build` for bf16, where the policy's own config decides on it too.
        reload: whether the host's `from_pretrained` can read the result here; else `load_state_dict` does.
        ties: how many weights have several names.
        batch_norm: whether it keeps running statistics, which a reference of one process updates more often.
        bf16_only: why there is no fp32 loss, for the support matrix.
        stubbed: what stands in for something that needs the hub or a GPU, for the support matrix.
        loss: a policy's loss, where `policy(batch)[0]` is none.
    """

    name: str
    policy: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    units: int
    dtensors: int
    observe: Callable[[int, int], Batch] | None = None
    infer: tuple[str, ...] = ("select_action", "predict_action_chunk")
    tolerance: float = 0.0
    samples: int = 2
    bf16_build: Callable[[], nn.Module] | None = None
    reload: bool = True
    ties: int = 0
    batch_norm: bool = False
    bf16_only: str = ""
    stubbed: str = ""
    loss: Callable[[nn.Module, Batch], Tensor] = field(default=lambda policy, batch: policy(batch)[0])

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16_only else "no"


def features(
    *, state: int = WIDTH, size: tuple[int, int] | None = (32, 32), cameras: tuple[str, ...] = (CAMERA,)
) -> dict[str, dict]:
    inputs = {STATE: PolicyFeature(FeatureType.STATE, (state,))} if state else {}
    if size is not None:
        inputs |= {camera: PolicyFeature(FeatureType.VISUAL, (3, *size)) for camera in cameras}
    return {"input_features": inputs, "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (WIDTH,))}}


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(77_000 + seed)


def actions(n: int, chunk: int, generator: torch.Generator, width: int = WIDTH) -> Batch:
    return {ACTION: torch.randn(n, chunk, width, generator=generator), PAD: torch.zeros(n, chunk, dtype=torch.bool)}


def language(n: int, generator: torch.Generator, length: int = 6) -> Batch:
    tokens = torch.randint(5, 80, (n, length), generator=generator)
    return {TOKENS: tokens, TOKEN_MASK: torch.ones_like(tokens, dtype=torch.bool)}


def vla_batch(n: int, seed: int, *, size: int, chunk: int = 4, cameras: tuple[str, ...] = (CAMERA,)) -> Batch:
    """State, cameras, language and an action chunk, as the processors of a vision-language policy leave them."""
    g = draw(seed)
    images = {camera: torch.rand(n, 3, size, size, generator=g) for camera in cameras}
    return {STATE: torch.randn(n, WIDTH, generator=g), **images, **language(n, g), **actions(n, chunk, g)}


def observation(batch: Batch) -> Batch:
    """What is left of a training batch at inference."""
    return {key: value for key, value in batch.items() if key.startswith("observation") or key == "task"}


def newest(batch: Batch) -> Batch:
    """An observation without its time dim, for policies that stack observations themselves."""
    return {key: value[:, 0] if key in (STATE, CAMERA) else value for key, value in observation(batch).items()}


def make(case: Case, seed: int) -> nn.Module:
    """The case's policy with weights that follow from the seed; what it starts at zero gets small numbers, so that
    gradients flow everywhere."""
    torch.manual_seed(seed)
    policy = case.build()
    with torch.no_grad():
        for param in policy.parameters():
            if param.is_floating_point() and not param.any():
                param.normal_(std=0.03)
    return policy


def model_folder(name: str, write: Callable[[Path], None]) -> Path:
    """A local model folder, written once a session; the first world that needs it has one process."""
    folder = Path(os.environ[FOLDERS]) / name
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            write(partial)
        partial.rename(folder)
    return folder


def loader(make_it: Callable[[], Any]) -> SimpleNamespace:
    """Stands in for a class whose `from_pretrained` would ask the hub."""
    return SimpleNamespace(from_pretrained=lambda *_, **__: make_it())


def word_tokenizer(**special: str) -> Any:
    """A tokenizer of 200 words, w0 to w195 and four special ones; `special` adds named tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{i}" for i in range(196))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    base = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=special, **base)
