"""Broken and hostile checkpoints are refused on one line, and nothing in them runs."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.progress import Progress
from lerobot_parallel.checkpoint.rng import restore_rng
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.checkpoint.select import resolve
from lerobot_parallel.config.errors import ConfigError
from tests.support.checkpoints import load_toy, save_toy, toy_run
from tests.support.world import run_world

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    plain = run_world(lambda: save_toy(toy_run(folder / "plain"), 4), 1)[0]
    sharded = run_world(
        lambda: save_toy(toy_run(folder / "dcp", dp_shard=2, checkpoint_format="dcp"), 4, 2), 2, init=True
    )[0]
    return {"plain": plain, "dcp": sharded}


class Bomb:
    """Pickles as a command that leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.marker}",)


def _open(checkpoint: Checkpoint) -> None:
    """All that a resume reads."""
    resolve(checkpoint.path, checksums=False, say=pytest.fail)
    load_toy(toy_run(Path("nowhere"), steps=0), checkpoint)
    Progress.read(checkpoint)
    restore_rng(checkpoint, 0)


def _json(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _tensors(path: Path, change: Callable[[dict], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def _header(path: Path, change: Callable[[dict], Any]) -> None:
    """Rewrites a safetensors header as it likes, the bytes stay."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _entry(metadata: Any, name: str) -> Any:
    return metadata.state_dict_metadata[name]


FIRST = "model.out.weight"
MOMENT = "optimizer.state.out.weight.exp_avg"
Change = Callable[[Checkpoint, Path], object]

PLAIN: dict[str, Change] = {
    "a step that is a word": lambda c, m: _json(c.step_file, lambda d: d | {"step": "four"}),
    "a negative step": lambda c, m: _json(c.step_file, lambda d: d | {"step": -1}),
    "no ranks": lambda c, m: _json(c.step_file, lambda d: d | {"dp_world_size": 0}),
    "a step file that is a list": lambda c, m: c.step_file.write_text("[4]"),
    "a step file that is nothing": lambda c, m: c.step_file.write_bytes(b""),
    "a step file of nested lists": lambda c, m: c.step_file.write_text("[" * 100_000),
    "a config that is no JSON": lambda c, m: c.train_config.write_text("{"),
    "a config that is a list": lambda c, m: c.train_config.write_text("[]"),
    "a config that claims shards": lambda c, m: _json(c.train_config, lambda d: d | {"checkpoint_format": "dcp"}),
    "no policy config": lambda c, m: c.policy_config.unlink(),
    "no optimizer": lambda c, m: c.optimizer_file.unlink(),
    "no optimizer groups": lambda c, m: c.optimizer_groups.unlink(),
    "groups that are words": lambda c, m: c.optimizer_groups.write_text('["params", "params"]'),
    "groups of more parameters": lambda c, m: _json(
        c.optimizer_groups, lambda g: [{**g[0], "params": [*g[0]["params"], 99]}, g[1]]
    ),
    "weights that are a pickle": lambda c, m: c.model_file.write_bytes(pickle.dumps(Bomb(m))),
    "weights of torch.save": lambda c, m: torch.save({"out.weight": Bomb(m)}, c.model_file),
    "an optimizer that is a pickle": lambda c, m: torch.save(Bomb(m), c.optimizer_file),
    "a random state that is a pickle": lambda c, m: torch.save(Bomb(m), c.rank_rng_file(0)),
    "a random state of other names": lambda c, m: save_file({"x": torch.zeros(1)}, c.rank_rng_file(0)),
    "a random state of another size": lambda c, m: _tensors(
        c.rank_rng_file(0), lambda t: t.update(torch_rng_state=torch.zeros(7, dtype=torch.uint8))
    ),
    "truncated weights": lambda c, m: c.model_file.write_bytes(c.model_file.read_bytes()[:-4]),
    "a header longer than the file": lambda c, m: (
        c.model_file.write_bytes(b"\xff" * 7 + b"\0" + c.model_file.read_bytes()[8:])
    ),
    "a tensor beyond the end": lambda c, m: (
        _header(c.model_file, lambda h: h["out.weight"].update(data_offsets=[0, 1 << 50]))
    ),
    "an absurd shape": lambda c, m: _header(c.model_file, lambda h: h["out.weight"].update(shape=[1 << 40, 1 << 40])),
    "weights of another shape": lambda c, m: (
        _tensors(c.model_file, lambda t: t.update({"out.weight": torch.zeros(2, 2)}))
    ),
    "integer weights": lambda c, m: _tensors(c.model_file, lambda t: t.update(update_count=torch.zeros(()))),
    "a missing weight": lambda c, m: _tensors(c.model_file, lambda t: t.pop("out.weight")),
    "a weight too many": lambda c, m: _tensors(c.model_file, lambda t: t.update(extra=torch.zeros(2))),
    "wrapper names": lambda c, m: (
        _tensors(c.model_file, lambda t: t.update({"_orig_mod.out.weight": t.pop("out.weight")}))
    ),
    "another policy": lambda c, m: save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, c.model_file),
    "optimizer state of another shape": lambda c, m: _tensors(
        c.optimizer_file, lambda t: t.update({"state/0/exp_avg": torch.zeros(2, 2)})
    ),
}  # fmt: skip

SHARDED: dict[str, Change] = {
    "a pickle payload for weights": lambda c, m: (c.model_shards / ".metadata").write_bytes(pickle.dumps(Bomb(m))),
    "a pickle payload for the optimizer": lambda c, m: (c.optimizer_shards / ".metadata").write_bytes(
        pickle.dumps(Bomb(m))
    ),
    "a payload in a field": lambda c, m: _metadata(
        c.model_shards, lambda d: setattr(d, "planner_data", {FIRST: Bomb(m)})
    ),
    "a payload in the storage data": lambda c, m: _metadata(
        c.optimizer_shards, lambda d: setattr(d, "storage_data", Bomb(m))
    ),
    "a missing shard": lambda c, m: next(c.model_shards.glob("__1*")).unlink(),
    "a truncated shard": lambda c, m: os.truncate(next(c.optimizer_shards.glob("__0*")), 1000),
    "two dots in a name": lambda c, m: _metadata(
        c.model_shards, lambda d: [setattr(i, "relative_path", "../../x") for i in d.storage_data.values()]
    ),
    "an absolute name": lambda c, m: _metadata(
        c.optimizer_shards, lambda d: [setattr(i, "relative_path", "/etc/passwd") for i in d.storage_data.values()]
    ),
    "an absurd size of shards": lambda c, m: _metadata(
        c.model_shards, lambda d: setattr(_entry(d, FIRST), "size", torch.Size([1 << 50, 16]))
    ),
    "a shape of another policy": lambda c, m: _metadata(c.model_shards, lambda d: d.state_dict_metadata.pop(FIRST)),
    "optimizer metadata of the model": lambda c, m: shutil.copytree(
        c.model_shards, c.optimizer_shards, dirs_exist_ok=True
    ),
    "no metadata": lambda c, m: (c.model_shards / ".metadata").unlink(),
    "an item that is a pickle": lambda c, m: _bomb_item(c.optimizer_shards, MOMENT, m),
}


def _bomb_item(folder: Path, key: str, marker: Path) -> None:
    target = folder / "__0_0.distcp"
    offset = target.stat().st_size
    with target.open("ab") as file:
        torch.save(Bomb(marker), file)

    def point(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                info.relative_path, info.offset, info.length = target.name, offset, target.stat().st_size - offset

    _metadata(folder, point)


CASES = [("plain", name) for name in PLAIN] + [("dcp", name) for name in SHARDED]


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "none"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_refused_on_one_line_and_nothing_runs(
    originals: dict[str, Path], tmp_path: Path, warmed: None, kind: str, name: str, manifest: bool
):
    checkpoint = Checkpoint(Path(shutil.copytree(originals[kind], tmp_path / "000004")))
    if not manifest:
        checkpoint.manifest.unlink()
    marker = tmp_path / "executed"
    (PLAIN | SHARDED)[name](checkpoint, marker)
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        _open(checkpoint)
    assert "\n" not in str(refused.value) and str(checkpoint.path) in str(refused.value)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["plain", "dcp"])
def test_the_unharmed_ones_are_opened(originals: dict[str, Path], warmed: None, kind: str):
    """Else the test above shows nothing."""
    _open(Checkpoint(originals[kind]))
