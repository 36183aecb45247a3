"""Reward models through the loop: the host's classifier on a tiny ResNet."""

from pathlib import Path

import numpy as np
import pytest

from tests.training.runs import assert_close, common_args, files, last_checkpoint, log_lines, train, weights_file

pytestmark = pytest.mark.usefixtures("warmed")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stages: 64 pixels become the 4 that the classifier wants."""
    from transformers import ResNetConfig, ResNetModel

    folder = tmp_path_factory.mktemp("resnet")
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8], depths=[1, 1, 1], layer_type="basic")
    ResNetModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 frames with a camera that is brighter where the reward is 1."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = tmp_path_factory.mktemp("data") / "rewards"
    vector = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
    features = {
        "observation.state": vector,
        "action": vector,
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": "image", "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
    }
    dataset = LeRobotDataset.create("local/toy", fps=10, features=features, root=root, use_videos=False)
    draw = np.random.default_rng(0)
    for _ in range(2):
        for frame in range(6):
            reward = frame % 2
            dataset.add_frame(
                {
                    "observation.state": np.zeros(2, np.float32),
                    "action": np.zeros(2, np.float32),
                    "next.reward": np.array([reward], np.float32),
                    "observation.images.top": draw.integers(
                        100 * reward, 100 * reward + 100, (64, 64, 3), dtype=np.uint8
                    ),
                    "task": "reach",
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return root


def _args(rewards: Path, resnet: Path, *flags: str) -> list[str]:
    return common_args(
        rewards,
        "--reward_model.type=reward_classifier",
        f"--reward_model.model_name={resnet}",
        "--reward_model.device=cpu",
        "--reward_model.num_cameras=1",
        "--reward_model.hidden_dim=8",
        "--reward_model.latent_dim=8",
        "--reward_model.dropout_rate=0",
        "--reward_model.learning_rate=1e-2",
        '--reward_model.input_features={"observation.images.top": {"type": "VISUAL", "shape": [3, 64, 64]}}',
        "--batch_size=2",
        *flags,
    )


@pytest.mark.parametrize("engine", ["single", "ddp2"])
def test_reward_model_is_the_hosts_and_resumes(rewards: Path, resnet: Path, tmp_path: Path, engine: str):
    host = {"single": "host", "ddp2": "host_ddp2"}[engine]
    args = _args(rewards, resnet, "--save_freq=2")
    expected = train(args, host, tmp_path / "host")
    ours = train(args, engine, tmp_path / "ours")
    assert log_lines(ours[0]) == log_lines(expected[0]) and "accuracy" in log_lines(ours[0])[0]
    assert_close(weights_file(tmp_path / "ours"), weights_file(tmp_path / "host"), 0)
    assert files(last_checkpoint(tmp_path / "host")) <= files(last_checkpoint(tmp_path / "ours"))

    resume = "--config_path=../ours/out/checkpoints/000002/pretrained_model/train_config.json"
    train(["--resume=true", resume, "--output_dir=out"], engine, tmp_path / "resumed")
    assert_close(weights_file(tmp_path / "resumed"), weights_file(tmp_path / "ours"), 0)
