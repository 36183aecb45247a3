"""Reading DCP shards without executing anything from them, and without believing what they say.

torch reads `.metadata` with a plain `pickle.load`. Here it goes through an unpickler that knows nothing but the
names below and makes inert records of them; torch's own objects are built from those records after every field,
shape and byte range has been checked. Tensors and values go through `torch.load(weights_only=True)`.
"""

import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lerobot_parallel.checkpoint.layout import SHARD_METADATA


class CheckpointError(ValueError):
    """A file of a checkpoint is not what it should be: one line that names the file and what is wrong with it."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(str(path), " ".join(problem.split()))

    def __str__(self) -> str:
        return ": ".join(self.args)


def read_metadata(directory: Path | str) -> Metadata:
    """The metadata of the DCP shards in `directory`, built from a pickle that was not trusted.

    What it promises holds afterwards: the chunks of every tensor lie within it, do not overlap and cover it, and
    each of them, and each value that is no tensor, is a range of a file of this directory that is large enough.

    Raises:
        CheckpointError: there is no metadata, it asks for code, or it does not fit itself or the files beside it.
    """
    directory = Path(directory)
    path = directory / SHARD_METADATA
    record = _unpickle(path)
    try:
        metadata = _metadata(record)
        _check_storage(metadata, directory)
    except _Problem as problem:
        raise CheckpointError(path, str(problem)) from None
    return metadata


def tensor_entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors, by flat key."""
    return {k: e for k, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}


def bytes_entries(metadata: Metadata) -> dict[str, BytesStorageMetadata]:
    """What is no tensor (the numbers in an optimizer's groups), by flat key."""
    return {k: e for k, e in metadata.state_dict_metadata.items() if isinstance(e, BytesStorageMetadata)}


def read_tensor(directory: Path, metadata: Metadata, key: str) -> torch.Tensor:
    """One whole tensor, contiguous and on the CPU, in the dtype it was saved in; `metadata` is from `read_metadata`.

    Raises:
        CheckpointError: a shard cannot be read, or holds another shape or dtype than the metadata says.
    """
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), key
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        path = directory / info.relative_path
        whole[place].copy_(load_chunk(path, info.offset, info.length, key, chunk.sizes, whole.dtype))
    return whole


def load(
    state_dict: dict[str, Any],
    directory: Path | str,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """`torch.distributed.checkpoint.load`, in place, through `SafeReader` and `SafeLoadPlanner`.

    Every rank of the group calls this, unless `no_dist`. An error on one rank is raised on all.

    Raises:
        CheckpointError: with the first rank's own error, which names the file where there is one.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(
                state_dict,
                storage_reader=SafeReader(directory),
                planner=SafeLoadPlanner(),
                process_group=process_group,
                no_dist=no_dist,
            )
        except CheckpointException as failed:
            raise _first_failure(Path(directory), failed) from failed


class SafeReader(FileSystemReader):
    """torch's file reader over `read_metadata`; a file that cannot be read is an error that names it."""

    def read_metadata(self) -> Metadata:
        try:
            metadata = read_metadata(self.path)
        except CheckpointError as error:
            raise _Unreadable(error) from None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in per_file.items():
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner).wait()
            except Exception as error:
                raise CheckpointError(Path(self.path) / name, _described(error)) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner; a value that is no tensor is read with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


class _Unreadable(BaseException):
    """Carries a CheckpointError past torch's loader, which swallows every Exception while it reads the metadata."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error)
        self.error = error


def _first_failure(directory: Path, failed: CheckpointException) -> CheckpointError:
    failures = [error for _, (error, _) in sorted(failed.failures.items())]
    failures = [error.error if isinstance(error, _Unreadable) else error for error in failures]
    for error in failures:
        if isinstance(error, CheckpointError):
            return error
    return CheckpointError(directory, _described(failures[0]))


def _described(error: BaseException) -> str:
    """What torch says about a bad file, on one line; its advice to load the file without limits left out."""
    if isinstance(error, CheckpointError):
        return error.args[-1]
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"cannot be read ({type(error).__name__}: {first_line[:200]})"


def load_chunk(path: Path, offset: int, length: int, key: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in one item of a shard, through torch and in memory.

    Raises:
        CheckpointError: it cannot be read, or is not of the size and dtype that the metadata says.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            tensor = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(path, f"{key!r} {_described(error)}") from error
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise CheckpointError(path, f"{key!r} is no plain tensor")
    if tensor.size() != size or tensor.dtype != dtype:
        found, expected = (tuple(tensor.size()), tensor.dtype), (tuple(size), dtype)
        raise CheckpointError(path, f"{key!r} is {found}, but the metadata says {expected}")
    return tensor


class _Record:
    """A thrown-away stand-in for one class of torch's: it holds what the pickle says and does nothing."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


_DCP_CLASSES = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}

# Every other name that DCP puts in a pickle, and the harmless thing that stands for it. Enum members were pickled
# through `getattr` by Python 3.11.0 to 3.11.3; pathlib lives in `pathlib._local` in Python 3.13.
_STAND_INS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): int,
    ("builtins", "getattr"): lambda owner, name: name,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # New classes for every file: a pickle can set attributes of the classes it names.
        self._records = {name: type(name[1], (_Record,), {}) for name in _DCP_CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        stand_in = self._records.get((module, name)) or _STAND_INS.get((module, name))
        if stand_in is not None:
            return stand_in
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Problem(f"asks for {module}.{name}, which no checkpoint needs: refused, nothing was run")


class _Problem(Exception):
    """What is wrong with the file being read; its name is added where it is known."""


def _unpickle(path: Path) -> object:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(path, "is missing, so these shards are not a complete checkpoint") from None
    try:
        return _Unpickler(data).load()
    except _Problem as problem:
        raise CheckpointError(path, str(problem)) from None
    except Exception as error:
        raise CheckpointError(path, _described(error)) from error


def _metadata(record: object) -> Metadata:
    fields = _fields(record, "Metadata")
    entries = _typed(fields.get("state_dict_metadata"), dict, "state_dict_metadata")
    storage = _typed(fields.get("storage_data"), dict, "storage_data")
    return Metadata(
        state_dict_metadata={_typed(key, str, "a key"): _entry(key, value) for key, value in entries.items()},
        planner_data=_planner_data(fields.get("planner_data")),
        storage_data={_index(key): _storage_info(value) for key, value in storage.items()},
        storage_meta=StorageMeta(),
        version=_optional(fields.get("version"), str, "version"),
    )


def _fields(record: object, name: str) -> dict[str, object]:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise _Problem(f"holds {_kind(record)} where a {name} belongs")
    # A dataclass without fields, such as BytesStorageMetadata, is pickled without a state.
    return _typed(record.state or {}, dict, f"the content of a {name}")


def _typed[T](value: object, kind: type[T], what: str) -> T:
    if type(value) is not kind:
        raise _Problem(f"{what} is {_kind(value)}, not {kind.__name__}")
    return value


def _optional[T](value: object, kind: type[T], what: str) -> T | None:
    return None if value is None else _typed(value, kind, what)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _entry(key: str, record: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        _fields(record, "BytesStorageMetadata")
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    size = _size(fields.get("size"), key)
    chunks = [_chunk(chunk, key) for chunk in _typed(fields.get("chunks"), list, f"the chunks of {key!r}")]
    _check_chunks(key, size, chunks)
    return TensorStorageMetadata(_properties(fields.get("properties"), key), size, chunks)


def _properties(record: object, key: str) -> TensorProperties:
    """The dtype; the other fields are deprecated in torch, and the same for every tensor that DCP saves."""
    if type(record).__name__ != "TensorProperties" or not isinstance(record, _Record):
        raise _Problem(f"holds {_kind(record)} where the properties of {key!r} belong")
    state = record.state
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], torch.dtype):
        raise _Problem(f"the properties of {key!r} are unknown")
    if state[1] != "torch.strided":
        raise _Problem(f"{key!r} is not strided, and only strided tensors can be read")
    return TensorProperties(dtype=state[0])


def _size(value: object, key: str) -> torch.Size:
    sizes = _typed(value, tuple, f"a size or offset of {key!r}")
    if not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise _Problem(f"a size or offset of {key!r} holds something that is no size")
    return torch.Size(sizes)


def _chunk(record: object, key: str) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(fields.get("offsets"), key), _size(fields.get("sizes"), key))


def _check_chunks(key: str, size: torch.Size, chunks: list[ChunkStorageMetadata]) -> None:
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            offset + n > whole for offset, n, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise _Problem(f"{key!r}: {_box(chunk)} is not within {tuple(size)}")
    boxes = {(chunk.offsets, chunk.sizes): chunk for chunk in chunks if math.prod(chunk.sizes)}
    for one, other in _overlapping(list(boxes.values())):
        raise _Problem(f"{key!r}: {_box(one)} and {_box(other)} overlap")
    covered = sum(math.prod(chunk.sizes) for chunk in boxes.values())
    if covered != math.prod(size):
        raise _Problem(f"{key!r}: the shards hold {covered} of {math.prod(size)} elements")


def _box(chunk: ChunkStorageMetadata) -> str:
    return f"the shard at {tuple(chunk.offsets)} of size {tuple(chunk.sizes)}"


def _overlapping(chunks: list[ChunkStorageMetadata]) -> Iterator[tuple[ChunkStorageMetadata, ChunkStorageMetadata]]:
    """A sweep along the dim that is cut most often: a tensor in a thousand shards must not cost a million tests."""
    if len(chunks) < 2:
        return
    dims = range(len(chunks[0].offsets))
    sweep = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[sweep]):
        active = [other for other in active if other.offsets[sweep] + other.sizes[sweep] > chunk.offsets[sweep]]
        for other in active:
            if all(
                chunk.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                and other.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                for dim in dims
            ):
                yield other, chunk
        active.append(chunk)


def _planner_data(value: object) -> dict[str, tuple[str | int, ...]] | None:
    """Where each flat key belongs in the nested state dict."""
    paths = _optional(value, dict, "planner_data")
    for key, path in (paths or {}).items():
        if type(key) is not str or type(path) is not tuple or not all(type(part) in (str, int) for part in path):
            raise _Problem(f"planner_data of {key!r} is no path")
    return paths


def _index(record: object) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    fqn = _typed(fields.get("fqn"), str, "the key of a storage entry")
    offset = fields.get("offset")
    index = _optional(fields.get("index"), int, f"the index of {fqn!r}")
    return MetadataIndex(fqn, None if offset is None else _size(offset, fqn), index)


def _storage_info(record: object) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name = _typed(fields.get("relative_path"), str, "a file name")
    if not name or name in (".", "..") or any(char in name for char in "/\\\0"):
        raise _Problem(f"{name!r} is not the name of a file beside it")
    if fields.get("transform_descriptors"):
        raise _Problem(f"{name!r} is compressed or transformed, which is not supported")
    offset = _typed(fields.get("offset"), int, f"the offset of an item in {name!r}")
    length = _typed(fields.get("length"), int, f"the length of an item in {name!r}")
    if offset < 0 or length < 0:
        raise _Problem(f"an item in {name!r} has the offset {offset} and the length {length}")
    return _StorageInfo(name, offset, length)


def _check_storage(metadata: Metadata, directory: Path) -> None:
    sizes: dict[str, int] = {}
    for info in metadata.storage_data.values():
        if info.relative_path not in sizes:
            sizes[info.relative_path] = _file_size(directory / info.relative_path)
        if info.offset + info.length > sizes[info.relative_path]:
            raise CheckpointError(
                directory / info.relative_path,
                f"is truncated: {sizes[info.relative_path]} bytes, but an item ends at {info.offset + info.length}",
            )
    for key, entry in metadata.state_dict_metadata.items():
        _check_items(key, entry, metadata.storage_data)


def _check_items(key: str, entry: object, storage: dict[MetadataIndex, _StorageInfo]) -> None:
    if not isinstance(entry, TensorStorageMetadata):
        if MetadataIndex(key) not in storage:
            raise _Problem(f"says nothing about where {key!r} is stored")
        return
    for chunk in entry.chunks:
        info = storage.get(MetadataIndex(key, chunk.offsets))
        if info is None:
            raise _Problem(f"says nothing about where {_box(chunk)} of {key!r} is stored")
        if math.prod(chunk.sizes) * entry.properties.dtype.itemsize > info.length:
            raise _Problem(f"{key!r}: {_box(chunk)} does not fit into the {info.length} bytes stored for it")


def _file_size(path: Path) -> int:
    if not path.is_file():
        raise CheckpointError(path, "is missing, but the metadata beside it needs it")
    return path.stat().st_size
