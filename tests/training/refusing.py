"""What holds for every refusal: one line, once, exit code 1 on all ranks, before anything is touched."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.commands import train_in_world
from tests.support.world import RankResult

FSDP2 = "--parallelism.dp_shard=2"
LINE = "lerobot-train: "


def _touched(what: str) -> Callable[..., NoReturn]:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(f"a refused run touched {what}")

    return fail


@pytest.fixture(autouse=True)
def quiet(warmed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks do not wait for a launcher, which is not there; the host does not say what decoders are missing."""
    from lerobot_parallel.training import command

    monkeypatch.setattr(command, "_GRACE_S", 0.0)
    host = logging.getLogger("lerobot.utils.import_utils")
    level = host.level
    host.setLevel(logging.ERROR)
    yield
    host.setLevel(level)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    from lerobot_parallel.training import data, preflight

    monkeypatch.setattr(dist, "init_process_group", _touched("the process group"))
    monkeypatch.setattr(dist, "TCPStore", _touched("a store"))
    monkeypatch.setattr(torch.cuda, "init", _touched("a GPU"))
    monkeypatch.setattr(torch.cuda, "_lazy_init", _touched("a GPU"))
    monkeypatch.setattr(data, "make_train_eval_datasets", _touched("the dataset"))
    monkeypatch.setattr(preflight, "LeRobotDatasetMetadata", _touched("the dataset's metadata"))


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def the_line(result: RankResult) -> str:
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(LINE)
    return lines[0].removeprefix(LINE)


def refusal(args: list[str], cwd: Path, *, nprocs: int = 2, env: dict[str, str] | None = None) -> str:
    """What the refused run says; everything that holds for every refusal is asserted here."""
    before = tree(cwd)
    results = train_in_world(args, nprocs, cwd, env=env, grace=5)
    assert [(r.exitcode, r.error, r.stopped, r.stdout) for r in results] == [(1, "", False, "")] * nprocs
    assert [r.stderr for r in results[1:]] == [""] * (nprocs - 1)
    assert tree(cwd) == before
    return the_line(results[0])
