"""A reward model through the whole command: sharded, saved, resumed, converted, loaded by the host."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lerobot_parallel.checkpoint.convert import convert
from tests.policies.builds.common import CAMERA, model_folder
from tests.policies.builds.rewards import _write_resnet
from tests.support.commands import train_in_world


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes of frames with one camera, of which the last in each is a success."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        CAMERA: {"dtype": "image", "shape": (32, 32, 3), "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    }
    root = tmp_path_factory.mktemp("rewards") / "data"
    data = LeRobotDataset.create("local/rewards", fps=10, features=features, root=root, use_videos=False)
    draw = np.random.default_rng(0)
    for _ in range(4):
        for step in range(8):
            image = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            reward = np.array([step == 7], dtype=np.float32)
            data.add_frame({CAMERA: image, "action": np.zeros(2, np.float32), "next.reward": reward, "task": "reach"})
        data.save_episode()
    data.finalize()
    return root


def arguments(dataset: Path, folder: Path, **flags: object) -> list[str]:
    inputs = json.dumps({CAMERA: {"type": "VISUAL", "shape": [3, 32, 32]}})
    base = {
        "dataset.repo_id": "local/rewards",
        "dataset.root": dataset,
        "reward_model.type": "reward_classifier",
        "reward_model.model_name": folder,
        "reward_model.device": "cpu",
        "reward_model.num_cameras": 1,
        "reward_model.hidden_dim": 16,
        "reward_model.latent_dim": 16,
        "reward_model.push_to_hub": "false",
        "reward_model.input_features": inputs,
        "batch_size": 2,
        "num_workers": 0,
        "save_freq": 2,
        "log_freq": 1,
        "seed": 3,
        "wandb.enable": "false",
    }
    return [f"--{name}={value}" for name, value in (base | flags).items()]


@pytest.mark.parametrize("checkpoint_format", ["dcp", "safetensors_dcp"])
def test_a_sharded_reward_model_trains_resumes_and_loads_into_the_host(
    world: Callable, dataset: Path, tmp_path: Path, checkpoint_format: str
) -> None:
    (folder,) = world(
        lambda: str(model_folder("resnet-small", _write_resnet)), 1, env={"TINY_MODELS": os.environ["TINY_MODELS"]}
    )
    sharded = {"parallelism.dp_shard": 2, "checkpoint_format": checkpoint_format}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for result in train_in_world(arguments(dataset, folder, steps=4, output_dir=whole, **sharded), 2, tmp_path):
        assert result.exitcode == 0, result.describe()
    for result in train_in_world(arguments(dataset, folder, steps=4, output_dir=halves, **sharded), 2, tmp_path):
        assert result.exitcode == 0, result.describe()
    config = halves / "checkpoints" / "000002" / "pretrained_model" / "train_config.json"
    for result in train_in_world([f"--config_path={config}", "--resume=true"], 2, tmp_path):
        assert result.exitcode == 0, result.describe()
    ours = _weights(halves / "checkpoints" / "000004")
    uninterrupted = _weights(whole / "checkpoints" / "000004")
    assert ours.keys() == uninterrupted.keys()
    differing = [name for name, tensor in uninterrupted.items() if not torch.equal(ours[name], tensor)]
    assert not differing
    ((loaded, reward),) = world(_load, 1, whole / "checkpoints" / "000004" / "pretrained_model")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in uninterrupted.items())
    assert set(reward.tolist()) <= {0.0, 1.0}


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    convert(checkpoint)
    return load_file(checkpoint / "pretrained_model" / "model.safetensors")


def _load(pretrained: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from lerobot.rewards.classifier.modeling_classifier import Classifier

    model = Classifier.from_pretrained(pretrained)
    return dict(model.state_dict()), model.compute_reward({CAMERA: torch.rand(2, 3, 32, 32)})
