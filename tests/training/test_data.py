"""The order of samples: accelerate's own sharding of the host's sampler, resumable at every step, on any topology."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from lerobot.common.train_utils import save_training_step
from lerobot.datasets import EpisodeAwareSampler, compute_sampler_state
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.progress import DataPosition, Progress
from lerobot_parallel.training.data import (
    DataOrder,
    Draw,
    SeededSamples,
    endless,
    held_out_subset,
    resumed_position,
    to_float_images,
)

START = DataPosition(epoch=0, start_index=0)
SIZES = (1, 2, 3, 5, 7, 8, 12, 13, 17)
BATCHES = (1, 2, 3, 4)
RANKS = (2, 3, 4)

pytestmark = pytest.mark.usefixtures("warmed")

Step = tuple[tuple[int, ...], ...]
"""The batches of all ranks in one step."""


def frames(size: int, seed: int = 3) -> EpisodeAwareSampler:
    """Two episodes where there is room for two."""
    bounds = [0, size] if size == 1 else [0, size // 2, size]
    return EpisodeAwareSampler(bounds[:-1], bounds[1:], shuffle=True, seed=seed)


def order(size: int, global_batch: int, start: DataPosition = START) -> DataOrder:
    return DataOrder(frames(size), global_batch, start)


def steps_of(samplers: list, batch: int) -> Iterator[Step]:
    """What accelerate hands to the ranks, epoch after epoch; every rank has a sampler of its own, as it has."""
    ranks = len(samplers)
    shards = [
        BatchSamplerShard(BatchSampler(sampler, batch, drop_last=False), num_processes=ranks, process_index=rank)
        for rank, sampler in enumerate(samplers)
    ]
    while True:
        epoch = [[tuple(indices) for indices in shard] for shard in shards]
        assert len({len(batches) for batches in epoch}) == 1, "ranks differ in their number of batches"
        yield from zip(*epoch, strict=True)


def draws(size: int, batch: int, ranks: int, start: DataPosition = START) -> Iterator[Step]:
    return steps_of([order(size, batch * ranks, start) for _ in range(ranks)], batch)


def ours(size: int, batch: int, ranks: int, start: DataPosition = START) -> Iterator[Step]:
    """The frames alone, without the epochs that draw them."""
    for step in draws(size, batch, ranks, start):
        yield tuple(tuple(draw.index for draw in indices) for indices in step)


def take(steps: Iterator[Step], count: int) -> list[Step]:
    return list(itertools.islice(steps, count))


def per_epoch(size: int, global_batch: int) -> int:
    return -(-size // global_batch)


# As the host under accelerate


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("batch", BATCHES)
def test_two_epochs_are_those_of_the_hosts_sampler_under_accelerate(batch: int, ranks: int):
    for size in SIZES:
        count = 2 * per_epoch(size, batch * ranks) + 1
        host = take(steps_of([frames(size) for _ in range(ranks)], batch), count)
        assert take(ours(size, batch, ranks), count) == host, f"{size} frames"


@pytest.mark.parametrize("ranks", (1, *RANKS))
@pytest.mark.parametrize("batch", BATCHES)
def test_every_rank_gets_whole_batches_and_every_frame_comes_in_every_epoch(batch: int, ranks: int):
    for size in SIZES:
        count = per_epoch(size, batch * ranks)
        steps = take(ours(size, batch, ranks), 2 * count)
        assert {len(indices) for step in steps for indices in step} == {batch}
        for epoch in (steps[:count], steps[count:]):
            seen = [index for step in epoch for indices in step for index in indices]
            assert sorted(seen[:size]) == list(range(size)), "an epoch begins with each frame once"
            assert seen[size:] == list(itertools.islice(itertools.cycle(seen[:size]), len(seen) - size))


def test_the_length_is_that_of_a_whole_epoch_of_whole_global_batches():
    for size, batch in itertools.product(SIZES, BATCHES):
        assert len(order(size, batch)) == per_epoch(size, batch) * batch
        assert len(order(size, batch, DataPosition(epoch=2, start_index=size - 1))) == per_epoch(size, batch) * batch


def test_a_draw_knows_its_epoch_also_where_it_fills_up():
    for size, batch in itertools.product(SIZES, BATCHES):
        count = per_epoch(size, batch)
        epochs = [{draw.epoch for draw in step[0]} for step in take(draws(size, batch, 1), 3 * count)]
        assert epochs == [{epoch} for epoch in range(3) for _ in range(count)]


# Resumed


@pytest.mark.parametrize(("batch", "ranks"), [(1, 1), (2, 1), (4, 1), (1, 2), (3, 2), (2, 3), (4, 4)])
def test_resuming_at_any_step_of_two_epochs_is_the_uninterrupted_run(batch: int, ranks: int):
    for size in SIZES:
        whole = order(size, batch * ranks)
        count = 2 * per_epoch(size, batch * ranks)
        uninterrupted = take(draws(size, batch, ranks), count + 3)
        for step in range(count + 1):
            position = whole.position(step)
            rest = take(draws(size, batch, ranks, position), count + 3 - step)
            assert rest == uninterrupted[step:], f"{size} frames, resumed after step {step}"


@pytest.mark.parametrize("global_batch", [1, 2, 3, 4, 8, 20])
def test_positions_add_up_over_any_number_of_resumes(global_batch: int):
    for size in SIZES:
        whole = order(size, global_batch)
        for first, second in itertools.product(range(2 * per_epoch(size, global_batch) + 1), repeat=2):
            again = order(size, global_batch, whole.position(first))
            assert again.position(second) == whole.position(first + second)


def test_a_position_is_always_in_an_epoch():
    for size, global_batch, step in itertools.product(SIZES, (1, 3, 8), range(12)):
        position = order(size, global_batch).position(step)
        assert 0 <= position.start_index < size
        assert position.epoch == step // per_epoch(size, global_batch)


def test_the_end_of_an_epoch_means_the_next_one():
    for index in (7, 8):
        assert order(7, 2, DataPosition(epoch=1, start_index=index)).position(0) == DataPosition(epoch=2, start_index=0)


@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((2, 2), (3, 2)), ((4, 1), (1, 4)), ((3, 2), (2, 4))]
)
def test_another_topology_goes_on_at_the_next_sample(before: tuple[int, int], after: tuple[int, int]):
    size = 17
    sampler = frames(size)
    epochs = [list(sampler) for _ in range(4)]
    first = order(size, before[0] * before[1])
    for step in range(2 * per_epoch(size, before[0] * before[1])):
        position = first.position(step)
        left = epochs[position.epoch][position.start_index :]
        count = per_epoch(len(left), after[0] * after[1])
        steps = take(ours(size, *after, position), count + 1)
        seen = [index for step_ in steps[:count] for indices in step_ for index in indices]
        assert seen[: len(left)] == left
        assert steps[count][0] == tuple(itertools.islice(itertools.cycle(epochs[position.epoch + 1]), after[0]))
        # A second change starts from where this run stands, not from its number of steps.
        second = order(size, after[0] * after[1], position)
        assert second.position(count) == DataPosition(epoch=position.epoch + 1, start_index=0)


# What checkpoints say


def test_the_first_run_starts_at_the_beginning():
    assert resumed_position(None, 10, 4) == START


def test_our_own_position_is_taken_as_it_is():
    saved = Progress(step=99, batch_size=2, num_processes=2, data_position=DataPosition(epoch=5, start_index=3))
    assert resumed_position(saved, 10, 4) == DataPosition(epoch=5, start_index=3)


@pytest.mark.parametrize(("batch", "ranks"), [(1, 1), (4, 1), (2, 2), (3, 2), (2, 5)])
def test_the_hosts_json_gives_the_hosts_position(tmp_path: Path, batch: int, ranks: int):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.training_state.mkdir()
    for size, step in itertools.product(SIZES, range(9)):
        save_training_step(step, checkpoint.training_state, num_processes=ranks, batch_size=batch)
        expected = compute_sampler_state(step, size, batch, ranks)
        # The batch of the resuming run must not matter.
        position = resumed_position(Progress.read(checkpoint), size, 7)
        assert position.model_dump() == expected
        sampler = frames(size)
        sampler.load_state_dict(expected)
        ahead = list(sampler)[:batch]
        assert [draw.index for draw in itertools.islice(order(size, batch * ranks, position), len(ahead))] == ahead


def test_an_older_host_wrote_the_step_alone_and_is_taken_to_be_as_now(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.training_state.mkdir()
    save_training_step(5, checkpoint.training_state)
    assert resumed_position(Progress.read(checkpoint), 10, 4) == DataPosition(epoch=1, start_index=8)


def test_the_later_hosts_json_counts_its_data_ranks(tmp_path: Path):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.training_state.mkdir()
    saved = {
        "step": 4,
        "dp_world_size": 2,
        "batch_size": 3,
        "grad_accum_steps": 2,
        "parallelism": {"dp_shard": 2},
        "later": 1,
    }
    checkpoint.step_file.write_text(json.dumps(saved))
    assert resumed_position(Progress.read(checkpoint), 20, 1) == DataPosition(epoch=1, start_index=0)


# Loaders


class Frames(Dataset):
    """Gives back what it is asked for, and a number drawn while loading it."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + float(np.random.rand()) + torch.rand(()).item()


def loader(sampler: DataOrder, batch: int, **kwargs: Any) -> DataLoader:
    return DataLoader(SeededSamples(Frames(), seed=1), batch_size=batch, sampler=sampler, collate_fn=tuple, **kwargs)


def loaded(loader_: Any, count: int) -> list[tuple]:
    return list(itertools.islice(endless(loader_, lambda: None), count))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_accelerate_keeps_our_order_in_its_loader(ranks: int):
    start = DataPosition(epoch=1, start_index=4)
    loaders = [
        prepare_data_loader(
            loader(order(13, 2 * ranks, start), 2),
            num_processes=ranks,
            process_index=rank,
            put_on_device=False,
            rng_types=["generator"],
        )
        for rank in range(ranks)
    ]
    batches = [[tuple(index for index, _ in batch) for batch in loaded(one, 12)] for one in loaders]
    assert list(zip(*batches, strict=True)) == take(ours(13, 2, ranks, start), 12)


def test_worker_processes_that_stay_read_one_epoch_after_the_other_and_draw_the_same():
    alone = loaded(loader(order(13, 2), 2), 20)
    workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    assert loaded(loader(order(13, 2), 2, **workers), 20) == alone


def test_a_sample_is_loaded_alike_in_one_epoch_otherwise_in_the_next_and_takes_nothing_from_training():
    samples, others = SeededSamples(Frames(), seed=1), SeededSamples(Frames(), seed=2)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    drawn = [samples[Draw(epoch, index)] for epoch in range(3) for index in range(3)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [samples[Draw(epoch, index)] for epoch in range(3) for index in range(3)] == drawn
    assert len({number for _, number in drawn}) == len(drawn)
    assert others[Draw(0, 0)] != drawn[0]
    assert len(samples) == 100


def test_every_epoch_is_announced_before_its_first_batch():
    said: list[Any] = []
    for batch in itertools.islice(endless([1, 2], lambda: said.append("epoch")), 5):
        said.append(batch)
    assert said == ["epoch", 1, 2, "epoch", 1, 2, "epoch", 1]


def test_a_loader_without_batches_is_an_error_and_not_an_endless_loop():
    with pytest.raises(ValueError, match="no batch"):
        next(endless([], lambda: None))


def test_stored_images_become_floats_from_zero_to_one():
    batch = {
        "a": torch.tensor([0, 255], dtype=torch.uint8),
        "b": torch.tensor([3.0]),
        "c": torch.tensor([7], dtype=torch.uint8),
    }
    to_float_images(batch, ["a", "b", "missing"])
    assert torch.equal(batch["a"], torch.tensor([0.0, 1.0]))
    assert torch.equal(batch["b"], torch.tensor([3.0]))
    assert batch["c"].dtype == torch.uint8


class Column:
    """As much of a dataset as the held-out subset looks at."""

    def __init__(self, tasks: list[int]) -> None:
        import pyarrow

        self.hf_dataset = type("Table", (), {"data": pyarrow.table({"task_index": tasks})})()
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)


@pytest.mark.parametrize(
    ("most", "indices"), [(2, [0, 2]), (4, [0, 1, 2, 4]), (5, [0, 1, 2, 4]), (1, [0, 2]), (100, [0, 1, 3, 2, 4])]
)
def test_held_out_samples_are_split_over_the_tasks(most: int, indices: list[int]):
    assert list(held_out_subset(Column([5, 5, 8, 5, 8]), most).indices) == indices


def test_all_held_out_samples_for_zero():
    dataset = Column([1, 2])
    assert held_out_subset(dataset, 0) is dataset


# Reading it


def _read(fails_on: int) -> str:
    from types import SimpleNamespace

    import torch.distributed as dist

    from lerobot_parallel.engine.ranks import OtherRankError
    from lerobot_parallel.training import data

    turns: list[int] = []

    def make(cfg: object) -> tuple[str, None]:
        if dist.get_rank() == fails_on:
            raise FileNotFoundError("no such dataset")
        turns.append(dist.get_rank())
        return "dataset", None

    data.make_train_eval_datasets = make
    accelerator = SimpleNamespace(is_main_process=dist.get_rank() == 0)
    try:
        return str(
            data.make_datasets(
                SimpleNamespace(dataset=SimpleNamespace(repo_id="a/b", streaming=False), num_workers=0), accelerator
            )
        )
    except (FileNotFoundError, OtherRankError) as error:
        return f"{type(error).__name__}: {error}; read by {turns}"


@pytest.mark.parametrize("fails_on", [0, 1])
def test_a_dataset_that_one_rank_cannot_read_is_an_error_on_all(world: Callable, fails_on: int):
    seen = world(_read, 2, fails_on, init=True, timeout=30)
    assert seen[fails_on].startswith("FileNotFoundError: no such dataset")
    assert "reading the dataset a/b" in seen[1 - fails_on]
    assert seen[1].endswith("read by []"), "rank 1 reads what rank 0 has fetched"


def test_every_rank_reads_the_dataset(world: Callable):
    assert world(_read, 2, -1, init=True) == ["('dataset', None)"] * 2
