"""A scheduler that wants its machine back: one save at the edge of a step, exit code 0."""

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler signals the whole job, and torchrun passes on to its workers what it got itself.
_SAME_EVENT_S = 10.0


class StopRequest:
    """Set by the first SIGTERM or SIGUSR1 that this process receives; the second does what it always did.

    The same signal again within seconds is the first one, passed on by a launcher.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.received is not None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        name = signal.Signals(signum).name
        if self.received is None:
            self.received, self._at = name, time.monotonic()
            logging.warning("%s: saving at the end of this step, a second signal kills", name)
        elif name != self.received or time.monotonic() - self._at > _SAME_EVENT_S:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _install(self) -> None:
        self._before = {signum: signal.signal(signum, self._note) for signum in SIGNALS}

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Listen for the signals inside. Outside of the main thread nobody can: then nothing is ever received."""
    request = StopRequest()
    with contextlib.suppress(ValueError):
        request._install()
    try:
        yield request
    finally:
        request._restore()


def ignore_in_worker(worker: int) -> None:
    """For loader workers, which schedulers signal along with their rank: they end when it does."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def end_workers_at_exit() -> None:
    """Let the interpreter end while loader workers live, also after an error.

    multiprocessing ends its daemons by SIGTERM, which ours ignore, and then waits for them without a limit. Ours
    runs first, since it is registered later.
    """
    atexit.unregister(_end_workers)
    atexit.register(_end_workers)


def _end_workers() -> None:
    # torch's handler would take their end for a crash.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
