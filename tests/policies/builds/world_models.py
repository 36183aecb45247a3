"""Policies that predict video together with actions."""

from dataclasses import replace

import torch
from torch import nn

from tests.policies.builds.common import ACTION, CAMERA, PAD, STATE, WIDTH, Batch, Case, draw, features

CONTEXT = 4


class SmallVAE(nn.Module):
    """In place of the frozen Wan VAE: 16x smaller in space, 4x in time, 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(0.5 * torch.randn(8, 3, generator=draw(3)))

    def encode(self, video: torch.Tensor | list[torch.Tensor], **_: object) -> torch.Tensor:
        video = torch.stack(list(video)) if isinstance(video, (list, tuple)) else video
        small = nn.functional.avg_pool3d(video[:, :, ::4], (1, 16, 16))
        return torch.einsum("zc,bcthw->bzthw", self.mix, small)


def fastwam(**options: bool) -> nn.Module:
    import lerobot.policies.fastwam.modeling_fastwam as module
    from lerobot.policies.fastwam.configuration_fastwam import FastWAMConfig

    module.build_wan_tokenizer = module.load_pretrained_wan_text_encoder = lambda **_: None
    module.load_pretrained_wan_vae = lambda **_: SmallVAE()
    heads = {"num_heads": 2, "attn_head_dim": 16, "num_layers": 2, "freq_dim": 16, "text_dim": 24, "eps": 1e-6}
    video = {
        "patch_size": [1, 2, 2],
        "in_dim": 8,
        "out_dim": 8,
        "hidden_dim": 32,
        "ffn_dim": 48,
        "seperated_timestep": True,
        **heads,
    }
    video |= {"video_attention_mask_mode": "first_frame_causal", "action_group_causal_mask_mode": "group_diagonal"}
    video |= {"action_conditioned": False, "action_dim": WIDTH}
    action = {"action_dim": WIDTH, "hidden_dim": 16, "ffn_dim": 32, **heads}
    window = {
        "action_horizon": 8,
        "n_action_steps": 8,
        "num_video_frames": 17,
        "action_video_freq_ratio": 4,
        "num_inference_steps": 2,
    }
    sizes = {
        "action_dim": WIDTH,
        "proprio_dim": WIDTH,
        "image_size": (32, 64),
        "context_len": CONTEXT,
        "torch_dtype": "float32",
    }
    config = FastWAMConfig(
        device="cpu",
        base_model_id=None,
        load_text_encoder=False,
        video_dit_config=video,
        action_dit_config=action,
        **window,
        **sizes,
        **options,
        **features(size=(32, 64)),
    )
    return module.FastWAMPolicy(config)


def fastwam_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    context = {
        "context": torch.randn(n, CONTEXT, 24, generator=g),
        "context_mask": torch.ones(n, CONTEXT, dtype=torch.bool),
    }
    seen = {CAMERA: torch.rand(n, 5, 3, 32, 64, generator=g), STATE: torch.randn(n, WIDTH, generator=g)}
    return {**seen, **context, ACTION: torch.randn(n, 8, WIDTH, generator=g), PAD: torch.zeros(n, 8, dtype=torch.bool)}


def fastwam_observe(n: int, seed: int) -> Batch:
    batch = fastwam_batch(n, seed)
    return {CAMERA: batch[CAMERA][:, 0], **{key: batch[key] for key in (STATE, "context", "context_mask")}}


def lingbot_va(*, dtype: str = "bfloat16") -> nn.Module:
    """Plain attention instead of the flex kernel, and latents instead of what VAE and UMT5 make of a batch."""
    import lerobot.policies.lingbot_va.utils as utils
    from lerobot.policies.lingbot_va.configuration_lingbot_va import LingBotVAConfig
    from lerobot.policies.lingbot_va.modeling_lingbot_va import LingBotVAPolicy

    def attend(_self: nn.Module, *qkv: torch.Tensor, **__: object) -> torch.Tensor:
        query, key, value = (x.transpose(1, 2) for x in qkv[:3])
        mixed = nn.functional.scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value)
        return mixed.transpose(1, 2)

    utils.FlexAttnFunc.forward = attend
    utils.FlexAttnFunc.init_mask = staticmethod(lambda *_, **__: None)
    net = {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "num_layers": 2,
        "ffn_dim": 48,
        "freq_dim": 16,
        "text_dim": 24,
    }
    sizes = {"in_channels": 8, "out_channels": 8, "action_dim": 8, "action_per_frame": 2, "frame_chunk_size": 2}
    sizes |= {"used_action_channel_ids": list(range(WIDTH)), "obs_cam_keys": [CAMERA], "attn_mode": "flex"}
    policy = LingBotVAPolicy(LingBotVAConfig(device="cpu", dtype=dtype, **net, **sizes, **features()))
    policy._frozen = {"vae": None}
    policy._build_training_streams = lambda batch: (
        *(batch[key].to(policy.dtype) for key in ("latents", "moves")),
        torch.ones_like(batch["moves"], dtype=policy.dtype),
        batch["text"].to(policy.dtype),
    )
    return policy


def lingbot_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    shapes = {"latents": (n, 8, 2, 4, 4), "moves": (n, 8, 2, 2, 1), "text": (n, 4, 24)}
    return {key: torch.randn(shape, generator=g) for key, shape in shapes.items()}


_FASTWAM = Case(
    "fastwam",
    "fastwam",
    fastwam,
    fastwam_batch,
    observe=fastwam_observe,
    units=2,
    dtensors=139,
    tolerance=1e-6,
    reload=False,
    stubbed="the VAE; no text encoder and tokenizer",
)
CASES = [
    _FASTWAM,
    replace(_FASTWAM, name="fastwam_frozen_video", build=lambda: fastwam(freeze_video_expert=True)),
    Case(
        "lingbot_va",
        "lingbot_va",
        lingbot_va,
        lingbot_batch,
        infer=(),
        units=2,
        dtensors=83,
        reload=False,
        bf16_only="against unsharded bf16: its host has no fp32 loss",
        # One bf16 ulp of a gradient near zero turns AdamW's step around.
        tolerance=2.5e-3,
        stubbed="flex attention, VAE and UMT5",
    ),
]
