"""What a resumed command line may change, what it may not, and how it is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_exact_resume import COMMON, DDP, FSDP2
from tests.support.commands import quiet_env, train_in_world
from tests.support.datasets import make_dataset
from tests.support.tracing import inspected_run, traced_training
from tests.support.world import run_world

TOY = ["--policy.type=toy_nasty", "--policy.optimizer_lr=1e-2", "--accelerator.fsdp.wrap_modules=[ToyBlock]"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, warmed: None) -> Path:
    """Runs of 4 steps of 8: unsharded, sharded, and with a schedule."""
    folder = tmp_path_factory.mktemp("base")
    data = make_dataset(folder / "data", episodes=2, frames=10)
    args = [*COMMON, *TOY, f"--dataset.root={data}", "--steps=8", "--save_freq=4"]
    for name, more in {
        "ddp": [DDP.format(2)],
        "fsdp2": [FSDP2.format(2), "--checkpoint_format=dcp"],
        "scheduled": [DDP.format(2), "--policy.scheduler_warmup_steps=2"],
    }.items():
        results = train_in_world([*args, *more, f"--output_dir={name}"], 2, folder)
        assert [r.exitcode for r in results] == [0, 0], results[0].stderr[-2000:]
    return folder


def _resume(base: Path, name: str, *more: str) -> list[str]:
    config = base / name / "checkpoints/000004/pretrained_model/train_config.json"
    return ["--resume=true", f"--config_path={config}", *more]


def _groups(run: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in run.saved.optimizer.param_groups
    ]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
@pytest.mark.parametrize("flag", ["policy.optimizer_lr", "optimizer.lr"])
def test_a_learning_rate_on_the_command_line_beats_the_stored_one(base: Path, tmp_path: Path, name: str, flag: str):
    for groups in inspected_run(_resume(base, name, f"--{flag}=0.005", "--output_dir=x"), 2, tmp_path, _groups):
        assert [group["lr"] for group in groups] == [0.005, 0.005]
        assert [group["weight_decay"] for group in groups] == [1e-2, 0.0]
    for groups in inspected_run(_resume(base, name, "--steps=9", "--output_dir=x"), 2, tmp_path, _groups):
        assert [group["lr"] for group in groups] == [1e-2, 1e-2]


def test_a_weight_decay_on_the_command_line_beats_the_stored_one(base: Path, tmp_path: Path):
    for groups in inspected_run(
        _resume(base, "ddp", "--optimizer.weight_decay=0.3", "--output_dir=x"), 2, tmp_path, _groups
    ):
        assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
        assert [group["lr"] for group in groups] == [1e-2, 1e-2]


@pytest.mark.parametrize("flag", ["policy.optimizer_lr", "optimizer.lr"])
def test_a_schedule_goes_on_from_its_place_with_the_given_rate(base: Path, tmp_path: Path, flag: str):
    whole = traced_training(_resume(base, "scheduled", "--output_dir=a"), 2, tmp_path)[0]
    # A tenth of the rate, at the same place of the same schedule (its floor is a tenth of the peak in both).
    lower = traced_training(_resume(base, "scheduled", f"--{flag}=0.001", "--output_dir=b"), 2, tmp_path)[0]
    assert [step["lr"] for step in lower] == pytest.approx([step["lr"] / 10 for step in whole], rel=1e-6)


def test_each_difference_is_logged_once_and_the_topology_warned_of(base: Path, tmp_path: Path):
    flags = [
        "--steps=6",
        "--save_freq=3",
        "--log_freq=1",
        "--policy.optimizer_lr=0.005",
        "--parallelism.dp_replicate=1",
    ]
    (result,) = train_in_world(_resume(base, "ddp", *flags, "--output_dir=x"), 1, tmp_path)
    assert result.exitcode == 0, result.stderr[-2000:]
    for line in (
        "--steps: 6 from the command line, the checkpoint has 8",
        "--save_freq: 3 from the command line, the checkpoint has 4",
        "--policy.optimizer_lr: 0.005 from the command line, the checkpoint has 0.01",
        "resuming on another topology: dp_replicate 1 x dp_shard 1 instead of 2 x 1",
    ):
        assert result.stderr.count(line) == 1, line
    assert "--log_freq" not in result.stderr, "it is the same"
    assert (tmp_path / "x/checkpoints/000006").is_dir()


def test_own_flags_are_written_only_where_they_differ(base: Path, tmp_path: Path):
    saved = json.loads((base / "ddp/checkpoints/000004/pretrained_model/train_config.json").read_text())
    assert "checkpoint" not in saved and saved["checkpoint_format"] == "safetensors"
    train_in_world(_resume(base, "ddp", "--checkpoint.keep_last=2", "--output_dir=x"), 2, tmp_path)
    config = json.loads((tmp_path / "x/checkpoints/last/pretrained_model/train_config.json").read_text())
    assert config["checkpoint"] == {"keep_last": 2}


def _frozen(args: list[str], cwd: Path, names: list[str]) -> tuple[dict, list[str]]:
    """Resumes with these parameters not trained; the optimizer's state by name, and the warnings."""
    import logging
    import os
    import sys

    from lerobot_parallel.training import assemble, command
    from tests.support.toy import ToyNastyPolicy

    init = ToyNastyPolicy.__init__

    def freezing(self: Any, *a: Any, **k: Any) -> None:
        init(self, *a, **k)
        for name, param in self.named_parameters():
            if name in names:
                param.requires_grad_(False)

    ToyNastyPolicy.__init__ = freezing
    seen: list[Any] = []
    lines: list[str] = []
    assemble.init_logging = lambda **_: None
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger().addHandler(handler)

    def look(run: Any) -> bool:
        from torch.distributed.tensor import DTensor

        for name, param in run.module.named_parameters():
            for field, value in run.saved.optimizer.state.get(param, {}).items():
                seen.append((f"{name}/{field}", (value.full_tensor() if isinstance(value, DTensor) else value).clone()))
        run.cfg.steps = run.step + 1
        return loop(run)

    loop = command.train_loop
    command.train_loop = look
    os.chdir(cwd)
    sys.argv = ["lerobot-train", *args]
    command.train()
    return dict(seen), [line for line in lines if "train" in line]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_freezing_and_unfreezing_keeps_the_state_of_all_others_and_lists_them(base: Path, tmp_path: Path, name: str):
    names = ["state_proj.weight", "out.bias"]
    everything, said = run_world(
        _frozen, 2, _resume(base, name, "--output_dir=a", "--save_freq=5"), tmp_path, [], env=quiet_env()
    )[0]
    assert said == [] and "out.bias/exp_avg" in everything
    args = _resume(base, name, "--output_dir=b", "--save_freq=5")
    state, said = run_world(_frozen, 2, args, tmp_path, names, env=quiet_env())[0]
    kept = {key: value for key, value in everything.items() if key.split("/")[0] not in names}
    assert state.keys() == kept.keys()
    assert [key for key in kept if not torch.equal(kept[key], state[key])] == []
    (line,) = said
    assert line.startswith("2 parameters do not train any more") and all(n in line for n in names)
    args = ["--resume=true", "--config_path=b/checkpoints/last", "--output_dir=c"]
    thawed, said = run_world(_frozen, 2, args, tmp_path, [], env=quiet_env())[0]
    assert thawed.keys() == kept.keys(), "they start afresh"
    (line,) = said
    assert line.startswith("2 parameters did not train before") and all(n in line for n in names)


def test_rates_of_the_peers_checkpoint_can_be_changed_too(base: Path, tmp_path: Path):
    from tests.support.datasets import copy_peer

    peer = copy_peer(tmp_path)
    for writer in ("fsdp2", "host1"):
        config = f"{writer}/000004/pretrained_model/train_config.json"
        args = [
            "--resume=true",
            f"--config_path={config}",
            "--output_dir=out",
            "--policy.optimizer_lr=3e-4",
            FSDP2.format(2),
        ]
        for groups in inspected_run(args, 2, peer, _groups):
            assert groups[0]["lr"] == 3e-4
    assert load_file(peer / "host1/step8.safetensors")
