"""A save that dies or finds no space, at any point, loses nothing but itself."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.checkpoints import full_state, load_toy, same, save_toy, toy_run
from tests.support.faults import Points, injected, no_space, spread
from tests.support.world import run_world, run_world_raw

FORMATS = {1: "safetensors", 2: "safetensors_dcp"}


def _sharded(ranks: int) -> dict:
    return {"dp_shard": ranks, "checkpoint_format": FORMATS[ranks]}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _count(folder: Path, ranks: int) -> tuple[list[str], int]:
    """The kinds of the points of saving step 2 beside step 1, and over itself, on this rank; how many the first has."""
    run = toy_run(folder, **_sharded(ranks))
    save_toy(run, 1, ranks)
    with injected(Points(), folder) as points:
        save_toy(run, 2, ranks)
        first = len(points.kinds)
        save_toy(run, 2, ranks)
    return points.kinds, first


def _save_and_die(folder: Path, ranks: int, at: int, victim: int | None, own: dict) -> None:
    """Saves step 2 twice; at a point of the victim's it dies alone, or (None: at one of rank 0's) with all."""
    run = toy_run(folder, steps=2, **_sharded(ranks), **own)
    pids = [os.getpid()] * ranks
    if dist.is_initialized():
        dist.all_gather_object(pids, os.getpid())
    doomed = pids if victim is None else [pids[victim]]

    def die() -> None:
        for pid in sorted(doomed, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)

    points = Points(at if _rank() == (victim or 0) else None, die)
    with injected(points, folder):
        save_toy(run, 2, ranks)
        save_toy(run, 2, ranks)


def _check_all(folders: list[Path], ranks: int) -> list[str]:
    """In each folder `last` resumes with exactly what was saved, and step 2 can be saved again; what is not so."""
    from lerobot_parallel.checkpoint.layout import Checkpoint, last_link
    from lerobot_parallel.checkpoint.manifest import verify
    from lerobot_parallel.checkpoint.progress import Progress
    from lerobot_parallel.checkpoint.select import resolve

    expected = {step: full_state(toy_run(folders[0], steps=step, **_sharded(ranks))) for step in (1, 2)}
    problems = []
    for folder in folders:
        said: list[str] = []
        checkpoint = resolve(last_link(folder), checksums=True, say=said.append)
        run = toy_run(folder, steps=0, **_sharded(ranks))
        load_toy(run, checkpoint)
        if said or not same(full_state(run), expected[Progress.read(checkpoint).step]):
            problems.append(f"{folder}: {said or 'other state'}")
        saved = save_toy(run, 2, ranks)
        left = [path.name for path in saved.parent.iterdir() if path.name.startswith(".")]
        if verify(Checkpoint(saved)) or left or last_link(folder).resolve() != saved.resolve():
            problems.append(f"{folder}: {verify(Checkpoint(saved))} {left}")
    return problems


KILLS = {
    "one process": (1, None, 70, {}),
    "both of two ranks": (2, None, 16, {}),
    "one of two ranks": (2, 1, 8, {}),
    "both of two ranks, saving in the background": (2, None, 6, {"async_save": True}),
}


@pytest.mark.parametrize("case", KILLS)
def test_kill_9_at_any_point_of_a_save_costs_that_save_at_most(tmp_path: Path, warmed: None, case: str):
    ranks, victim, count, own = KILLS[case]
    base = tmp_path / "base"
    kinds, _ = run_world(_count, ranks, base, ranks, init=ranks > 1)[victim or 0]
    shutil.rmtree(base / "checkpoints/000002")
    (base / "checkpoints/last").unlink()
    (base / "checkpoints/last").symlink_to("000001")
    folders = []
    for at in spread(kinds, count):
        folders.append(tmp_path / f"at{at}")
        shutil.copytree(base, folders[-1], symlinks=True)
        results = run_world_raw(
            _save_and_die, ranks, folders[-1], ranks, at, victim, own, init=ranks > 1, timeout=60, grace=15
        )
        assert results[victim or 0].exitcode == -signal.SIGKILL, f"point {at} ({kinds[at]}) was not reached"
        assert not any(r.stopped for r in results), f"a rank waited for ever at point {at} ({kinds[at]})"
    assert len(folders) >= count
    assert run_world(_check_all, ranks, folders, ranks, init=ranks > 1, timeout=240)[0] == []


def _fill_disk_everywhere(folder: Path, ranks: int, own: dict, choose: list[int], victim: int) -> list[tuple[int, str]]:
    """Saves with one point after the other finding no space; what each save said on this rank."""
    from lerobot_parallel.checkpoint.layout import last_link
    from lerobot_parallel.checkpoint.manifest import verify
    from lerobot_parallel.checkpoint.save import SaveError
    from lerobot_parallel.checkpoint.select import resolve

    run = toy_run(folder, **_sharded(ranks), **own)
    said = []
    for at in choose:
        text = ""
        with injected(Points(at if _rank() == victim else None, no_space), folder):
            try:
                save_toy(run, 2, ranks)
            except SaveError as error:
                text = str(error)
        checkpoint = resolve(last_link(folder), checksums=True, say=lambda text: None)
        assert not verify(checkpoint)
        said.append((at, text))
        dist.barrier() if dist.is_initialized() else None
    save_toy(run, 3, ranks)
    return said


@pytest.mark.parametrize("own", [{}, {"async_save": True}], ids=["sync", "async"])
@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_full_disk_at_any_write_is_said_on_every_rank(tmp_path: Path, warmed: None, ranks: int, victim: int, own: dict):
    kinds, count = run_world(_count, ranks, tmp_path / "run", ranks, init=ranks > 1)[victim]
    first = kinds[:count]
    writes = [at for at, kind in enumerate(first) if kind in ("write", "safetensors", "fsync")]
    choose = writes[:: max(1, len(writes) // 25)]
    results = run_world(
        _fill_disk_everywhere, ranks, tmp_path / "run", ranks, own, choose, victim, init=ranks > 1, timeout=240
    )
    for rank, said in enumerate(results):
        silent = [(at, first[at]) for at, text in said if "No space left" not in text]
        assert not silent, f"rank {rank} said nothing"
        assert all("older ones are untouched" in text and "\n" not in text for _, text in said)


def test_too_little_space_is_refused_before_the_first_byte(tmp_path: Path, warmed: None):
    def save_without_space() -> tuple[str, list[str]]:
        from lerobot_parallel.checkpoint import save

        run = toy_run(tmp_path)
        save_toy(run, 1)
        real = shutil.disk_usage
        save.shutil.disk_usage = lambda path: real(path)._replace(free=20_000)
        text = ""
        with contextlib.suppress(StopIteration):
            try:
                save_toy(run, 2)
            except save.SaveError as error:
                text = str(error)
        return text, sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    text, names = run_world(save_without_space, 1)[0]
    assert "has 0 MB free, a checkpoint takes about 17 MB" in text
    assert names == ["000001", "last"]
