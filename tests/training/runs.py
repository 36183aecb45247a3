"""Small runs of our loop and of the host's own in forked worlds, with something of the test's set up in every rank."""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.support.commands import quiet_env
from tests.support.toy import TOY_PLAN
from tests.support.world import RankResult, run_world_raw

OURS, HOST = "lerobot_parallel.training.command", "lerobot.scripts.lerobot_train"
ENGINES = {
    "host": (HOST, 1, []),
    "host_ddp2": (HOST, 2, []),
    "single": (OURS, 1, ["--parallelism.dp_shard=1"]),
    "ddp2": (OURS, 2, ["--parallelism.dp_shard=1"]),
    "fsdp2": (OURS, 2, ["--parallelism.dp_shard=2"]),
    "hsdp2x2": (OURS, 4, ["--parallelism.dp_replicate=2", "--parallelism.dp_shard=2"]),
}

Setup = Callable[[], Callable[[], Any] | None]
"""Runs in every rank before the command; what it returns is called after it, and gives the rank's value."""


def common_args(dataset: Path, *flags: str) -> list[str]:
    """A short, quiet run on a local dataset; later flags win."""
    return merged(
        "--dataset.repo_id=local/toy",
        f"--dataset.root={dataset}",
        "--num_workers=0",
        "--batch_size=3",
        "--steps=4",
        "--log_freq=1",
        "--seed=7",
        "--wandb.enable=false",
        "--output_dir=out",
        *flags,
    )


def act_args(dataset: Path, *flags: str) -> list[str]:
    """ACT in ten thousand numbers, with its VAE and dropout: a policy that draws noise."""
    return common_args(
        dataset,
        "--policy.type=act",
        "--policy.device=cpu",
        "--policy.push_to_hub=false",
        "--policy.dim_model=16",
        "--policy.dim_feedforward=32",
        "--policy.n_heads=2",
        "--policy.n_encoder_layers=1",
        "--policy.n_vae_encoder_layers=1",
        "--policy.chunk_size=4",
        "--policy.n_action_steps=2",
        "--policy.latent_dim=4",
        "--policy.dropout=0.3",
        "--policy.use_vae=true",
        "--policy.optimizer_lr=1e-3",
        *flags,
    )


def merged(*flags: str) -> list[str]:
    """The last value of each flag."""
    return list({flag.partition("=")[0]: flag for flag in flags}.values())


def launch(
    args: list[str], engine: str, cwd: Path, setup: Setup | None = None, *, timeout: float = 120
) -> list[RankResult]:
    """Trains in a world and reports how every rank ended."""
    module, nprocs, flags = ENGINES[engine]
    cwd.mkdir(exist_ok=True)
    return run_world_raw(
        _train,
        nprocs,
        module,
        [*args, *flags],
        cwd,
        setup,
        timeout=timeout,
        grace=20,
        env=quiet_env(),
        launcher=nprocs > 1,
    )


def train(
    args: list[str], engine: str, cwd: Path, setup: Setup | None = None, *, timeout: float = 120
) -> list[RankResult]:
    """Trains in a world, to the end."""
    results = launch(args, engine, cwd, setup, timeout=timeout)
    failed = [result for result in results if result.exitcode != 0]
    assert not failed, min(failed, key=lambda result: result.failed_at or float("inf")).describe()
    return results


def _train(module: str, args: list[str], cwd: Path, setup: Setup | None) -> Any:
    os.chdir(cwd)
    sys.argv = ["lerobot-train", *args]
    if module == HOST:
        _outlive_ddp()
    collect = setup() if setup is not None else None
    importlib.import_module(module).train()
    return collect() if collect is not None else None


def _outlive_ddp() -> None:
    """Keeps the process group until the rank exits.

    Where DDP is the last to let go of a gloo group, it waits, holding Python's lock, for a worker that may want
    that lock: of the host's DDP runs one in fifteen never ends.
    """
    destroy, kept = dist.destroy_process_group, []

    def keep_and_destroy(group: dist.ProcessGroup | None = None) -> None:
        kept.append(dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = keep_and_destroy


def log_lines(result: RankResult) -> list[dict[str, str]]:
    """The loop's log lines, by the names in them, without what is measured in seconds."""
    lines = re.findall(r"(step:\d.*)", result.stderr)
    fields = [dict(re.findall(r"(\S+?):(\S+)", line)) for line in lines]
    return [{name: value for name, value in line.items() if name not in _TIMES} for line in fields]


_TIMES = {"updt_s", "data_s", "smp/s", "mem_gb"}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def payload(file: Path) -> tuple[dict[str, Any], bytes]:
    """Of a safetensors file: which tensor is where, and all bytes of them. The rest is free text."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    return header, content[end:]


def last_checkpoint(cwd: Path) -> Path:
    return cwd / "out/checkpoints/last"


def weights_file(cwd: Path) -> Path:
    return last_checkpoint(cwd) / "pretrained_model/model.safetensors"


QUIET = ["--policy.dropout=0", "--policy.use_vae=false"]
"""ACT without noise, for comparisons across ranks: the host's own ranks all draw the same noise, ours do not."""


def toy_args(dataset: Path, *flags: str, kind: str = "toy_nasty") -> list[str]:
    """The nasty toy, updated by SGD: Adam would hide wrong factors."""
    return common_args(
        dataset,
        f"--policy.type={kind}",
        "--policy.device=cpu",
        "--policy.push_to_hub=false",
        "--policy.optimizer=sgd",
        *flags,
    )


def plan_for_toy(kind: str = "toy_nasty") -> None:
    """In a rank: the toy's plan, as a package would register it."""
    from lerobot_parallel.plans.builtin import BUILTIN_PLANS
    from lerobot_parallel.plans.plan import WrapPlan

    BUILTIN_PLANS[kind] = WrapPlan(**TOY_PLAN | {"keep_gathered": ["joint.prefix.{last}"]})


def watch_steps(look: Callable[[Any, dict], Any], *, when: str = "after") -> Callable[[], list[Any]]:
    """In a rank: what `look(run, batch)` saw before or after each step of our loop."""
    from lerobot_parallel.training import loop

    seen, step = [], loop.train_step

    def watched(run: Any, batch: dict) -> tuple:
        if when == "before":
            seen.append(look(run, batch))
        result = step(run, batch)
        if when == "after":
            seen.append(look(run, batch))
        return result

    loop.train_step = watched
    return lambda: seen


def full_state(run: Any) -> dict[str, torch.Tensor]:
    """Copies of parameters and persistent buffers, whole. Collective under sharding."""
    from lerobot_parallel.checkpoint.state import model_state

    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model_state(run.module).items()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def assert_close(got: Path, expected: Path, atol: float) -> None:
    """Two weight files; with `atol` 0 they must be equal."""
    ours, theirs = load_file(got), load_file(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
