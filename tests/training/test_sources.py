"""Where samples come from: streams, and loader processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import train_command
from tests.training.runs import QUIET, act_args, assert_close, log_lines, payload, train, watch_steps, weights_file

pytestmark = pytest.mark.usefixtures("warmed")

STREAM = ["--dataset.streaming=true", "--dataloader_multiprocessing_context=fork"]


def _indices() -> Any:
    return watch_steps(lambda run, batch: batch["index"].tolist())


def test_a_stream_in_one_process_is_the_hosts(small_dataset: Path, tmp_path: Path):
    """The host needs a loader process for it: without one it makes no shard of the stream."""
    args = act_args(small_dataset, *STREAM, "--num_workers=1", "--steps=12")
    (host,) = train(args, "host", tmp_path / "host")
    (ours,) = train(args, "single", tmp_path / "ours")
    assert log_lines(ours) == log_lines(host)
    assert payload(weights_file(tmp_path / "ours")) == payload(weights_file(tmp_path / "host"))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("engine", ["single", "ddp2", "fsdp2"])
def test_ranks_share_a_stream_without_overlap(small_dataset: Path, tmp_path: Path, engine: str, workers: int):
    """30 frames in batches of 3: 10 steps are an epoch of one rank, 5 of two."""
    steps = 10 if engine == "single" else 5
    args = act_args(small_dataset, *STREAM, f"--num_workers={workers}", f"--steps={steps}")
    ranks = [result.value for result in train(args, engine, tmp_path, _indices)]
    assert all(len(rank) == steps for rank in ranks)
    assert sorted(index for rank in ranks for batch in rank for index in batch) == list(range(30))


@pytest.mark.slow
def test_loader_processes_change_nothing_under_torchrun(small_dataset: Path, tmp_path: Path):
    """Spawned ones, under FSDP2, with noise in the policy."""
    args = act_args(small_dataset, "--parallelism.dp_shard=2")
    train(args, "fsdp2", tmp_path / "without")
    (tmp_path / "with").mkdir()
    done = train_command([*args, "--num_workers=2"], tmp_path / "with", nproc=2, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_close(weights_file(tmp_path / "with"), weights_file(tmp_path / "without"), 0)


def test_resumed_stream_warns_that_it_starts_over(small_dataset: Path, tmp_path: Path):
    args = act_args(small_dataset, *STREAM, *QUIET, "--num_workers=1", "--steps=2")
    train(args, "single", tmp_path)
    resume = ["--resume=true", "--config_path=out/checkpoints/last/pretrained_model/train_config.json", "--steps=3"]
    (resumed,) = train(resume, "single", tmp_path, _indices)
    assert "a streaming dataset starts over on resume" in resumed.stderr
    assert len(resumed.value) == 1
