"""Gradient accumulation: what belongs to an update, what to a step, and when a save may happen."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.training.fakes import fake_wandb
from tests.training.runs import full_state, log_lines, plan_for_toy, toy_args, train, watch_steps

pytestmark = pytest.mark.usefixtures("warmed")

WINDOW = 3


def _watch() -> Any:
    """After each step: updates so far, the learning rate, and how often gradients were clipped and applied."""
    from lerobot_parallel.engine.gradients import AccumulationWindow

    plan_for_toy()
    counts = {"finished": 0}
    finish = AccumulationWindow.finish

    def counted(self: AccumulationWindow, max_norm: float) -> Any:
        counts["finished"] += 1
        return finish(self, max_norm)

    AccumulationWindow.finish = counted

    def look(run: Any, batch: dict) -> dict[str, Any]:
        return {
            "lr": run.optimizer.param_groups[0]["lr"],
            "updates": int(run.module.update_count),
            "finished": counts["finished"],
            "weights": full_state(run),
            "moments": sorted({int(s["step"]) for s in run.saved.optimizer.state.values() if "step" in s}),
            "gradients": any(p.grad is not None for p in run.module.parameters()),
        }

    return watch_steps(look)


@pytest.mark.parametrize("engine", ["single", "ddp2", "fsdp2"])
def test_updates_come_at_window_ends_and_the_schedule_at_every_step(small_dataset: Path, tmp_path: Path, engine: str):
    flags = ["--policy.optimizer=adamw", "--policy.scheduler_warmup_steps=4", "--steps=7"]
    args = toy_args(small_dataset, *flags, f"--accelerator.gradient_accumulation.steps={WINDOW}")
    ranks = train(args, engine, tmp_path / "ours", _watch)
    rates = _host_rates(toy_args(small_dataset, *flags, "--wandb.enable=true"), tmp_path / "host")
    for rank in ranks:
        assert [step["updates"] for step in rank.value] == [0, 0, 1, 1, 1, 2, 2]
        assert [step["finished"] for step in rank.value] == [0, 0, 1, 1, 1, 2, 2]
        assert [step["moments"] for step in rank.value] == [[], [], [1], [1], [1], [2], [2]]
        assert [step["gradients"] for step in rank.value] == [True, True, False, True, True, False, True]
        assert [step["lr"] for step in rank.value] == rates
        moved = [
            any((before["weights"][name] != after["weights"][name]).any() for name in before["weights"])
            for before, after in zip(rank.value, rank.value[1:], strict=False)
        ]
        assert moved == [False, True, False, False, True, False]
    norms = [float(line["grdn"]) for line in log_lines(ranks[0])]
    assert norms[:2] == [0, 0] and 0 < norms[2] == norms[3] == norms[4] != norms[5] == norms[6]


def _host_rates(args: list[str], cwd: Path) -> list[float]:
    """The learning rate after each step of the host's loop."""

    def fake() -> Any:
        calls = fake_wandb()
        return lambda: [data["train/lr"] for name, _, data in calls if name == "log"]

    rates = train(args, "host", cwd, fake)[0].value
    assert len(set(rates)) > 4
    return rates


@pytest.mark.parametrize("engine", ["single", "fsdp2"])
def test_a_save_inside_a_window_waits_for_its_end(small_dataset: Path, tmp_path: Path, engine: str):
    flags = ["--save_freq=4", f"--accelerator.gradient_accumulation.steps={WINDOW}"]
    (main, *_) = train(toy_args(small_dataset, *flags, "--steps=12"), engine, tmp_path, plan_for_toy)
    assert _saved(tmp_path) == ["000006", "000009", "000012"]
    assert "are no multiple" not in main.stderr


def test_steps_beyond_the_last_window_warn_and_are_saved(small_dataset: Path, tmp_path: Path):
    flags = ["--save_freq=4", f"--accelerator.gradient_accumulation.steps={WINDOW}"]
    main, other = train(toy_args(small_dataset, *flags, "--steps=11"), "ddp2", tmp_path)
    assert _saved(tmp_path) == ["000006", "000009", "000011"]
    assert "no multiple of gradient_accumulation.steps=3: the last 2 micro-batches reach no update" in main.stderr
    assert "no multiple" not in other.stderr


def _saved(cwd: Path) -> list[str]:
    return sorted(path.name for path in (cwd / "out/checkpoints").iterdir() if not path.is_symlink())


def test_a_window_without_an_update_logs_the_last_norm(small_dataset: Path, tmp_path: Path):
    args = toy_args(small_dataset, "--log_freq=2", "--steps=8", "--accelerator.gradient_accumulation.steps=4")
    (result,) = train(args, "single", tmp_path)
    norms = [float(line["grdn"]) for line in log_lines(result)]
    assert len(norms) == 4 and all(math.isfinite(norm) for norm in norms)
    assert norms[0] == 0 and 0 < norms[1] == norms[2]
