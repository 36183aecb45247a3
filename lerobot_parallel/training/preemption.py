"""A scheduler that wants its machine back: one save at the edge of a step, exit code 0."""

import contextlib
import logging
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Set by the first SIGTERM or SIGUSR1 that this process receives; the second does what it always did."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.received is not None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(signum).name
        for one in SIGNALS:
            signal.signal(one, signal.SIG_DFL)
        logging.warning("%s: saving at the end of this step, a second signal kills", self.received)

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
