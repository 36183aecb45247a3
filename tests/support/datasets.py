"""Small local datasets, and the peer data that other software produced."""

import shutil
from pathlib import Path

import numpy as np
import pytest

REPO_ID = "local/toy"
STATE, ENV, ACTION = 6, 4, 6

PEER_ARGS = [
    "--dataset.repo_id=local/reach",
    "--dataset.root=reach",
    "--policy.type=act",
    "--policy.device=cpu",
    "--policy.push_to_hub=false",
    "--policy.dim_model=32",
    "--policy.dim_feedforward=64",
    "--policy.n_heads=4",
    "--policy.chunk_size=8",
    "--policy.n_action_steps=8",
    "--policy.latent_dim=8",
    "--policy.dropout=0",
    "--policy.use_vae=false",
    "--policy.optimizer_lr=1e-3",
    "--batch_size=4",
    "--steps=8",
    "--save_freq=4",
    "--log_freq=1",
    "--num_workers=0",
    "--wandb.enable=false",
    "--seed=7",
]


def peer_dir() -> Path:
    """The peer data beside the repository; skips the test in a clone that has none. Never write there."""
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "peer"
    if not folder.is_dir():
        pytest.skip(f"needs the peer data of other software in {folder}, which is not part of the repository")
    return folder


def copy_peer(tmp_path: Path) -> Path:
    """A writable copy of the peer data: `PEER_ARGS` are relative to it."""
    target = tmp_path / "peer"
    shutil.copytree(peer_dir(), target, copy_function=shutil.copyfile)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def make_dataset(root: Path | str, episodes: int = 4, frames: int = 25, image: bool = False, seed: int = 0) -> Path:
    """Writes a LeRobotDataset: state (6), environment state (4), action (6) and, on request, a 64x64 camera.

    Actions follow from observations, so that there is something to learn; equal arguments give equal numbers.
    Returns the root, for `--dataset.repo_id=local/toy --dataset.root=ROOT`.
    """
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.create(
        REPO_ID, fps=10, features=_features(image), root=root, robot_type="toy", use_videos=False
    )
    draw = np.random.default_rng(seed)
    mixing = draw.normal(size=(ENV, ACTION)).astype(np.float32)
    for _ in range(episodes):
        state, goal = draw.normal(size=STATE), draw.normal(size=ENV)
        for _ in range(frames):
            action = np.tanh(goal @ mixing - state)
            frame = {
                "observation.state": state.astype(np.float32),
                "observation.environment_state": goal.astype(np.float32),
                "action": action.astype(np.float32),
                "task": "reach",
            }
            if image:
                frame["observation.images.top"] = draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            dataset.add_frame(frame)
            state = state + 0.2 * action + 0.02 * draw.normal(size=STATE)
        dataset.save_episode()
    dataset.finalize()
    return Path(root)


def _features(image: bool) -> dict[str, dict]:
    def vector(name: str, size: int) -> dict:
        return {"dtype": "float32", "shape": (size,), "names": [f"{name}{i}" for i in range(size)]}

    features = {
        "observation.state": vector("joint", STATE),
        "observation.environment_state": vector("goal", ENV),
        "action": vector("joint", ACTION),
    }
    if image:
        names = ["height", "width", "channels"]
        features["observation.images.top"] = {"dtype": "image", "shape": (64, 64, 3), "names": names}
    return features
