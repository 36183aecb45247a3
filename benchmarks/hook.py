"""What the hook costs everyone who imports torch.

`import_torch`: wall time of `python -c "import torch"` with the hook and with LEROBOT_PARALLEL=0 (torch still loads the
entry point then, which returns at once), alternating, in pairs. `install`: the time that torch waits for our entry
point, load and call, in fresh interpreters in which torch has been imported already, as when torch calls it.
Prints JSON lines.

    python benchmarks/hook.py --repeats 15
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

IMPORT_TORCH = "import torch"
# Autoload is off there, so that our code is loaded and called under the clock, not before it.
INSTALL = """
import time, torch
from importlib.metadata import entry_points
(entry,) = entry_points(group="torch.backends", name="lerobot_parallel")
start = time.perf_counter()
entry.load()()
print((time.perf_counter() - start) * 1e3)
"""


def run(code: str, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "LEROBOT_PARALLEL"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean | env, check=True, capture_output=True, text=True).stdout


def import_torch_ms(**env: str) -> float:
    start = time.perf_counter()
    run(IMPORT_TORCH, **env)
    return (time.perf_counter() - start) * 1e3


def paired(repeats: int) -> dict:
    import_torch_ms(), import_torch_ms(LEROBOT_PARALLEL="0")  # page cache, .pyc files
    on, off = [], []
    for index in range(repeats):
        order = [(on, {}), (off, {"LEROBOT_PARALLEL": "0"})]
        for times, env in order if index % 2 else reversed(order):
            times.append(import_torch_ms(**env))
    differences = [a - b for a, b in zip(on, off, strict=True)]
    return {
        "measure": "import_torch",
        "on_ms": round(statistics.median(on), 2),
        "off_ms": round(statistics.median(off), 2),
        "ratio": round(statistics.median(on) / statistics.median(off), 4),
        "median_paired_difference_ms": round(statistics.median(differences), 2),
        "spread_off_ms": round(max(off) - min(off), 2),
    }


def direct(repeats: int) -> dict:
    times = [float(run(INSTALL, TORCH_DEVICE_BACKEND_AUTOLOAD="0")) for _ in range(repeats)]
    median = statistics.median(times)
    return {"measure": "install", "median_ms": round(median, 2), "max_ms": round(max(times), 2), "aim_ms": 10}


def commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None


def context(repeats: int) -> dict:
    names = ("lerobot-parallel", "lerobot", "torch", "wrapt")
    return {
        "repeats": repeats,
        "versions": {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names},
        "commit": commit(),
        "hardware": {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0))},
    }


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="pairs, and fresh interpreters (default: 15)")
    repeats = parser.parse_args().repeats
    for measure in (direct, paired):
        print(json.dumps(measure(repeats) | context(repeats)), flush=True)


if __name__ == "__main__":
    main()
