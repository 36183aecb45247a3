"""torchrun starts the workers again after one is killed, and the run goes on by itself."""

import contextlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.distributed.test_exact_resume import ACT, COMMON, FSDP2
from tests.support.checkpoints import contents
from tests.support.commands import CommandResult, run_command, train_in_world
from tests.support.datasets import make_dataset

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1"]


@pytest.mark.slow
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_nothing_else(tmp_path: Path, warmed: None):
    """The README's recipe, as it stands there."""
    args = [*COMMON, *ACT, f"--dataset.root={make_dataset(tmp_path / 'data', episodes=2, frames=10)}", FSDP2.format(2)]
    args += ["--steps=8", "--save_freq=2", "--checkpoint.auto_resume=true"]
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "lerobot.scripts.lerobot_train"]
    killer = threading.Thread(target=_kill_a_worker_after, args=(tmp_path / "out/checkpoints/000002",))
    killer.start()
    result = run_command([*launch, *args, "--output_dir=out"], tmp_path)
    killer.join()
    assert result.returncode == 0, result.stderr[-4000:]
    assert "exitcode: -9" in result.stderr and "going on from" in result.stderr
    whole = train_in_world([*args, "--output_dir=whole"], 2, tmp_path)
    assert [r.exitcode for r in whole] == [0, 0]
    ours, expected = (tmp_path / name / "checkpoints/last" for name in ("out", "whole"))
    assert ours.readlink() == expected.readlink() == Path("000008")
    assert contents(ours / "training_state") == contents(expected / "training_state")
    weights = [(last / "pretrained_model/model.safetensors").read_bytes() for last in (ours, expected)]
    assert weights[0] == weights[1]


def _kill_a_worker_after(directory: Path) -> None:
    deadline = time.monotonic() + 150
    while not directory.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == "1":
                process.kill()
                return


@pytest.mark.slow
def test_ranks_on_two_nodes_meet_again(tmp_path: Path):
    """Two agents, which count their restarts each on its own and share one store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command = [*TORCHRUN, *launch, "--rdzv-id=two", "-m", "tests.support.restarted", str(tmp_path / "died")]

    def agent(_: int) -> CommandResult:
        return run_command(command, tmp_path, timeout=100)

    with ThreadPoolExecutor(2) as nodes:
        results = list(nodes.map(agent, range(2)))
    assert [result.returncode for result in results] == [0, 0], results[0].stderr[-3000:] + results[1].stderr[-3000:]
    assert ["met 2 ranks after a restart: True" in result.stdout for result in results] == [True, True]
