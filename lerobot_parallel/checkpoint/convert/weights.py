"""The header of a weights file: which tensor lies where. Its format: https://github.com/huggingface/safetensors."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from lerobot_parallel.checkpoint.convert.plan import DTYPES
from lerobot_parallel.checkpoint.safe_read import CheckpointError

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a weights file; `start` is its first byte there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class WeightsHeader:
    """`raw` is the header with its length in front, `tensors` are in the order of the file."""

    raw: bytes
    tensors: tuple[FileTensor, ...]


def read_header(path: Path) -> WeightsHeader:
    """
    Raises:
        CheckpointError: it is no weights file, damaged, or holds a dtype that torch has not.
    """
    try:
        # The library checks what the header says against itself and the size of the file.
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            raw = file.read(8)
            raw += file.read(int.from_bytes(raw, "little"))
        content = json.loads(raw[8:])
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(path, f"cannot be read ({error})") from error
    content.pop("__metadata__", None)
    tensors = [_tensor(path, name, said, len(raw)) for name, said in content.items()]
    return WeightsHeader(raw, tuple(sorted(tensors, key=lambda tensor: tensor.start)))


def _tensor(path: Path, name: str, said: dict, base: int) -> FileTensor:
    if said["dtype"] not in _BY_NAME:
        raise CheckpointError(path, f"{name!r} is {said['dtype']}, which torch has no dtype for")
    start, end = said["data_offsets"]
    return FileTensor(name, _BY_NAME[said["dtype"]], tuple(said["shape"]), path, base + start, end - start)
