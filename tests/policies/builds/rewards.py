"""Trainable reward models."""

from pathlib import Path

import torch
from torch import nn

from tests.policies.builds.common import CAMERA, WIDTH, WRIST, Batch, Case, draw, features, model_folder


def sarm() -> nn.Module:
    from lerobot.rewards.sarm.configuration_sarm import SARMConfig
    from lerobot.rewards.sarm.modeling_sarm import SARMRewardModel

    return SARMRewardModel(
        SARMConfig(device="cpu", image_dim=16, text_dim=16, hidden_dim=32, num_heads=2, num_layers=2, max_state_dim=8)
    )


def sarm_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    shapes = {"video_features": (n, 9, 16), "text_features": (n, 16), "state_features": (n, 9, WIDTH)}
    seen = {key: torch.randn(shape, generator=g) for key, shape in shapes.items()}
    return {"observation": {**seen, "lengths": torch.full((n,), 9), "sparse_targets": torch.rand(n, 9, generator=g)}}


def classifier() -> nn.Module:
    from lerobot.rewards.classifier.configuration_classifier import RewardClassifierConfig
    from lerobot.rewards.classifier.modeling_classifier import Classifier

    net = {
        "model_name": str(model_folder("resnet-small", _write_resnet)),
        "hidden_dim": 16,
        "latent_dim": 16,
        "num_cameras": 2,
    }
    seen = features(state=0, cameras=(CAMERA, WRIST))["input_features"]
    return Classifier(RewardClassifierConfig(device="cpu", input_features=seen, **net))


def _write_resnet(folder: Path) -> None:
    from transformers import ResNetConfig, ResNetModel

    ResNetModel(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ).save_pretrained(folder)


def classifier_batch(n: int, seed: int) -> Batch:
    g = draw(seed)
    images = {camera: torch.rand(n, 3, 32, 32, generator=g) for camera in (CAMERA, WRIST)}
    return {**images, "next.reward": torch.randint(0, 2, (n,), generator=g).float()}


CASES = [
    Case("sarm", "sarm", sarm, sarm_batch, infer=(), units=4, dtensors=78),
    Case(
        "reward_classifier",
        "reward_classifier",
        classifier,
        classifier_batch,
        infer=("compute_reward",),
        units=2,
        dtensors=34,
        ties=36,
        batch_norm=True,
        stubbed="a ResNet of two blocks from a local folder",
    ),
]
