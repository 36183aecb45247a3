"""The demo as a user sees it, once from end to end; then what its stages are made of."""

import json
import re
import shutil
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from lerobot_parallel.cli import demo
from lerobot_parallel.cli.main import main
from lerobot_parallel.config.errors import ConfigError
from tests.support.commands import CommandResult, run_command
from tests.support.datasets import copy_peer

STAGES = ["dataset", "train", "resume", "convert", "load"]


def run(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CommandResult]:
    """The folder and what was printed; the real thing, on the CPU."""
    folder = tmp_path_factory.mktemp("played") / "demo"
    command = [sys.executable, "-m", "lerobot_parallel.cli.main", "demo", "--dir", str(folder), "--json"]
    result = run_command(command, folder.parent, timeout=280)
    assert result.returncode == 0, result.stderr
    return folder, result


@pytest.mark.slow
def test_demo_trains_resumes_converts_and_loads(played: tuple[Path, CommandResult]) -> None:
    folder, result = played
    stages = {stage["name"]: stage["facts"] for stage in json.loads(result.stdout)["stages"]}
    assert list(stages) == STAGES
    assert stages["dataset"] == {"episodes": 6, "frames": 180, "gpus": 0}
    topologies = {name: (stages[name]["dp_replicate"], stages[name]["dp_shard"]) for name in ("train", "resume")}
    assert topologies == {"train": (1, 2), "resume": (2, 2)}
    assert [stages[name]["step"] for name in topologies] == [20, 40]
    losses = stages["train"]["losses"] + stages["resume"]["losses"]
    assert len(losses) == 8 and losses[-1] < losses[3] < losses[0]
    for name in topologies:
        assert 0.5 <= stages[name]["parameters_per_rank"] / stages[name]["parameters"] < 0.51
    assert stages["load"]["difference"] == 0
    assert len(stages["load"]["action"]) == 6


@pytest.mark.slow
def test_demo_leaves_what_it_says_where_it_says(played: tuple[Path, CommandResult]) -> None:
    folder, result = played
    paths = {name: Path(path) for name, path in json.loads(result.stdout)["paths"].items()}
    steps = folder / "run" / "checkpoints"
    assert paths == {
        "policy": steps / "000040" / "pretrained_model",
        "dataset": folder / "dataset",
        "logs": folder / "logs",
    }
    weights = load_file(paths["policy"] / "model.safetensors")
    facts = {stage["name"]: stage["facts"] for stage in json.loads(result.stdout)["stages"]}
    assert sum(weight.numel() for weight in weights.values()) == pytest.approx(facts["train"]["parameters"], rel=0.02)
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    assert not (steps / "000020" / "pretrained_model" / "model.safetensors").exists()
    for name in STAGES:
        assert (paths["logs"] / f"{name}.log").read_text().startswith("$ ")
    assert "--nproc-per-node=4" in (paths["logs"] / "resume.log").read_text().splitlines()[0]


@pytest.mark.slow
def test_demo_says_what_it_is_doing_and_nothing_else(played: tuple[Path, CommandResult]) -> None:
    folder, result = played
    first, *lines = result.stderr.splitlines()
    assert first == f"working in {folder}"
    assert [line.split()[0] for line in lines] == ["1/5", "2/5", "3/5", "4/5", "5/5"]


def test_table_is_short_and_ends_with_the_paths(tmp_path: Path) -> None:
    stages = [demo.Stage("dataset", 5.04, ("6 episodes",), {}), demo.Stage("load", 61.5, ("one", "two"), {})]
    assert demo._table(stages, {"logs": tmp_path}).splitlines() == [
        "dataset    5.0 s  6 episodes",
        "load      61.5 s  one",
        "                  two",
        "in all    66.5 s",
        "",
        f"logs     {tmp_path}",
    ]


def test_refuses_a_used_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("demo", "--dir", tmp_path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "--dir" in result.stderr
    with pytest.raises(ConfigError, match="exists already"):
        demo._fresh(tmp_path / "file")


def test_refuses_where_lerobot_train_would_not_find_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEROBOT_PARALLEL", "0")
    result = run("demo", "--dir", tmp_path / "demo")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "LEROBOT_PARALLEL=0" in result.stderr
    assert not (tmp_path / "demo").exists()


def test_keeps_the_global_batch_on_every_topology() -> None:
    assert {demo.GLOBAL_BATCH % topology.processes for topology in (demo.FIRST, demo.SECOND)} == {0}
    assert str(demo.SECOND) == "HSDP on 4 processes (2 x 2)"


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (3, "cpu"), (4, "cuda")])
def test_a_training_uses_gpus_where_there_is_one_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, device: str
) -> None:
    calls = []

    def refuse(self: demo._Demo, name: str, command: list[str], **env: str) -> None:
        calls.append((command, env))
        raise click.ClickException("seen")

    monkeypatch.setattr(demo._Demo, "_call", refuse)
    stages = demo._Demo(tmp_path)
    stages.gpus = gpus
    with pytest.raises(click.ClickException, match="seen"):
        stages.resume()
    [(command, env)] = calls
    assert f"--policy.device={device}" in command
    assert env == ({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})


def test_stage_that_fails_shows_its_log_and_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_MAKE_DATASET", "print('what happened')\nraise SystemExit(3)")
    result = run("demo", "--dir", tmp_path / "demo")
    assert result.exit_code == 1
    assert "what happened" in result.stderr
    assert f"the stage 'dataset' exited with 3; its log: {tmp_path / 'demo' / 'logs' / 'dataset.log'}" in result.stderr


def test_tail_of_a_log_is_what_went_wrong_without_the_noise_around_it() -> None:
    noise = (
        "WARNING:lerobot.utils.import_utils:Could not load libtorchcodec. Likely causes:\nOSError: no such file\n"
        "'torchcodec' is installed but cannot be loaded (see above). Falling back to 'pyav' as a default decoder.\n"
    )
    bar = "".join(f"\rTraining: {done}%" for done in range(100))
    launcher = (
        "E1130 14:43:37 9 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)\nTraceback\n"
    )
    log = f"{noise}start\n{bar}\n{noise}NameError: x\r\n\n{launcher}"
    assert demo._tail(log) == "start\nTraining: 99%\nNameError: x"
    long = "\n".join(map(str, range(500)))
    assert re.findall(r"\d+", demo._tail(long)) == [str(number) for number in range(500 - demo.TAIL_LINES, 500)]


def test_stage_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STAGE_LIMIT_S", 0.2)
    stages = demo._Demo(tmp_path)
    with pytest.raises(click.ClickException, match="took more than"):
        stages._call("sleep", [sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.mark.slow
def test_around_its_training(tmp_path: Path) -> None:
    """Dataset, convert and load, on a checkpoint of other software in place of the two trainings."""
    stages = demo._Demo(tmp_path)
    assert stages.make_dataset().saw == ("6 episodes, 180 frames",)
    shutil.copytree(copy_peer(tmp_path / "copy") / "fsdp2", stages.run / "checkpoints")
    (stages.run / "checkpoints" / "last").symlink_to("000004")
    assert stages.convert().facts["file_bytes"] == 201120
    assert stages.load().facts["difference"] == 0
