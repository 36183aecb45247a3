"""What checkpoints of a sharded model cost: saving, saving in the background, resuming, against the disk itself.

    python benchmarks/checkpoint.py --megabytes 1000 --ranks 2 --rounds 3 > checkpoint.jsonl

Every row is one JSON line with the hardware, versions and commit; times are medians over the rounds, in seconds, and
ratios are medians of the ratios within a round. The model is a stack of linear layers with Adam's two moments: a
checkpoint holds three times its size. `raw` writes the same number of bytes from every rank with plain `write` and one
`fsync`, in the same run.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from report import emit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lerobot_parallel.checkpoint import durable, resume, save
from lerobot_parallel.checkpoint.progress import progress
from lerobot_parallel.checkpoint.snapshot import RunState
from lerobot_parallel.config.checkpointing import CheckpointConfig
from lerobot_parallel.config.topology import Degrees

WIDTH = 2048


class _Files:
    """Stands for a config and processors, which this benchmark does not have."""

    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / "config.json").write_text("{}")


def _run_state(folder: Path, megabytes: int, device: str, asynchronous: bool) -> RunState:
    layers = max(1, megabytes * 10**6 // (4 * WIDTH * WIDTH))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for param in model.parameters():
        nn.init.normal_(param)
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    model.config = _Files()
    cfg = SimpleNamespace(
        output_dir=folder,
        steps=1000,
        checkpoint_format="dcp",
        checkpoint=CheckpointConfig(async_save=asynchronous, keep_last=1),
        peft=None,
        is_reward_model_training=False,
        save_pretrained=lambda directory: (Path(directory) / "train_config.json").write_text(
            '{"checkpoint_format": "dcp"}'
        ),
    )
    return RunState(cfg, model, optimizer, None, None, None)


def _timed(action: Any) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def _raw(folder: Path, size: int) -> float:
    """This rank's part of `size` bytes, written and flushed."""
    block = os.urandom(1 << 24)
    path = folder / f"raw{dist.get_rank()}"

    def write() -> None:
        with path.open("wb") as file:
            for _ in range(max(1, size // dist.get_world_size() // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    seconds = _timed(write)
    path.unlink()
    return seconds


class _NoHash:
    def update(self, data: bytes) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def _rank(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(args.ranks),
    }
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    one_gpu_each = args.device == "cuda" and torch.cuda.device_count() >= args.ranks
    dist.init_process_group("cpu:gloo,cuda:nccl" if one_gpu_each else "gloo")
    rows = _measure(args)
    if rank == 0:
        for row in rows:
            emit(row | {"ranks": args.ranks, "rounds": args.rounds, "device": args.device}, "lerobot-parallel", "torch")
    dist.barrier()
    dist.destroy_process_group()


def _measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    folder = args.dir
    degrees = Degrees(1, args.ranks)
    times: dict[str, list[float]] = {key: [] for key in ("raw", "sync", "sync_unhashed", "stall", "total", "resume")}
    run = _run_state(folder, args.megabytes, args.device, asynchronous=False)
    later = RunState(
        **{
            **vars(run),
            "cfg": SimpleNamespace(**{**vars(run.cfg), "checkpoint": CheckpointConfig(async_save=True, keep_last=1)}),
        }
    )
    at_once, background = save.Saver(run), save.Saver(later)
    size = 3 * sum(param.numel() * 4 for param in run.policy.parameters())
    hasher, step = durable.xxhash.xxh3_64, 0
    for number in range(args.rounds + 1):
        found: dict[str, float] = {"raw": _raw(folder, size)}
        for key in ("sync", "sync_unhashed"):
            step += 1
            durable.xxhash.xxh3_64 = _NoHash if key == "sync_unhashed" else hasher
            found[key] = _timed(lambda step=step: at_once.save(_progress(step, degrees)))
            at_once.wait()  # the replaced checkpoint is deleted while training goes on
        durable.xxhash.xxh3_64 = hasher
        step += 1
        began = time.perf_counter()
        found["stall"] = _timed(lambda step=step: background.save(_progress(step, degrees)))
        background.wait()
        found["total"] = time.perf_counter() - began
        checkpoint = save.Checkpoint(folder / f"checkpoints/{step:06d}")
        found["resume"] = _timed(lambda checkpoint=checkpoint: _load(run, checkpoint))
        if number:  # the first round warms caches, and makes the room that background copies reuse
            for key, value in found.items():
                times[key].append(value)
    return _rows(times, size)


def _progress(step: int, degrees: Degrees) -> Any:
    return progress(step, degrees, batch_size=1, grad_accum_steps=1, position=None)


def _load(run: RunState, checkpoint: Any) -> None:
    resume.load_weights(run.policy, checkpoint)
    resume.load_optimizer(run.policy, run.optimizer, checkpoint)


def _rows(times: dict[str, list[float]], size: int) -> list[dict[str, Any]]:
    median = {key: statistics.median(values) for key, values in times.items()}
    speed = {key: size / seconds for key, seconds in median.items()}

    def paired(part: str, whole: str) -> float:
        return statistics.median(a / b for a, b in zip(times[part], times[whole], strict=True))

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    common = {"checkpoint_bytes": size, "peak_rss_bytes_rank0": peak}
    return [
        {"row": "raw write + fsync", "seconds": median["raw"], "bytes_per_s": speed["raw"], **common},
        {
            "row": "synchronous save",
            "seconds": median["sync"],
            "bytes_per_s": speed["sync"],
            "of_raw": paired("raw", "sync"),
            "checksums_cost": paired("sync", "sync_unhashed") - 1,
            **common,
        },
        {
            "row": "asynchronous save",
            "stall_seconds": median["stall"],
            "total_seconds": median["total"],
            "stall_of_synchronous": paired("stall", "sync"),
            **common,
        },
        {"row": "resume", "seconds": median["resume"], "bytes_per_s": speed["resume"], **common},
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the model's weights")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dir", type=Path, help="where to write; a temporary directory by default")
    args = parser.parse_args()
    made = args.dir is None
    args.dir = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-")) if made else args.dir
    try:
        context, port = multiprocessing.get_context("spawn"), _free_port()
        ranks = [context.Process(target=_rank, args=(rank, port, args)) for rank in range(args.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(max(process.exitcode or 0 for process in ranks))
    finally:
        if made:
            shutil.rmtree(args.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
