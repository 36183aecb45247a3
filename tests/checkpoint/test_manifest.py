"""Any flipped byte, truncation, missing or extra file is found and named."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from lerobot_parallel.checkpoint.convert import convert
from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.manifest import Manifest, amend, verify
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from tests.support.checkpoints import save_toy, toy_run
from tests.support.world import run_world


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two sharded ranks in both formats."""
    folder = tmp_path_factory.mktemp("saved")

    def save() -> Path:
        return save_toy(toy_run(folder, dp_shard=2, checkpoint_format="safetensors_dcp"), 7, 2)

    return run_world(save, 2, init=True)[0]


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Checkpoint:
    return Checkpoint(Path(shutil.copytree(saved, tmp_path / saved.name)))


def _files(checkpoint: Checkpoint) -> list[Path]:
    return sorted(path for path in checkpoint.path.rglob("*") if path.is_file())


def test_the_manifest_says_what_was_written(checkpoint: Checkpoint):
    data = json.loads(checkpoint.manifest.read_bytes())
    assert (data["version"], data["step"], data["world_size"], data["checkpoint_format"]) == (
        1,
        7,
        2,
        "safetensors_dcp",
    )
    assert data["topology"] == {"dp_replicate": 1, "dp_shard": 2, "ring_degree": 1, "ulysses_degree": 1}
    assert data["tied"] == [["embed.weight", "head.weight"]]
    assert data["rng_files"] == [f"training_state/rng_state_rank_0000{rank}.safetensors" for rank in range(2)]
    assert {"lerobot", "torch", "accelerate", "lerobot_parallel", "python"} <= data["versions"].keys()
    from tests.support.toy import make_toy

    toy = make_toy()
    distinct = {id(t): t for t in toy.state_dict(keep_vars=True).values()}.values()
    assert data["model"] == {"count": len(distinct), "bytes": sum(t.numel() * t.element_size() for t in distinct)}
    names = {id(p): name for name, p in toy.named_parameters()}
    assert data["optimizer_parameters"] == [[names[id(p)] for p in g["params"]] for g in toy.get_optim_params()]
    found = {path.relative_to(checkpoint.path).as_posix(): path.read_bytes() for path in _files(checkpoint)}
    del found["manifest.json"]
    assert data["files"] == {
        name: {"size": len(content), "xxh3_64": xxhash.xxh3_64(content).hexdigest()} for name, content in found.items()
    }
    assert {"pretrained_model/pytorch_model_fsdp_0/.metadata", "pretrained_model/model.safetensors"} <= found.keys()
    assert verify(checkpoint) == []


def _damaged(checkpoint: Checkpoint, count: int, seed: int) -> Iterator[tuple[Path, int]]:
    """Files, and places in them, at random: half of them by file, half of them by byte."""
    draw = random.Random(seed)
    files = [path for path in _files(checkpoint) if path.stat().st_size]
    sizes = [path.stat().st_size for path in files]
    for number in range(count):
        path = draw.choices(files, sizes if number % 2 else None)[0]
        yield path, draw.randrange(path.stat().st_size)


def test_a_thousand_flipped_bits_are_found_and_named(checkpoint: Checkpoint):
    for number, (path, place) in enumerate(_damaged(checkpoint, 1000, seed=1)):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (number % 8)
        path.write_bytes(flipped)
        assert [problem.path for problem in verify(checkpoint)][:1] == [path], (path, place)
        path.write_bytes(whole)
    assert verify(checkpoint) == []


def test_a_hundred_truncations_are_found_without_reading_bytes(checkpoint: Checkpoint):
    for path, place in _damaged(checkpoint, 100, seed=2):
        whole = path.read_bytes()
        path.write_bytes(whole[:place])
        assert [problem.path for problem in verify(checkpoint, checksums=False)][:1] == [path]
        path.write_bytes(whole)


def test_every_missing_file_is_named(checkpoint: Checkpoint):
    for path in _files(checkpoint):
        if path == checkpoint.manifest:
            continue
        path.rename(checkpoint.path.parent / "away")
        (problem,) = verify(checkpoint)
        assert (problem.path, problem.kind) == (path, "missing")
        (checkpoint.path.parent / "away").rename(path)


@pytest.mark.parametrize("name", ["extra", "pretrained_model/.hidden", "training_state/deep/er"])
def test_an_extra_file_is_named(checkpoint: Checkpoint, name: str):
    (checkpoint.path / name).parent.mkdir(exist_ok=True)
    (checkpoint.path / name).write_text("")
    (problem,) = verify(checkpoint)
    assert (problem.path, problem.kind) == (checkpoint.path / name, "extra")


def test_a_checkpoint_without_a_manifest_has_no_problems(checkpoint: Checkpoint):
    checkpoint.manifest.unlink()
    assert verify(checkpoint) == [] and Manifest.read(checkpoint) is None


@pytest.mark.parametrize("change", ["version", "outside", "absolute", "spaces"])
def test_a_manifest_that_lies_is_refused(checkpoint: Checkpoint, change: str):
    manifest = Manifest.read(checkpoint)
    entry = manifest.files["training_state/training_step.json"]
    names = {"outside": "../x", "absolute": "/etc/passwd"}
    if change == "version":
        manifest = manifest.model_copy(update={"version": 2})
    elif change in names:
        manifest = manifest.model_copy(update={"files": {names[change]: entry}})
    data = manifest.encode()
    checkpoint.manifest.write_bytes(data.replace(b" ", b"\t", 1) if change == "spaces" else data)
    with pytest.raises(CheckpointError, match="manifest.json"):
        Manifest.read(checkpoint)
    (problem,) = verify(checkpoint)
    assert problem.kind == "manifest"


def test_a_deliberate_change_is_amended(checkpoint: Checkpoint):
    checkpoint.model_file.write_bytes(b"other weights")
    shutil.rmtree(checkpoint.model_shards)
    (checkpoint.pretrained / "README.md").write_text("a card")
    step = checkpoint.step_file.read_bytes()
    checkpoint.step_file.write_bytes(step.replace(b"7", b"8"))
    amend(checkpoint, [checkpoint.model_file, checkpoint.model_shards, checkpoint.pretrained / "README.md"])
    (problem,) = verify(checkpoint)
    assert (problem.path, problem.kind) == (checkpoint.step_file, "checksum"), "what was not named stays as it was"
    checkpoint.manifest.unlink()
    amend(checkpoint, [checkpoint.model_file])
    assert not checkpoint.manifest.exists()


@pytest.mark.parametrize("delete", [False, True])
def test_a_converted_checkpoint_is_intact(checkpoint: Checkpoint, delete: bool):
    checkpoint.model_file.unlink()
    amend(checkpoint, [checkpoint.model_file])
    convert(checkpoint.path, delete_dcp=delete)
    assert verify(checkpoint) == []
    assert checkpoint.model_shards.exists() != delete
    data = Manifest.read(checkpoint).files["pretrained_model/model.safetensors"]
    assert data.size == checkpoint.model_file.stat().st_size
