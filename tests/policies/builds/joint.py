"""Policies whose two transformers attend to each other layer by layer, and pi0-FAST, their relative."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.policies.builds.common import (
    PADDED,
    TOWER,
    Batch,
    Case,
    draw,
    features,
    loader,
    model_folder,
    observation,
    vla_batch,
    word_tokenizer,
)

PI_SIZE = 28
PI_VOCABULARY = 300


def smolvla(**options: Any) -> nn.Module:
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    folder = str(model_folder("smolvlm-small", _write_smolvlm))
    net = {"num_vlm_layers": 4, "num_steps": 2, "resize_imgs_with_padding": (32, 32)} | options
    config = SmolVLAConfig(device="cpu", vlm_model_name=folder, load_vlm_weights=False, **net, **PADDED, **features())
    return SmolVLAPolicy(config)


def _write_smolvlm(folder: Path) -> None:
    from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "vocab_size": 260,
        "pad_token_id": 0,
    }
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    ids = {"image_token_id": 1, "pad_token_id": 0}
    SmolVLMConfig(text_config={**text, **heads}, vision_config=vision, scale_factor=2, **ids).save_pretrained(folder)
    tokenizer = word_tokenizer(
        fake_image_token="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    images, videos = SmolVLMImageProcessor(), SmolVLMVideoProcessor()
    SmolVLMProcessor(image_processor=images, tokenizer=tokenizer, video_processor=videos).save_pretrained(folder)


def pi(kind: str, **options: Any) -> nn.Module:
    """pi0, pi05 or pi0_fast. Their sizes are fixed in the module, so the module's own names are replaced."""
    module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    _shrink(module)
    prefix = {"pi0": "PI0", "pi05": "PI05", "pi0_fast": "PI0Fast"}[kind]
    config = getattr(importlib.import_module(f"lerobot.policies.{kind}.configuration_{kind}"), f"{prefix}Config")
    options = PADDED | {"image_resolution": (PI_SIZE, PI_SIZE)} | options
    return getattr(module, f"{prefix}Policy")(config(device="cpu", **options, **features(size=(PI_SIZE, PI_SIZE))))


def _shrink(module: ModuleType) -> None:
    if hasattr(module, "_shrunk"):
        return
    module._shrunk = True
    gemma = module.GemmaConfig
    module.get_gemma_config = lambda variant: gemma(
        width=32 if variant == "gemma_2b" else 16, depth=2, mlp_dim=48, num_heads=8, num_kv_heads=1, head_dim=8
    )
    _change_config(module, "PaliGemmaForConditionalGenerationWithPiGemma", _small_paligemma)
    if hasattr(module, "PiGemmaForCausalLM"):
        _change_config(module, "PiGemmaForCausalLM", lambda config: setattr(config, "vocab_size", PI_VOCABULARY))


def _change_config(module: ModuleType, name: str, change: Callable[[Any], None]) -> None:
    original = getattr(module, name)

    def build(config: Any) -> nn.Module:
        change(config)
        return original(config=config)

    setattr(module, name, build)


def _small_paligemma(config: Any) -> None:
    vision, text = config.vision_config, config.text_config
    vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers, vision.num_attention_heads = 16, 24, 2, 2
    vision.patch_size, vision.image_size, vision.projection_dim = 14, PI_SIZE, text.hidden_size
    text.vocab_size = PI_VOCABULARY
    config.projection_dim = text.hidden_size
    config.image_token_index = config.image_token_id = PI_VOCABULARY - 1


def pi0_fast() -> nn.Module:
    """The text and action tokenizers come from the hub: words, and nothing."""
    module = importlib.import_module("lerobot.policies.pi0_fast.modeling_pi0_fast")
    module.AutoTokenizer, module.AutoProcessor = loader(word_tokenizer), loader(SimpleNamespace)
    return pi("pi0_fast", max_decoding_steps=3)


def pi_batch(n: int, seed: int) -> Batch:
    return vla_batch(n, seed, size=PI_SIZE)


def pi_fast_batch(n: int, seed: int) -> Batch:
    tokens = torch.randint(5, 80, (n, 5), generator=draw(seed + 900))
    return {
        **pi_batch(n, seed),
        "action.tokens": tokens,
        "action.token_mask": torch.ones_like(tokens, dtype=torch.bool),
    }


def small_batch(n: int, seed: int) -> Batch:
    return vla_batch(n, seed, size=32)


def small_observation(n: int, seed: int) -> Batch:
    return observation(small_batch(n, seed))


def pi_observation(n: int, seed: int) -> Batch:
    return observation(pi_batch(n, seed))


_PI_STUBS = "Gemma and SigLIP of two layers in place of the fixed sizes"

_SMOLVLA = Case(
    "smolvla",
    "smolvla",
    smolvla,
    small_batch,
    observe=small_observation,
    units=12,
    dtensors=124,
    tolerance=1e-6,
    stubbed="SmolVLM of four layers from a local folder",
)
_PI0 = Case(
    "pi0",
    "pi0",
    lambda: pi("pi0", num_inference_steps=2),
    pi_batch,
    observe=pi_observation,
    units=9,
    dtensors=90,
    tolerance=1e-6,
    reload=False,
    stubbed=_PI_STUBS,
)
CASES = [
    _SMOLVLA,
    replace(
        _SMOLVLA,
        name="smolvla_full",
        build=lambda: smolvla(train_expert_only=False, freeze_vision_encoder=False),
    ),
    replace(
        _SMOLVLA,
        name="smolvla_fewer_expert_layers",
        build=lambda: smolvla(train_expert_only=False, num_expert_layers=2, attention_mode="self_attn"),
        # The host's own inference fails with fewer expert than VLM layers.
        infer=(),
        units=10,
        dtensors=106,
    ),
    _PI0,
    # The policy's own checkpointing recomputes the layers of both stacks together, attention included.
    replace(
        _PI0,
        name="pi0_gradient_checkpointing",
        build=lambda: pi("pi0", num_inference_steps=2, gradient_checkpointing=True),
    ),
    replace(_PI0, name="pi05", policy="pi05", build=lambda: pi("pi05", num_inference_steps=2), dtensors=93),
    Case(
        "pi0_fast",
        "pi0_fast",
        pi0_fast,
        pi_fast_batch,
        infer=(),
        units=6,
        dtensors=60,
        reload=False,
        stubbed=f"{_PI_STUBS}, both tokenizers",
    ),
]
