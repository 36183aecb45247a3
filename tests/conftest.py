"""Settings of the whole run. They come before torch and the host are imported, and hold for every test."""

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import quiet_env
from tests.support.world import run_world, warm

TEST_TIMEOUT_S = 300
GPU_FOLDER = Path(__file__).parent / "gpu"

_gpu_visible = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ.update(quiet_env())


def pytest_configure(config: pytest.Config) -> None:
    """GPUs stay hidden unless the run asks for nothing else: a parent that used CUDA cannot fork worlds."""
    if not _gpu_tests_only(config):
        return
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks without initialising
    if _gpu_visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = _gpu_visible


def _gpu_tests_only(config: pytest.Config) -> bool:
    paths = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    return config.option.markexpr == "gpu" or all(p.is_relative_to(GPU_FOLDER) for p in paths)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(GPU_FOLDER):
            item.add_marker("gpu")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    if not _gpu_tests_only(config):
        reason = "GPU tests need a run of their own: pytest -m gpu"
    elif not _has_cuda():
        reason = "no CUDA device"
    else:
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test, with its fixtures, that runs too long prints all stacks and fails.

    By an alarm, since the thread of `faulthandler.dump_traceback_later` would not survive a fork: a child that
    touches it waits for ever.
    """
    previous = signal.signal(signal.SIGALRM, _too_long)
    faulthandler.register(signal.SIGALRM, file=2, chain=True)
    signal.setitimer(signal.ITIMER_REAL, TEST_TIMEOUT_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(signal.SIGALRM)
        signal.signal(signal.SIGALRM, previous)


def _too_long(signum: int, frame: object) -> None:
    raise TimeoutError(f"the test ran longer than {TEST_TIMEOUT_S} s; all stacks are in its stderr")


@pytest.fixture(scope="session")
def warmed() -> None:
    """Imports what worlds need before the first one, outside any test's time."""
    warm()


@pytest.fixture
def world(warmed: None) -> Callable[..., list]:
    """`run_world`, from a warmed parent."""
    return run_world
