"""Policies that call every layer of a vision-language model as it was meant to be called."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.policies.builds.common import (
    ACTION,
    CAMERA,
    CHUNK,
    PAD,
    PADDED,
    STATE,
    TOWER,
    WIDTH,
    WINDOW,
    WRIST,
    Batch,
    Case,
    actions,
    draw,
    features,
    model_folder,
    observation,
    vla_batch,
    word_tokenizer,
)

ACTION_START, ACTION_END, ACTION_TOKENS = 181, 182, range(183, 189)
"""Words of MolmoAct2 that no training batch holds; the end of the actions is the end of the text."""


def xvla() -> nn.Module:
    from lerobot.policies.xvla.configuration_xvla import XVLAConfig
    from lerobot.policies.xvla.modeling_xvla import XVLAPolicy

    vision = {
        "embed_dim": [16, 16],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "depths": [1, 1],
        "patch_size": [7, 3],
        "window_size": 4,
    }
    vision |= {"patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True], "projection_dim": 32}
    vision |= {"max_temporal_embeddings": 10, "max_position_embeddings": 10}
    text = {
        "model_type": "bart",
        "vocab_size": 200,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_ffn_dim": 48,
    }
    text |= {
        "decoder_ffn_dim": 48,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 128,
    }
    text |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    florence = {"vision_config": vision, "text_config": text, "image_token_id": 199}
    net = {
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 2,
        "num_domains": 3,
        "len_soft_prompts": 4,
        "max_len_seq": 256,
        "dim_time": 8,
    }
    net |= {"florence_config": florence, "action_mode": "auto", "num_denoising_steps": 2}
    return XVLAPolicy(XVLAConfig(device="cpu", **net, **PADDED, **features(size=(64, 64), cameras=(CAMERA, WRIST))))


def xvla_batch(n: int, seed: int) -> Batch:
    return {**vla_batch(n, seed, size=64, chunk=CHUNK, cameras=(CAMERA, WRIST)), "domain_id": torch.arange(n) % 3}


def xvla_observe(n: int, seed: int) -> Batch:
    return {key: value for key, value in xvla_batch(n, seed).items() if key not in (ACTION, PAD)}


def evo1(stage: str) -> nn.Module:
    from lerobot.policies.evo1.configuration_evo1 import Evo1Config
    from lerobot.policies.evo1.modeling_evo1 import Evo1Policy

    vlm = {
        "vlm_model_name": str(model_folder("internvl-small", _write_internvl)),
        "vlm_num_layers": 2,
        "vlm_dtype": "float32",
    }
    vlm |= {"use_flash_attn": False, "image_resolution": (28, 28), "max_views": 1}
    net = {
        "embed_dim": 64,
        "hidden_dim": 64,
        "state_hidden_dim": 32,
        "num_heads": 2,
        "num_layers": 2,
        "num_inference_timesteps": 2,
    }
    return Evo1Policy(Evo1Config(device="cpu", training_stage=stage, **vlm, **net, **PADDED, **features(size=(28, 28))))


def _write_internvl(folder: Path) -> None:
    from transformers import InternVLConfig, InternVLModel

    tokenizer = word_tokenizer(context_image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>")
    vision = {**TOWER, "image_size": [28, 28], "patch_size": [7, 7]}
    text = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "vocab_size": 260,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    image = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
    }
    InternVLModel(InternVLConfig(vision_config=vision, text_config=text, **image)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def evo1_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    seen = {
        STATE: torch.randn(n, WIDTH, generator=g),
        CAMERA: torch.rand(n, 3, 28, 28, generator=g),
        "task": ["w1 w2 w3"] * n,
    }
    return {**seen, **actions(n, CHUNK, g)}


def molmoact2() -> nn.Module:
    from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
    from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy

    net = {"num_flow_timesteps": 2, "model_dtype": "float32"}
    folder = str(model_folder("molmoact2-small", _write_molmoact2))
    return MolmoAct2Policy(
        MolmoAct2Config(device="cpu", checkpoint_path=folder, **net, **WINDOW, **features(size=(28, 28)))
    )


def _write_molmoact2(folder: Path) -> None:
    import lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 as configs
    from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import MolmoAct2ForConditionalGeneration

    heads = {"num_key_value_heads": 2, "head_dim": 16}
    text = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 200,
        "additional_vocab_size": 8,
        "num_hidden_layers": 2,
    }
    text |= {"intermediate_size": 80, "max_position_embeddings": 256, "rope_theta": 10000.0}
    vision = {**TOWER, "image_default_input_size": (28, 28), "image_num_pos": 5}
    adapter = {
        "vit_layers": (-1,),
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "text_hidden_size": 64,
    }
    expert = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_multiple_of": 16, "timestep_embed_dim": 16}
    names = ("image_patch_id", "image_start_token_id", "image_end_token_id", "image_col_id", "image_low_res_id")
    config = configs.MolmoAct2Config(
        text_config=configs.MolmoAct2TextConfig(**text, **heads),
        vit_config=configs.MolmoAct2VitConfig(**vision, **heads),
        adapter_config=configs.MolmoAct2AdapterConfig(**adapter, **heads),
        action_expert_config=configs.MolmoAct2ActionExpertConfig(**expert),
        max_action_horizon=CHUNK,
        action_start_token_id=ACTION_START,
        action_end_token_id=ACTION_END,
        eos_token_id=ACTION_END,
        action_token_start_id=ACTION_TOKENS.start,
        num_action_tokens=len(ACTION_TOKENS),
        **{name: 190 + i for i, name in enumerate(names)},
    )
    MolmoAct2ForConditionalGeneration(config).save_pretrained(folder)


def molmoact2_batch(n: int, seed: int) -> Batch:
    """Text only; six of the 32 action dims are in use."""
    g = draw(seed)
    ids = torch.randint(4, 180, (n, 10), generator=g)
    moved = nn.functional.pad(torch.randn(n, CHUNK, WIDTH, generator=g), (0, 32 - WIDTH))
    unused = (torch.arange(32) >= WIDTH).expand(n, 32).clone()
    text: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    text["labels"] = ids.masked_fill(torch.arange(10) < 5, -100)
    return {
        **text,
        ACTION: moved,
        "action_horizon_is_pad": torch.zeros(n, CHUNK, dtype=torch.bool),
        "action_dim_is_pad": unused,
    }


_EVO1 = Case(
    "evo1_stage1",
    "evo1",
    lambda: evo1("stage1"),
    evo1_batch,
    observe=lambda n, s: observation(evo1_batch(n, s)),
    units=8,
    dtensors=108,
    stubbed="InternVL of three layers from a local folder",
)
CASES = [
    # Of two samples, bf16's rounding alone moves the loss by up to 1.6 %, either way; of 16 by up to 0.7 %.
    Case("xvla", "xvla", xvla, xvla_batch, observe=xvla_observe, units=6, dtensors=149, ties=1, samples=16),
    _EVO1,
    replace(_EVO1, name="evo1_stage2", build=lambda: evo1("stage2")),
    Case(
        "molmoact2",
        "molmoact2",
        molmoact2,
        molmoact2_batch,
        infer=(),
        units=6,
        dtensors=108,
        stubbed="MolmoAct2 of two layers from a local folder, text-only batches",
    ),
]
