"""Ranks of one start meet in a part of the store that no dead rank ever wrote to."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lerobot_parallel.engine.rendezvous import fresh_corner, store_arguments

WORLD = 3


def _meet(store: dist.Store, ranks: list[int]) -> list[dist.Store]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: fresh_corner(store, rank, WORLD), ranks))


def test_every_start_gets_a_corner_of_its_own_and_all_its_ranks_the_same_one():
    store = dist.HashStore()
    for start in range(3):
        corners = _meet(store, [0, 1, 2])
        assert not corners[0].check(["address/1"])
        corners[1].set("address/1", str(start))
        assert [corner.get("address/1") for corner in corners] == [str(start).encode()] * WORLD


def test_ranks_that_died_while_they_met_are_no_part_of_the_next_start():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError):  # rank 0 is gone
        fresh_corner(store, 2, WORLD)
    with pytest.raises(dist.DistStoreError, match="2 ranks should join rank 0"):  # the others are
        fresh_corner(store, 0, WORLD)
    store.set_timeout(timedelta(seconds=20))
    corners = _meet(store, [2, 1, 0])
    corners[2].set("address/0", "new")
    assert [corner.get("address/0") for corner in corners] == [b"new"] * WORLD


def test_a_launcher_without_a_store_of_its_own_needs_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert store_arguments() == {}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert store_arguments() == {}
