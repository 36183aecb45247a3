"""Datasets, the order of their samples, and loaders that accelerate splits over the ranks."""

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from lerobot.datasets import EpisodeAwareSampler
from lerobot.datasets.factory import make_train_eval_datasets
from lerobot.utils.collate import lerobot_collate_fn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from lerobot_parallel.checkpoint.progress import DataPosition, Progress
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.ranks import patient_group, raised_together
from lerobot_parallel.training.preemption import end_workers_at_exit, ignore_in_worker


def make_datasets(cfg: ParallelTrainPipelineConfig, accelerator: Accelerator) -> tuple[Any, Any]:
    """Train and held-out dataset (or None). Collective: rank 0 downloads, the others read its copy.

    A dataset that one rank cannot read is an error on all of them, where a barrier would wait for it.
    """
    datasets = None
    for turn in (True, False):
        with raised_together(f"reading the dataset {cfg.dataset.repo_id}", patient_group()):
            if accelerator.is_main_process is turn:
                datasets = make_train_eval_datasets(cfg)
    if cfg.dataset.streaming and cfg.num_workers == 0:
        # The host cuts a stream into one shard a worker: into none where there is no worker.
        datasets[0].num_shards = 1
    return datasets


class DataOrder(Sampler["Draw"]):
    """Frames in the host's order, resumable at any sample, in whole global batches.

    Every epoch is a permutation that depends on seed and epoch only, so that all ranks agree on it without
    talking. Over several ranks its last global batch is filled up from the epoch's own beginning, as accelerate
    does; doing it here keeps that true for an epoch that is resumed in its middle. One process leaves it short, as
    the host does.

    Args:
        frames: the host's sampler.
        global_batch: samples that all ranks together take in one step.
        start: where the next epoch begins; a position at the end of an epoch means the next one.
        even: whether the last global batch of an epoch is filled up.
    """

    def __init__(
        self, frames: EpisodeAwareSampler, global_batch: int, start: DataPosition, *, even: bool = True
    ) -> None:
        self._frames = frames
        self._global_batch = global_batch
        self._even = even
        over = start.start_index >= len(frames)
        self._start = DataPosition(epoch=start.epoch + over, start_index=0 if over else start.start_index)
        self._next = self._start

    def __len__(self) -> int:
        return self._samples_left(0)

    def __iter__(self) -> Iterator["Draw"]:
        epoch, start = self._next.epoch, self._next.start_index
        self._next = DataPosition(epoch=epoch + 1, start_index=0)
        endless = itertools.chain(self._epoch(epoch, start), self._repeat(epoch))
        frames = itertools.islice(endless, self._samples_left(start))
        return (Draw(epoch, index) for index in frames)

    def position(self, steps: int) -> DataPosition:
        """Where the data stands after `steps` steps from `start`."""
        first = self._steps_left(self._start.start_index)
        if steps < first:
            taken = self._start.start_index + steps * self._global_batch
            return DataPosition(epoch=self._start.epoch, start_index=taken)
        epochs, rest = divmod(steps - first, self._steps_left(0))
        return DataPosition(epoch=self._start.epoch + 1 + epochs, start_index=rest * self._global_batch)

    def _steps_left(self, start: int) -> int:
        return math.ceil((len(self._frames) - start) / self._global_batch)

    def _samples_left(self, start: int) -> int:
        return self._steps_left(start) * self._global_batch if self._even else len(self._frames) - start

    def _epoch(self, epoch: int, start: int) -> Iterator[int]:
        self._frames.load_state_dict({"epoch": epoch, "start_index": start})
        yield from iter(self._frames)

    def _repeat(self, epoch: int) -> Iterator[int]:
        while True:
            yield from self._epoch(epoch, 0)


class Draw(NamedTuple):
    """One sample to load: the epoch that draws it, and its index in the dataset."""

    epoch: int
    index: int


class SeededSamples(Dataset):
    """A dataset whose random transforms follow from seed, epoch and sample alone, in whatever process they run.

    Loading touches no random state of its process, so that training draws the same numbers with and without
    workers, and a resumed run augments each sample as the uninterrupted one did.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: Draw) -> Any:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        words = np.random.SeedSequence([self._seed, *draw]).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(words[1])
        # torch.manual_seed would seed the GPUs too.
        torch.default_generator.manual_seed(int(words[2]))
        try:
            return self.dataset[draw.index]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


def make_order(
    cfg: ParallelTrainPipelineConfig, dataset: Any, accelerator: Accelerator, resumed: Progress | None
) -> DataOrder | None:
    """The order of the training samples, from where a resumed run left off; None for a streaming dataset."""
    if cfg.dataset.streaming:
        if resumed is not None:
            logging.warning("a streaming dataset starts over on resume: its order cannot be repositioned")
        return None
    frames = EpisodeAwareSampler(
        dataset.meta.episodes["dataset_from_index"],
        dataset.meta.episodes["dataset_to_index"],
        episode_indices_to_use=dataset.episodes,
        drop_n_last_frames=getattr(cfg.trainable_config, "drop_n_last_frames", 0),
        shuffle=True,
        seed=cfg.seed if cfg.seed is not None else 0,
        absolute_to_relative_idx=dataset.absolute_to_relative_idx,
    )
    global_batch = cfg.batch_size * accelerator.num_processes
    start = resumed_position(resumed, len(frames), global_batch)
    if resumed is not None:
        logging.info("Resuming data order at epoch %d, sample %d", start.epoch, start.start_index)
    return DataOrder(frames, global_batch, start, even=accelerator.num_processes > 1)


def resumed_position(resumed: Progress | None, num_frames: int, global_batch: int) -> DataPosition:
    """Where the saved run's data stood; derived from its step where the checkpoint does not say.

    A checkpoint of other software gives the step, and the batch size and ranks that made it; what it leaves
    out is taken to be as now.
    """
    if resumed is None:
        return DataPosition(epoch=0, start_index=0)
    if resumed.data_position is not None:
        return resumed.data_position
    if resumed.batch_size and resumed.data_ranks:
        global_batch = resumed.batch_size * resumed.data_ranks
    epoch, steps = divmod(resumed.step, math.ceil(num_frames / global_batch))
    return DataPosition(epoch=epoch, start_index=steps * global_batch)


def make_loader(
    cfg: ParallelTrainPipelineConfig, dataset: Dataset, device: torch.device, *, order: DataOrder | None, like: Any
) -> DataLoader:
    """One rank's loader before accelerate splits it; `like` is the dataset whose columns decide on the collate."""
    workers = cfg.num_workers > 0
    if workers:
        end_workers_at_exit()
    return DataLoader(
        dataset if order is None else SeededSamples(dataset, cfg.seed or 0),
        batch_size=cfg.batch_size,
        sampler=order,
        shuffle=False,
        num_workers=cfg.num_workers,
        pin_memory=device.type == "cuda",
        drop_last=False,
        collate_fn=lerobot_collate_fn if like.meta.has_language_columns else None,
        prefetch_factor=cfg.prefetch_factor if workers else None,
        persistent_workers=cfg.persistent_workers and workers,
        multiprocessing_context=cfg.dataloader_multiprocessing_context if workers else None,
        worker_init_fn=ignore_in_worker,
        # An iterator draws the seed of its workers; see `draw_as_the_host`.
        generator=torch.Generator().manual_seed(cfg.seed or 0),
    )


def draw_as_the_host() -> None:
    """Draw what the iterator of the host's loader takes from the training's random state when an epoch begins.

    Ours have a generator of their own: whether an iterator exists already must not decide what training draws.
    """
    torch.empty((), dtype=torch.int64).random_()


def held_out_subset(dataset: Any, max_samples: int) -> Dataset:
    """At most `max_samples` held-out frames, split evenly over the tasks; all of them for 0."""
    if max_samples <= 0 or not hasattr(dataset, "hf_dataset"):
        return dataset
    tasks = dataset.hf_dataset.data.column("task_index").to_numpy()
    distinct = sorted(set(tasks.tolist()))
    per_task = max(1, max_samples // len(distinct))
    return Subset(dataset, [int(i) for task in distinct for i in (tasks == task).nonzero()[0][:per_task]])


def endless(loader: Any, epoch_begins: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Batches epoch after epoch; `epoch_begins` is called before the first batch of each."""
    while True:
        empty = True
        epoch_begins()
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("the dataset gives no batch")


def to_float_images(batch: dict[str, Any], camera_keys: list[str]) -> dict[str, Any]:
    """Images stored as uint8 become fp32 in [0, 1], in place."""
    for key in camera_keys:
        if key in batch and batch[key].dtype == torch.uint8:
            batch[key] = batch[key].to(dtype=torch.float32) / 255.0
    return batch
