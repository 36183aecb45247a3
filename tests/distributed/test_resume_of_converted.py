"""A checkpoint whose shards were converted and deleted resumes from the file, and says so."""

import shutil
from pathlib import Path

import pytest

from lerobot_parallel.checkpoint.convert import convert, to_dcp
from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.resume import check_resumable
from lerobot_parallel.config.errors import ConfigError
from tests.distributed.test_peer import _assert_equal, _full_state, _resume, _saved_state
from tests.support.datasets import copy_peer
from tests.support.tracing import inspected_run


@pytest.fixture
def peer(tmp_path: Path, warmed: None) -> Path:
    return copy_peer(tmp_path)


ALONE = ["--parallelism.dp_shard=1", "--checkpoint_format=safetensors"]


@pytest.mark.parametrize(("nprocs", "flags"), [(2, ["--parallelism.dp_shard=2"]), (1, ALONE)])
def test_weights_and_optimizer_are_those_saved(peer: Path, nprocs: int, flags: list[str]) -> None:
    weights, optimizer = _saved_state(peer / "fsdp2/000004", "fsdp2")
    convert(peer / "fsdp2/000004", delete_dcp=True)
    for found, found_optimizer, _ in inspected_run([*_resume("fsdp2"), *flags], nprocs, peer, _full_state):
        _assert_equal(found, weights)
        _assert_equal(found_optimizer, optimizer)


def test_the_hosts_checkpoint_with_shards_made_from_its_file_resumes_sharded(peer: Path) -> None:
    weights, optimizer = _saved_state(peer / "host1/000004", "host1")
    to_dcp(peer / "host1/000004")
    Checkpoint(peer / "host1/000004").model_file.unlink()
    args = [*_resume("host1"), "--parallelism.dp_shard=2"]
    for found, found_optimizer, _ in inspected_run(args, 2, peer, _full_state):
        _assert_equal(found, weights)
        _assert_equal(found_optimizer, optimizer)


def test_what_the_config_says_and_what_is_there_are_in_the_log(peer: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint(peer / "fsdp2/000004")
    check_resumable(checkpoint)
    assert not caplog.messages
    convert(checkpoint.path, delete_dcp=True)
    check_resumable(checkpoint)
    (said,) = caplog.messages
    assert "lacks pretrained_model/pytorch_model_fsdp_0" in said
    assert said.endswith("from pretrained_model/model.safetensors")
    checkpoint.model_file.unlink()
    shutil.rmtree(checkpoint.model_shards, ignore_errors=True)
    with pytest.raises(ConfigError, match="lacks pretrained_model/pytorch_model_fsdp_0"):
        check_resumable(checkpoint)
