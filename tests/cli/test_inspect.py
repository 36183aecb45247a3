"""`lerobot-parallel inspect`, as it is read by people and by programs."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lerobot_parallel.cli.main import main
from tests.support.datasets import copy_peer


def inspect(*args: object) -> Result:
    result = CliRunner().invoke(main, ["inspect", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return copy_peer(tmp_path) / "fsdp2/000004"


def test_page_says_what_is_there(checkpoint: Path) -> None:
    lines = {line.split("  ")[0]: line for line in inspect(checkpoint).stdout.splitlines()}
    assert lines["step"].endswith(" 4")
    assert lines["topology"].endswith("2 processes, dp_shard=2, batch_size=4, grad_accum_steps=1")
    assert "dcp (" in lines["weights"] and lines["optimizer"].endswith("dcp")
    assert lines["tensors"].endswith("78 (78 float32), 48,294 numbers")
    assert lines["state"].endswith("complete")


def test_tensors_are_listed_on_request(checkpoint: Path) -> None:
    plain, listed = inspect(checkpoint).stdout, inspect(checkpoint, "--tensors").stdout
    assert listed.startswith(plain) and len(listed.splitlines()) - len(plain.splitlines()) == 78
    assert "model.action_head.weight" in listed and "[6, 32]" in listed


def test_json_is_one_object(checkpoint: Path) -> None:
    seen = json.loads(inspect(checkpoint, "--json").stdout)
    assert (seen["step"], seen["complete"], seen["tensor_count"]) == (4, True, 78) and "tensors" not in seen
    seen = json.loads(inspect(checkpoint, "--json", "--tensors").stdout)
    assert seen["tensors"][0] == {
        "name": "model.action_head.bias",
        "dtype": "float32",
        "shape": [6],
        "bytes": 24,
        "chunks": 2,
    }


def test_verify_exits_with_1_only_where_something_is_wrong(checkpoint: Path) -> None:
    fine = inspect(checkpoint, "--verify")
    assert fine.exit_code == 0 and "complete, every stored tensor was read" in fine.stdout
    shard = checkpoint / "training_state" / "optimizer_0" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-9])
    damaged = inspect(checkpoint, "--verify")
    assert damaged.exit_code == 1 and "is truncated" in damaged.stdout
    assert inspect(checkpoint).exit_code == 0


def test_run_directory_gives_a_table(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run" / "checkpoints"
    for name in ("000004", "000008"):
        shutil.copytree(checkpoint, run / name)
    (run / "000008" / "training_state" / "training_step.json").unlink()
    lines = inspect(tmp_path / "run").stdout.splitlines()
    assert lines[0].split() == ["step", "state", "weights", "optimizer", "size", "topology"]
    assert lines[1].split()[:4] == ["000004", "complete", "dcp", "dcp"]
    assert lines[2].split()[:2] == ["000008", "incomplete"]
    assert lines[3] == "000008: training_state/training_step.json"
    seen = json.loads(inspect(run, "--json").stdout)["checkpoints"]
    assert [each["complete"] for each in seen] == [True, False]


def test_nothing_there_is_one_line(tmp_path: Path) -> None:
    result = inspect(tmp_path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
