"""Which signals ask for a stop, and which one kills; by a clock of the test's own."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lerobot_parallel.training import preemption
from lerobot_parallel.training.preemption import StopRequest, stop_requests

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


class Machine:
    """A clock that stands still, and a `kill` that notes what it is asked for."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.killed: list[signal.Signals] = []

    def signals(self, *events: tuple[float, signal.Signals]) -> None:
        """Signals to this process, each at its seconds after the beginning."""
        for seconds, signum in events:
            self.now = 1000.0 + seconds
            signal.raise_signal(signum)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: machine.now))
    kill = lambda pid, signum: machine.killed.append(signum)  # noqa: E731
    monkeypatch.setattr(preemption, "os", SimpleNamespace(getpid=os.getpid, kill=kill))
    return machine


@pytest.fixture
def request_() -> Iterator[StopRequest]:
    before = [signal.getsignal(signum) for signum in (TERM, USR1)]
    with stop_requests() as request:
        yield request
    assert [signal.getsignal(signum) for signum in (TERM, USR1)] == before


@pytest.mark.parametrize("signum", [TERM, USR1])
def test_the_same_signal_within_ten_seconds_is_the_first_one_passed_on(
    machine: Machine, request_: StopRequest, signum: signal.Signals
):
    assert not request_
    machine.signals((0, signum), (0, signum), (0.5, signum), (9.9, signum))
    assert request_ and request_.received == signum.name
    assert machine.killed == []


def test_the_same_signal_later_kills(machine: Machine, request_: StopRequest):
    machine.signals((0, TERM), (9.9, TERM), (10.1, TERM))
    assert machine.killed == [TERM]
    assert signal.getsignal(TERM) is signal.SIG_DFL, "what it always did"


@pytest.mark.parametrize(("first", "second"), [(TERM, USR1), (USR1, TERM)])
def test_another_signal_kills_at_once(
    machine: Machine, request_: StopRequest, first: signal.Signals, second: signal.Signals
):
    machine.signals((0, first), (0, second))
    assert machine.killed == [second]
