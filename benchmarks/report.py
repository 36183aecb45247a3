"""What every row of a benchmark says of where it was measured, and how rows are printed."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def emit(row: dict[str, Any], *packages: str) -> None:
    """Print one row as a JSON line, with versions (Python's, and those of `packages`), commit and hardware."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    context = {"versions": versions, "commit": _commit(), "hardware": _hardware()}
    print(json.dumps(row | context), flush=True)


def _commit() -> str | None:
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty") or None


def _hardware() -> dict[str, Any]:
    return {"cpu": _cpu_model(), "cpus": len(os.sched_getaffinity(0)), "gpus": _gpus()}


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def _gpus() -> list[str]:
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") if shutil.which("nvidia-smi") else ""
    return names.splitlines()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
