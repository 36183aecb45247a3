"""Wall time of a training step: our loop against the host's own, on the same job.

Two worlds of processes live side by side, one runs the host's `train`, one ours, and they take turns of a few
steps: A B, B A, and so on. A turn ends at an optimizer step, in a hook of torch that both loops pass through, so
that both are measured in the same way, from outside; the world that waits takes no time. Each pair of turns gives
one ratio, the row its median, over several launches, since a process is faster or slower by its memory layout too.

The engine `host` is the host against itself: what its ratio differs from 1 by is noise. DDP, FSDP2 and HSDP are
compared with the host's DDP on as many processes. The job is ACT on states, on a dataset made here.
Prints JSON lines.

    python benchmarks/step_time.py --dim 128 --rounds 20
"""

import argparse
import importlib
import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from report import emit

# Turns that are dropped: allocators, caches and DDP's buckets settle.
WARMUP = 3
# One thread a process, so that two processes on two cores do not wait for each other.
_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
HOST, OURS = "lerobot.scripts.lerobot_train", "lerobot_parallel.training.command"


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: a module with a `train`, and its own flags."""

    module: str
    ranks: int
    flags: tuple[str, ...] = ()


# Engine -> its number of processes, and our flags for it (None: the host itself).
ENGINES: dict[str, tuple[int, list[str] | None]] = {
    "host": (1, None),
    "single": (1, []),
    "ddp": (2, ["--parallelism.dp_replicate=2"]),
    "fsdp2": (2, ["--parallelism.dp_shard=2"]),
    "hsdp": (4, ["--parallelism.dp_replicate=2", "--parallelism.dp_shard=2"]),
}


def job(args: argparse.Namespace, dataset: Path, output: Path) -> list[str]:
    """The flags that both sides get; nothing but training falls into the measured steps."""
    return [
        "--dataset.repo_id=local/bench",
        f"--dataset.root={dataset}",
        f"--output_dir={output}",
        "--policy.type=act",
        f"--policy.device={args.device}",
        "--policy.push_to_hub=false",
        f"--policy.dim_model={args.dim}",
        f"--policy.dim_feedforward={4 * args.dim}",
        "--policy.chunk_size=50",
        "--policy.n_action_steps=50",
        f"--batch_size={args.batch_size}",
        f"--steps={args.turn * (WARMUP + args.rounds + 2)}",
        "--log_freq=200",
        "--save_checkpoint=false",
        "--num_workers=0",
        "--wandb.enable=false",
        "--seed=1",
    ]


def make_dataset(root: Path) -> None:
    import numpy as np
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    sizes = {"observation.state": 14, "observation.environment_state": 8, "action": 14}
    features = {
        name: {"dtype": "float32", "shape": (size,), "names": [f"{i}" for i in range(size)]}
        for name, size in sizes.items()
    }
    dataset = LeRobotDataset.create("local/bench", fps=10, features=features, root=root, use_videos=False)
    draw = np.random.default_rng(0)
    for _ in range(10):
        for _ in range(100):
            frame = {name: draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
            dataset.add_frame(frame | {"task": "none"})
        dataset.save_episode()
    dataset.finalize()


class World:
    """The processes of one side; they run one turn whenever they are told to."""

    def __init__(self, side: Side, flags: list[str], *, turn: int, log: Path) -> None:
        context = get_context("forkserver")
        port = _free_port()
        self._log = log
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(side.ranks):
            mine, theirs = context.Pipe()
            env = _launcher_env(rank, side.ranks, port) if side.ranks > 1 else {}
            process = context.Process(target=_rank, args=(side.module, [*flags, *side.flags], env, turn, theirs, log))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def turn(self) -> float:
        """Let all ranks run one turn; seconds of the slowest."""
        for pipe in self._pipes:
            pipe.send(None)
        return self.started()

    def started(self) -> float:
        """Wait until all ranks have started and ended their first turn, which needs no telling."""
        try:
            return max([pipe.recv() for pipe in self._pipes])
        except EOFError:
            sys.exit(f"a run ended early; the end of its log:\n{self._log.read_text()[-4000:]}")

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _launcher_env(rank: int, ranks: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _rank(module: str, flags: list[str], env: dict[str, str], turn: int, pipe: Connection, log: Path) -> None:
    """The life of a process: the module's `train`, which waits after every turn to be told to go on."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    sys.argv = ["lerobot-train", *flags]
    train = importlib.import_module(module).train
    _take_turns(turn, pipe)
    train()


def _take_turns(steps: int, pipe: Connection) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    done, began = 0, time.perf_counter()

    def after_step(*_: Any) -> None:
        nonlocal done, began
        done += 1
        if done % steps:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        pipe.send(time.perf_counter() - began)
        pipe.recv()
        began = time.perf_counter()

    register_optimizer_step_post_hook(after_step)


def compare(sides: tuple[Side, Side], args: argparse.Namespace, folder: Path) -> list[tuple[float, float]]:
    """Milliseconds of a step, host and ours, in every pair of turns of one launch."""
    with ExitStack() as stack:
        worlds = []
        for name, side in zip(("host", "ours"), sides, strict=True):
            flags = job(args, folder / "dataset", Path(tempfile.mkdtemp(dir=folder)) / "run")
            worlds.append(World(side, flags, turn=args.turn, log=folder / f"{name}.log"))
            stack.callback(worlds[-1].end)
        for world in worlds:
            world.started()
        pairs = []
        for index in range(WARMUP + args.rounds):
            seconds = {world: world.turn() for world in (worlds if index % 2 else reversed(worlds))}
            pairs.append(tuple(seconds[world] / args.turn * 1e3 for world in worlds))
        return pairs[WARMUP:]


def row(engine: str, launches: list[list[tuple[float, float]]], args: argparse.Namespace) -> dict[str, Any]:
    pairs = [pair for launch in launches for pair in launch]
    ratios = sorted(ours / host for host, ours in pairs)
    tenth = len(ratios) // 10
    return {
        "measure": "step_time",
        "engine": engine,
        "processes": ENGINES[engine][0],
        "host_ms": round(statistics.median(host for host, _ in pairs), 2),
        "ours_ms": round(statistics.median(ours for _, ours in pairs), 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_spread": [round(ratios[tenth], 4), round(ratios[-1 - tenth], 4)],
        "ratio_of_launches": [round(statistics.median(ours / host for host, ours in launch), 4) for launch in launches],
        "aim": 1.0,
        "job": {"policy": "act", "dim": args.dim, "batch_size": args.batch_size, "device": args.device},
        "turns": len(pairs),
        "steps_per_turn": args.turn,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128, help="dim_model of ACT: 128 is small, 512 its default")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of one process's step")
    parser.add_argument("--turn", type=int, default=5, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of turns of a launch")
    parser.add_argument("--launches", type=int, default=3, help="times that both worlds are started afresh")
    parser.add_argument("--device", default="cpu", help="cuda needs one GPU a process")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    args = parser.parse_args()
    os.environ.update(_ENV)
    get_context("forkserver").set_forkserver_preload([HOST, OURS])
    with tempfile.TemporaryDirectory(prefix="step-time-") as name:
        folder = Path(name)
        make_dataset(folder / "dataset")
        for engine in args.engines:
            ranks, flags = ENGINES[engine]
            ours = Side(HOST, ranks) if flags is None else Side(OURS, ranks, tuple(flags))
            launches = [compare((Side(HOST, ranks), ours), args, folder) for _ in range(args.launches)]
            emit(row(engine, launches, args), "lerobot-parallel", "lerobot", "torch", "accelerate")


if __name__ == "__main__":
    main()
