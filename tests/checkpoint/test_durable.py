"""Files that are hashed and flushed while they are written."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lerobot_parallel.checkpoint import durable

PIECE = os.urandom(1 << 20)


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that flushed early, after every MiB."""
    names: list[str] = []

    def flush(descriptor: int, really: Callable[[int], None] = os.fdatasync) -> None:
        names.append(threading.current_thread().name)
        really(descriptor)

    monkeypatch.setattr(durable, "_EARLY_FLUSH", len(PIECE))
    monkeypatch.setattr(os, "fdatasync", flush)
    return names


def _write(path: Path, pieces: int) -> durable.HashingFileSystem:
    files = durable.HashingFileSystem()
    with files.create_stream(path, "wb") as stream:
        for _ in range(pieces):
            stream.write(PIECE)
        os.fsync(stream.fileno())
    return files


def test_the_entry_is_that_of_the_file(tmp_path: Path):
    path = tmp_path / "shard"
    assert _write(path, 3).written == {path: durable.digest(path)}
    assert path.read_bytes() == 3 * PIECE


def test_what_is_written_is_flushed_meanwhile_by_a_thread_that_ends(tmp_path: Path, flushes: list[str]):
    _write(tmp_path / "shard", 8)
    assert flushes and all(name.startswith("checkpoint-flusher") for name in flushes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-flusher")]


@pytest.mark.parametrize("pieces", [1, 8])
def test_a_write_back_that_fails_in_the_thread_fails_the_file(
    tmp_path: Path, flushes: list[str], monkeypatch: pytest.MonkeyPatch, pieces: int
):
    def lost(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", lost)
    with pytest.raises(OSError, match="Input/output error"):
        _write(tmp_path / "shard", pieces)


def test_small_files_need_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fdatasync", pytest.fail)
    _write(tmp_path / "shard", 1)
