"""Agreement between ranks: an error on one is raised on all, never waited for."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist

# An upload, a rollout or a slow disk may take longer than the 10 or 30 minutes of torch's groups. Whoever waits for a
# rank that dies hears of it all the same: its connections close, once its loader workers have ended too.
_PATIENCE = timedelta(days=7)


class OtherRankError(RuntimeError):
    """Another rank failed; the text names the rank and its error."""


def rank() -> int:
    """This process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    return rank() == 0


@contextmanager
def raised_together(doing: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Leave the block on all ranks or raise on all ranks. Collective: every rank enters and leaves it.

    The block itself must hold no collective that an early exception would skip on one rank only. The rank
    that failed raises its own error, the others `OtherRankError`. `group` spans the world, for use beside it.
    """
    error: BaseException | None = None
    try:
        yield
    # torch's CheckpointException is no Exception; SystemExit and KeyboardInterrupt must reach the others too.
    except BaseException as caught:
        error = caught
    if dist.is_initialized() and dist.get_world_size() > 1:
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}", group=group)
        failed = next(((rank, text) for rank, text in enumerate(texts) if text is not None), None)
        if error is None and failed is not None:
            raise OtherRankError(f"rank {failed[0]} failed while {doing}: {failed[1]}")
    if error is not None:
        raise error


def new_patient_group() -> dist.ProcessGroup | None:
    """A group of its own over the world, in host memory, for waiting as long as it takes. Collective.

    None in a world of one, as in every `group` argument here.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # Ranks that are not there yet have no connections: one that is dead is found here, or within the usual limit.
    true_anywhere(False)
    group = dist.new_group(backend="gloo")
    dist.distributed_c10d._set_pg_timeout(_PATIENCE, group)
    return group


def patient_group() -> dist.ProcessGroup | None:
    """The one that the main thread uses; made at the first call. Collective."""
    return _patient_group_beside(dist.group.WORLD)


@lru_cache(maxsize=1)
def _patient_group_beside(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return new_patient_group()


def forget_groups() -> None:
    """Let go of what is kept here of the process group."""
    _patient_group_beside.cache_clear()


def true_anywhere(*flags: bool) -> list[bool]:
    """For each flag, whether it is set on any rank; the same on all of them. Collective, in host memory."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return votes.bool().tolist()


def broadcast_from_main(value: object) -> object:
    """Rank 0's `value` on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def seed_rank(seed: int, rank: int) -> None:
    """Give this rank its own noise stream. Rank 0 keeps the stream that a single process would have."""
    if rank == 0:
        return
    own = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
