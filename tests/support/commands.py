"""Training commands as users start them, and the same in cheap forked worlds."""

import atexit
import contextlib
import functools
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.world import RankResult, WorldError, run_world_raw

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def quiet_env() -> dict[str, str]:
    """Variables under which nothing asks the network, a GPU or the user's own caches; HF_HOME is a fresh folder."""
    home = tempfile.mkdtemp(prefix="hf-home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": home,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
    }


@dataclass(frozen=True)
class CommandResult:
    args: list[str]
    returncode: int
    stdout: str
    stderr: str


def train_command(
    args: list[str],
    cwd: Path | str,
    nproc: int = 1,
    env: dict[str, str] | None = None,
    timeout: float = 180,
) -> CommandResult:
    """Runs the host's `lerobot-train ARGS`, under torchrun if `nproc` is above 1. Its exit code is not judged here.

    Raises:
        WorldError: it ran longer than `timeout` seconds; the text has the end of its stderr, with the stacks of
            every Python process in it.
    """
    run = [f"--nproc-per-node={nproc}", "-m", "lerobot.scripts.lerobot_train"]
    launch = ["-m", "torch.distributed.run", "--standalone", *run] if nproc > 1 else run[1:]
    return run_command([sys.executable, *launch, *args], cwd, env=env, timeout=timeout)


def run_command(
    command: list[str], cwd: Path | str, env: dict[str, str] | None = None, timeout: float = 180
) -> CommandResult:
    """Runs any command in a session of its own, under the quiet environment; see `train_command`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **os.environ,
        **quiet_env(),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **(env or {}),
    }
    # Files, not pipes: a grandchild that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end_tree(process)
        texts = [_content(out), _content(err)]
    if timed_out:
        lines = [line for line in texts[1].splitlines() if not line.startswith("Extension modules:")]
        end = "\n".join(lines)[-12000:]
        text = f"{' '.join(command)}\nran longer than {timeout:g} s; the end of its stderr:\n{end}"
        raise WorldError(text, rank=None, results=[])
    return CommandResult(command, process.returncode, *texts)


def _content(file) -> str:  # noqa: ANN001
    file.seek(0)
    return file.read()


def _end_tree(process: subprocess.Popen) -> None:
    """Ends a command that still runs, with its descendants: torchrun puts workers into sessions of their own.

    First each descendant in turn is aborted, which makes Python's fault handler write its stacks, while the root
    is stopped, so that it does not end the others as soon as the first is gone.
    """
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    tree = [*root.children(recursive=True), root]
    if len(tree) > 1:
        _send(root, signal.SIGSTOP)
    for member in tree[:-1] or tree:
        _send(member, signal.SIGABRT)
        time.sleep(0.3)
    for member in tree:
        _send(member, signal.SIGKILL)
    psutil.wait_procs(tree, timeout=5)
    process.wait()


def _send(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def train_in_world(
    args: list[str],
    nprocs: int,
    cwd: Path | str,
    timeout: float = 120,
    env: dict[str, str | None] | None = None,
    grace: float = 30,
) -> list[RankResult]:
    """Runs our `lerobot-train ARGS` on forked ranks; one rank runs as under a plain `python`, without torchrun."""
    return _in_world("lerobot_parallel.training.command", args, nprocs, cwd, timeout, env, grace)


def host_train_in_world(
    args: list[str],
    nprocs: int,
    cwd: Path | str,
    timeout: float = 120,
    env: dict[str, str | None] | None = None,
    grace: float = 30,
) -> list[RankResult]:
    """Runs the host's own, untouched training on forked ranks: an independent reference."""
    return _in_world("lerobot.scripts.lerobot_train", args, nprocs, cwd, timeout, env, grace)


def _in_world(
    module: str,
    args: list[str],
    nprocs: int,
    cwd: Path | str,
    timeout: float,
    env: dict[str, str | None] | None,
    grace: float,
) -> list[RankResult]:
    variables = {**quiet_env(), **(env or {})}
    return run_world_raw(
        _train, nprocs, module, args, cwd, timeout=timeout, grace=grace, env=variables, launcher=nprocs > 1
    )


def _train(module: str, args: list[str], cwd: Path | str) -> None:
    os.chdir(cwd)
    sys.argv = ["lerobot-train", *map(str, args)]
    importlib.import_module(module).train()
