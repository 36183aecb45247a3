"""Collective save: every rank calls it, the checkpoint appears whole or not at all."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lerobot.optim import save_optimizer_state, save_scheduler_state
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule

from lerobot_parallel.checkpoint.layout import (
    MODEL_KEY,
    OPTIMIZER_KEY,
    Checkpoint,
    discard_path,
    last_link,
    staging_path,
    step_dir,
)
from lerobot_parallel.checkpoint.progress import Progress
from lerobot_parallel.checkpoint.rng import save_rng
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.checkpoint.sharded_policy import write_whole
from lerobot_parallel.checkpoint.state import gather_model_state, model_state, optimizer_state
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.buffers import agree_on_buffers
from lerobot_parallel.engine.ranks import is_main, raised_together, rank


@dataclass(frozen=True)
class RunState:
    """What a checkpoint is made of. `policy` is unwrapped: sharded, or the module that DDP wraps."""

    cfg: ParallelTrainPipelineConfig
    policy: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    preprocessor: Any
    postprocessor: Any

    @property
    def sharded(self) -> bool:
        return isinstance(self.policy, FSDPModule)


def save_checkpoint(run: RunState, progress: Progress) -> Path:
    """Write the checkpoint of `progress.step` and point `last` at it. Collective; returns the step directory.

    Everything is written under a name that no reader takes for a checkpoint, flushed, and renamed; `last`
    moves after that.

    Raises:
        OSError, CheckpointError: writing failed here; `OtherRankError` on the ranks where it did not.
    """
    target = step_dir(run.cfg.output_dir, run.cfg.steps, progress.step)
    staging = Checkpoint(staging_path(target))
    with raised_together(f"making room for {target}"):
        if is_main():
            shutil.rmtree(staging.path, ignore_errors=True)
            staging.pretrained.mkdir(parents=True)
            staging.training_state.mkdir()
    _write_weights(run, staging)
    if run.sharded:
        _save_shards({OPTIMIZER_KEY: optimizer_state(run.policy, run.optimizer)}, staging.optimizer_shards)
    with raised_together(f"writing {target}"):
        save_rng(staging, rank())
        if is_main():
            _write_rest(run, progress, staging)
    with raised_together(f"publishing {target}"):
        if is_main():
            _publish(staging.path, target)
            _point_last_at(target)
    return target


def _write_weights(run: RunState, staging: Checkpoint) -> None:
    """Collective."""
    if run.sharded:
        agree_on_buffers(run.policy)
    if run.sharded and "dcp" in run.cfg.checkpoint_format:
        _save_shards({MODEL_KEY: model_state(run.policy)}, staging.model_shards)
    whole = gather_model_state(run.policy) if run.sharded and "safetensors" in run.cfg.checkpoint_format else None
    with raised_together(f"writing the weights of {staging.path}"):
        if is_main():
            if run.sharded and whole is None:
                run.policy.config.save_pretrained(staging.pretrained)
            else:
                write_whole(run.policy, staging.pretrained, whole)


def _save_shards(state: dict[str, Any], directory: Path) -> None:
    """Collective; torch writes each distinct shard once, on one rank."""
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, sync_files=True))
    # CheckpointException is no Exception, and every rank gets it.
    except CheckpointException as failed:
        rank_, (error, _) = next(iter(failed.failures.items()))
        raise CheckpointError(directory, f"rank {rank_} could not write its shards ({error})") from failed


def _write_rest(run: RunState, progress: Progress, staging: Checkpoint) -> None:
    run.cfg.save_pretrained(staging.pretrained)
    if run.cfg.peft is not None:
        # With adapters the policy writes them and their config only.
        run.policy.config.save_pretrained(staging.pretrained)
    for processor in (run.preprocessor, run.postprocessor):
        if processor is not None:
            processor.save_pretrained(staging.pretrained)
    if not run.sharded:
        save_optimizer_state(run.optimizer, staging.training_state)
    if run.scheduler is not None:
        save_scheduler_state(run.scheduler, staging.training_state)
    progress.write(staging)


def _publish(staging: Path, target: Path) -> None:
    """Rank 0: make the finished directory visible under its name, durable before anybody can see it."""
    _flush_tree(staging)
    discarded = discard_path(target)
    shutil.rmtree(discarded, ignore_errors=True)
    if target.exists():
        target.rename(discarded)
    staging.rename(target)
    _flush(target.parent)
    shutil.rmtree(discarded, ignore_errors=True)


def _point_last_at(target: Path) -> None:
    link = last_link(target.parent.parent)
    fresh = staging_path(link)
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(target.name)
    fresh.replace(link)
    _flush(link.parent)


def _flush_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            _flush(Path(folder) / name)
        _flush(Path(folder))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
