"""Cheap worlds of N processes over gloo, forked from one parent that has imported everything once.

Importing the host takes seconds, forking takes milliseconds. A rank is an ordinary process: it may raise, hang,
exit or be killed, and its parent reports which of these it did. The parent must stay forkable: it never starts
autograd or OpenMP threads and never touches CUDA.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import logging
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

STACKS_SIGNAL = signal.SIGUSR2  # SIGTERM and SIGUSR1 belong to the engine (pre-emption)
POLL_S = 0.005
PR_SET_PDEATHSIG = 1

_WARM_MODULES = (
    "accelerate",
    "datasets.io.parquet",
    "torch._dynamo",  # the first optimizer step would import it in every rank
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "lerobot.scripts.lerobot_train",
    "lerobot.policies.act.modeling_act",
    "tests.support.toy",
)
_OWN_MODULES = ("lerobot_parallel.training.command",)
_warmed = False


class WorldError(AssertionError):
    """A world that did not end well: what the first failing rank said, or every rank's stack after a timeout.

    `rank` is that rank (None after a timeout), `results` the `RankResult` of every rank.
    """

    def __init__(self, text: str, *, rank: int | None, results: list["RankResult"]) -> None:
        super().__init__(text)
        self.rank = rank
        self.results = results


@dataclass(frozen=True)
class RankResult:
    """How one rank ended: `exitcode` as in `subprocess` (minus the signal's number if a signal ended it).

    `error` is the traceback of an exception other than SystemExit, `stopped` says that the harness killed the
    rank because it, or the world, did not end by itself.
    """

    rank: int
    value: Any
    exitcode: int
    stdout: str
    stderr: str
    error: str = ""
    failed_at: float = 0.0
    stopped: bool = False

    def describe(self) -> str:
        """One line on how the rank ended, then its traceback or the end of its stderr."""
        if self.error:
            return f"rank {self.rank} raised:\n{self.error}"
        if self.exitcode < 0:
            how = f"was ended by {signal.Signals(-self.exitcode).name}"
        else:
            how = f"exited with {self.exitcode}"
        return f"rank {self.rank} {how}; the end of its stderr:\n{self.stderr[-4000:]}"


def warm() -> None:
    """Imports what ranks need into this process, once. Starts no thread and touches no device."""
    global _warmed
    if _warmed:
        return
    import torch
    import tqdm

    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0  # its monitor is a thread
    for name in _WARM_MODULES:
        importlib.import_module(name)
    for name in _OWN_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _warm_parser()
    gc.freeze()  # a rank that collects garbage would copy every page of what it inherited
    _warmed = True


def _warm_parser() -> None:
    """Lets draccus read the comments of the config classes, for their help texts, here and not in every rank.

    They are half of the time of a short training run; draccus has their cache commented out.
    """
    import draccus
    from draccus.wrappers import docstring
    from lerobot.configs.train import TrainPipelineConfig

    docstring.get_attribute_docstring = functools.cache(docstring.get_attribute_docstring)
    draccus.argparsing.ArgumentParser(config_class=TrainPipelineConfig)


def run_world(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str | None] | None = None,
    init: bool = False,
    launcher: bool = True,
) -> list[Any]:
    """Calls `fn(*args)` in `nprocs` forked ranks and returns their values in rank order.

    `fn` may be a closure; its value must be picklable. `init` opens a gloo process group around it, else that is
    left to `fn`. `env` adds variables (None removes one). Without `launcher` the variables that torchrun sets are
    absent, as under a plain `python`. Ranks differ in their random seeds.

    Raises:
        WorldError: a rank raised, exited with another code than 0 or was killed (the others are then killed at
            once), or the world ran longer than `timeout` seconds.
    """
    world = World(fn, nprocs, *args, env=env, init=init, launcher=launcher)
    results = world.wait(timeout, grace=0)
    failed = [r for r in results if r.exitcode != 0 and not r.stopped]
    if failed:
        first = min(failed, key=lambda r: r.failed_at or float("inf"))
        raise WorldError(first.describe(), rank=first.rank, results=results)
    return [r.value for r in results]


def run_world_raw(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float = 120,
    grace: float = 30,
    env: dict[str, str | None] | None = None,
    init: bool = False,
    launcher: bool = True,
) -> list[RankResult]:
    """Like `run_world`, but reports how every rank ended, with its output, instead of raising.

    After the first rank that failed the others have `grace` seconds to end by themselves; then they are killed
    and marked `stopped`.

    Raises:
        WorldError: the world ran longer than `timeout` seconds.
    """
    return World(fn, nprocs, *args, env=env, init=init, launcher=launcher).wait(timeout, grace=grace)


class World:
    """Running ranks, for tests that act on them from outside: `signal` some, then `wait`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        nprocs: int,
        *args: Any,
        env: dict[str, str | None] | None = None,
        init: bool = False,
        launcher: bool = True,
    ) -> None:
        warm()
        _check_forkable()
        self.folder = Path(tempfile.mkdtemp(prefix="world-"))
        self.pids: list[int] = []
        self._codes: dict[int, int] = {}
        self._stopped: set[int] = set()
        port = _free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(nprocs):
            variables = {**(_launcher_env(rank, nprocs, port) if launcher else _NO_LAUNCHER), **(env or {})}
            group = (rank, nprocs, port) if init else None
            self.pids.append(_fork_rank(rank, self.folder / str(rank), variables, group, fn, args))

    def signal(self, rank: int, signum: int) -> None:
        """Sends a signal to one rank, if it still runs."""
        if rank not in self._codes:
            os.kill(self.pids[rank], signum)

    def wait(self, timeout: float, *, grace: float) -> list[RankResult]:
        """Waits until every rank ended; see `run_world_raw`. No rank outlives this call."""
        try:
            stacks = self._wait(timeout, grace)
            results = [self._result(rank) for rank in range(len(self.pids))]
        finally:
            self._kill_rest()
            shutil.rmtree(self.folder, ignore_errors=True)
        if stacks is not None:
            text = f"the world of {len(self.pids)} ranks ran longer than {timeout:g} s\n{stacks}"
            raise WorldError(text, rank=None, results=results)
        return results

    def _wait(self, timeout: float, grace: float) -> str | None:
        """Returns None, or the stacks of all ranks if they had to be killed at the timeout."""
        deadline = time.monotonic() + timeout
        patience = float("inf")
        while not self._reap():
            now = time.monotonic()
            if any(self._codes.values()):
                patience = min(patience, now + grace)
            if now >= patience:
                self._kill_rest()
            elif now >= deadline:
                stacks = self._collect_stacks()
                self._kill_rest()
                return stacks
            else:
                time.sleep(POLL_S)
        return None

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self.pids)) if rank not in self._codes]

    def _reap(self) -> bool:
        """Takes note of ranks that ended; True once all have."""
        for rank in self._running():
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
        return not self._running()

    def _kill_rest(self) -> None:
        """Kills the ranks that still run, each with the processes it started in its own group."""
        rest = self._running()
        for rank in rest:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pids[rank], signal.SIGKILL)
        for rank in rest:
            _, status = os.waitpid(self.pids[rank], 0)
            self._codes[rank] = os.waitstatus_to_exitcode(status)
            self._stopped.add(rank)

    def _collect_stacks(self) -> str:
        files = {rank: self.folder / str(rank) / "stacks" for rank in self._running()}
        for rank in files:
            self.signal(rank, STACKS_SIGNAL)
        patience = time.monotonic() + 2
        while time.monotonic() < patience and not all(_size(f) for f in files.values()):
            time.sleep(POLL_S)
        time.sleep(0.05)
        texts = [f"--- stacks of rank {rank}\n{_read(file)}" for rank, file in files.items()]
        ended = [f"--- rank {rank} had ended with {code}" for rank, code in sorted(self._codes.items())]
        return "\n".join(ended + texts)

    def _result(self, rank: int) -> RankResult:
        folder = self.folder / str(rank)
        outcome: dict[str, Any] = {}
        if (folder / "outcome").exists():
            outcome = pickle.loads((folder / "outcome").read_bytes())
        if outcome.get("value") is not None:
            outcome["value"] = pickle.loads(outcome["value"])
        return RankResult(
            rank=rank,
            value=outcome.get("value"),
            exitcode=self._codes[rank],
            stdout=_read(folder / "stdout"),
            stderr=_read(folder / "stderr"),
            error=outcome.get("error", ""),
            failed_at=outcome.get("failed_at", 0.0),
            stopped=rank in self._stopped,
        )


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _check_forkable() -> None:
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("this process has used CUDA, so its forks cannot: run worlds in a process of their own")


def _free_port() -> int:
    """A port below the ephemeral range, where gloo's own connections cannot take it before rank 0 does."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_NO_LAUNCHER: dict[str, str | None] = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


def _launcher_env(rank: int, nprocs: int, port: int) -> dict[str, str | None]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _fork_rank(
    rank: int,
    folder: Path,
    env: dict[str, str | None],
    group: tuple[int, int, int] | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> int:
    folder.mkdir()
    with warnings.catch_warnings():
        # Arrow and others keep idle threads and restart them in the child by their own fork handlers.
        warnings.simplefilter("ignore", DeprecationWarning)
        parent, pid = os.getpid(), os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    _run_rank(parent, rank, folder, env, group, fn, args)


def _run_rank(
    parent: int,
    rank: int,
    folder: Path,
    env: dict[str, str | None],
    group: tuple[int, int, int] | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> NoReturn:
    """The whole life of a rank; leaves by `os._exit`, so that nothing of pytest's runs twice."""
    code = 70
    try:
        _become_own_process(parent, folder)
        _set_env({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback(), **env})
        _refresh_state(rank)
        code = _call(folder, group, fn, args)
        _flush()
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            _flush()
    finally:
        os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _call(folder: Path, group: tuple[int, int, int] | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Runs `fn` and leaves its outcome in the folder; returns the exit code, as the interpreter would choose it."""
    outcome: dict[str, Any] = {}
    code = 0
    try:
        with _process_group(group):
            outcome["value"] = pickle.dumps(fn(*args))
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException:
        code = 1
        outcome["error"] = traceback.format_exc()
        sys.stderr.write(outcome["error"])
    if code:
        outcome["failed_at"] = time.monotonic()
    (folder / "outcome.part").write_bytes(pickle.dumps(outcome))
    (folder / "outcome.part").rename(folder / "outcome")
    return code


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


@contextlib.contextmanager
def _process_group(group: tuple[int, int, int] | None) -> Iterator[None]:
    if group is None:
        yield
        return
    import torch.distributed as dist

    rank, size, port = group
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    yield
    dist.barrier()  # rank 0 holds the store that the others still need
    dist.destroy_process_group()


def _become_own_process(parent: int, folder: Path) -> None:
    """Own process group, own output files, own signal handlers; dies with the parent."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(70)
    for signum in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1):
        faulthandler.unregister(signum)
        signal.signal(signum, signal.SIG_DFL)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, fd)
        os.close(target)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
    stdin = os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    faulthandler.enable(file=2)
    stacks = os.open(folder / "stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)


def _set_env(env: dict[str, str | None]) -> None:
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _loopback() -> str | None:
    """The name of the loopback interface: without it gloo asks for the address of the host's name."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def _refresh_state(rank: int) -> None:
    """Undoes what pytest and other tests left behind in the parent: log handlers, captured warnings, singletons."""
    import numpy
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    warnings.resetwarnings()
    warnings.showwarning = _show_warning
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.set_num_threads(1)
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:  # noqa: ANN001
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))
