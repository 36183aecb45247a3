"""Carrying a planned file out: workers copy byte ranges positionally and checksum them in the same pass.

A chunk that is a few contiguous ranges of the tensor is copied range by range. Any other (shards of other dims,
strides, another dtype wanted) is assembled band by band, a band being a contiguous part of the result.
"""

import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import RawIOBase
from itertools import product

import torch

from lerobot_parallel.checkpoint.convert.checksum import combined
from lerobot_parallel.checkpoint.convert.plan import PlannedFile, PlannedTensor
from lerobot_parallel.checkpoint.convert.records import Record, StoredChunk, locate
from lerobot_parallel.checkpoint.safe_read import CheckpointError, load_chunk

Progress = Callable[[int], None]
"""Called with the bytes done since the last call."""

PIECE = 4 << 20
"""The largest range that is one worker's task."""
BLOCK = 256 << 10
"""What is read, checksummed and written at a time: it stays in a core's cache meanwhile."""
BAND = 1 << 20
"""The largest band. Times a few copies and the number of workers it bounds the memory of a conversion."""
_SHORTEST_RANGE = 64 << 10
_worker = threading.local()


@dataclass(frozen=True)
class Written:
    """A range of the file and its checksum."""

    start: int
    nbytes: int
    crc: int


def default_jobs() -> int:
    """As many as there are CPUs for this process, at most 4: more do not make a disk faster."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cpus))


def write_tensors(file: PlannedFile, descriptor: int, jobs: int, progress: Progress) -> list[Written]:
    """Write everything but the header of a planned file. Returns its ranges, in the order of the file.

    Raises:
        CheckpointError: a chunk cannot be read, or is not what its own checksum says.
        OSError: the file cannot be written.
    """
    written: list[Written] = []
    sources: dict[StoredChunk, tuple[int, list[Written]]] = {}

    def collect(done: set[Future]) -> None:
        for future in done:
            task, result = future.result()
            written.append(result)
            if isinstance(task, _Move) and task.crc is not None:
                sources.setdefault(task.chunk, (task.crc, []))[1].append(result)
            progress(result.nbytes)

    with ThreadPoolExecutor(jobs, "convert") as pool:
        pending: set[Future] = set()
        try:
            for task in _tasks(file):
                pending.add(pool.submit(_run, task, descriptor))
                if len(pending) >= 4 * jobs:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    collect(done)
            collect(wait(pending).done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    _check_sources(sources)
    return sorted(written, key=lambda part: part.start)


def _check_sources(sources: dict[StoredChunk, tuple[int, list[Written]]]) -> None:
    for chunk, (expected, parts) in sources.items():
        parts.sort(key=lambda part: part.start)
        if combined((part.crc, part.nbytes) for part in parts) != expected:
            raise CheckpointError(chunk.path, f"{chunk.key!r} is damaged: its bytes have another checksum than stored")


@dataclass(frozen=True)
class _Move:
    """A range of a shard that is a range of the result; `crc` is what the whole chunk must have."""

    chunk: StoredChunk
    crc: int | None
    source: int
    target: int
    nbytes: int

    def write(self, descriptor: int) -> Written:
        block = _own_block()
        crc = 0
        with self.chunk.path.open("rb", buffering=0) as file:
            file.seek(self.source)
            for done in range(0, self.nbytes, BLOCK):
                data = block[: min(BLOCK, self.nbytes - done)]
                _read_into(data, file, self.chunk)
                crc = zlib.crc32(data, crc)
                _write_at(descriptor, data, self.target + done)
        return Written(self.target, self.nbytes, crc)


def _own_block() -> memoryview:
    """The worker's own: fresh memory for every read would cost as much as the copy."""
    if not hasattr(_worker, "block"):
        _worker.block = memoryview(bytearray(BLOCK))
    return _worker.block


@dataclass(frozen=True)
class _Band:
    """A box of a tensor that is contiguous in the result, and the chunks to make it of; None: only torch reads it."""

    tensor: PlannedTensor
    parts: tuple[tuple[StoredChunk, Record | None], ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: int

    def write(self, descriptor: int) -> Written:
        data = self._data()
        _write_at(descriptor, data, self.target)
        return Written(self.target, len(data), zlib.crc32(data))

    def _data(self) -> memoryview:
        band = torch.empty(self.sizes, dtype=self.tensor.stored)
        for chunk, record in self.parts:
            _fill(band, self.offsets, chunk, record)
        return _bytes(_cast(band, self.tensor))


def _run(task: "_Move | _Band", descriptor: int) -> tuple["_Move | _Band", Written]:
    written = task.write(descriptor)
    if written.nbytes >= BLOCK:
        leave_cache(descriptor, written.start, written.nbytes)
    return task, written


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count


def leave_cache(descriptor: int, start: int, nbytes: int) -> None:
    """Tell the system that a range will not be needed soon; 0 bytes: to the end.

    On Linux this starts writing back what is dirty there, so that the flush at the end finds little to do.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)


def _tasks(file: PlannedFile) -> Iterator["_Move | _Band"]:
    for tensor in file.tensors:
        parts = tuple((chunk, locate(chunk)) for chunk in tensor.chunks)
        if tensor.dtype == tensor.stored and all(_is_ranges(tensor, *part) for part in parts):
            for chunk, record in parts:
                yield from _moves(tensor, chunk, record)
        else:
            yield from _bands(tensor, parts)


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    wanted = contiguous_strides(sizes)
    return all(size == 1 or a == b for size, a, b in zip(sizes, strides, wanted, strict=True))


def _range_dim(tensor: PlannedTensor, chunk: StoredChunk) -> int:
    """The dim from which on the chunk is one range: all dims behind it are whole."""
    dim = len(tensor.shape)
    while dim and chunk.sizes[dim - 1] == tensor.shape[dim - 1]:
        dim -= 1
    return max(dim - 1, 0)


def _is_ranges(tensor: PlannedTensor, chunk: StoredChunk, record: Record | None) -> bool:
    if record is None or not _is_contiguous(chunk.sizes, record.strides):
        return False
    dim = _range_dim(tensor, chunk)
    return math.prod(chunk.sizes[:dim]) == 1 or math.prod(chunk.sizes[dim:]) * chunk.dtype.itemsize >= _SHORTEST_RANGE


def _moves(tensor: PlannedTensor, chunk: StoredChunk, record: Record) -> Iterator[_Move]:
    dim, width = _range_dim(tensor, chunk), tensor.stored.itemsize
    strides = contiguous_strides(tensor.shape)
    length = math.prod(chunk.sizes[dim:]) * width
    source = record.start
    crc = record.crc
    for place in product(*(range(size) for size in chunk.sizes[:dim])):
        first = [o + i for o, i in zip(chunk.offsets, (*place, *(0,) * (len(tensor.shape) - dim)), strict=True)]
        target = tensor.start + sum(i * stride for i, stride in zip(first, strides, strict=True)) * width
        for start in range(0, length, PIECE):
            yield _Move(chunk, crc, source + start, target + start, min(PIECE, length - start))
        source += length


def _bands(tensor: PlannedTensor, parts: tuple[tuple[StoredChunk, Record | None], ...]) -> Iterator[_Band]:
    # A chunk that is not contiguous is read whole for each band: then the tensor is one.
    plain = all(record is not None and _is_contiguous(chunk.sizes, record.strides) for chunk, record in parts)
    limit = BAND // tensor.stored.itemsize if plain else math.prod(tensor.shape)
    strides = contiguous_strides(tensor.shape)
    for offsets, sizes in boxes(tensor.shape, limit):
        first = sum(o * stride for o, stride in zip(offsets, strides, strict=True))
        near = tuple(part for part in parts if _overlap(offsets, sizes, part[0]) is not None)
        if math.prod(sizes):
            yield _Band(tensor, near, offsets, sizes, tensor.start + first * tensor.dtype.itemsize)


def boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes of at most `limit` elements that follow each other in a contiguous tensor."""
    dim = next((i for i, size in enumerate(shape) if size > 1), None)
    if dim is None or math.prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[dim + 1 :])
    rows = max(1, limit // max(1, row))
    for start in range(0, shape[dim], rows):
        count = min(rows, shape[dim] - start)
        for offsets, sizes in boxes((*shape[:dim], count, *shape[dim + 1 :]), max(limit, 1)):
            yield (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), sizes


def _overlap(
    offsets: tuple[int, ...], sizes: tuple[int, ...], chunk: StoredChunk
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets in the whole tensor, and sizes, of what a box and a chunk share."""
    low = tuple(map(max, offsets, chunk.offsets))
    ends = ((o + n, c + m) for o, n, c, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True))
    shared = tuple(min(end) - start for start, end in zip(low, ends, strict=True))
    return (low, shared) if all(n > 0 for n in shared) else None


def _fill(band: torch.Tensor, offsets: tuple[int, ...], chunk: StoredChunk, record: Record | None) -> None:
    low, sizes = _overlap(offsets, tuple(band.shape), chunk)
    inside = [start - offset for start, offset in zip(low, chunk.offsets, strict=True)]
    starts = [start - offset for start, offset in zip(low, offsets, strict=True)]
    place = tuple(slice(i, i + n) for i, n in zip(starts, sizes, strict=True))
    if record is None:
        whole = load_chunk(chunk.path, chunk.start, chunk.length, chunk.key, torch.Size(chunk.sizes), chunk.dtype)
        band[place].copy_(whole[tuple(slice(i, i + n) for i, n in zip(inside, sizes, strict=True))])
        return
    first = sum(i * stride for i, stride in zip(inside, record.strides, strict=True))
    reach = sum((n - 1) * stride for n, stride in zip(sizes, record.strides, strict=True)) + 1
    width = chunk.dtype.itemsize
    data = torch.frombuffer(_read(chunk, record.start + first * width, reach * width), dtype=chunk.dtype)
    band[place].copy_(data.as_strided(sizes, record.strides))


def _cast(band: torch.Tensor, tensor: PlannedTensor) -> torch.Tensor:
    if tensor.dtype == tensor.stored:
        return band
    cast = band.to(tensor.dtype)
    narrower = tensor.dtype.itemsize < tensor.stored.itemsize
    if narrower and (infinite := cast.isinf()).any() and infinite.sum() != band.isinf().sum():
        text = f"{tensor.name!r} holds values that are too large for {tensor.dtype}: take bf16 or fp32"
        raise CheckpointError(tensor.chunks[0].path, text)
    return cast


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read(chunk: StoredChunk, start: int, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    with chunk.path.open("rb", buffering=0) as file:
        file.seek(start)
        _read_into(memoryview(data), file, chunk)
    return data


def _read_into(rest: memoryview, file: RawIOBase, chunk: StoredChunk) -> None:
    while rest:
        count = file.readinto(rest)
        if not count:
            raise CheckpointError(chunk.path, f"is truncated: {chunk.key!r} ends after {file.tell()} bytes")
        rest = rest[count:]
