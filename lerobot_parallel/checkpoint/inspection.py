"""What is in a checkpoint, from names, sizes and headers; on request every stored byte is read.

Needs torch, but neither the host nor accelerate.
"""

import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert.copy import PIECE
from lerobot_parallel.checkpoint.convert.names import model_names
from lerobot_parallel.checkpoint.convert.plan import stored_chunks
from lerobot_parallel.checkpoint.convert.records import StoredChunk, locate
from lerobot_parallel.checkpoint.convert.source import Source, find_source
from lerobot_parallel.checkpoint.convert.weights import read_header
from lerobot_parallel.checkpoint.progress import Progress
from lerobot_parallel.checkpoint.safe_read import (
    CheckpointError,
    bytes_entries,
    load_chunk,
    read_metadata,
    tensor_entries,
)

Step = Callable[[int], None]


@dataclass(frozen=True)
class TensorInfo:
    """`chunks` is in how many parts the tensor is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    chunks: int


@dataclass
class Inspection:
    """`formats` are those of the weights; `complete` says that a run could resume from here, or that a directory
    without training state holds a policy; `problems` is what is wrong, `missing` what is not there."""

    path: Path
    kind: str
    step: int | None = None
    topology: dict[str, Any] | None = None
    policy: str | None = None
    dataset: str | None = None
    formats: list[str] = field(default_factory=list)
    optimizer: str | None = None
    rng_ranks: int = 0
    processors: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    tied: list[list[str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    verified: bool = False

    @property
    def complete(self) -> bool:
        return not self.missing and not self.problems


def inspect_checkpoint(path: Path | str, *, verify: bool = False, progress: Step | None = None) -> Inspection:
    """Look into one checkpoint. What is wrong with it is in the result, not raised.

    Args:
        path: any of the forms of `find_source`.
        verify: read every stored tensor and value, and compare checksums where there are some.
        progress: called with the bytes read since the last call.

    Raises:
        ConfigError: it is no checkpoint.
    """
    source = find_source(path)
    kind = "checkpoint" if source.checkpoint is not None else "policy" if source.pretrained is not None else "shards"
    seen = Inspection(source.path, kind)
    _weights(source, seen)
    if source.pretrained is not None:
        _configs(source.pretrained, seen)
    if source.checkpoint is not None:
        _training_state(source.checkpoint, seen)
        _manifest(source.checkpoint, seen)
    if verify:
        _verify(source, seen, progress or (lambda nbytes: None))
    return seen


def run_checkpoints(path: Path | str) -> list[Path]:
    """The step directories of a run, if `path` is a run's output directory or its `checkpoints`; else none."""
    path = Path(path).resolve()
    if (path / layout.PRETRAINED_DIR).is_dir():
        return []
    for folder in (layout.checkpoints_dir(path), path):
        steps = [step for step in folder.iterdir() if step.name.isdecimal()] if folder.is_dir() else []
        if steps and folder.name == layout.CHECKPOINTS_DIR:
            return sorted(steps, key=lambda step: int(step.name))
    return []


def _noted(seen: Inspection, look: Callable[[], object]) -> None:
    try:
        look()
    except (CheckpointError, OSError) as error:
        seen.problems.append(str(error))


def _weights(source: Source, seen: Inspection) -> None:
    if source.has_shards:
        seen.formats.append("dcp")
        seen.sizes["dcp"] = _size(source.shards)
        _noted(seen, lambda: _sharded_tensors(source.shards, seen))
    _noted(seen, lambda: _file_tensors(source.weights(), seen))
    adapter = source.pretrained is not None and (source.pretrained / layout.ADAPTER_CONFIG).is_file()
    if adapter:
        seen.formats.append("adapter")
    if not seen.formats:
        seen.missing.append(f"weights: neither {layout.MODEL_SHARDS} nor {layout.MODEL_FILE}")
    seen.parameters = sum(math.prod(tensor.shape) for tensor in seen.tensors)
    seen.dtypes = dict(Counter(tensor.dtype for tensor in seen.tensors))


def _sharded_tensors(shards: Path, seen: Inspection) -> None:
    metadata = read_metadata(shards)
    entries = tensor_entries(metadata)
    names = model_names(shards, metadata)
    seen.left_out = names.left_out
    for name, key in sorted(names.keys.items()):
        dtype, size = entries[key].properties.dtype, tuple(entries[key].size)
        nbytes = math.prod(size) * dtype.itemsize
        chunks = sum(1 for _ in stored_chunks(key, shards, metadata))
        seen.tensors.append(TensorInfo(name, _dtype(dtype), size, nbytes, chunks))


def _file_tensors(paths: list[Path], seen: Inspection) -> None:
    if not paths:
        return
    seen.formats.append("safetensors")
    seen.sizes["safetensors"] = sum(path.stat().st_size for path in paths)
    found = [tensor for path in paths for tensor in read_header(path).tensors]
    if not seen.tensors:
        seen.tensors = [TensorInfo(t.name, _dtype(t.dtype), t.shape, t.nbytes, 1) for t in found]
        seen.tensors.sort(key=lambda tensor: tensor.name)
        return
    sharded, filed = {t.name: t.shape for t in seen.tensors}, {t.name: t.shape for t in found}
    other = [name for name, shape in filed.items() if sharded.get(name) != shape]
    if other:
        seen.problems.append(f"{paths[0].name} and the shards disagree about {other[0]!r} and {len(other) - 1} more")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _configs(pretrained: Path, seen: Inspection) -> None:
    policy = _json(pretrained / layout.POLICY_CONFIG, seen)
    train = _json(pretrained / layout.TRAIN_CONFIG, seen)
    seen.policy = policy.get("type")
    seen.dataset = (train.get("dataset") or {}).get("repo_id") if isinstance(train.get("dataset"), dict) else None
    seen.processors = sorted(path.stem for path in pretrained.glob(layout.PROCESSOR_CONFIGS))


def _json(path: Path, seen: Inspection) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        seen.missing.append(path.name)
        return {}
    except (OSError, ValueError) as error:
        seen.problems.append(f"{path}: cannot be read ({error})")
        return {}
    return content if isinstance(content, dict) else {}


def _training_state(checkpoint: layout.Checkpoint, seen: Inspection) -> None:
    state = checkpoint.training_state
    if not checkpoint.step_file.is_file():
        seen.missing.append(f"{layout.TRAINING_STATE_DIR}/{layout.STEP_FILE}")
    else:
        _noted(seen, lambda: _progress(checkpoint, seen))
    seen.optimizer = _optimizer_format(checkpoint)
    if seen.optimizer is None:
        seen.missing.append(f"{layout.TRAINING_STATE_DIR}: the optimizer's state")
    elif seen.optimizer == "dcp":
        _noted(seen, lambda: read_metadata(checkpoint.optimizer_shards))
    seen.rng_ranks = sum(1 for _ in state.glob(layout.RANK_RNG_FILES)) or int(checkpoint.rng_file.is_file())
    if not seen.rng_ranks:
        seen.missing.append(f"{layout.TRAINING_STATE_DIR}/{layout.RNG_FILE}")
    if state.is_dir():
        seen.sizes[layout.TRAINING_STATE_DIR] = _size(state)


def _progress(checkpoint: layout.Checkpoint, seen: Inspection) -> None:
    saved = Progress.read(checkpoint)
    seen.step = saved.step
    seen.topology = saved.model_dump(exclude={"step", "data_position"}, exclude_none=True)


def _optimizer_format(checkpoint: layout.Checkpoint) -> str | None:
    if checkpoint.optimizer_shards.is_dir():
        return "dcp"
    return "safetensors" if checkpoint.optimizer_file.is_file() else None


def _manifest(checkpoint: layout.Checkpoint, seen: Inspection) -> None:
    if not checkpoint.manifest.is_file():
        return
    content = _json(checkpoint.manifest, seen)
    versions, tied = content.get("versions"), content.get("tied")
    seen.versions = versions if isinstance(versions, dict) else {}
    seen.tied = tied if isinstance(tied, list) else []


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _verify(source: Source, seen: Inspection, progress: Step) -> None:
    folders = [source.shards] if source.has_shards else []
    if source.checkpoint is not None and source.checkpoint.optimizer_shards.is_dir():
        folders.append(source.checkpoint.optimizer_shards)
    for folder in folders:
        _noted(seen, lambda folder=folder: _read_shards(folder, seen, progress))
    if source.checkpoint is not None:
        seen.problems += _manifest_problems(source.checkpoint)
    seen.problems = list(dict.fromkeys(seen.problems))
    seen.verified = True


def _read_shards(folder: Path, seen: Inspection, progress: Step) -> None:
    metadata = read_metadata(folder)
    for chunk in _all_chunks(folder, metadata):
        _noted(seen, lambda chunk=chunk: _read_chunk(chunk))
        progress(chunk.nbytes)
    for key in bytes_entries(metadata):
        info = metadata.storage_data[MetadataIndex(key)]
        _noted(seen, lambda key=key, info=info: _read_value(folder / info.relative_path, info, key))


def _all_chunks(folder: Path, metadata: Metadata) -> Iterator[StoredChunk]:
    for key in tensor_entries(metadata):
        yield from stored_chunks(key, folder, metadata)


def _read_chunk(chunk: StoredChunk) -> None:
    record = locate(chunk)
    if record is None:
        load_chunk(chunk.path, chunk.start, chunk.length, chunk.key, torch.Size(chunk.sizes), chunk.dtype)
        return
    crc = 0
    with chunk.path.open("rb") as file:
        file.seek(record.start)
        for done in range(0, chunk.nbytes, PIECE):
            crc = zlib.crc32(file.read(min(PIECE, chunk.nbytes - done)), crc)
    if record.crc is not None and crc != record.crc:
        raise CheckpointError(chunk.path, f"{chunk.key!r} is damaged: its bytes have another checksum than stored")


def _read_value(path: Path, info: Any, key: str) -> None:
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
    except Exception as error:
        raise CheckpointError(path, f"{key!r} cannot be read ({type(error).__name__})") from error


def _manifest_problems(checkpoint: layout.Checkpoint) -> list[str]:
    try:
        from lerobot_parallel.checkpoint.manifest import verify
    except ImportError:
        return []
    return [str(problem) for problem in verify(checkpoint) if getattr(problem, "kind", None) != "extra"]
