"""The plans of the host's policies and reward models, one entry each, keyed by the type.

Embeddings and heads that are only ever called are units of their own where they are large, so that the root, which
is gathered for the whole step, stays small. A pair that shares one weight stays in the root: cut apart by two units,
the halves would train as different weights.
"""

from collections.abc import Callable

from torch import nn

from lerobot_parallel.plans.plan import INFERENCE_METHODS, WrapPlan

Plan = WrapPlan | Callable[[nn.Module], WrapPlan]
"""A plan, or what makes one for a built policy."""

# A joint-attention stack calls these leaves of its layers, and never a layer.
_JOINT_LEAVES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp",
)


def _joint_layers(*stacks: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(f"{stack}.{{i}}.{leaf}" for leaf in _JOINT_LEAVES) for stack in stacks)


def _smolvla(policy: nn.Module) -> WrapPlan:
    """Its expert may have fewer layers than its VLM: every n-th VLM layer then feeds one.

    Nothing reads the output of the VLM beyond the last layer that feeds the expert, so no gradient comes back
    through it, and the hook that would gather the layer again never fires while keys and values still need it.
    """
    joint = policy.model.vlm_with_expert
    every = max(joint.num_vlm_layers // joint.num_expert_layers, 1)
    last_feeding = (joint.num_vlm_layers - 1) // every * every
    vlm, expert = "model.vlm_with_expert.vlm", "model.vlm_with_expert.lm_expert"
    return WrapPlan(
        units=("SmolVLMEncoderLayer",),
        groups=_joint_layers(f"{vlm}.model.text_model.layers", f"{expert}.layers"),
        # The head is never called, hence never gathered.
        modules=(f"{vlm}.model.text_model.embed_tokens", f"{vlm}.lm_head"),
        keep_gathered=tuple(f"{vlm}.model.text_model.layers.{i}" for i in range(last_feeding, joint.num_vlm_layers)),
    )


def _pi0() -> WrapPlan:
    """pi0 and pi05 differ inside the expert's norms only."""
    joint = "model.paligemma_with_expert"
    vlm, expert = f"{joint}.paligemma", f"{joint}.gemma_expert"
    layers = f"{vlm}.model.language_model.layers"
    return WrapPlan(
        units=("SiglipEncoderLayer",),
        groups=_joint_layers(layers, f"{expert}.model.layers"),
        # Both heads are trainable and never called: as units they are never gathered, 790 M parameters less.
        modules=(f"{vlm}.model.language_model.embed_tokens", f"{vlm}.lm_head", f"{expert}.lm_head"),
        # The loss reads the expert's output alone; see smolvla.
        keep_gathered=(f"{layers}.{{last}}",),
    )


_QWEN25 = ("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock")
_QWEN3 = ("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock", "Qwen3VLVisionPatchMerger")
_RESNET = ("BasicBlock", "Bottleneck")
_REWARD_METHODS = ("compute_reward",)
_ZERO_SHOT = "it is zero-shot and has nothing to train"

BUILTIN_PLANS: dict[str, Plan] = {
    # Encoder layers serve the VAE encoder too. The ResNet backbone is absent without images.
    "act": WrapPlan(units=("ACTEncoderLayer", "ACTDecoderLayer", *_RESNET)),
    # The strided convolutions between the residual blocks stay in the root: they are small and called singly.
    "diffusion": WrapPlan(units=("DiffusionConditionalResidualBlock1d", *_RESNET)),
    # The head is tied to the embedding and never called.
    "eo1": WrapPlan(units=_QWEN25),
    # The embedding has no head beside it.
    "evo1": WrapPlan(
        units=("BasicTransformerBlock", "Qwen2DecoderLayer", "InternVLVisionLayer"),
        modules=("model.embedder.model.language_model.embed_tokens", "model.action_head.seq_pool_proj"),
    ),
    # Video and action expert run inside one MoTLayer. VAE and text encoder are outside of `parameters()`: every
    # rank holds them whole. The blocks read their third norm.
    "fastwam": WrapPlan(units=("MoTLayer",), uncalled=("*.norm3",)),
    "gaussian_actor": WrapPlan(
        units=("MLP",),
        forward_methods=("select_action",),
        unshardable="its forward returns no loss, the RL learner optimises it, and it has 0.3 M parameters",
    ),
    # The encoders of state and actions hold a matrix for every embodiment, up to 151 M parameters in one.
    "groot": WrapPlan(
        units=("BasicTransformerBlock", *_QWEN3, "CategorySpecificMLP", "MultiEmbodimentActionEncoder"),
    ),
    "lingbot_va": WrapPlan(units=("WanTransformerBlock",), needs_bf16="its training forward casts its inputs to bf16"),
    # Losses read `lm_head.weight`, discrete inference the two tables of `wte`, without a call. Discrete decoding
    # ends when a rank's own samples do.
    "molmoact2": WrapPlan(
        units=(
            "MolmoAct2DecoderLayer",
            "MolmoAct2PostNormDecoderLayer",
            "MolmoAct2VisionBlock",
            "ActionExpertBlock",
        ),
        keep_in_root=("*.lm_head", "*.wte"),
        gathered_methods=INFERENCE_METHODS,
    ),
    "multi_task_dit": WrapPlan(
        units=("TransformerBlock", "CLIPEncoderLayer"), modules=("*.embeddings.token_embedding",)
    ),
    "pi0": _pi0(),
    "pi05": _pi0(),
    # Layers are called here, one tower, and the head is used but not tied. Decoding ends when a rank's own samples do.
    "pi0_fast": WrapPlan(
        units=("_PiGemmaDecoderLayerBase", "SiglipEncoderLayer"),
        modules=("*.language_model.embed_tokens", "*.paligemma.lm_head"),
        gathered_methods=INFERENCE_METHODS,
    ),
    "smolvla": _smolvla,
    # `update` is not a forward method: it moves the target network elementwise on the shards, after the
    # optimizer, and would write into temporary gathered copies if it were one.
    "tdmpc": WrapPlan(units=("Sequential",), pointless="it has 5.5 M parameters, half of them a frozen target"),
    # `future_tokens` is an embedding that is read, not called. The head is tied to the embedding.
    "vla_jepa": WrapPlan(units=(*_QWEN3, "VJEPA2Layer", "ACBlock", "BasicTransformerBlock")),
    # In its first phase the policy trains the VQ-VAE through plain methods of the action head: no unit runs,
    # everything happens in the root.
    "vqbet": WrapPlan(units=("Block", *_RESNET)),
    # The head is tied to the embedding and used.
    "wall_x": WrapPlan(units=("Qwen2_5_VLDecoderLayer_with_MoE", "Qwen2_5_VLVisionBlock")),
    # The encoder's `shared` table is tied to its `embed_tokens`.
    "xvla": WrapPlan(units=("TransformerBlock", "BartEncoderLayer", "Florence2VisionBlock")),
    # Reward models.
    "reward_classifier": WrapPlan(
        units=("ResNetBasicLayer", "ResNetBottleNeckLayer"),
        forward_methods=("compute_reward", "predict", "predict_reward"),
        pointless="only its last head trains",
    ),
    "robometer": WrapPlan(units=_QWEN3, forward_methods=_REWARD_METHODS, unshardable=_ZERO_SHOT),
    "sarm": WrapPlan(units=("TransformerEncoderLayer",), forward_methods=("compute_reward", "calculate_rewards")),
    "topreward": WrapPlan(units=_QWEN3, forward_methods=_REWARD_METHODS, unshardable=_ZERO_SHOT),
}

# What an engine that wraps by class name alone, and wants every name present in every build, can be told. The MLPs of
# the joint-attention stacks are called, their layers are not.
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "act": ("ACTEncoderLayer", "ACTDecoderLayer"),
    "diffusion": ("DiffusionConditionalResidualBlock1d",),
    "eo1": _QWEN25,
    "evo1": ("BasicTransformerBlock", "Qwen2DecoderLayer", "InternVLVisionLayer"),
    "fastwam": ("MoTLayer",),
    "groot": ("BasicTransformerBlock", *_QWEN3),
    "lingbot_va": ("WanTransformerBlock",),
    "multi_task_dit": ("TransformerBlock", "CLIPEncoderLayer"),
    "pi0": ("GemmaMLP", "SiglipEncoderLayer", "GemmaTextScaledWordEmbedding"),
    "pi05": ("GemmaMLP", "SiglipEncoderLayer", "GemmaTextScaledWordEmbedding"),
    "pi0_fast": ("_PiGemmaDecoderLayerBase", "SiglipEncoderLayer", "GemmaTextScaledWordEmbedding"),
    "smolvla": ("LlamaMLP", "SmolVLMEncoderLayer"),
    "vla_jepa": (*_QWEN3, "VJEPA2Layer", "ACBlock", "BasicTransformerBlock"),
    "vqbet": ("Block",),
    "wall_x": ("Qwen2_5_VLDecoderLayer_with_MoE", "Qwen2_5_VLVisionBlock"),
    "xvla": ("TransformerBlock", "BartEncoderLayer", "Florence2VisionBlock"),
}
