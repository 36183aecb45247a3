"""Policies without a language model, and the multi-task DiT."""

from pathlib import Path

import torch
from lerobot.configs import FeatureType, PolicyFeature
from torch import nn

from tests.policies.builds.common import (
    ACTION,
    CAMERA,
    PAD,
    STATE,
    TOWER,
    WIDTH,
    Batch,
    Case,
    actions,
    draw,
    features,
    language,
    model_folder,
    newest,
)

TOP = "observation.image"


def act() -> nn.Module:
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    small = {
        "dim_model": 32,
        "n_heads": 2,
        "dim_feedforward": 48,
        "latent_dim": 8,
        "n_encoder_layers": 2,
        "n_vae_encoder_layers": 2,
    }
    window = {"chunk_size": 6, "n_action_steps": 6}
    return ACTPolicy(
        ACTConfig(device="cpu", pretrained_backbone_weights=None, **small, **window, **features(size=(64, 64)))
    )


def act_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    return {
        STATE: torch.randn(n, WIDTH, generator=g),
        CAMERA: torch.rand(n, 3, 64, 64, generator=g),
        **actions(n, 6, g),
    }


def diffusion() -> nn.Module:
    """With group norm: batch norm makes the result chaotic, a change of 1e-7 in the weights moves it by 1e-3.

    Without oneDNN, whose convolutions round differently where memory lies differently: on a CPU with AMX by 5e-5.
    """
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

    torch.backends.mkldnn.set_flags(False)
    small = {"down_dims": (16, 32), "diffusion_step_embed_dim": 16, "n_groups": 4, "spatial_softmax_num_keypoints": 8}
    window = {"horizon": 8, "n_action_steps": 4, "num_train_timesteps": 10, "num_inference_steps": 2}
    config = DiffusionConfig(
        device="cpu",
        pretrained_backbone_weights=None,
        use_group_norm=True,
        **small,
        **window,
        **features(size=(64, 64)),
    )
    return DiffusionPolicy(config)


def stacked_batch(n: int, seed: int, *, chunk: int, size: int) -> Batch:
    """Two observations and a chunk of actions."""
    g = draw(seed)
    seen = {STATE: torch.randn(n, 2, WIDTH, generator=g), CAMERA: torch.rand(n, 2, 3, size, size, generator=g)}
    return {**seen, **actions(n, chunk, g)}


def vqbet() -> nn.Module:
    """In its second phase, as after `n_vqvae_training_steps`: the code book is fixed, the transformer learns."""
    policy = vqbet_first_phase()
    vae = policy.vqbet.action_head.vqvae_model
    vae.discretized.fill_(True)
    vae.vq_layer.freeze_codebook.fill_(True)
    for layer in vae.vq_layer.layers:
        layer._codebook.initted.fill_(1.0)
    vae.requires_grad_(False).eval()
    return policy


def vqbet_first_phase() -> nn.Module:
    from lerobot.policies.vqbet.configuration_vqbet import VQBeTConfig
    from lerobot.policies.vqbet.modeling_vqbet import VQBeTPolicy

    gpt = {
        "gpt_n_layer": 2,
        "gpt_n_head": 2,
        "gpt_block_size": 50,
        "gpt_input_dim": 32,
        "gpt_output_dim": 32,
        "gpt_hidden_dim": 32,
    }
    vae = {
        "vqvae_embedding_dim": 16,
        "vqvae_enc_hidden_dim": 16,
        "vqvae_n_embed": 4,
        "spatial_softmax_num_keypoints": 8,
    }
    window = {"n_obs_steps": 2, "n_action_pred_token": 2, "action_chunk_size": 3, "crop_shape": (56, 56)}
    config = VQBeTConfig(
        device="cpu", pretrained_backbone_weights=None, **gpt, **vae, **window, **features(size=(64, 64))
    )
    return VQBeTPolicy(config)


def tdmpc() -> nn.Module:
    from lerobot.policies.tdmpc.configuration_tdmpc import TDMPCConfig
    from lerobot.policies.tdmpc.modeling_tdmpc import TDMPCPolicy

    nets = {
        "latent_dim": 10,
        "mlp_dim": 32,
        "state_encoder_hidden_dim": 16,
        "image_encoder_hidden_dim": 8,
        "q_ensemble_size": 2,
    }
    plan = {
        "horizon": 3,
        "n_action_repeats": 2,
        "n_gaussian_samples": 8,
        "n_pi_samples": 4,
        "n_elites": 4,
        "cem_iterations": 1,
    }
    seen = features(size=None)
    seen["input_features"][TOP] = PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
    return TDMPCPolicy(TDMPCConfig(device="cpu", **nets, **plan, **seen))


def tdmpc_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    seen = {STATE: torch.randn(n, 4, WIDTH, generator=g), TOP: torch.rand(n, 4, 3, 64, 64, generator=g)}
    done = {ACTION: torch.rand(n, 3, WIDTH, generator=g) * 2 - 1, "next.reward": torch.randn(n, 3, generator=g)}
    pads = {PAD: (n, 3), "next.reward_is_pad": (n, 3), "observation.state_is_pad": (n, 4)}
    return {
        **seen,
        **done,
        **{key: torch.zeros(shape, dtype=torch.bool) for key, shape in pads.items()},
        "index": torch.arange(n),
    }


def tdmpc_observe(n: int, seed: int) -> Batch:
    batch = tdmpc_batch(n, seed)
    return {STATE: batch[STATE][:, 0], TOP: batch[TOP][:, 0]}


def multi_task_dit() -> nn.Module:
    from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig
    from lerobot.policies.multi_task_dit.modeling_multi_task_dit import MultiTaskDiTPolicy

    clip = str(model_folder("clip-small", _write_clip))
    net = {"hidden_dim": 32, "num_layers": 2, "num_heads": 2, "timestep_embed_dim": 16, "tokenizer_max_length": 16}
    window = {
        "horizon": 8,
        "n_action_steps": 4,
        "num_train_timesteps": 10,
        "num_inference_steps": 2,
        "image_crop_shape": (32, 32),
    }
    names = {"vision_encoder_name": clip, "text_encoder_name": clip}
    return MultiTaskDiTPolicy(MultiTaskDiTConfig(device="cpu", **names, **net, **window, **features()))


def _write_clip(folder: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    text = {
        **TOWER,
        "vocab_size": 200,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    vision = {**TOWER, "image_size": 32, "patch_size": 16}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)).save_pretrained(folder)


def dit_batch(n: int, seed: int) -> Batch:
    return {**stacked_batch(n, seed, chunk=8, size=32), **language(n, draw(seed + 500))}


CASES = [
    Case("act", "act", act, act_batch, units=13, dtensors=105),
    Case(
        "diffusion",
        "diffusion",
        diffusion,
        lambda n, seed: stacked_batch(n, seed, chunk=8, size=64),
        observe=lambda n, seed: newest(stacked_batch(n, seed, chunk=8, size=64)),
        infer=("select_action",),
        units=16,
        dtensors=164,
        tolerance=1e-6,
    ),
    Case(
        "vqbet",
        "vqbet",
        vqbet,
        lambda n, seed: stacked_batch(n, seed, chunk=5, size=64),
        observe=lambda n, seed: newest(stacked_batch(n, seed, chunk=5, size=64)),
        infer=("select_action",),
        units=10,
        dtensors=115,
        batch_norm=True,
    ),
    Case("tdmpc", "tdmpc", tdmpc, tdmpc_batch, observe=tdmpc_observe, infer=("select_action",), units=16, dtensors=148),
    Case(
        "multi_task_dit",
        "multi_task_dit",
        multi_task_dit,
        dit_batch,
        observe=lambda n, seed: newest(dit_batch(n, seed)),
        infer=("select_action",),
        units=7,
        dtensors=105,
        stubbed="CLIP of two layers from a local folder",
    ),
]
