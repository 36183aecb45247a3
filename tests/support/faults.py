"""Faults at chosen points of a save: every call that changes the disk is counted, and one of them goes wrong.

What is counted: writes to files opened below a root, files that safetensors writes by itself, fsync, rename, mkdir,
symlink and unlink. A write that goes wrong has left half of its bytes.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch

from lerobot_parallel.checkpoint import commit

_CALLS = ("fsync", "rename", "replace", "mkdir", "symlink", "unlink", "rmdir")


class Points:
    """The points passed so far, by kind; calls `fault` at number `at` (None: never)."""

    def __init__(self, at: int | None = None, fault: Callable[[], None] = lambda: None) -> None:
        self.kinds: list[str] = []
        self._at = at
        self._fault = fault

    def due(self, kind: str) -> bool:
        self.kinds.append(kind)
        return len(self.kinds) - 1 == self._at

    def fail(self) -> None:
        self._fault()


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _File:
    """A file opened for writing, whose writes are points."""

    def __init__(self, file: Any, points: Points) -> None:
        self._file = file
        self._points = points

    def write(self, data: Any) -> int:
        if self._points.due("write"):
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._points.fail()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def injected(points: Points, root: Path) -> Iterator[Points]:
    """Count and fail inside; undone afterwards."""
    originals = {name: getattr(os, name) for name in _CALLS}
    opened, serialize, exchange = io.open, safetensors.torch.serialize_file, commit._exchange

    def guarded(name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if points.due(name):
                points.fail()
            return originals[name](*args, **kwargs)

        return call

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        handle = opened(file, mode, *args, **kwargs)
        below = isinstance(file, str | os.PathLike) and str(file).startswith(str(root))
        return _File(handle, points) if below and "w" in mode else handle

    def serialize_(data: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        if points.due("safetensors"):
            serialize(data, filename, *args, **kwargs)
            os.truncate(filename, os.stat(filename).st_size // 2)
            points.fail()
        serialize(data, filename, *args, **kwargs)

    def exchange_(first: Path, second: Path) -> bool:
        if points.due("before exchange"):
            points.fail()
        done = exchange(first, second)
        if points.due("after exchange"):
            points.fail()
        return done

    for name in _CALLS:
        setattr(os, name, guarded(name))
    builtins.open = io.open = open_
    safetensors.torch.serialize_file, commit._exchange = serialize_, exchange_
    try:
        yield points
    finally:
        for name, function in originals.items():
            setattr(os, name, function)
        builtins.open = io.open = opened
        safetensors.torch.serialize_file, commit._exchange = serialize, exchange


def spread(kinds: list[str], count: int) -> list[int]:
    """About `count` of the points, evenly spread: two thirds of them calls that are no write, if there are as many."""
    rare = [i for i, kind in enumerate(kinds) if kind != "write"]
    writes = [i for i, kind in enumerate(kinds) if kind == "write"]
    rare = rare[:: max(1, -(-len(rare) * 3 // (2 * count)))]
    return sorted({*rare, *writes[:: max(1, len(writes) // max(1, count - len(rare)))]})
