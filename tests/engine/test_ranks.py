"""An error on one rank is raised on all; every rank has its own noise."""

import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.engine.ranks import (
    OtherRankError,
    broadcast_from_main,
    is_main,
    patient_group,
    raised_together,
    rank,
    seed_rank,
)
from tests.support.world import run_world_raw

pytestmark = pytest.mark.usefixtures("warmed")

ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("two\nlines"),
    "ConfigError": ConfigError("--steps", 3, "bad", "mend it"),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "CheckpointException": CheckpointException("saving", {}),
}


def _raise_on(failing: set[int], error: BaseException) -> tuple[str, str]:
    """The type and text of what this rank gets out of the block, then whether the world still works."""
    caught: tuple[str, str] = ("", "")
    try:
        with raised_together("counting"):
            if dist.get_rank() in failing:
                raise error
    except BaseException as raised:
        caught = (type(raised).__name__, str(raised))
    dist.barrier()
    return caught


@pytest.mark.parametrize("kind", ERRORS)
def test_one_ranks_error_is_its_own_there_and_another_ranks_elsewhere(world: Callable, kind: str):
    first, second = world(_raise_on, 2, {1}, ERRORS[kind], init=True, timeout=30)
    assert second[0] == kind
    assert first[0] == "OtherRankError"
    assert first[1].startswith(f"rank 1 failed while counting: {kind}")


def test_the_first_failing_rank_is_named_and_each_keeps_its_own_error(world: Callable):
    seen = world(_raise_on, 4, {1, 3}, ValueError("x"), init=True)
    assert [name for name, _ in seen] == ["OtherRankError", "ValueError", "OtherRankError", "ValueError"]
    assert seen[2][1] == "rank 1 failed while counting: ValueError: x"


def test_without_an_error_nothing_is_raised(world: Callable):
    assert world(_raise_on, 2, set(), ValueError(), init=True) == [("", "")] * 2


def test_without_a_process_group_errors_pass():
    with pytest.raises(ZeroDivisionError), raised_together("dividing"):
        raise ZeroDivisionError
    with raised_together("nothing"):
        pass
    assert (rank(), is_main()) == (0, True)
    assert broadcast_from_main("mine") == "mine"


def test_another_ranks_error_is_a_runtime_error():
    assert issubclass(OtherRankError, RuntimeError)


def test_rank_0s_value_reaches_all(world: Callable):
    seen = world(lambda: (rank(), is_main(), broadcast_from_main({"value": dist.get_rank()})), 2, init=True)
    assert seen == [(0, True, {"value": 0}), (1, False, {"value": 0})]


# Noise


def draws(seed: int, rank: int) -> tuple[float, float, float]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    seed_rank(seed, rank)
    return random.random(), float(np.random.rand()), torch.rand(()).item()


@pytest.fixture(autouse=True)
def own_generators():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_rank_0_keeps_the_noise_of_a_single_process():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    alone = random.random(), float(np.random.rand()), torch.rand(()).item()
    assert draws(5, 0) == alone


def test_every_rank_of_every_seed_has_its_own_noise_in_every_generator():
    seen = [draws(seed, rank) for seed in (0, 1, 2) for rank in range(4)]
    for generator in zip(*seen, strict=True):
        assert len(set(generator)) == len(seen)


def test_the_noise_of_a_rank_follows_from_seed_and_rank_alone():
    first = draws(7, 3)
    torch.rand(10)
    assert draws(7, 3) == first


def _wait_for_rank_0(seconds: float, patient: bool) -> str:
    """What rank 1 hears while rank 0 works longer than the limit of the world's own group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    group = patient_group() if patient else None
    try:
        with raised_together("uploading", group):
            if is_main():
                time.sleep(seconds)
    except RuntimeError as error:
        return str(error)
    return "done"


def test_ranks_wait_longer_for_rank_0_than_the_limit_of_their_group(world: Callable):
    assert world(_wait_for_rank_0, 2, 3.0, True, timeout=60) == ["done", "done"]
    # The same without it: this test can fail.
    assert "imed out" in world(_wait_for_rank_0, 2, 3.0, False, timeout=60)[1]


def _die_at_work() -> float:
    dist.init_process_group("gloo")
    group = patient_group()
    began = time.monotonic()
    with pytest.raises(RuntimeError), raised_together("uploading", group):
        if is_main():
            os.kill(os.getpid(), signal.SIGKILL)
    return time.monotonic() - began


def test_who_waits_for_a_rank_that_dies_hears_of_it_at_once():
    _, second = run_world_raw(_die_at_work, 2, grace=20, timeout=60)
    assert second.value < 10
