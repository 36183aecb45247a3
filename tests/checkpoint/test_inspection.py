"""What an inspection sees, on a checkpoint of other software and on damaged copies of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert import convert
from lerobot_parallel.checkpoint.inspection import TensorInfo, inspect_checkpoint, run_checkpoints
from lerobot_parallel.config.errors import ConfigError
from tests.support.datasets import copy_peer
from tests.support.shards import save_alone


@pytest.fixture
def checkpoint(tmp_path: Path) -> layout.Checkpoint:
    return layout.Checkpoint(copy_peer(tmp_path) / "fsdp2/000004")


def test_everything_in_a_sharded_checkpoint(checkpoint: layout.Checkpoint) -> None:
    seen = inspect_checkpoint(checkpoint.path, verify=True)
    assert (seen.step, seen.policy, seen.dataset) == (4, "act", "local/reach")
    assert (seen.formats, seen.optimizer, seen.rng_ranks) == (["dcp"], "dcp", 1)
    assert seen.topology["dp_world_size"] == 2 and seen.topology["parallelism"]["dp_shard"] == 2
    assert (len(seen.tensors), seen.parameters, seen.dtypes) == (78, 48294, {"float32": 78})
    assert seen.tensors[0] == TensorInfo("model.action_head.bias", "float32", (6,), 24, 2)
    assert seen.processors == ["policy_postprocessor", "policy_preprocessor"]
    assert seen.complete and seen.verified


def test_sharded_and_merged_weights_are_both_seen_and_compared(checkpoint: layout.Checkpoint) -> None:
    convert(checkpoint.path)
    assert inspect_checkpoint(checkpoint.path).formats == ["dcp", "safetensors"]
    assert inspect_checkpoint(checkpoint.path).complete
    shutil.rmtree(checkpoint.model_shards)
    save_alone(checkpoint.model_shards, {"model": {"model.action_head.bias": torch.ones(7)}})
    seen = inspect_checkpoint(checkpoint.path)
    assert "disagree about" in seen.problems[0] and not seen.complete


def test_manifest_is_shown(checkpoint: layout.Checkpoint) -> None:
    checkpoint.manifest.write_text(json.dumps({"versions": {"torch": "2.11.0"}, "tied": [["a", "b"]]}))
    seen = inspect_checkpoint(checkpoint.path)
    assert (seen.versions, seen.tied) == ({"torch": "2.11.0"}, [["a", "b"]])


MISSING = {
    "pretrained_model/config.json": "config.json",
    "pretrained_model/train_config.json": "train_config.json",
    "pretrained_model/pytorch_model_fsdp_0": "weights: neither",
    "training_state/training_step.json": "training_state/training_step.json",
    "training_state/optimizer_0": "the optimizer's state",
    "training_state/rng_state.safetensors": "training_state/rng_state.safetensors",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_named(checkpoint: layout.Checkpoint, name: str) -> None:
    path = checkpoint.path / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    seen = inspect_checkpoint(checkpoint.path)
    assert len(seen.missing) == 1 and MISSING[name] in seen.missing[0]
    assert not seen.complete


@pytest.mark.parametrize("part", ["pretrained_model/pytorch_model_fsdp_0", "training_state/optimizer_0"])
def test_verify_finds_one_flipped_bit_of_a_tensor(checkpoint: layout.Checkpoint, part: str) -> None:
    shard = checkpoint.path / part / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    at = data.index(b"data/0") + 200
    data[at] ^= 1
    shard.write_bytes(data)
    assert inspect_checkpoint(checkpoint.path).complete
    seen = inspect_checkpoint(checkpoint.path, verify=True)
    assert len(seen.problems) == 1 and str(shard) in seen.problems[0] and "is damaged" in seen.problems[0]


DAMAGES = {
    "pretrained_model/config.json": (b"{", "cannot be read"),
    "training_state/training_step.json": (b"{}", "step: Field required"),
    "pretrained_model/pytorch_model_fsdp_0/.metadata": (b"cos\nsystem\n(Vtrue\ntR.", "asks for os.system"),
    "training_state/optimizer_0/__0_0.distcp": (b"", "is truncated"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_a_finding_not_an_error(checkpoint: layout.Checkpoint, name: str) -> None:
    data, expected = DAMAGES[name]
    (checkpoint.path / name).write_bytes(data)
    seen = inspect_checkpoint(checkpoint.path, verify=True)
    assert len(seen.problems) == 1 and expected in seen.problems[0]


def test_a_directory_that_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        inspect_checkpoint(tmp_path)


def test_run_directory_lists_its_steps_in_order(tmp_path: Path) -> None:
    steps = [tmp_path / "checkpoints" / name for name in ("000010", "000002", "1000000")]
    for step in steps:
        (step / layout.PRETRAINED_DIR).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".incoming-000012").mkdir()
    layout.last_link(tmp_path).symlink_to("000010")
    ordered = [steps[1].resolve(), steps[0].resolve(), steps[2].resolve()]
    assert run_checkpoints(tmp_path) == run_checkpoints(tmp_path / "checkpoints") == ordered
    assert run_checkpoints(layout.last_link(tmp_path)) == run_checkpoints(steps[0]) == []
