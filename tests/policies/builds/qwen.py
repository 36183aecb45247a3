"""Policies on Qwen vision-language models."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tests.policies.builds.common import (
    ACTION,
    CAMERA,
    CHUNK,
    PAD,
    PADDED,
    STATE,
    WIDTH,
    WINDOW,
    Batch,
    Case,
    actions,
    draw,
    features,
    loader,
    model_folder,
    observation,
    word_tokenizer,
)

IMAGE, VIDEO, VISION_START, VISION_END = 250, 251, 252, 253
STATE_TOKEN, ACTION_TOKEN = 254, 255
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def qwen25() -> dict[str, Any]:
    """The config of a Qwen2.5-VL of two and two layers, with a tied head."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**_TEXT, "num_hidden_layers": 2, "vocab_size": 260, "rope_parameters": rope}
    vision = {**_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **_IDS}


def qwen3(*, vocabulary: int = 260, layers: int = 3) -> Any:
    """The config of a Qwen3-VL, with a tied head."""
    from transformers import Qwen3VLConfig

    rope = {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True, "rope_theta": 10000.0}
    text = {**_TEXT, "num_hidden_layers": layers, "head_dim": 16, "vocab_size": vocabulary, "rope_parameters": rope}
    vision = {**_VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **_IDS)


def qwen_inputs(n: int, g: torch.Generator, *, patch: int, tail: list[int], vocabulary: int = 240) -> Batch:
    """Five words, one image of 4 x 4 patches (four tokens after merging) and a tail of token ids for each sample."""
    image = [VISION_START, *[IMAGE] * 4, VISION_END]
    words = torch.randint(4, vocabulary, (n, 5), generator=g)
    ids = torch.cat([words, torch.tensor([image + tail] * n)], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(n * 16, 3 * 2 * patch * patch, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * n),
    }


def eo1() -> nn.Module:
    """Both a pretrained path and a VLM config: a random build, without a look at the hub."""
    from lerobot.policies.eo1.configuration_eo1 import EO1Config
    from lerobot.policies.eo1.modeling_eo1 import EO1Policy
    from transformers import Qwen2_5_VLConfig

    vlm, net = Qwen2_5_VLConfig(**qwen25()).to_dict(), {"dtype": "float32", "num_denoise_steps": 2}
    config = EO1Config(device="cpu", vlm_config=vlm, **net, **PADDED, **features(size=(56, 56)))
    config.pretrained_path = "local"
    return EO1Policy(config)


def eo1_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    text = qwen_inputs(n, g, patch=14, tail=[STATE_TOKEN, *[ACTION_TOKEN] * CHUNK])
    ids = {"state_token_id": STATE_TOKEN, "action_token_id": ACTION_TOKEN}
    return {**text, **ids, STATE: torch.randn(n, WIDTH, generator=g), **actions(n, CHUNK, g)}


def without_actions(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key not in (ACTION, PAD)}


def groot(*, use_bf16: bool = False, **options: Any) -> nn.Module:
    from lerobot.policies.groot.configuration_groot import GrootConfig
    from lerobot.policies.groot.modeling_groot import GrootPolicy

    folder = model_folder("groot-n1.7-small", _write_groot)
    net = {"base_model_path": str(folder), "use_bf16": use_bf16} | options
    return GrootPolicy(GrootConfig(device="cpu", **net, **PADDED, **features(size=(64, 64))))


def _write_groot(folder: Path) -> None:
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config

    backbone = model_folder("qwen3-vl-small", lambda path: qwen3().save_pretrained(path))
    block = {"positional_embeddings": None, "dropout": 0.2, "final_dropout": True, "attention_head_dim": 16}
    dit = {
        **block,
        "num_layers": 4,
        "num_attention_heads": 2,
        "output_dim": 32,
        "norm_type": "ada_norm",
        "interleave_self_attention": True,
    }
    sizes = {
        "hidden_size": 32,
        "input_embedding_dim": 32,
        "backbone_embedding_dim": 64,
        "max_seq_len": 64,
        "max_num_embodiments": 4,
    }
    config = GR00TN17Config(
        model_name=str(backbone),
        select_layer=2,
        action_horizon=CHUNK,
        max_state_dim=8,
        max_action_dim=8,
        num_inference_timesteps=2,
        diffusion_model_cfg=dit,
        vl_self_attention_cfg={**block, "num_layers": 2, "num_attention_heads": 4},
        **sizes,
    )
    GR00TN17(config, load_backbone_weights=False).save_pretrained(folder)


def groot_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    done = {"action": torch.randn(n, CHUNK, 8, generator=g), "action_mask": torch.ones(n, CHUNK, 8)}
    seen = {"state": torch.randn(n, 1, 8, generator=g), "embodiment_id": torch.arange(n) % 4}
    return {**qwen_inputs(n, g, patch=16, tail=[]), **seen, **done}


def wall_x() -> nn.Module:
    """Its own from_pretrained and its preprocessing (images, text, tokens) are replaced; weights start in fp32."""
    import lerobot.policies.wall_x.modeling_wall_x as module
    from lerobot.policies.wall_x.configuration_wall_x import WallXConfig

    original = getattr(module, "_original_model", module.Qwen2_5_VLMoEForAction)
    module._original_model = original
    config = wall_x_config(qwen25(), experts=(80, 48), arm=8)
    module.Qwen2_5_VLMoEForAction = loader(lambda: original(config, processor=_wall_x_processor()))
    original.to_bfloat16_for_selected_params = lambda self: None
    policy = module.WallXPolicy(WallXConfig(device="cpu", **PADDED, **features(size=(56, 56))))
    policy.preprocess_inputs = lambda batch, **_: dict(batch)
    return policy


def wall_x_config(vlm: dict[str, Any], *, experts: tuple[int, int], arm: int) -> Any:
    """The config of wall_x on a Qwen2.5-VL.

    Args:
        experts: their intermediate sizes.
        arm: number of action dims.
    """
    from lerobot.policies.wall_x.qwen_model.configuration_qwen2_5_vl import Qwen2_5_VLConfig
    from transformers import Qwen2_5_VLConfig as Base

    base, width = Base(**vlm).to_dict(), vlm["text_config"]["hidden_size"]
    sizes = [{"hidden_size": width, "intermediate_size": size, "hidden_act": "silu"} for size in experts]
    moe = {"num_experts": 2, "experts": sizes, "mlp_moe": True, "dim_inputs": [width] * 2, "dof_config": {"arm": arm}}
    text = {key: value for key, value in base["text_config"].items() if key != "model_type"} | moe
    config = Qwen2_5_VLConfig(text_config=text, vision_config=base["vision_config"], tie_word_embeddings=True, **_IDS)
    config.agent_pos_config = {"arm": arm}
    return config


def _wall_x_processor() -> SimpleNamespace:
    special = {"<|propri|>": STATE_TOKEN, "<|action|>": ACTION_TOKEN}
    tokenizer = SimpleNamespace(
        convert_tokens_to_ids=lambda token: special.get(token, 1), pad_token_id=0, init_kwargs={}
    )
    return SimpleNamespace(tokenizer=tokenizer)


def wall_x_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    text = qwen_inputs(n, g, patch=14, tail=[STATE_TOKEN, *[ACTION_TOKEN] * CHUNK])
    del text["mm_token_type_ids"]
    ids = text["input_ids"]
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < 10, -100)
    masks = {"agent_pos_mask": torch.ones(n, 1, 8), "dof_mask": torch.ones(n, CHUNK, 8)}
    moved = {"proprioception": torch.randn(n, 1, 8, generator=g), "action_chunk": torch.randn(n, CHUNK, 8, generator=g)}
    return {**text, "labels": labels, "moe_token_types": ids == ACTION_TOKEN, **masks, **moved}


class _InFp32(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (F.linear, F.scaled_dot_product_attention, F.layer_norm):
            args, kwargs = tree_map_only(torch.Tensor, _widen, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@contextmanager
def _autocast(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """torch's, and one to fp32 as CUDA has it: torch lacks that on CPU, where it would cast nothing."""
    if dtype != torch.float32:
        with torch.autocast(device_type, dtype):
            yield
        return
    with torch.autocast(device_type, enabled=False), _InFp32():
        yield


def vla_jepa() -> nn.Module:
    """Qwen3-VL, V-JEPA2 and their processors are built in place of a download; text and images become tokens here."""
    import lerobot.policies.vla_jepa.modeling_vla_jepa as module
    import lerobot.policies.vla_jepa.qwen_interface as interface
    from lerobot.policies.vla_jepa.configuration_vla_jepa import VLAJEPAConfig
    from transformers import Qwen3VLForConditionalGeneration, VJEPA2Config, VJEPA2Model

    world = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "crop_size": 32,
        "patch_size": 16,
        "mlp_ratio": 2,
    }
    predictor = {
        "pred_hidden_size": 16,
        "pred_num_attention_heads": 2,
        "pred_num_hidden_layers": 1,
        "pred_num_mask_tokens": 2,
    }
    video = VJEPA2Config(image_size=32, frames_per_clip=4, tubelet_size=2, **world, **predictor)
    interface.AutoProcessor = loader(lambda: SimpleNamespace(tokenizer=word_tokenizer()))
    if not hasattr(interface, "_real_model"):
        interface._real_model = Qwen3VLForConditionalGeneration
    interface.Qwen3VLForConditionalGeneration = loader(lambda: interface._real_model(qwen3(vocabulary=400, layers=2)))
    module.AutoModel = loader(lambda: VJEPA2Model(video))
    module._get_autocast_context = _autocast
    module.AutoVideoProcessor = loader(lambda: lambda videos, **_: {"pixel_values_videos": torch.stack(videos)})
    sizes = {"action_hidden_size": 32, "action_num_layers": 2, "action_num_heads": 2, "action_attention_head_dim": 16}
    sizes |= {
        "predictor_depth": 2,
        "predictor_num_heads": 2,
        "repeated_diffusion_steps": 2,
        "num_inference_timesteps": 2,
    }
    tokens = {
        "num_action_tokens_per_timestep": 2,
        "num_embodied_action_tokens_per_instruction": 4,
        "num_video_frames": 4,
    }
    policy = module.VLAJEPAPolicy(
        VLAJEPAConfig(device="cpu", torch_dtype="float32", **sizes, **tokens, **WINDOW, **features())
    )
    interface.Qwen3VLInterface.build_inputs = _jepa_inputs(policy.model)
    return policy


def _jepa_inputs(model: Any) -> Any:
    config, action, embodied = model.config, model.action_token_ids[0], model.embodied_action_token_id
    steps = config.num_video_frames // 2 - 1
    tail = [action] * (steps * config.num_action_tokens_per_timestep)
    tail += [embodied] * config.num_embodied_action_tokens_per_instruction

    def build(_self: Any, images: list, **_: Any) -> Batch:
        seed = int(images[0][0].sum() * 1000) % 1000
        return qwen_inputs(len(images), draw(seed), patch=16, tail=tail, vocabulary=190)

    return build


def jepa_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    video = torch.rand(n, 4, 3, 32, 32, generator=g)
    return {STATE: torch.randn(n, WIDTH, generator=g), CAMERA: video, "task": ["w1"] * n, **actions(n, CHUNK, g)}


_TUNED = {"tune_llm": True, "tune_visual": True}
_GROOT = Case(
    "groot",
    "groot",
    groot,
    groot_batch,
    observe=lambda n, s: without_actions(groot_batch(n, s)),
    units=16,
    dtensors=182,
    bf16_build=lambda: groot(use_bf16=True),
    reload=False,
    ties=1,
    stubbed="GR00T on a Qwen3-VL of three layers from a local folder",
)
CASES = [
    Case(
        "eo1",
        "eo1",
        eo1,
        eo1_batch,
        observe=lambda n, s: without_actions(eo1_batch(n, s)),
        units=4,
        dtensors=68,
        reload=False,
        ties=1,
    ),
    _GROOT,
    replace(
        _GROOT,
        name="groot_tuned",
        build=lambda: groot(**_TUNED),
        bf16_build=lambda: groot(use_bf16=True, **_TUNED),
    ),
    Case(
        "wall_x",
        "wall_x",
        wall_x,
        wall_x_batch,
        infer=(),
        units=4,
        dtensors=67,
        reload=False,
        ties=1,
        stubbed="the VLM, its processor and preprocess_inputs",
    ),
    Case(
        "vla_jepa",
        "vla_jepa",
        vla_jepa,
        jepa_batch,
        observe=lambda n, s: observation(jepa_batch(n, s)),
        units=14,
        dtensors=216,
        reload=False,
        ties=1,
        stubbed="Qwen3-VL, V-JEPA2 and their processors; CUDA's autocast to fp32",
    ),
]
