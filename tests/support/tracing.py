"""Training in a cheap world, watched from inside: what every step saw and did, on every rank."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.commands import quiet_env
from tests.support.world import run_world


def traced_training(
    args: list[str], nprocs: int, cwd: Path | str, *, timeout: float = 120, env: dict | None = None
) -> list[list[dict[str, Any]]]:
    """Runs our `lerobot-train ARGS`; for every rank, a dict for each step: loss, grad_norm, index, lr."""
    return run_world(
        _trace, nprocs, args, cwd, timeout=timeout, env={**quiet_env(), **(env or {})}, launcher=nprocs > 1
    )


def inspected_run(
    args: list[str], nprocs: int, cwd: Path | str, look: Callable[[Any], Any], *, timeout: float = 120
) -> list[Any]:
    """Assembles the run of `ARGS` and returns `look(run)` of every rank, instead of training."""
    return run_world(_inspect, nprocs, args, cwd, look, timeout=timeout, env=quiet_env(), launcher=nprocs > 1)


def _trace(args: list[str], cwd: Path | str) -> list[dict[str, Any]]:
    from lerobot_parallel.training import command, loop

    steps: list[dict[str, Any]] = []
    step = loop.train_step

    def watched(run: Any, batch: dict[str, Any]) -> tuple:
        loss, norm, outputs = step(run, batch)
        steps.append(
            {
                "loss": loss.item(),
                "grad_norm": None if norm is None else norm.item(),
                "index": batch["index"].tolist() if "index" in batch else None,
                "lr": run.optimizer.param_groups[0]["lr"],
            }
        )
        return loss, norm, outputs

    loop.train_step = watched
    _start(args, cwd, command)
    return steps


def _inspect(args: list[str], cwd: Path | str, look: Callable[[Any], Any]) -> Any:
    from lerobot_parallel.training import command

    seen: list[Any] = []
    command.train_loop = lambda run: seen.append(look(run))
    _start(args, cwd, command)
    return seen[0]


def _start(args: list[str], cwd: Path | str, command: Any) -> None:
    os.chdir(cwd)
    sys.argv = ["lerobot-train", *map(str, args)]
    command.train()
