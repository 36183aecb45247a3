"""A checkpoint written in the background is the one that would have been written at once."""

import threading
from pathlib import Path

import pytest

from tests.support.checkpoints import contents, save_toy, take_step, toy_progress, toy_run
from tests.support.world import run_world

CASES = {"one process": (1, "safetensors"), "two ranks": (2, "safetensors_dcp"), "two ranks, dcp": (2, "dcp")}


def _train_and_save(folder: Path, ranks: int, checkpoint_format: str, asynchronous: bool) -> bool:
    """Saves twice, each time with the next steps, in place, before a byte is written; whether that was so."""
    from lerobot_parallel.checkpoint import save

    run = toy_run(folder, dp_shard=ranks, checkpoint_format=checkpoint_format, async_save=asynchronous)
    saver = save.Saver(run)
    write, go, held = save._write, threading.Event(), []

    def held_back(job: object) -> None:
        held.append(go.wait(20))
        write(job)

    save._write = held_back if asynchronous else write
    for step in (1, 2):
        go.clear()
        saver.save(toy_progress(step, ranks))
        for more in range(3):
            take_step(run, seed=10 * step + more)
        assert saver.step_edge(False) is False
        go.set()
        saver.wait()
    return held == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_asynchronous_checkpoints_equal_synchronous_ones_byte_for_byte(tmp_path: Path, warmed: None, case: str):
    ranks, checkpoint_format = CASES[case]
    for name, asynchronous in (("sync", False), ("async", True)):
        held = run_world(
            _train_and_save, ranks, tmp_path / name, ranks, checkpoint_format, asynchronous, init=ranks > 1
        )
        assert all(held) == asynchronous
    for step in ("000001", "000002"):
        ours, expected = (contents(tmp_path / name / "checkpoints" / step) for name in ("async", "sync"))
        own = {"pretrained_model/train_config.json", "manifest.json"}  # name the flag and the folder
        assert ours.keys() == expected.keys() and own < ours.keys()
        assert [name for name in expected if name not in own and ours[name] != expected[name]] == []


def test_a_failure_in_the_background_is_raised_on_all_ranks_at_the_next_step(tmp_path: Path, warmed: None):
    def fail() -> list[str]:
        import time

        import torch.distributed as dist

        from lerobot_parallel.checkpoint import save

        run = toy_run(tmp_path, dp_shard=2, checkpoint_format="dcp", async_save=True)
        saver = save.Saver(run)
        if dist.get_rank() == 1:

            def full(*args: object) -> None:
                raise OSError(28, "No space left on device")

            save.HashingFileSystem.create_stream = full
        saver.save(toy_progress(1, 2))
        said = []
        for _ in range(200):
            try:
                saver.step_edge(False)
            except save.SaveError as error:
                said.append(str(error))
                break
            time.sleep(0.02)
        return [*said, *sorted(path.name for path in (tmp_path / "checkpoints").iterdir())]

    for said in run_world(fail, 2, init=True):
        assert len(said) == 1 and "rank 1 could not write its shards" in said[0] and "No space left" in said[0]


def test_one_save_is_in_flight_and_the_log_says_what_it_cost(tmp_path: Path, warmed: None):
    def save_three() -> tuple[list[str], list[str]]:
        import logging

        from lerobot_parallel.checkpoint import save

        lines: list[str] = []
        logging.getLogger().setLevel(logging.INFO)
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger().addHandler(handler)
        saver = save.Saver(toy_run(tmp_path, async_save=True, keep_last=1))
        published: list[str] = []
        saver.published = lambda directory: published.append(directory.name)
        for step in (1, 2, 3):
            saver.save(toy_progress(step))
            assert len([t for t in threading.enumerate() if t.name == "checkpoint-writer"]) <= 1
            assert published == [f"00000{n}" for n in range(1, step)]
        saver.wait()
        return [line for line in lines if "stood still" in line], published

    lines, published = run_world(save_three, 1)[0]
    assert published == ["000001", "000002", "000003"]
    assert len(lines) == 3 and "MB" in lines[0] and "written in" in lines[0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000003", "last"]


def test_rank_files_appear_once(tmp_path: Path, warmed: None):
    directory = run_world(lambda: save_toy(toy_run(tmp_path, dp_shard=2, checkpoint_format="dcp"), 4, 2), 2, init=True)[
        0
    ]
    assert not (directory / "pretrained_model/model.safetensors").exists()
    assert len(list((directory / "training_state").glob("rng_state_rank_*"))) == 2
