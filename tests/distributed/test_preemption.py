"""A machine that is taken away: one save, exit 0; the same command goes on where it stopped."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.distributed.test_exact_resume import ACT, COMMON, DDP, FSDP2
from tests.support.checkpoints import contents
from tests.support.commands import quiet_env, train_in_world
from tests.support.datasets import make_dataset
from tests.support.world import run_world_raw


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "plain", episodes=2, frames=10)


def _args(dataset: Path, *more: str) -> list[str]:
    return [*COMMON, *ACT, f"--dataset.root={dataset}", *more]


def _signalled(args: list[str], cwd: Path, at_step: int, rank: int, signals: list[int]) -> int:
    """Trains; in the given step the given rank gets the signals. Returns how many steps this rank made."""
    from lerobot_parallel.training import command, loop

    step, made = loop.train_step, []

    def watched(run: object, batch: dict) -> tuple:
        if run.step == at_step and run.accelerator.process_index == rank:
            for signum in signals:
                os.kill(os.getpid(), signum)
        made.append(run.step)
        return step(run, batch)

    loop.train_step = watched
    os.chdir(cwd)
    sys.argv = ["lerobot-train", *args]
    command.train()
    return len(made)


def _run(args: list[str], cwd: Path, ranks: int, *, at_step: int, rank: int, signals: list[int]) -> list:
    return run_world_raw(
        _signalled, ranks, args, cwd, at_step, rank, signals, launcher=ranks > 1, env=quiet_env(), timeout=120
    )


@pytest.mark.parametrize(("signum", "rank"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0)])
@pytest.mark.parametrize("more", [[], ["--checkpoint.async_save=true", "--save_freq=2"]], ids=["sync", "async"])
def test_a_signal_on_any_rank_saves_once_on_all_and_exits_0(
    tmp_path: Path, warmed: None, dataset: Path, signum: int, rank: int, more: list[str]
):
    args = _args(dataset, FSDP2.format(2), "--checkpoint_format=dcp", "--steps=50", "--output_dir=out", *more)
    results = _run(args, tmp_path, 2, at_step=3, rank=rank, signals=[signum])
    assert [r.exitcode for r in results] == [0, 0], results[0].stderr[-3000:]
    assert [r.value for r in results] == [4, 4], "within the step"
    names = sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir())
    assert names == (["000002", "000004", "last"] if more else ["000004", "last"])
    assert (tmp_path / "out/checkpoints/last").readlink() == Path("000004")
    assert "Stopped at step 4 of 50" in results[0].stderr


def test_a_signal_inside_a_window_waits_for_its_update(tmp_path: Path, warmed: None, dataset: Path):
    args = _args(
        dataset, DDP.format(2), "--accelerator.gradient_accumulation.steps=3", "--steps=50", "--output_dir=out"
    )
    results = _run(args, tmp_path, 2, at_step=3, rank=1, signals=[signal.SIGTERM])
    assert [(r.exitcode, r.value) for r in results] == [(0, 6), (0, 6)]
    assert sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir()) == ["000006", "last"]


def test_a_second_signal_kills(tmp_path: Path, warmed: None, dataset: Path):
    args = _args(dataset, "--accelerator.mixed_precision=no", "--steps=50", "--output_dir=out")
    (result,) = _run(args, tmp_path, 1, at_step=3, rank=0, signals=[signal.SIGUSR1, signal.SIGTERM])
    assert result.exitcode == -signal.SIGTERM
    assert not (tmp_path / "out/checkpoints").exists()


class TestAutoResume:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_the_same_command_goes_on_after_a_stop_and_ends_as_if_there_was_none(
        self, tmp_path: Path, warmed: None, dataset: Path, ranks: int
    ):
        args = _args(dataset, DDP.format(ranks), "--steps=8", "--save_freq=100", "--checkpoint.auto_resume=true")
        stopped = _run(
            [*args, "--output_dir=out"], tmp_path, ranks, at_step=2, rank=ranks - 1, signals=[signal.SIGTERM]
        )
        again = train_in_world([*args, "--output_dir=out"], ranks, tmp_path)
        once = train_in_world([*args, "--output_dir=whole"], ranks, tmp_path)
        assert [r.exitcode for r in [*stopped, *again, *once]] == [0] * 3 * ranks, again[0].stderr[-3000:]
        assert "going on from" in again[0].stderr and "000003" in again[0].stderr
        ours, expected = (contents(tmp_path / name / "checkpoints/last/training_state") for name in ("out", "whole"))
        assert ours == expected
        weights = [
            (tmp_path / n / "checkpoints/last/pretrained_model/model.safetensors").read_bytes()
            for n in ("out", "whole")
        ]
        assert weights[0] == weights[1]

    def test_a_killed_run_goes_on_from_the_newest_good_checkpoint(self, tmp_path: Path, warmed: None, dataset: Path):
        args = _args(
            dataset, FSDP2.format(2), "--steps=8", "--save_freq=2", "--checkpoint.auto_resume=true", "--output_dir=out"
        )
        killed = _run(args, tmp_path, 2, at_step=5, rank=1, signals=[signal.SIGKILL])
        assert killed[1].exitcode == -signal.SIGKILL and not killed[0].stopped
        shard = tmp_path / "out/checkpoints/000004/pretrained_model/model.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        results = train_in_world(args, 2, tmp_path)
        assert [r.exitcode for r in results] == [0, 0], results[0].stderr[-3000:]
        assert "000004 is damaged or incomplete" in results[0].stderr and "model.safetensors" in results[0].stderr
        assert "falling back to" in results[0].stderr and "000002" in results[0].stderr
        step = json.loads((tmp_path / "out/checkpoints/last/training_state/training_step.json").read_text())
        assert step["step"] == 8

    def test_it_starts_in_a_directory_that_holds_no_checkpoint_yet(self, tmp_path: Path, warmed: None, dataset: Path):
        (tmp_path / "out/checkpoints/.incoming-000003-abc").mkdir(parents=True)
        (tmp_path / "out/logs").mkdir()
        args = _args(dataset, "--steps=2", "--output_dir=out")
        (refused,) = train_in_world([*args, "--accelerator.mixed_precision=no"], 1, tmp_path)
        assert refused.exitcode == 1 and "already exists" in refused.stderr
        (started,) = train_in_world([*args, "--checkpoint.auto_resume=true"], 1, tmp_path)
        assert started.exitcode == 0, started.stderr[-3000:]
        assert sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir()) == ["000002", "last"]

    def test_it_needs_an_output_directory(self, tmp_path: Path, warmed: None, dataset: Path):
        (refused,) = train_in_world(_args(dataset, "--checkpoint.auto_resume=true"), 1, tmp_path)
        assert refused.exitcode == 1 and "give --output_dir" in refused.stderr
