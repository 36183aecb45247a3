"""DCP shards to one `model.safetensors`: offline, one process, no GPU."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import Metadata

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.manifest import amend
from lerobot_parallel.checkpoint.safe_read import (
    CheckpointError,
    bytes_entries,
    read_metadata,
    read_tensor,
    tensor_entries,
)
from lerobot_parallel.config.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes there are."""

# The names that the format has (https://github.com/huggingface/safetensors), in its own order: a file holds its
# tensors in this order, and those of one dtype by name, so that each of them is aligned.
_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# What torch.compile and activation checkpointing put into names, and no loader of the policy expects.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class ConvertResult:
    """What `convert` did; `converted` is false where there were no shards and the weights were there already."""

    path: Path
    tensors: int
    bytes: int
    seconds: float
    converted: bool
    verified: bool
    deleted_dcp: bool


def convert(
    source: Path | str,
    *,
    output: Path | str | None = None,
    delete_dcp: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Merge the model shards of a checkpoint into `model.safetensors`, beside its config.

    The file appears complete and flushed, or not at all; an older one is replaced. Every tensor has the dtype, the
    shape and the bits it was saved with. Both names of a tied weight are written: shards do not say what is tied.

    Args:
        source: the checkpoint, in any of the forms of `layout.locate`.
        output: write a new directory instead: the weights, and copies of the configs and processors.
        delete_dcp: remove the model shards once the weights are in place; implies `verify`.
        verify: read the written file back, and compare each tensor with the shards, before it takes its place.
        progress: called after each tensor.

    Raises:
        ConfigError: `source` is no checkpoint, `output` is taken, or the options exclude each other.
        CheckpointError: a file of the checkpoint is missing, damaged or hostile, or holds what no weights file can.
    """
    started = time.monotonic()
    checkpoint = layout.locate(source)
    output = None if output is None else Path(output)
    _check_options(checkpoint, output, delete_dcp)
    if not checkpoint.model_shards.exists():
        return _nothing_to_convert(checkpoint)
    plan = _Plan.of(checkpoint.model_shards)
    if output is None:
        _write_file(plan, checkpoint.model_file, verify or delete_dcp, progress)
    else:
        _write_directory(plan, checkpoint, output, verify, progress)
    if delete_dcp:
        _delete(checkpoint.model_shards)
    if output is None:
        amend(checkpoint, [checkpoint.model_file, checkpoint.model_shards])
    return ConvertResult(
        path=checkpoint.model_file if output is None else output / layout.MODEL_FILE,
        tensors=len(plan.keys),
        bytes=len(plan.header) + plan.total,
        seconds=time.monotonic() - started,
        converted=True,
        verified=verify or delete_dcp,
        deleted_dcp=delete_dcp,
    )


def _check_options(checkpoint: layout.Checkpoint, output: Path | None, delete_dcp: bool) -> None:
    if output is None:
        return
    if delete_dcp:
        raise ConfigError(
            "--delete-dcp", True, "would leave the checkpoint itself without weights", "drop it, or drop --output"
        )
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError("--output", output, "exists already", "give a new directory")
    if not checkpoint.model_shards.exists():
        raise ConfigError("--output", output, "there are no shards to convert", f"copy {checkpoint.pretrained}")


def _nothing_to_convert(checkpoint: layout.Checkpoint) -> ConvertResult:
    path = checkpoint.model_file
    if not path.exists():
        raise CheckpointError(checkpoint.pretrained, f"holds neither {layout.MODEL_SHARDS} nor {layout.MODEL_FILE}")
    with _opened(path) as file:
        tensors = len(file.keys())
    return ConvertResult(path, tensors, path.stat().st_size, 0.0, converted=False, verified=False, deleted_dcp=False)


@dataclass(frozen=True)
class _Plan:
    """The file to write: its header, and the shards' key of every tensor by name, in the order of the file."""

    shards: Path
    metadata: Metadata
    keys: dict[str, str]
    header: bytes
    total: int

    @classmethod
    def of(cls, shards: Path) -> "_Plan":
        metadata = read_metadata(shards)
        entries = tensor_entries(metadata)
        widths = list(_DTYPES)

        def place(item: tuple[str, str]) -> tuple[int, str]:
            return widths.index(entries[item[1]].properties.dtype), item[0]

        keys = dict(sorted(_keys_by_name(shards, metadata).items(), key=place))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, key in keys.items():
            start, end = end, end + _nbytes(metadata, key)
            dtype = _DTYPES[entries[key].properties.dtype]
            header[name] = {"dtype": dtype, "shape": list(entries[key].size), "data_offsets": [start, end]}
        return cls(shards, metadata, keys, _encoded(header), end)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, key in self.keys.items():
            yield name, read_tensor(self.shards, self.metadata, key)


def _nbytes(metadata: Metadata, key: str) -> int:
    entry = metadata.state_dict_metadata[key]
    return entry.size.numel() * entry.properties.dtype.itemsize


def _encoded(header: dict[str, object]) -> bytes:
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _keys_by_name(shards: Path, metadata: Metadata) -> dict[str, str]:
    path = shards / layout.SHARD_METADATA
    if others := sorted(bytes_entries(metadata)):
        raise CheckpointError(path, f"{others[0]!r} is no tensor, and {layout.MODEL_FILE} holds nothing else")
    keys: dict[str, str] = {}
    for key, entry in tensor_entries(metadata).items():
        name = _name(key, metadata)
        if name is None:
            raise CheckpointError(path, f"{key!r} is not in the {layout.MODEL_KEY!r} part of the state dict")
        if entry.properties.dtype not in _DTYPES:
            raise CheckpointError(path, f"{key!r} is {entry.properties.dtype}, which {layout.MODEL_FILE} cannot hold")
        if name in keys or name == "__metadata__":
            raise CheckpointError(path, f"{key!r} has the name {name!r}, which is taken")
        keys[name] = key
    if not keys:
        raise CheckpointError(path, "holds no tensors")
    return keys


def _name(key: str, metadata: Metadata) -> str | None:
    root, *rest = (metadata.planner_data or {}).get(key) or key.split(".")
    parts = [part for part in ".".join(map(str, rest)).split(".") if part not in _WRAPPERS]
    return ".".join(parts) if root == layout.MODEL_KEY and rest else None


def _write_file(plan: _Plan, target: Path, verify: bool, progress: Progress | None) -> None:
    staging = layout.staging_path(target)
    try:
        with staging.open("wb") as file:
            _write_weights(plan, file, progress)
        if verify:
            _verify(plan, staging)
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)
    _flush_directory(target.parent)


def _write_directory(
    plan: _Plan, checkpoint: layout.Checkpoint, output: Path, verify: bool, progress: Progress | None
) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = layout.staging_path(output)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        for path in layout.companion_files(checkpoint.pretrained):
            with path.open("rb") as original, (staging / path.name).open("wb") as copy:
                shutil.copyfileobj(original, copy)
                _flush(copy)
        _write_file(plan, staging / layout.MODEL_FILE, verify, progress)
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _flush_directory(output.parent)


def _write_weights(plan: _Plan, file: BinaryIO, progress: Progress | None) -> None:
    file.write(plan.header)
    done = 0
    for _, tensor in plan.tensors():
        done += file.write(_bits(tensor).numpy().data)
        if progress is not None:
            progress(done, plan.total)
    _flush(file)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _verify(plan: _Plan, path: Path) -> None:
    with _opened(path) as file:
        if set(file.keys()) != set(plan.keys):
            raise CheckpointError(path, "does not hold the names that were written to it")
        for name, expected in plan.tensors():
            found = file.get_tensor(name)
            same = found.dtype == expected.dtype and found.shape == expected.shape
            if not same or not torch.equal(_bits(found), _bits(expected)):
                raise CheckpointError(path, f"{name!r} reads back differently from the shards")


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(path, f"cannot be read ({error})") from error


def _delete(shards: Path) -> None:
    doomed = layout.discard_path(shards)
    shutil.rmtree(doomed, ignore_errors=True)
    shards.rename(doomed)
    _flush_directory(shards.parent)
    shutil.rmtree(doomed)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
