"""Policies at their default size, on meta. What the hub would say of a backbone's size is filled in from its published
config: Qwen2.5-VL-3B, Qwen3-VL-2B, V-JEPA2-L, SmolVLM2-500M, InternVL3-1B. The command `lerobot-parallel plans` builds
the others by itself."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lerobot_parallel.plans.skeleton import build_skeleton, default_config
from tests.policies.builds.common import loader, word_tokenizer
from tests.policies.builds.qwen import _IDS, wall_x_config

_QWEN25 = {
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "tie_word_embeddings": True,
    **_IDS,
}
_QWEN3 = {
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
            "rope_theta": 5e6,
        },
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
}


def pi0_fast() -> nn.Module:
    import lerobot.policies.pi0_fast.modeling_pi0_fast as module

    module.AutoTokenizer, module.AutoProcessor = loader(word_tokenizer), loader(SimpleNamespace)
    return build_skeleton(default_config("pi0_fast"))


def eo1() -> nn.Module:
    from lerobot.policies.eo1.configuration_eo1 import EO1Config
    from transformers import Qwen2_5_VLConfig

    features = {name: getattr(default_config("act"), name) for name in ("input_features", "output_features")}
    config = EO1Config(vlm_config=Qwen2_5_VLConfig(**_QWEN25).to_dict(), dtype="bfloat16", **features)
    config.pretrained_path = "local"
    return build_skeleton(config)


def groot() -> nn.Module:
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config

    with torch.device("meta"):
        return GR00TN17(GR00TN17Config(), load_backbone_weights=False)


def fastwam() -> nn.Module:
    import lerobot.policies.fastwam.modeling_fastwam as module
    from lerobot.policies.fastwam.configuration_fastwam import FastWAMConfig

    module.build_wan_tokenizer = module.load_pretrained_wan_text_encoder = lambda **_: None
    module.load_pretrained_wan_vae = lambda **_: nn.Identity()
    features = {name: getattr(default_config("act"), name) for name in ("input_features", "output_features")}
    config = FastWAMConfig(
        base_model_id=None, load_text_encoder=False, image_size=(224, 224), proprio_dim=7, **features
    )
    return build_skeleton(config)


def molmoact2() -> nn.Module:
    from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import MolmoAct2Config
    from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import MolmoAct2ForConditionalGeneration

    with torch.device("meta"):
        return MolmoAct2ForConditionalGeneration(MolmoAct2Config())


def wall_x() -> nn.Module:
    from lerobot.policies.wall_x.modeling_wall_x import Qwen2_5_VLMoEForAction

    config = wall_x_config(_QWEN25, experts=(11008, 4096), arm=20)
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda _: 1, pad_token_id=0, init_kwargs={})
    with torch.device("meta"):
        return Qwen2_5_VLMoEForAction(config, processor=SimpleNamespace(tokenizer=tokenizer))


def vla_jepa() -> nn.Module:
    import lerobot.policies.vla_jepa.modeling_vla_jepa as module
    import lerobot.policies.vla_jepa.qwen_interface as interface
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, VJEPA2Config, VJEPA2Model

    video = VJEPA2Config()
    video.image_size = video.crop_size
    interface.AutoProcessor = loader(lambda: SimpleNamespace(tokenizer=word_tokenizer()))
    interface.Qwen3VLForConditionalGeneration = loader(lambda: Qwen3VLForConditionalGeneration(Qwen3VLConfig(**_QWEN3)))
    module.AutoModel, module.AutoVideoProcessor = loader(lambda: VJEPA2Model(video)), loader(SimpleNamespace)
    return build_skeleton(default_config("vla_jepa"))


def by_command(policy_type: str) -> Any:
    return lambda: build_skeleton(default_config(policy_type))


BUILDERS = {
    name: by_command(name) for name in ("act", "diffusion", "lingbot_va", "pi0", "pi05", "sarm", "tdmpc", "vqbet")
}
BUILDERS |= {function.__name__: function for function in (pi0_fast, eo1, groot, fastwam, molmoact2, wall_x, vla_jepa)}
