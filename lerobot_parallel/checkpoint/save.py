"""Collective save: every rank calls it, the checkpoint appears whole or not at all."""

import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lerobot.optim import save_optimizer_state, save_scheduler_state
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta

from lerobot_parallel.checkpoint import commit
from lerobot_parallel.checkpoint.durable import FileEntry, HashingFileSystem, digest, flush, flush_tree
from lerobot_parallel.checkpoint.layout import Checkpoint, staging_path, step_dir
from lerobot_parallel.checkpoint.manifest import Manifest, describe_files, software_versions
from lerobot_parallel.checkpoint.progress import Progress, SavedTopology
from lerobot_parallel.checkpoint.rng import save_rng
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.checkpoint.sharded_policy import write_whole
from lerobot_parallel.checkpoint.snapshot import Copier, RunState, Snapshot, count_model, count_optimizer, take
from lerobot_parallel.checkpoint.state import parameter_names, tied_names
from lerobot_parallel.engine.ranks import (
    OtherRankError,
    broadcast_from_main,
    is_main,
    new_patient_group,
    patient_group,
    raised_together,
    rank,
    true_anywhere,
)

# Configs, processors, headers and the manifest; the state itself is counted.
_SMALL_FILES_BYTES = 16 << 20


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank, the older checkpoints are as they were."""


@dataclass
class _Job:
    """One checkpoint on its way to the disk."""

    run: RunState
    staging: Checkpoint
    target: Path
    snapshot: Snapshot
    manifest: Manifest
    group: dist.ProcessGroup | None
    written: dict[str, FileEntry] = field(default_factory=dict)
    stall_s: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    error: BaseException | None = None
    doomed: list[Path] = field(default_factory=list)
    device: int | None = None
    thread: threading.Thread | None = None


class Saver:
    """Writes the checkpoints of a run, one at a time. Every method is collective unless it says otherwise.

    With `--checkpoint.async_save`, `save` returns after the state is copied; a thread writes and commits it over a
    process group of its own. `step_edge` and `wait` raise what went wrong there, on all ranks.

    `published` is called on rank 0, in the main thread, with each step directory once it is visible.
    """

    published: Callable[[Path], None] | None = None

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._asynchronous = run.cfg.checkpoint.async_save
        self._copier = Copier()
        self._job: _Job | None = None
        self._remover: threading.Thread | None = None
        # The writer thread needs one that nobody else uses meanwhile.
        self._group = new_patient_group() if self._asynchronous else patient_group()

    def save(self, progress: Progress) -> Path:
        """Write the checkpoint of `progress.step` and point `last` at it; returns the step directory.

        Raises:
            SaveError: on every rank.
        """
        began = time.perf_counter()
        self.wait()
        job = self._prepare(progress)
        self._job = job
        if self._asynchronous:
            job.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            job.thread = threading.Thread(target=_write_aside, args=(job,), name="checkpoint-writer", daemon=True)
            job.stall_s = time.perf_counter() - began
            job.thread.start()
            return job.target
        _write(job)
        job.stall_s = time.perf_counter() - began
        self._remover = threading.Thread(
            target=commit.remove, args=(job.doomed,), name="checkpoint-remover", daemon=True
        )
        self._remover.start()
        self._finish()
        return job.target

    def step_edge(self, stop: bool) -> bool:
        """Between two steps: ends a save whose writing is over; returns whether any rank wants to stop.

        Raises:
            SaveError: on every rank, if writing failed on one.
        """
        job = self._job
        busy = job is not None and job.thread is not None and job.thread.is_alive()
        stop_anywhere, busy_anywhere = true_anywhere(stop, busy)
        if job is not None and not busy_anywhere:
            self._finish()
        return stop_anywhere

    def wait(self) -> None:
        """Until the save in flight, if there is one, is committed, and the old checkpoints that it replaced are gone.

        Raises:
            SaveError: on every rank, if it failed on one.
        """
        if self._remover is not None:
            self._remover.join()
        if self._job is not None:
            self._finish()

    def _prepare(self, progress: Progress) -> _Job:
        run = self._run
        target = step_dir(run.cfg.output_dir, run.cfg.steps, progress.step)
        staging = Checkpoint(staging_path(target, broadcast_from_main(uuid.uuid4().hex[:8])))
        try:
            with raised_together(f"making room for {target}", patient_group()):
                if is_main():
                    _make_room(run, staging)
            snapshot = take(run)
            if self._asynchronous:
                snapshot = self._copier.copy(snapshot)
            with raised_together(f"writing {target}", patient_group()):
                _write_small_files(run, progress, staging)
        except _FAILURES as error:
            raise _failed(target, staging, error) from error
        manifest = _describe(run, progress)
        return _Job(run, staging, target, snapshot, manifest, self._group)

    def _finish(self) -> None:
        job, self._job = self._job, None
        if job.thread is not None:
            job.thread.join()
        with raised_together(f"writing {job.target}"):
            if isinstance(job.error, _FAILURES):
                raise _failed(job.target, job.staging, job.error) from job.error
            if job.error is not None:
                raise job.error
        logging.info(
            "Checkpoint %s: training stood still %.3f s, written in %.3f s, %.1f MB",
            job.target,
            job.stall_s,
            job.seconds,
            job.bytes / 1e6,
        )
        with raised_together(f"uploading {job.target}", patient_group()):
            if is_main() and self.published is not None:
                self.published(job.target)


def _failed(target: Path, staging: Checkpoint, error: BaseException) -> SaveError:
    if is_main():
        # A full disk stays full otherwise.
        shutil.rmtree(staging.path, ignore_errors=True)
    text = f"the checkpoint {target} could not be written, older ones are untouched: {error}"
    return SaveError(" ".join(text.split()))


_FAILURES = (OSError, SafetensorError, CheckpointError, OtherRankError)


def _make_room(run: RunState, staging: Checkpoint) -> None:
    """Rank 0: no leftovers, enough space, and empty directories to write into."""
    staging.path.parent.mkdir(parents=True, exist_ok=True)
    commit.sweep(staging.path.parent)
    # Adapters are a small part of the model, and the only one that is written.
    model = 0 if run.cfg.peft is not None else count_model(run.policy).bytes
    optimizer = count_optimizer(run.optimizer).bytes
    copies = len(run.cfg.checkpoint_format.split("_")) if run.sharded else 1
    needed = copies * model + optimizer + _SMALL_FILES_BYTES
    free = shutil.disk_usage(staging.path.parent).free
    if free < needed:
        raise CheckpointError(
            staging.path.parent,
            f"has {free / 1e6:.0f} MB free, a checkpoint takes about {needed / 1e6:.0f} MB: free some, "
            "or let --checkpoint.keep_last remove old checkpoints",
        )
    staging.pretrained.mkdir(parents=True)
    staging.training_state.mkdir()


def _write_small_files(run: RunState, progress: Progress, staging: Checkpoint) -> None:
    """Everything that must be as it is now and takes no time; not flushed yet."""
    save_rng(staging, rank())
    if is_main():
        _write_configs(run, staging)
        if run.scheduler is not None:
            save_scheduler_state(run.scheduler, staging.training_state)
        if run.scaler is not None:
            staging.scaler_file.write_text(json.dumps(run.scaler.state_dict(), indent=4) + "\n")
        progress.write(staging)


def _write_configs(run: RunState, staging: Checkpoint) -> None:
    if run.host_writes_model:
        run.policy.save_pretrained(staging.pretrained)
    run.cfg.save_pretrained(staging.pretrained)
    if not (run.host_writes_model and run.cfg.is_reward_model_training):
        # With adapters the policy writes them and their config only.
        run.policy.config.save_pretrained(staging.pretrained)
    for processor in (run.preprocessor, run.postprocessor):
        if processor is not None:
            processor.save_pretrained(staging.pretrained)


def _describe(run: RunState, progress: Progress) -> Manifest:
    """All of the manifest but the files."""
    named = [name for name, _ in parameter_names(run.policy, run.optimizer)]
    groups, start = [], 0
    for group in run.optimizer.param_groups:
        groups.append(named[start : start + len(group["params"])])
        start += len(group["params"])
    world = progress.num_processes or 1
    return Manifest(
        step=progress.step,
        world_size=world,
        topology=progress.parallelism or SavedTopology(),
        checkpoint_format=run.cfg.checkpoint_format,
        versions=software_versions(),
        model=count_model(run.policy),
        optimizer=count_optimizer(run.optimizer),
        tied=sorted(sorted(names) for names in tied_names(run.policy)),
        optimizer_parameters=groups,
        rng_files=[Checkpoint(Path()).rank_rng_file(r).as_posix() for r in range(world)],
        files={},
    )


def _write_aside(job: _Job) -> None:
    """`_write` in a thread, which starts on the first GPU whatever its rank computes on."""
    if job.device is not None:
        torch.cuda.set_device(job.device)
    _write(job)
    commit.remove(job.doomed)


def _write(job: _Job) -> None:
    """Write the large state and commit; never raises, `job.error` says what went wrong. Collective over the group."""
    began = time.perf_counter()
    try:
        for state, directory in job.snapshot.shards(job.staging):
            job.written.update(_save_shards(state, directory, job))
        with raised_together(f"writing {job.target}", job.group):
            # Only this rank's machine may have it in memory.
            mine = job.staging.rank_rng_file(rank())
            flush(mine)
            job.written[mine.relative_to(job.staging.path).as_posix()] = digest(mine)
            if is_main():
                _write_full(job)
        _commit(job)
    except BaseException as error:
        job.error = error
    job.seconds = time.perf_counter() - began


class _ShardWriter(dcp.FileSystemWriter):
    """torch's, hashing what it writes; equal states make equal bytes (torch's own notes a random id and a path)."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True)
        self.fs = HashingFileSystem()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _save_shards(state: dict[str, Any], directory: Path, job: _Job) -> dict[str, FileEntry]:
    """Torch writes each distinct shard once, on one rank. Returns what this rank wrote."""
    writer = _ShardWriter(directory)
    try:
        dcp.save(state, storage_writer=writer, process_group=job.group)
    # CheckpointException is no Exception, and every rank gets it.
    except CheckpointException as failed:
        rank_, (error, _) = next(iter(failed.failures.items()))
        raise CheckpointError(directory, f"rank {rank_} could not write its shards ({error})") from failed
    return {path.relative_to(job.staging.path).as_posix(): entry for path, entry in writer.fs.written.items()}


def _write_full(job: _Job) -> None:
    """Rank 0: files that hold full tensors, by the host's own writers."""
    model, optimizer = job.snapshot.model_file, job.snapshot.optimizer_file
    if model is not None:
        write_whole(job.run.policy, job.staging.pretrained, model)
    if optimizer is not None:
        save_optimizer_state(job.run.optimizer, job.staging.training_state, optim_state_dict=optimizer)


def _commit(job: _Job) -> None:
    """Collective over the group: every file described and durable, the manifest last, then the name."""
    everyone: list[dict[str, FileEntry]] = [job.written]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, job.written, group=job.group)
    with raised_together(f"publishing {job.target}", job.group):
        if is_main():
            known = {name: entry for entries in everyone for name, entry in entries.items()}
            flush_tree(job.staging.path)
            manifest = job.manifest.model_copy(update={"files": describe_files(job.staging, known)})
            manifest.write(job.staging)
            job.bytes = sum(entry.size for entry in manifest.files.values())
            commit.publish(job.staging.path, job.target)
            if (keep := job.run.cfg.checkpoint.keep_last) is not None:
                job.doomed = commit.retain(job.target.parent, keep)
