"""The way back: a weights file to DCP shards, which the engine loads on any topology.

torch's writer wants the tensors in memory. Here each item, a zip that holds the bytes as they are, is streamed.
"""

import io
import math
import os
import pickle
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert.copy import PIECE, Progress, contiguous_strides, default_jobs
from lerobot_parallel.checkpoint.convert.files import (
    check_space,
    copy_files,
    counted,
    flush_directory,
    new_directory,
    write_bytes,
)
from lerobot_parallel.checkpoint.convert.merge import amend_manifest, check_output
from lerobot_parallel.checkpoint.convert.plan import plan_files
from lerobot_parallel.checkpoint.convert.source import Source, find_source
from lerobot_parallel.checkpoint.convert.weights import FileTensor, WeightsHeader, read_header
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError

_ALIGNMENT = 64
_PICKLE_PROTOCOL = 2
_LARGE = 1 << 31
"""From here on the sizes of an item go into a field of their own, as zips have it."""


@dataclass(frozen=True)
class ShardResult:
    """What `to_dcp` did; `source` is the checkpoint that was taken, `path` the directory of the shards."""

    source: Path
    path: Path
    tensors: int
    bytes: int
    seconds: float
    converted: bool
    verified: bool


def to_dcp(
    source: Path | str,
    *,
    output: Path | str | None = None,
    verify: bool = False,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ShardResult:
    """Write the weights of a checkpoint as DCP shards, beside its weights file.

    Args:
        source: the checkpoint, in any of the forms of `find_source`.
        output: write a new directory instead: the shards, and copies of the configs and processors.
        verify: read the shards back, and compare each tensor with the file, before they take their place.
        jobs: into how many files the shards go; each is written by a worker.
        dry_run: look only.
        progress: called with the bytes done so far and the bytes there are.

    Raises:
        ConfigError: `source` is no checkpoint, or what would be written exists.
        CheckpointError: the weights file is missing or damaged.
        OSError: the result cannot be written.
    """
    started = time.monotonic()
    found = find_source(source)
    output = None if output is None else Path(output)
    _check_target(found, output)
    headers = [read_header(path) for path in found.weights()]
    if not headers:
        raise CheckpointError(found.pretrained or found.path, f"holds no {layout.MODEL_FILE}")
    tensors = [tensor for header in headers for tensor in header.tensors]
    total = sum(tensor.nbytes for tensor in tensors)
    target = found.shards if output is None else output / layout.MODEL_SHARDS
    result = ShardResult(found.path, target, len(tensors), total, 0.0, converted=False, verified=False)
    if dry_run:
        return result
    step = counted(progress, total)
    if output is None:
        with new_directory(target) as folder:
            _write(headers, folder, jobs or default_jobs(), verify, step)
        amend_manifest(found, target)
    else:
        with new_directory(output) as folder:
            copy_files(layout.companion_files(found.pretrained), folder)
            (folder / layout.MODEL_SHARDS).mkdir()
            _write(headers, folder / layout.MODEL_SHARDS, jobs or default_jobs(), verify, step)
    return ShardResult(found.path, target, len(tensors), total, time.monotonic() - started, True, verify)


def _check_target(source: Source, output: Path | None) -> None:
    if output is not None:
        check_output(output)
    elif source.shards.exists():
        raise ConfigError("--to", "dcp", f"{source.shards} exists already", "delete it, or give --output")


def _write(headers: list[WeightsHeader], folder: Path, jobs: int, verify: bool, progress: Progress) -> None:
    tensors = [tensor for header in headers for tensor in header.tensors]
    check_space(folder, sum(tensor.nbytes for tensor in tensors))
    shares = [share for share in _shares(tensors, jobs) if share]
    with ThreadPoolExecutor(len(shares) or 1) as pool:
        names = [layout.shard_file(number) for number in range(len(shares))]
        parts = list(pool.map(lambda name, share: _write_items(folder / name, share, progress), names, shares))
    places = {name: info for part in parts for name, info in part.items()}
    if len(headers) == 1:
        write_bytes(folder / layout.SOURCE_HEADER, headers[0].raw)
    write_bytes(folder / layout.SHARD_METADATA, pickle.dumps(_metadata(tensors, places)))
    flush_directory(folder)
    if verify:
        _verify(folder, tensors)


def _shares(tensors: list[FileTensor], count: int) -> list[list[FileTensor]]:
    """Each next tensor, the largest first, to the file that has the least so far."""
    shares: list[list[FileTensor]] = [[] for _ in range(count)]
    sizes = [0] * count
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.name)):
        least = sizes.index(min(sizes))
        shares[least].append(tensor)
        sizes[least] += tensor.nbytes
    return shares


def _write_items(path: Path, tensors: list[FileTensor], progress: Progress) -> dict[str, _StorageInfo]:
    places = {}
    with path.open("wb") as file:
        for tensor in tensors:
            start = file.tell()
            _write_item(file, start, tensor)
            places[tensor.name] = _StorageInfo(path.name, start, file.tell() - start)
            progress(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return places


def _write_item(file: BinaryIO, start: int, tensor: FileTensor) -> None:
    """What `torch.save` writes for one tensor."""
    with zipfile.ZipFile(_From(file, start), "w", zipfile.ZIP_STORED) as archive:  # type: ignore[arg-type]
        archive.writestr("archive/data.pkl", _pickled(tensor))
        archive.writestr("archive/byteorder", "little")
        member = zipfile.ZipInfo(f"archive/data/{_STORAGE_KEY}")
        large = tensor.nbytes >= _LARGE
        member.extra = _padding(file.tell() - start + 30 + len(member.filename) + 20 * large)
        with archive.open(member, "w", force_zip64=large) as out:
            _copy(tensor, out)
        archive.writestr("archive/version", "3\n")


def _copy(tensor: FileTensor, out: Any) -> None:
    with tensor.path.open("rb") as source:
        source.seek(tensor.start)
        rest = tensor.nbytes
        while rest:
            data = source.read(min(PIECE, rest))
            if not data:
                raise CheckpointError(tensor.path, f"is truncated: {tensor.name!r} ends too early")
            out.write(data)
            rest -= len(data)


def _padding(position: int) -> bytes:
    """An extra field that moves what follows a header to a multiple of the alignment, as torch's own zips have it."""
    length = -(position + 4) % _ALIGNMENT
    return b"FB" + length.to_bytes(2, "little") + b"Z" * length


class _From(io.RawIOBase):
    """A file that begins at an offset of another."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self.file, self.start = file, start

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.file.tell() - self.start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset + self.start if whence == os.SEEK_SET else offset, whence) - self.start

    def write(self, data: Any) -> int:
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


_STORAGE_KEY = "0"


class _Storage:
    """Pickled as a reference to the bytes beside the pickle."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Rebuild:
    """Pickled as the call by which torch rebuilds a tensor."""

    def __init__(self, tensor: FileTensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple:
        shape = self.tensor.shape
        fields = (_Storage(self.tensor.nbytes), 0, shape, contiguous_strides(shape), False, OrderedDict())
        return torch._utils._rebuild_tensor_v3, (*fields, self.tensor.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> tuple | None:
        if not isinstance(value, _Storage):
            return None
        return "storage", torch.storage.UntypedStorage, _STORAGE_KEY, "cpu", value.nbytes


def _pickled(tensor: FileTensor) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=_PICKLE_PROTOCOL).dump(_Rebuild(tensor))
    return buffer.getvalue()


def _metadata(tensors: list[FileTensor], places: dict[str, _StorageInfo]) -> Metadata:
    keys = {f"{layout.MODEL_KEY}.{tensor.name}": tensor for tensor in tensors}
    entries = {}
    for key, tensor in keys.items():
        size = torch.Size(tensor.shape)
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, [chunk])
    index = {key: MetadataIndex(key, entries[key].chunks[0].offsets, 0) for key in keys}
    return Metadata(
        state_dict_metadata=entries,
        planner_data={key: (layout.MODEL_KEY, tensor.name) for key, tensor in keys.items()},
        storage_data={index[key]: places[tensor.name] for key, tensor in keys.items()},
        storage_meta=StorageMeta(),
    )


def _verify(folder: Path, tensors: list[FileTensor]) -> None:
    """Through the reader that converts, so that what it would copy is compared, range by range."""
    from lerobot_parallel.checkpoint.convert.records import locate

    by_name = {tensor.name: tensor for tensor in tensors}
    planned = [tensor for file in plan_files(folder).files for tensor in file.tensors]
    for tensor in planned:
        original = by_name[tensor.name]
        for chunk in tensor.chunks:
            record = locate(chunk)
            same = record is not None and math.prod(chunk.sizes) == math.prod(tensor.shape)
            if not same or not _same(chunk.path, record.start, original):
                raise CheckpointError(chunk.path, f"{tensor.name!r} reads back differently from the file")


def _same(path: Path, start: int, original: FileTensor) -> bool:
    with path.open("rb") as ours, original.path.open("rb") as theirs:
        ours.seek(start)
        theirs.seek(original.start)
        sizes = [min(PIECE, original.nbytes - done) for done in range(0, original.nbytes, PIECE)]
        return all(ours.read(size) == theirs.read(size) for size in sizes)
