"""Bytes that are on the disk when a call returns, and their checksums."""

import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from torch.distributed.checkpoint.filesystem import FileSystem

_CHUNK = 1 << 22
# Written bytes after which the disk is set to work on them, while the next ones are made.
_EARLY_FLUSH = 1 << 26


class FileEntry(BaseModel):
    """Size and checksum of one file; xxh3 is faster than any disk and finds every accident, no attack."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    size: NonNegativeInt
    xxh3_64: str


def digest(path: Path) -> FileEntry:
    """Read a file and describe it."""
    hasher, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
    return FileEntry(size=size, xxh3_64=hasher.hexdigest())


def flush(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """fsync a directory, everything in it, and its entry in its parent."""
    for folder, _, files in os.walk(directory):
        for name in files:
            flush(Path(folder) / name)
        flush(Path(folder))
    flush(directory.parent)


def write_durably(path: Path, data: bytes) -> FileEntry:
    """Write a new file and fsync it; a crash leaves a name that holds less, so the caller renames it afterwards."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size=len(data), xxh3_64=xxhash.xxh3_64_hexdigest(data))


class HashingFileSystem(FileSystem):
    """torch's, for DCP writers: every file that it wrote has its entry in `written`, made while writing."""

    def __init__(self) -> None:
        self.written: dict[Path, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            try:
                yield hashing
                hashing.close()
            except Exception:
                # torch's own writer says "failed writing" of whatever went wrong here.
                if hashing.error is not None:
                    raise hashing.error from None
                raise
        self.written[Path(path)] = hashing.entry()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        if Path(path) in self.written:
            self.written[Path(new_path)] = self.written.pop(Path(path))


class _HashingStream(io.RawIOBase):
    """Hashes what passes, and has it flushed in the background: the fsync at the end finds little left to do."""

    def __init__(self, stream: io.IOBase) -> None:
        self.error: OSError | None = None
        self._stream = stream
        self._hasher = xxhash.xxh3_64()
        self._size = 0
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-flusher")
        self._flushing: Future[None] | None = None
        self._flushed = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self._hasher.update(data)
        view = memoryview(data).cast("B")
        self._size += len(view)
        try:
            self._stream.write(view)
            self._flush_early()
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def _flush_early(self) -> None:
        if self._size - self._flushed < _EARLY_FLUSH or (self._flushing is not None and not self._flushing.done()):
            return
        self._wait_for_flusher()
        self._flushed = self._size
        # Not every system has the one that leaves times of access alone.
        self._flushing = self._flusher.submit(getattr(os, "fdatasync", os.fsync), self._stream.fileno())

    def _wait_for_flusher(self) -> None:
        """A failed write-back is reported to one caller only: it must not get lost in the thread."""
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        # Called before an fsync: what is buffered has to be in the file then.
        self._wait_for_flusher()
        self._stream.flush()
        return self._stream.fileno()

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def close(self) -> None:
        if not self.closed:
            self._flusher.shutdown()
            self._wait_for_flusher()
            self._stream.close()
            super().close()

    def entry(self) -> FileEntry:
        return FileEntry(size=self._size, xxh3_64=self._hasher.hexdigest())
