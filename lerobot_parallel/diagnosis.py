"""Whether this machine and this environment can train in parallel, and what stands in the way."""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from lerobot_parallel import hooks

_PACKAGES = ("lerobot", "torch", "accelerate", "safetensors", "huggingface_hub")
_SHM = Path("/dev/shm")
_LEAST_SHM = 1 << 30
_LEAST_FILES = 4096
_LEAST_DISK = 20 << 30
_BACKEND_LIMIT_S = 90

_ALL_REDUCE = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
backend, rank, size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group(
    backend, init_method="file://" + store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
value = torch.ones(1, device=device)
dist.all_reduce(value)
assert value.item() == size, value
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Problem:
    """`fatal`: a sharded run cannot start like this; otherwise it may go wrong later."""

    about: str
    problem: str
    way_out: str
    fatal: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """`facts` by section; `problems`, the fatal ones first."""

    facts: dict[str, dict[str, Any]]
    problems: list[Problem]

    @property
    def healthy(self) -> bool:
        return not any(problem.fatal for problem in self.problems)


def diagnose(folder: Path | None = None) -> Diagnosis:
    """Look at versions, the hook, devices, backends and limits. Starts a few short processes.

    Args:
        folder: where checkpoints would go; the current directory if None.
    """
    problems: list[Problem] = []
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "packages": lambda: _packages(problems),
        "hook": lambda: _hook(problems),
        "devices": _devices,
        "backends": lambda: _backends(problems),
        "environment": lambda: _environment(problems),
        "limits": lambda: _limits(problems, folder or Path.cwd()),
    }
    facts = {name: _examined(name, look, problems) for name, look in sections.items()}
    return Diagnosis(facts, sorted(problems, key=lambda problem: not problem.fatal))


def _examined(name: str, look: Callable[[], dict[str, Any]], problems: list[Problem]) -> dict[str, Any]:
    """What cannot even be looked at (a torch that does not import) is a finding, not a crash."""
    try:
        return look()
    except Exception as error:
        text = f"cannot be examined: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
        way_out = "reinstall what it names, e.g. pip install --force-reinstall torch"
        problems.append(Problem(name, text, way_out, fatal=True))
        return {}


def _packages(problems: list[Problem]) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version()}
    for name, supported in _supported().items():
        version = _version(name)
        found[name] = {"version": version, "supported": str(supported)}
        if version is None or not supported.contains(version, prereleases=True):
            state = "is not installed" if version is None else f"is {version}"
            problems.append(
                Problem(name, f"{state}, and {supported} is needed", f"pip install '{name}{supported}'", fatal=True)
            )
    return found


def _supported() -> dict[str, Any]:
    """Ranges as the installed metadata of this package states them."""
    try:
        lines = importlib.metadata.requires("lerobot-parallel") or []
    except importlib.metadata.PackageNotFoundError:
        lines = [f"lerobot{hooks.SUPPORTED_HOSTS}"]
    requirements = [Requirement(line) for line in lines if "extra ==" not in line]
    return {each.name: each.specifier for each in requirements if each.name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hook(problems: list[Problem]) -> dict[str, Any]:
    status = hooks.status()
    if not status["active"]:
        way_out = "see the reason; lerobot-train takes none of the parallel flags until then"
        problems.append(Problem("hook", f"is not active: {status['reason']}", way_out, fatal=True))
    return status


def _devices() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    described = [
        {"name": gpu.name, "bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in gpus
    ]
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpus": cpus, "gpus": described, "cuda": torch.version.cuda}


def _backends(problems: list[Problem]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {"gloo": _tried("gloo", 2)}
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["nccl"] = _tried("nccl", min(2, torch.cuda.device_count()))
    for name, result in found.items():
        if result != "works":
            way_out = {
                "gloo": "see that the host's name resolves, or set GLOO_SOCKET_IFNAME=lo on one machine",
                "nccl": "run with NCCL_DEBUG=INFO to see why",
            }[name]
            problems.append(Problem(name, f"does not start between processes: {result}", way_out, fatal=True))
    return found


def _tried(backend: str, size: int) -> str:
    """`works`, or the last line that the first process to fail said."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _ALL_REDUCE, backend]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "LEROBOT_PARALLEL": "0"}
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        ranks = [
            subprocess.Popen([*command, str(rank), str(size), f"{folder}/store"], env=env, **streams)
            for rank in range(size)
        ]
        return next((text for text in map(_ended, ranks) if text), "works")


def _ended(process: subprocess.Popen) -> str:
    try:
        _, errors = process.communicate(timeout=_BACKEND_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"no answer within {_BACKEND_LIMIT_S} seconds"
    lines = errors.decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else (lines or [f"exit code {process.returncode}"])[-1][:200]


def _environment(problems: list[Problem]) -> dict[str, Any]:
    from lerobot_parallel.config.errors import ConfigError
    from lerobot_parallel.engine.accelerator import check_environment

    try:
        check_environment()
    except ConfigError as error:
        problems.append(Problem("environment", str(error), "unset it", fatal=True))
    launcher = shutil.which("torchrun")
    if launcher and not Path(launcher).resolve().is_relative_to(Path(sys.prefix).resolve()):
        way_out = f"start with {sys.executable} -m torch.distributed.run"
        problems.append(Problem("torchrun", f"on PATH is of another environment: {launcher}", way_out))
    return {"python": sys.executable, "torchrun": launcher, "prefix": sys.prefix}


def _limits(problems: list[Problem], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if _SHM.is_dir():
        found["shared_memory"] = {"bytes": shutil.disk_usage(_SHM).total, "free": shutil.disk_usage(_SHM).free}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found["open_files"] = {"soft": soft, "hard": hard}
    found["disk"] = {"path": str(folder), "free": shutil.disk_usage(folder).free}
    problems.extend(_too_small(found))
    return found


def _too_small(found: dict[str, Any]) -> Iterator[Problem]:
    if found.get("shared_memory", {"free": _LEAST_SHM})["free"] < _LEAST_SHM:
        free = found["shared_memory"]["free"] >> 20
        text = f"has {free} MiB free, too few for dataloader workers"
        yield Problem("shared memory", text, "--shm-size=8g for a container")
    if 0 <= found["open_files"]["soft"] < _LEAST_FILES:
        hard = found["open_files"]["hard"]
        yield Problem("open files", f"are limited to {found['open_files']['soft']}", f"ulimit -n {hard}")
    if found["disk"]["free"] < _LEAST_DISK:
        free = found["disk"]["free"] >> 30
        text = f"{free} GiB are free for checkpoints in {found['disk']['path']}"
        yield Problem("disk", text, "free some, or --output_dir elsewhere")
