"""Files that appear whole and flushed, or not at all."""

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert.checksum import combined
from lerobot_parallel.checkpoint.convert.copy import PIECE, Progress, Written, leave_cache, write_tensors
from lerobot_parallel.checkpoint.convert.plan import Plan, PlannedFile
from lerobot_parallel.checkpoint.safe_read import CheckpointError

_OWN_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True)
class WrittenFile:
    """A file of the result; `crc32` is that of all its bytes, eight hexadecimal digits."""

    name: str
    bytes: int
    crc32: str


def write_into(folder: Path, plan: Plan, *, jobs: int, verify: bool, progress: Progress) -> list[WrittenFile]:
    """Write the files of a plan into an existing folder, in place of weights that are there.

    All of them are complete under names that no reader looks for before the first gets its own. One file replaces
    an older one in a single step. Of several, the index comes last, and an old index leaves first.

    Raises:
        CheckpointError, OSError: the folder is as before.
    """
    check_space(folder, plan.nbytes)
    targets = [folder / file.name for file in plan.files]
    try:
        pairs = zip(plan.files, targets, strict=True)
        written = [_write(file, target, jobs=jobs, verify=verify, progress=progress) for file, target in pairs]
        if plan.index is not None:
            write_bytes(layout.staging_path(folder / layout.MODEL_INDEX), plan.index)
        _publish(folder, targets, with_index=plan.index is not None)
    finally:
        for target in (*targets, folder / layout.MODEL_INDEX):
            layout.staging_path(target).unlink(missing_ok=True)
    return written


def _publish(folder: Path, targets: list[Path], *, with_index: bool) -> None:
    index = folder / layout.MODEL_INDEX
    if with_index:
        index.unlink(missing_ok=True)
    for target in targets:
        layout.staging_path(target).replace(target)
    if with_index:
        flush_directory(folder)
        layout.staging_path(index).replace(index)
    names = {target.name for target in targets}
    stale = [path for path in folder.iterdir() if _is_weights(path.name) and path.name not in names]
    for path in [*([] if with_index else [index]), *stale]:
        path.unlink(missing_ok=True)
    flush_directory(folder)


def _is_weights(name: str) -> bool:
    return name == layout.MODEL_FILE or layout.is_weights_part(name)


def _write(file: PlannedFile, target: Path, *, jobs: int, verify: bool, progress: Progress) -> WrittenFile:
    staging = layout.staging_path(target)
    descriptor = os.open(staging, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        _preallocate(descriptor, file.nbytes, target)
        parts = [_write_header(file, descriptor), *write_tensors(file, descriptor, jobs, progress)]
        progress(len(file.header))
        os.fsync(descriptor)
        if verify:
            _read_back(file, parts, descriptor, target, progress)
    finally:
        os.close(descriptor)
    crc = combined((part.crc, part.nbytes) for part in parts)
    return WrittenFile(file.name, file.nbytes, f"{crc:08x}")


def _write_header(file: PlannedFile, descriptor: int) -> Written:
    written = 0
    while written < len(file.header):
        written += os.pwrite(descriptor, file.header[written:], written)
    return Written(0, len(file.header), zlib.crc32(file.header))


def _preallocate(descriptor: int, nbytes: int, target: Path) -> None:
    """Room now rather than an error after minutes; a file system that cannot reserve it gets a size at least."""
    try:
        if hasattr(os, "posix_fallocate"):
            return os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise OSError(error.errno, os.strerror(error.errno), str(target)) from None
    os.ftruncate(descriptor, nbytes)


def _read_back(file: PlannedFile, parts: list[Written], descriptor: int, target: Path, progress: Progress) -> None:
    """Compare what the disk gives back with the checksums of what was read from the shards."""
    leave_cache(descriptor, 0, 0)
    for part in parts:
        crc = 0
        for start in range(part.start, part.start + part.nbytes, PIECE):
            crc = zlib.crc32(os.pread(descriptor, min(PIECE, part.start + part.nbytes - start), start), crc)
        if crc != part.crc:
            names = (t.name for t in reversed(file.tensors) if t.start <= part.start and t.nbytes)
            raise CheckpointError(target, f"{next(names, 'the header')!r} reads back differently from the shards")
        progress(part.nbytes)


def check_space(folder: Path, nbytes: int) -> None:
    """
    Raises:
        OSError: the file system of `folder` has less room.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        text = f"{os.strerror(errno.ENOSPC)}: {nbytes} bytes are needed, {free} are free"
        raise OSError(errno.ENOSPC, text, str(folder))


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, beside `target`, which it becomes at the end; after an error there is nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = layout.staging_path(target)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        yield staging
        flush_directory(staging)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    flush_directory(target.parent)


def copy_files(paths: list[Path], folder: Path) -> None:
    for path in paths:
        with path.open("rb") as original, (folder / path.name).open("wb") as copy:
            shutil.copyfileobj(original, copy)
            copy.flush()
            os.fsync(copy.fileno())


def write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def delete_directory(directory: Path) -> None:
    """Nobody meets it half deleted: it loses its name first."""
    doomed = layout.discard_path(directory)
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    flush_directory(directory.parent)
    shutil.rmtree(doomed)


def flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, _OWN_READ)
    try:
        # Some network file systems do not flush directories.
        with suppress(PermissionError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def counted(progress: Callable[[int, int], None] | None, total: int) -> Progress:
    """From steps to what a bar shows: the bytes done so far, and the bytes there are."""
    done = 0
    lock = threading.Lock()

    def step(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if progress is not None:
                progress(done, total)

    return step
