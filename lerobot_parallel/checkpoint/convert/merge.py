"""DCP shards to weights files that the host reads."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert.copy import default_jobs
from lerobot_parallel.checkpoint.convert.files import (
    WrittenFile,
    copy_files,
    counted,
    delete_directory,
    new_directory,
    write_into,
)
from lerobot_parallel.checkpoint.convert.plan import Plan, plan_files
from lerobot_parallel.checkpoint.convert.source import Source, find_source
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError

WANTED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ConvertResult:
    """What `convert` did; `converted` is false where the weights were there already and no shards, and in a dry run.

    `source` is the checkpoint that was taken; `path` the weights file, or the index of several. `tied` has the name
    that stands for each dropped name; `left_out` how many values lay beside the model, by their root.
    """

    source: Path
    path: Path
    files: tuple[WrittenFile, ...]
    tensors: int
    bytes: int
    seconds: float
    converted: bool = False
    verified: bool = False
    deleted_dcp: bool = False
    tied: dict[str, str] | None = None
    left_out: dict[str, int] | None = None


def convert(
    source: Path | str,
    *,
    output: Path | str | None = None,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    delete_dcp: bool = False,
    verify: bool = False,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertResult:
    """Merge the model shards of a checkpoint into `model.safetensors`, beside its config.

    The file appears complete and flushed, or not at all; an older one is replaced. Every tensor has the shape and the
    bits it was saved with. A tied weight is written under one name where the checkpoint's manifest lists it as tied,
    and under each of its names otherwise. What is copied as it is, is checked against the checksum stored with it.

    Args:
        source: the checkpoint, in any of the forms of `find_source`.
        output: write a new directory instead: the weights, and copies of the configs and processors.
        dtype: "bf16", "fp16" or "fp32" for floating tensors.
        max_shard_size: bytes of weights in one file; more give several files and an index, which the host cannot load.
        delete_dcp: remove the model shards once the weights are in place; implies `verify`.
        verify: read the written bytes back, and compare them with those of the shards, before they take their place.
        jobs: how many ranges are copied at a time.
        dry_run: plan only.
        progress: called with the bytes done so far and the bytes there are.

    Raises:
        ConfigError: `source` is no checkpoint, `output` is taken, or the options exclude each other.
        CheckpointError: a file of the checkpoint is missing, damaged or hostile, or holds what no weights file can.
        OSError: the result cannot be written.
    """
    started = time.monotonic()
    found = find_source(source)
    output = None if output is None else Path(output)
    if not found.has_shards:
        if delete_dcp:
            # A run that was killed between the two has deleted the shards, but not their entries.
            amend_manifest(found, found.shards)
        return _nothing_to_convert(found, output)
    _check_target(found, output)
    plan = plan_files(
        found.shards,
        dtype=WANTED_DTYPES[dtype] if dtype is not None else None,
        max_bytes=max_shard_size,
        tied=found.tied(),
    )
    if delete_dcp:
        _check_deletion(found, plan, output, dtype)
    verify = verify or delete_dcp
    result = _result(found, plan, output or found.pretrained)
    if dry_run:
        return result
    options = {
        "jobs": jobs or default_jobs(),
        "verify": verify,
        "progress": counted(progress, plan.nbytes * (2 if verify else 1)),
    }
    files = _write(found, plan, output, options)
    if output is None:
        amend_manifest(found, *_weights_paths(found.pretrained))
    if delete_dcp:
        delete_directory(found.shards)
        amend_manifest(found, found.shards)
    seconds = time.monotonic() - started
    done = {"converted": True, "verified": verify, "deleted_dcp": delete_dcp}
    return replace(result, files=tuple(files), seconds=seconds, **done)


def _write(source: Source, plan: Plan, output: Path | None, options: dict[str, Any]) -> list[WrittenFile]:
    if output is None:
        return write_into(source.pretrained, plan, **options)
    with new_directory(output) as folder:
        if source.pretrained is not None:
            copy_files(layout.companion_files(source.pretrained), folder)
        return write_into(folder, plan, **options)


def _weights_paths(pretrained: Path) -> list[Path]:
    """Everything that writing may have made, replaced or removed."""
    parts = [path for path in pretrained.iterdir() if layout.is_weights_part(path.name)]
    return [pretrained / layout.MODEL_FILE, pretrained / layout.MODEL_INDEX, *parts]


def amend_manifest(source: Source, *changed: Path) -> None:
    """The manifest, where there is one, lists what is there now."""
    if source.checkpoint is None or not source.checkpoint.manifest.exists():
        return
    with suppress(ImportError):
        from lerobot_parallel.checkpoint.manifest import amend

        amend(source.checkpoint, changed)


def _result(source: Source, plan: Plan, folder: Path) -> ConvertResult:
    return ConvertResult(
        source=source.path,
        path=folder / (plan.files[0].name if plan.index is None else layout.MODEL_INDEX),
        files=tuple(WrittenFile(file.name, file.nbytes, "") for file in plan.files),
        tensors=plan.tensors,
        bytes=plan.nbytes,
        seconds=0.0,
        tied=plan.tied,
        left_out=plan.left_out,
    )


def check_output(output: Path) -> None:
    """
    Raises:
        ConfigError: it exists, and is more than an empty directory.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError("--output", output, "exists already", "give a new directory")


def _check_target(source: Source, output: Path | None) -> None:
    if output is not None:
        check_output(output)
    elif source.pretrained is None:
        problem = f"{source.path} is a directory of shards alone, with no place for weights beside it"
        raise ConfigError("--output", None, problem, "give a new directory")


def _check_deletion(source: Source, plan: Plan, output: Path | None, dtype: str | None) -> None:
    """The shards may go only where nothing is lost with them, and where the run can still be resumed."""
    problem = None
    if output is not None:
        problem = "would leave the checkpoint itself without weights", "drop it, or drop --output"
    elif dtype is not None:
        problem = f"would leave nothing but weights rounded to {dtype}", "drop it, or drop --dtype"
    elif plan.index is not None:
        problem = "would leave several files, from which no run resumes", "drop it, or drop --max-shard-size"
    elif plan.left_out:
        others = ", ".join(plan.left_out)
        problem = f"would delete {others} too, which is beside the model in {source.shards}", "drop it"
    if problem is not None:
        raise ConfigError("--delete-dcp", True, *problem)


def _nothing_to_convert(source: Source, output: Path | None) -> ConvertResult:
    paths = source.weights() or source.adapter()
    if not paths:
        where = source.pretrained or source.path
        raise CheckpointError(where, f"holds neither {layout.MODEL_SHARDS} nor {layout.MODEL_FILE}")
    if output is not None:
        raise ConfigError("--output", output, "there are no shards to convert", f"copy {source.pretrained}")
    tensors = sum(count_tensors(path) for path in paths)
    files = tuple(WrittenFile(path.name, path.stat().st_size, "") for path in paths)
    whole = source.pretrained / layout.MODEL_INDEX if layout.is_weights_part(paths[0].name) else paths[0]
    return ConvertResult(source.path, whole, files, tensors, sum(file.bytes for file in files), 0.0)


def count_tensors(path: Path) -> int:
    """How many tensors a weights file holds.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return len(file.keys())
    except SafetensorError as error:
        raise CheckpointError(path, f"cannot be read ({error})") from error
