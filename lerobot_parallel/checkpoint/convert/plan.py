"""What will be written where: decided from the metadata alone, before a byte of a weight is read."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert.names import model_names
from lerobot_parallel.checkpoint.convert.records import StoredChunk
from lerobot_parallel.checkpoint.safe_read import CheckpointError, read_metadata, tensor_entries

# The names that the format has (https://github.com/huggingface/safetensors), in its own order: a file holds its
# tensors in this order, and those of one dtype by name, so that each of them is aligned.
DTYPES = {
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
_ORDER = {dtype: place for place, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the result: `dtype` is what is written, `chunks` hold `stored`; `start` is its first byte."""

    name: str
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Plan:
    """`index` is the content of the index file, where there is more than one file.

    `tied`: the name kept, by each name that was dropped; `left_out`: how many values beside the model, by their root.
    """

    files: tuple[PlannedFile, ...]
    index: bytes | None
    tied: dict[str, str]
    left_out: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def tensors(self) -> int:
        return sum(len(file.tensors) for file in self.files)


def plan_files(
    shards: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    tied: list[list[str]] | None = None,
) -> Plan:
    """
    Args:
        dtype: what floating tensors become; others, and all without one, keep theirs.
        max_bytes: the largest sum of tensors in one file.
        tied: groups of names of one weight each; of these, one name is written.

    Raises:
        CheckpointError: the metadata is damaged or hostile, or the state cannot be held by weights files.
    """
    metadata = read_metadata(shards)
    names = model_names(shards, metadata)
    tensors = {name: _tensor(name, key, shards, metadata, dtype) for name, key in names.keys.items()}
    dropped = _dropped(tensors, tied or [])
    kept = [tensor for name, tensor in sorted(tensors.items()) if name not in dropped]
    if max_bytes is None and dtype is None and not dropped and (as_before := _as_before(shards, kept)):
        return Plan((as_before,), None, {}, names.left_out)
    parts = _split(kept, max_bytes)
    files = tuple(
        _file(layout.weights_file(number, len(parts)), part, dropped) for number, part in enumerate(parts, start=1)
    )
    return Plan(files, _index(files) if len(files) > 1 else None, dropped, names.left_out)


def _tensor(name: str, key: str, shards: Path, metadata: Metadata, dtype: torch.dtype | None) -> PlannedTensor:
    entry = tensor_entries(metadata)[key]
    stored = entry.properties.dtype
    if stored not in DTYPES:
        raise CheckpointError(
            shards / layout.SHARD_METADATA, f"{key!r} is {stored}, which {layout.MODEL_FILE} cannot hold"
        )
    chunks = tuple(stored_chunks(key, shards, metadata))
    wanted = dtype if dtype is not None and stored.is_floating_point else stored
    return PlannedTensor(name, tuple(entry.size), stored, wanted, chunks)


def stored_chunks(key: str, shards: Path, metadata: Metadata) -> Iterator[StoredChunk]:
    """Each distinct chunk that holds something, once: replicas may have been listed twice."""
    entry = tensor_entries(metadata)[key]
    boxes = {(c.offsets, c.sizes): c for c in entry.chunks if math.prod(c.sizes)}
    for chunk in sorted(boxes.values(), key=lambda c: c.offsets):
        info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        yield StoredChunk(
            key=key,
            dtype=entry.properties.dtype,
            offsets=tuple(chunk.offsets),
            sizes=tuple(chunk.sizes),
            path=shards / info.relative_path,
            start=info.offset,
            length=info.length,
        )


def _dropped(tensors: Mapping[str, PlannedTensor], groups: list[list[str]]) -> dict[str, str]:
    """Of each tied group the name that sorts first stays, as in safetensors' own `save_model`."""
    dropped = {}
    for group in groups:
        first, *others = sorted(name for name in group if name in tensors) or [""]
        kinds = {name: (tensors[name].shape, tensors[name].stored) for name in (first, *others) if name}
        dropped.update({name: first for name in others if kinds[name] == kinds[first]})
    return dropped


def _split(tensors: list[PlannedTensor], max_bytes: int | None) -> list[list[PlannedTensor]]:
    """In the order of names, each file filled up to the limit; a tensor above it has a file of its own."""
    if max_bytes is None:
        return [tensors]
    parts: list[list[PlannedTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if parts[-1] and used + tensor.nbytes > max_bytes:
            parts.append([])
            used = 0
        parts[-1].append(tensor)
        used += tensor.nbytes
    return parts


def _file(name: str, tensors: list[PlannedTensor], dropped: dict[str, str]) -> PlannedFile:
    ordered = sorted(tensors, key=lambda tensor: (_ORDER[tensor.dtype], tensor.name))
    own = {tensor.name for tensor in ordered}
    metadata = {"format": "pt"} | {name: kept for name, kept in sorted(dropped.items()) if kept in own}
    content: dict[str, object] = {"__metadata__": metadata}
    starts, end = [], 0
    for tensor in ordered:
        starts.append(end)
        end += tensor.nbytes
        offsets = [starts[-1], end]
        content[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    header = _encoded(content)
    placed = (replace(t, start=len(header) + start) for t, start in zip(ordered, starts, strict=True))
    return PlannedFile(name, header, tuple(placed))


def _encoded(content: dict[str, object]) -> bytes:
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(files: tuple[PlannedFile, ...]) -> bytes:
    names = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _as_before(shards: Path, tensors: list[PlannedTensor]) -> PlannedFile | None:
    """The very file that `--to dcp` read, where its header was kept beside the shards and describes these tensors."""
    try:
        header = (shards / layout.SOURCE_HEADER).read_bytes()
        content = json.loads(header[8:])
        content.pop("__metadata__", None)
        by_name = {tensor.name: tensor for tensor in tensors}
        placed = []
        end = 0
        for name, said in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
            tensor = by_name.pop(name)
            expected = [end, end := end + tensor.nbytes]
            described = said["dtype"], said["shape"], said["data_offsets"]
            if described != (DTYPES[tensor.dtype], [*tensor.shape], expected):
                return None
            placed.append(replace(tensor, start=len(header) + expected[0]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = not by_name and int.from_bytes(header[:8], "little") == len(header) - 8
    return PlannedFile(layout.MODEL_FILE, header, tuple(placed)) if whole else None
