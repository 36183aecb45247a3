"""The harness itself: what a world reports when its ranks return, raise, hang, exit or are killed."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest

from tests.support.world import World, WorldError, run_world, run_world_raw


def _allreduce(offset: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_world_reduces_over_all_ranks_and_returns_in_rank_order(nprocs):
    total = sum(range(nprocs)) + 10.0 * nprocs
    assert run_world(_allreduce, nprocs, 10, init=True, timeout=30) == [(r, total) for r in range(nprocs)]


def test_closures_and_tensors_travel():
    import torch

    rows = torch.arange(6.0).view(2, 3)
    values = run_world(lambda: rows[int(os.environ["RANK"])] * 2, 2, timeout=30)
    assert [v.tolist() for v in values] == [[0, 2, 4], [6, 8, 10]]


def test_ranks_see_the_launchers_variables_and_those_asked_for():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "EXTRA", "HOME")
    env = {"EXTRA": "1", "HOME": None}
    values = run_world(lambda: [os.environ.get(name) for name in names], 2, env=env, timeout=30)
    assert values == [[str(rank), "2", str(rank), "127.0.0.1", "1", "1", None] for rank in range(2)]
    assert run_world(lambda: os.environ.get("RANK"), 1, launcher=False, timeout=30) == [None]


def test_accelerate_starts_fresh_in_every_world():
    from accelerate import PartialState

    def world_size() -> tuple[int, str]:
        state = PartialState(cpu=True)
        size = state.num_processes, state.backend
        state.destroy_process_group()
        return size

    assert run_world(world_size, 2, timeout=30) == [(2, "gloo")] * 2
    assert run_world(world_size, 4, timeout=30) == [(4, "gloo")] * 4


def test_ranks_draw_different_numbers_whatever_the_parent_did():
    import torch

    first = run_world(lambda: torch.rand(()).item(), 2, timeout=30)
    torch.manual_seed(123)
    assert run_world(lambda: torch.rand(()).item(), 2, timeout=30) == first
    assert first[0] != first[1]


def test_exception_of_one_rank_ends_the_world_with_its_traceback():
    def fail_on_rank_1() -> None:
        if os.environ["RANK"] == "1":
            raise LookupError("no such drawer")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(WorldError, match="no such drawer") as info:
        run_world(fail_on_rank_1, 2, timeout=30)
    assert time.monotonic() - start < 5
    assert info.value.rank == 1
    assert "in fail_on_rank_1" in str(info.value)


def test_hang_is_killed_at_the_timeout_with_the_stacks_of_all_ranks():
    def hang_in_a_barrier() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(60)

    start = time.monotonic()
    world = World(hang_in_a_barrier, 2, init=True)
    with pytest.raises(WorldError, match="longer than 2 s") as info:
        world.wait(2, grace=0)
    assert time.monotonic() - start < 6
    assert "rank 0" in str(info.value) and "in barrier" in str(info.value)
    assert "rank 1" in str(info.value) and "in hang_in_a_barrier" in str(info.value)
    assert _gone(world.pids)


def test_kill_9_and_exit_codes_and_output_are_reported():
    def end_in_four_ways() -> str:
        rank = int(os.environ["RANK"])
        print(f"out {rank}")
        os.write(2, b"raw err\n")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            sys.exit("refused")
        if rank == 3:
            sys.exit(7)
        warnings.warn("careful", stacklevel=1)
        return "done"

    results = run_world_raw(end_in_four_ways, 4, timeout=30)
    assert [r.exitcode for r in results] == [0, -9, 1, 7]
    assert [r.value for r in results] == ["done", None, None, None]
    assert [r.stdout for r in results] == [f"out {rank}\n" for rank in range(4)]
    assert all("raw err" in r.stderr for r in results)
    assert "refused" in results[2].stderr and not results[2].error
    assert "careful" in results[0].stderr


def test_a_killed_rank_is_named():
    with pytest.raises(WorldError, match="rank 0 was ended by SIGKILL"):
        run_world(lambda: os.kill(os.getpid(), signal.SIGKILL), 1, timeout=30)


def test_ranks_can_be_signalled_from_outside(tmp_path: Path):
    def wait_for_signal() -> int:
        got: list[int] = []
        signal.signal(signal.SIGUSR1, lambda signum, frame: got.append(signum))
        (tmp_path / os.environ["RANK"]).touch()
        while not got:
            time.sleep(0.01)
        return got[0]

    world = World(wait_for_signal, 2)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    world.signal(0, signal.SIGUSR1)
    world.signal(1, signal.SIGKILL)
    first, second = world.wait(30, grace=5)
    assert (first.value, first.exitcode, second.exitcode) == (signal.SIGUSR1, 0, -9)


def test_survivors_of_a_failed_rank_are_stopped_after_the_grace():
    def one_leaves() -> None:
        if os.environ["RANK"] == "0":
            sys.exit(3)
        time.sleep(60)

    first, second = run_world_raw(one_leaves, 2, timeout=30, grace=0.2)
    assert (first.exitcode, first.stopped) == (3, False)
    assert (second.exitcode, second.stopped) == (-9, True)


def test_a_value_that_does_not_pickle_is_the_ranks_error():
    with pytest.raises(WorldError, match="pickle"):
        run_world(lambda: lambda: None, 1, timeout=30)
