"""manifest.json: what a checkpoint was written to hold, and whether it still does."""

import importlib.metadata
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

import lerobot_parallel
from lerobot_parallel.checkpoint.durable import FileEntry, digest, flush, write_durably
from lerobot_parallel.checkpoint.layout import Checkpoint, staging_path
from lerobot_parallel.checkpoint.progress import SavedTopology
from lerobot_parallel.checkpoint.safe_read import CheckpointError

VERSION = 1
_PACKAGES = ("lerobot", "torch", "accelerate", "safetensors")


class TensorCount(BaseModel):
    """Distinct full tensors, and the bytes of their elements."""

    count: NonNegativeInt
    bytes: NonNegativeInt


class Manifest(BaseModel):
    """Contents of the file, which is written last; a checkpoint of other software has none.

    Attributes:
        tied: the FQNs under which each tied weight is known; DCP shards hold it under each of them.
        optimizer_parameters: FQNs in the order of the optimizer's groups, by which the host numbers state.
        files: every file but this one, by its path from the step directory.
    """

    model_config = ConfigDict(extra="ignore")

    version: PositiveInt = VERSION
    step: NonNegativeInt
    world_size: PositiveInt
    topology: SavedTopology
    checkpoint_format: str
    versions: dict[str, str]
    model: TensorCount
    optimizer: TensorCount
    tied: list[list[str]]
    optimizer_parameters: list[list[str]]
    rng_files: list[str]
    files: dict[str, FileEntry]

    def encode(self) -> bytes:
        """The file's exact bytes; its last entry is the checksum of all before it."""
        body = self.model_dump(mode="json")
        return _text({**body, "checksum": xxhash.xxh3_64_hexdigest(_text(body))})

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Manifest | None":
        """None where there is no manifest.

        Raises:
            CheckpointError: it is damaged, or of a later version than this software knows.
        """
        path = checkpoint.manifest
        if not path.exists():
            return None
        try:
            raw = path.read_bytes()
            body = json.loads(raw)
            manifest = cls.model_validate(body)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read ({error.strerror})") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(path, f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(path, f"is no manifest ({error})") from None
        if manifest.version > VERSION:
            raise CheckpointError(path, f"has version {manifest.version}, this software knows {VERSION}")
        if raw != manifest.encode():
            raise CheckpointError(path, "does not have the checksum that it states")
        outside = next((name for name in manifest.files if not _is_inside(name)), None)
        if outside is not None:
            raise CheckpointError(path, f"lists {outside!r}, which is not within the checkpoint")
        return manifest

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the file atomically."""
        staging = staging_path(checkpoint.manifest)
        write_durably(staging, self.encode())
        staging.replace(checkpoint.manifest)
        flush(checkpoint.path)


def _text(body: dict) -> bytes:
    return json.dumps(body, indent=1).encode() + b"\n"


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


def software_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "lerobot_parallel": lerobot_parallel.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_files(checkpoint: Checkpoint, known: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """An entry for every file of a checkpoint but its manifest; those not yet `known` are read."""
    names = sorted(_files_of(checkpoint))
    return {name: known[name] if name in known else digest(checkpoint.path / name) for name in names}


def amend(checkpoint: Checkpoint, changed: Iterable[Path]) -> None:
    """Bring the manifest up to date after files were added, rewritten or deleted on purpose.

    Does nothing where there is no manifest.

    Args:
        changed: files or directories within the checkpoint; others keep the entries they have.
    """
    manifest = Manifest.read(checkpoint)
    if manifest is None:
        return
    roots = [path.relative_to(checkpoint.path).as_posix() for path in changed]
    known = {n: e for n, e in manifest.files.items() if not any(n == r or n.startswith(f"{r}/") for r in roots)}
    present = {*known, *(n for n in _files_of(checkpoint) if any(n == r or n.startswith(f"{r}/") for r in roots))}
    files = {name: known[name] if name in known else digest(checkpoint.path / name) for name in sorted(present)}
    manifest.model_copy(update={"files": files}).write(checkpoint)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file. An `extra` file is in nobody's way: resuming does not mind it."""

    path: Path
    kind: Literal["missing", "size", "checksum", "extra", "manifest", "unreadable"]
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def verify(checkpoint: Checkpoint, *, checksums: bool = True) -> list[Problem]:
    """What of a checkpoint is not as its manifest says; empty for one that is intact, or that has no manifest.

    Args:
        checksums: read every byte; else look at names and sizes only.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointError as error:
        return [Problem(checkpoint.manifest, "manifest", error.args[-1])]
    if manifest is None:
        return []
    found = [_check_file(checkpoint.path / name, entry, checksums) for name, entry in manifest.files.items()]
    extra = sorted(_files_of(checkpoint) - set(manifest.files))
    unlisted = [Problem(checkpoint.path / name, "extra", "is not in the manifest") for name in extra]
    return [problem for problem in found if problem is not None] + unlisted


def _check_file(path: Path, entry: FileEntry, checksums: bool) -> Problem | None:
    if not path.is_file():
        return Problem(path, "missing", "is missing")
    try:
        size = path.stat().st_size
        if size != entry.size:
            return Problem(path, "size", f"has {size} bytes, {entry.size} were written")
        if checksums and digest(path) != entry:
            return Problem(path, "checksum", "does not hold the bytes that were written")
    except OSError as error:
        return Problem(path, "unreadable", f"cannot be read ({error.strerror})")
    return None


def _files_of(checkpoint: Checkpoint) -> set[str]:
    root = checkpoint.path
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir()} - {checkpoint.manifest.name}
