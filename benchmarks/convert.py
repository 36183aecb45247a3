"""Merging the shards of a checkpoint into one file: ours against a plain copy and the stock tools, on the same bytes.

Makes a checkpoint of `--gib` GiB in `--ranks` dim-0 shards, as an FSDP2 run leaves it, and runs in turn, each in a
fresh process: a raw copy of the shards with fsync, `convert` with 1 job and with N, accelerate's `merge_fsdp_weights`,
and torch's `dcp_to_torch_save`. Each writes a new file and flushes it. Before each, dirty pages are flushed and, with
`--cold`, the shards leave the page cache. `peak_mib` is the high-water mark of the process above what it took after
its imports. One JSON line per row; then ratios of medians. `--plot FILE` draws the rows with matplotlib.

    python benchmarks/convert.py --gib 4 --repeats 3 --plot convert.png
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = ("copy", "ours-1", "ours-n", "accelerate", "torch")
NAMES = {
    "copy": "raw copy + fsync",
    "ours-1": "convert --jobs 1",
    "ours-n": "convert",
    "accelerate": "accelerate merge_fsdp_weights",
    "torch": "torch dcp_to_torch_save",
}

# What a process does after its imports; {"seconds", "peak_mib"} on its stdout.
_WORK = """
import contextlib, io, json, os, shutil, sys, time, warnings
warnings.filterwarnings("ignore")
tool, shards, target = sys.argv[1:]

def flush(path):
    with open(path, "rb+") as file:
        os.fsync(file.fileno())

def copy():
    os.mkdir(target)
    for name in os.listdir(shards):
        shutil.copyfile(os.path.join(shards, name), os.path.join(target, name))
        flush(os.path.join(target, name))

def ours(jobs):
    from lerobot_parallel.checkpoint.convert import convert
    return lambda: convert(shards, output=target, jobs=jobs)

def accelerate():
    from accelerate.utils import merge_fsdp_weights
    def merge():
        merge_fsdp_weights(shards, target, safe_serialization=True)
        flush(os.path.join(target, "model.safetensors"))
    return merge

def stock():
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    def merge():
        dcp_to_torch_save(shards, target)
        flush(target)
    return merge

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024

work = {
    "copy": lambda: copy,
    "ours-1": lambda: ours(1),
    "ours-n": lambda: ours(None),
    "accelerate": accelerate,
    "torch": stock,
}[tool]()
import torch
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
with contextlib.redirect_stdout(io.StringIO()):
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak_mib": status("VmHWM") - before}))
"""

_MAKE = """
import sys, os, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
warnings.filterwarnings("ignore")
folder, gib = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
width, rows = 2048, 8192
layers = max(1, round(gib * 2**30 / 4 / (width * rows * 1.25)))
local = torch.arange(width * rows // dist.get_world_size(), dtype=torch.float32).reshape(-1, width)
state = {}
for layer in range(layers):
    big = DTensor.from_local(local + layer, mesh, [Shard(0)], run_check=False)
    small = DTensor.from_local(local[: len(local) // 4] - layer, mesh, [Shard(0)], run_check=False)
    state[f"layers.{layer}.mlp.weight"], state[f"layers.{layer}.attention.weight"] = big, small
    state[f"layers.{layer}.norm.weight"] = torch.ones(width)
dcp.save({"model": state}, checkpoint_id=folder)
dist.destroy_process_group()
"""


def make(folder: Path, gib: float, ranks: int) -> None:
    script = folder.with_suffix(".py")
    script.write_text(_MAKE)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    subprocess.run([sys.executable, *launch, str(folder), str(gib)], check=True, stderr=subprocess.DEVNULL)


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(tool: str, shards: Path, *, cold: bool) -> dict:
    target = shards.with_name("result")
    os.sync()
    if cold:
        drop_from_cache(shards)
    try:
        command = [sys.executable, "-c", _WORK, tool, str(shards), str(target)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)


def row(tool: str, measured: dict, nbytes: int) -> dict:
    return {
        "measure": "convert",
        "tool": tool,
        "name": NAMES[tool],
        "bytes": nbytes,
        "seconds": round(measured["seconds"], 3),
        "bytes_per_second": round(nbytes / measured["seconds"]),
        "peak_mib": round(measured["peak_mib"], 1),
    }


def summary(rows: list[dict], tools: list[str]) -> dict:
    def median(tool: str, field: str) -> float:
        return statistics.median(r[field] for r in rows if r["tool"] == tool)

    seconds = {tool: median(tool, "seconds") for tool in tools}
    ratios = {}
    if {"ours-n", "copy"} <= set(tools):
        ratios["ours_over_copy"] = round(seconds["ours-n"] / seconds["copy"], 3)
    if {"ours-n", "accelerate"} <= set(tools):
        ratios["accelerate_over_ours"] = round(seconds["accelerate"] / seconds["ours-n"], 3)
    peaks = {tool: median(tool, "peak_mib") for tool in tools}
    aims = {"ours_over_copy": 1.25, "accelerate_over_ours": 2.5, "peak_mib": 64}
    return {"measure": "convert_medians", "seconds": seconds, "peak_mib": peaks, **ratios, "aims": aims}


def context(gib: float, ranks: int, repeats: int, *, cold: bool) -> dict:
    names = ("lerobot-parallel", "torch", "accelerate", "safetensors")
    return {
        "gib": gib,
        "ranks": ranks,
        "repeats": repeats,
        "cold": cold,
        "versions": {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names},
        "commit": commit(),
        "hardware": {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]},
    }


def commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def plot(medians: dict, gib: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tools = list(medians["seconds"])
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.5 * len(tools) + 1.2), sharey=True)
    for axis, field, label in zip(axes, ("seconds", "peak_mib"), ("seconds", "peak memory, MiB"), strict=True):
        values = [medians[field][tool] for tool in tools]
        colors = ["#c44e52" if tool.startswith("ours") else "#8c8c8c" for tool in tools]
        bars = axis.barh([NAMES[tool] for tool in tools], values, color=colors)
        axis.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values], padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(f"Merging the shards of a {gib:g} GiB model")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the model (default: 4)")
    parser.add_argument("--ranks", type=int, default=4, help="shards of each tensor (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all tools (default: 3)")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"which, of {','.join(TOOLS)}")
    parser.add_argument("--cold", action="store_true", help="drop the shards from the page cache before each")
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians")
    options = parser.parse_args()
    tools = options.tools.split(",")
    rows = []
    with tempfile.TemporaryDirectory(prefix="convert-", dir=options.dir) as folder:
        shards = Path(folder) / "shards"
        make(shards, options.gib, options.ranks)
        nbytes = sum(path.stat().st_size for path in shards.iterdir())
        for index in range(options.repeats):
            for tool in tools if index % 2 == 0 else reversed(tools):
                rows.append(row(tool, measure(tool, shards, cold=options.cold), nbytes))
                print(json.dumps(rows[-1]), flush=True)
    medians = summary(rows, tools)
    about = context(options.gib, options.ranks, options.repeats, cold=options.cold)
    print(json.dumps(medians | about), flush=True)
    if options.plot is not None:
        plot(medians, options.gib, options.plot)


if __name__ == "__main__":
    main()
