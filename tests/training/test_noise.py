"""Seeds: equal weights everywhere, noise of its own on every rank, one output directory for all."""

import datetime
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import act_args, full_state, train, watch_steps

pytestmark = pytest.mark.usefixtures("warmed")


def _noise() -> Any:
    """Which features dropout let through in each step, and the weights before the first one."""
    kept: list[list[bool]] = []
    start: dict[str, torch.Tensor] = {}
    hooked = []

    def look(run: Any, batch: dict) -> None:
        if not hooked:
            start.update(full_state(run))
            dropout = run.module.model.encoder.layers[0].dropout1
            hooked.append(
                dropout.register_forward_hook(lambda module, args, out: kept.append((out != 0).flatten().tolist()))
            )

    watch_steps(look, when="before")
    return lambda: {"kept": kept, "start": start}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_ranks_start_alike_and_draw_their_own_noise(small_dataset: Path, tmp_path: Path):
    """Within an epoch: at its end the loader's iterator draws a number too."""
    args = act_args(small_dataset, "--batch_size=2", "--steps=3")
    (single,) = train(args, "single", tmp_path / "single", _noise)
    assert len(single.value["kept"]) == 3
    assert 0.5 < sum(single.value["kept"][0]) / len(single.value["kept"][0]) < 0.9
    for engine in ("ddp2", "fsdp2", "hsdp2x2"):
        ranks = [result.value for result in train(args, engine, tmp_path / engine, _noise)]
        assert ranks[0]["kept"] == single.value["kept"]
        for step in zip(*[rank["kept"] for rank in ranks], strict=True):
            assert len({tuple(kept) for kept in step}) == len(ranks)
        for rank in ranks:
            assert _equal(rank["start"], single.value["start"]), engine


@pytest.mark.parametrize("engine", ["single", "ddp2", "fsdp2"])
def test_without_a_seed_rank_0_gives_the_weights(small_dataset: Path, tmp_path: Path, engine: str):
    """The harness seeds its ranks differently, as the operating system would."""
    ranks = [result.value for result in train(act_args(small_dataset, "--seed=null"), engine, tmp_path, _noise)]
    for rank in ranks[1:]:
        assert _equal(rank["start"], ranks[0]["start"])
        assert rank["kept"] != ranks[0]["kept"]


def test_ranks_agree_on_a_default_output_directory(small_dataset: Path, tmp_path: Path):
    def late_clock() -> Any:
        from lerobot.configs import train as config

        from lerobot_parallel.training import loop

        rank = int(os.environ["RANK"])
        now = datetime.datetime(2030, 1, 1, 12, 0, rank)
        config.dt = types.SimpleNamespace(datetime=types.SimpleNamespace(now=lambda: now))
        seen: list[Any] = []
        run_loop = loop._batches

        def watched(run: Any, metrics: Any) -> Any:
            seen.append((str(run.cfg.output_dir), run.cfg.job_name))
            return run_loop(run, metrics)

        loop._batches = watched
        return lambda: seen

    args = [flag for flag in act_args(small_dataset) if not flag.startswith("--output_dir")]
    for engine in ("ddp2", "fsdp2"):
        ranks = train(args, engine, tmp_path / engine, late_clock)
        assert [rank.value for rank in ranks] == [[("outputs/train/2030-01-01/12-00-00_act", "act")]] * 2
        (run,) = (tmp_path / engine / "outputs/train").glob("*/*")
        assert len(list(run.glob("checkpoints/000004/training_state/rng_state_rank_*"))) == 2
