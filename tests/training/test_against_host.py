"""The host's own loop is the reference: one process gives its bytes, its log lines and its files."""

from pathlib import Path

import pytest

from tests.support.datasets import make_dataset
from tests.training.runs import act_args, files, last_checkpoint, log_lines, train

pytestmark = pytest.mark.usefixtures("warmed")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "toy", episodes=3, frames=10)


SAME_BYTES = [
    "pretrained_model/model.safetensors",
    "training_state/optimizer_state.safetensors",
    "training_state/optimizer_param_groups.json",
    "training_state/rng_state.safetensors",
]


@pytest.mark.parametrize("log_freq", [1, 3])
def test_one_process_gives_the_hosts_bytes(dataset: Path, tmp_path: Path, log_freq: int):
    """Over an epoch's end (10 steps of 3 in 30 frames), with noise, and with steps after the last log line."""
    args = act_args(dataset, "--steps=13", "--save_freq=6", f"--log_freq={log_freq}")
    (host,) = train(args, "host", tmp_path / "host")
    (ours,) = train(args, "single", tmp_path / "ours")
    expected, got = (last_checkpoint(tmp_path / side) for side in ("host", "ours"))
    print(host.stderr)
    print(ours.stderr)
    assert log_lines(ours) == log_lines(host)
    assert len(log_lines(ours)) == 13 // log_freq
    for name in SAME_BYTES:
        assert (got / name).read_bytes() == (expected / name).read_bytes(), name
    assert files(got) - files(expected) == {"training_state/rng_state_rank_00000.safetensors"}
    assert files(expected) <= files(got)
