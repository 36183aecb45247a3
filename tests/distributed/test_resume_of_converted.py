"""A checkpoint whose shards were converted and deleted resumes from the file where its manifest says so."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from lerobot_parallel.checkpoint.check import check_resumable
from lerobot_parallel.checkpoint.convert import convert, to_dcp
from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.select import resolve
from lerobot_parallel.config.errors import ConfigError
from tests.distributed.test_peer import _assert_equal, _full_state, _read_shards
from tests.support.datasets import PEER_ARGS, copy_peer
from tests.support.tracing import inspected_run, traced_training


@pytest.fixture
def peer(tmp_path: Path, warmed: None) -> Path:
    return copy_peer(tmp_path)


ALONE = ["--parallelism.dp_shard=1", "--checkpoint_format=safetensors"]


def test_weights_and_optimizer_are_those_saved_and_the_log_says_where_from(
    peer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--parallelism.dp_shard=2", "--checkpoint_format=dcp", "--output_dir=mine"]
    traced_training([*PEER_ARGS, *flags], 2, peer)
    checkpoint = Checkpoint(peer / "mine/checkpoints/000004")
    optimizer = _read_shards(checkpoint.optimizer_shards, "optimizer.state.")
    weights = load_file(convert(checkpoint.path, delete_dcp=True).path)
    caplog.clear()  # torch logs that it reads without a process group
    check_resumable(checkpoint)
    (said,) = caplog.messages
    assert "lacks pretrained_model/pytorch_model_fsdp_0" in said
    assert said.endswith("from pretrained_model/model.safetensors")
    resume = ["--resume=true", f"--config_path={checkpoint.train_config}", "--output_dir=out"]
    for nprocs, topology in ((2, ["--parallelism.dp_shard=2"]), (1, ALONE)):
        for found, found_optimizer, _ in inspected_run([*resume, *topology], nprocs, peer, _full_state):
            _assert_equal(found, weights)
            _assert_equal(found_optimizer, optimizer)


@pytest.mark.parametrize("flags", [["--parallelism.dp_shard=2"], ALONE], ids=["fsdp2", "ddp2"])
def test_shards_made_of_a_weights_file_serve_without_it(peer: Path, flags: list[str]) -> None:
    traced_training([*PEER_ARGS, *flags, "--checkpoint_format=safetensors", "--output_dir=mine"], 2, peer)
    checkpoint = Checkpoint(peer / "mine/checkpoints/000004")
    resume = ["--resume=true", f"--config_path={checkpoint.train_config}", "--output_dir=out"]
    (_, optimizer, _), *_ = inspected_run([*resume, *ALONE], 1, peer, _full_state)
    weights = load_file(checkpoint.model_file)
    to_dcp(checkpoint.path)
    checkpoint.model_file.unlink()
    for nprocs, topology in ((2, ["--parallelism.dp_shard=2"]), (1, ALONE)):
        for found, found_optimizer, _ in inspected_run([*resume, *topology], nprocs, peer, _full_state):
            _assert_equal(found, weights)
            _assert_equal(found_optimizer, optimizer)
    (next(checkpoint.model_shards.glob("*.distcp"))).unlink()
    with pytest.raises(ConfigError, match="is damaged or incomplete"):
        resolve(checkpoint.path, checksums=False, say=pytest.fail)


def test_without_a_manifest_a_checkpoint_must_have_what_its_config_says(peer: Path) -> None:
    checkpoint = Checkpoint(peer / "fsdp2/000004")
    check_resumable(checkpoint)
    convert(checkpoint.path, delete_dcp=True)
    with pytest.raises(ConfigError, match="lacks pretrained_model/pytorch_model_fsdp_0"):
        check_resumable(checkpoint)
