"""What the hook costs everyone who imports torch.

`import_torch`: wall time of `python -c "import torch"` with the hook and with LEROBOT_PARALLEL=0 (torch still loads the
entry point then, which returns at once), alternating, in pairs. `install`: the time that torch waits for our entry
point, load and call, in fresh interpreters in which torch has been imported already, as when torch calls it.
Prints JSON lines.

    python benchmarks/hook.py --repeats 15
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from report import emit

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="pairs, and fresh interpreters (default: 15)")
    repeats = parser.parse_args().repeats
    for measure in (direct, paired):
        emit(measure(repeats) | {"repeats": repeats}, "lerobot-parallel", "lerobot", "torch", "wrapt")


if __name__ == "__main__":
    main()
