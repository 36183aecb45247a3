"""Where the bytes of a stored chunk lie: an item of a `.distcp` file is an uncompressed zip around them.

Nothing is loaded and nothing is run. What `torch.save` wrote in another way than DCP lets it has no record here,
and goes through `torch.load(weights_only=True)`.
"""

import math
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import Any

import torch

from lerobot_parallel.checkpoint.safe_read import CheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LARGEST_PICKLE = 1 << 16
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}


@dataclass(frozen=True)
class StoredChunk:
    """A part of a tensor, and the item that holds it. `start` and `length` of the item are in bytes."""

    key: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """The bytes of a chunk. `start` is that of its first element; `crc` is there where it covers exactly the chunk."""

    start: int
    strides: tuple[int, ...]
    crc: int | None


def locate(chunk: StoredChunk) -> Record | None:
    """Find a chunk's bytes; None where only torch can read them.

    Raises:
        CheckpointError: the item is damaged, or holds another shape or dtype than the metadata says.
    """
    try:
        with chunk.path.open("rb") as file:
            return _record(chunk, _Window(file.fileno(), chunk.start, chunk.length))
    except _Unusual:
        return None
    except (zipfile.BadZipFile, NotImplementedError, EOFError, struct.error) as error:
        raise CheckpointError(chunk.path, f"{chunk.key!r} cannot be read ({error})") from error


class _Unusual(Exception):
    """Not what DCP writes."""


class _Window(RawIOBase):
    """An item of a file as a file of its own."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self.descriptor, self.start, self.length = descriptor, start, length
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self.position = base + offset
        return self.position

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self.length - self.position)
        size = rest if size is None or size < 0 else min(size, rest)
        data = os.pread(self.descriptor, size, self.start + self.position) if size else b""
        self.position += len(data)
        return data


def _record(chunk: StoredChunk, window: _Window) -> Record:
    with zipfile.ZipFile(window) as archive:  # type: ignore[arg-type]
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    layout, crc_is_real = _tensor_layout(window, members)
    storage = members.get(f"data/{layout.storage_key}")
    if storage is None or storage.compress_type != zipfile.ZIP_STORED:
        raise _Unusual
    _check(chunk, layout, storage.file_size)
    begin = _data_offset(window, storage)
    if begin + storage.file_size > chunk.length:
        raise EOFError("its data ends after the item")
    exact = storage.file_size == chunk.nbytes and crc_is_real
    return Record(
        start=chunk.start + begin + layout.offset * chunk.dtype.itemsize,
        strides=layout.strides,
        crc=storage.CRC if exact else None,
    )


def _data_offset(window: _Window, member: zipfile.ZipInfo) -> int:
    window.seek(member.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile("no header where the directory says")
    return member.header_offset + _LOCAL_HEADER.size + name + extra


def _content(window: _Window, member: zipfile.ZipInfo | None) -> bytes:
    if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size > _LARGEST_PICKLE:
        raise _Unusual
    window.seek(_data_offset(window, member))
    return window.read(member.file_size)


@dataclass(frozen=True)
class _Layout:
    """What the pickle says of the tensor; `offset` and `strides` in elements."""

    dtype: torch.dtype
    storage_key: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor_layout(window: _Window, members: dict[str, zipfile.ZipInfo]) -> tuple[_Layout, bool]:
    """The layout, and whether this file holds real checksums: torch can be told to leave them out."""
    if "byteorder" in members and _content(window, members["byteorder"]) != b"little":
        raise _Unusual
    data = _content(window, members.get("data.pkl"))
    try:
        layout = _Unpickler(BytesIO(data)).load()
    except Exception as error:
        # What is refused here is refused by torch too, with its reason.
        raise _Unusual from error
    if not isinstance(layout, _Layout):
        raise _Unusual
    return layout, zlib.crc32(data) == members["data.pkl"].CRC


def _check(chunk: StoredChunk, layout: _Layout, stored: int) -> None:
    found, expected = (layout.sizes, layout.dtype), (chunk.sizes, chunk.dtype)
    if found != expected:
        raise CheckpointError(chunk.path, f"{chunk.key!r} is {found}, but the metadata says {expected}")
    if len(layout.strides) != len(layout.sizes) or layout.offset < 0 or min(layout.strides, default=0) < 0:
        raise _Unusual
    reach = layout.offset + sum((n - 1) * stride for n, stride in zip(layout.sizes, layout.strides, strict=True)) + 1
    if reach * layout.dtype.itemsize > stored:
        raise CheckpointError(chunk.path, f"{chunk.key!r} reaches over the {stored} bytes stored for it")


class _Unpickler(pickle.Unpickler):
    """Knows the names that torch puts into the pickle of one plain tensor; it builds a `_Layout`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _from_typed
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _from_untyped
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        known = _STORAGES.get(name) or vars(torch).get(name) if module == "torch" else None
        if isinstance(known, torch.dtype):
            return known
        raise _Unusual

    def persistent_load(self, pid: Any) -> tuple[torch.dtype | None, str]:
        kind, dtype, key, _, _ = pid
        if kind != "storage":
            raise _Unusual
        return dtype, str(key)


def _from_typed(storage: tuple, offset: int, sizes: tuple, strides: tuple, *_: object) -> _Layout:
    return _Layout(storage[0], storage[1], offset, tuple(sizes), tuple(strides))


def _from_untyped(
    storage: tuple, offset: int, sizes: tuple, strides: tuple, grad: bool, hooks: object, dtype: torch.dtype, *_: object
) -> _Layout:
    return _Layout(dtype, storage[1], offset, tuple(sizes), tuple(strides))
