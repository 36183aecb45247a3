"""How the ranks of one start find each other, and none of a start that died."""

import os
import time
import uuid
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_POLL_S = 0.01


def store_arguments() -> dict[str, Any]:
    """What `init_process_group` gets beside its backend. Collective.

    torchrun keeps one store over its restarts (torch 2.11; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is its switch), and
    in it the addresses of the workers that died: gloo connects to those, NCCL takes up their id.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return {}
    store, rank, world_size = next(rendezvous("env://"))
    return {"store": fresh_corner(store, rank, world_size), "rank": rank, "world_size": world_size}


def fresh_corner(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of a store that nobody wrote to before, the same on every rank that calls this. Collective.

    Nothing that torchrun tells its workers names the start for all of them: agents on several nodes count their
    restarts each on its own. So rank 0 draws a name, and answers a ticket of each rank with it; the tickets that it
    finds of dead ranks get an answer that nobody reads.

    Raises:
        dist.DistStoreError: a rank did not come within the store's own limit.
    """
    if rank == 0:
        name = _admit(store, world_size)
    else:
        ticket = uuid.uuid4().hex
        store.set(f"ticket/{rank}", ticket)
        name = store.get(f"admitted/{ticket}").decode()
        store.add(f"{name}/came", 1)
    return dist.PrefixStore(name, store)


def _admit(store: dist.Store, world_size: int) -> str:
    name, admitted = f"start-{uuid.uuid4().hex}", set()
    deadline = time.monotonic() + store.timeout.total_seconds()
    while store.add(f"{name}/came", 0) < world_size - 1:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"{world_size - 1} ranks should join rank 0 within {store.timeout}, some did not")
        for key in (f"ticket/{rank}" for rank in range(1, world_size)):
            if store.check([key]) and (ticket := store.get(key).decode()) not in admitted:
                store.set(f"admitted/{ticket}", name)
                admitted.add(ticket)
        time.sleep(_POLL_S)
    return name
