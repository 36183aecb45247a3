"""Shards become the file that the host reads: every bit, whole or not at all."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert import ConvertResult, WrittenFile, convert
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError
from tests.support.datasets import copy_peer, peer_dir
from tests.support.shards import bits, checkpoint_in, save_alone, torch_read
from tests.support.world import run_world

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
]
ODD_NAMES = ["with space", "ünïcode", 'quo"te', "back\\slash", "a.b.0.c"]


def random(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaNs among them; a bool has but two."""
    draw = torch.Generator().manual_seed(len(str(dtype)) + sum(size))
    count = torch.Size(size).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, size, generator=draw).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=draw, dtype=torch.uint8)
    return raw.view(dtype).reshape(size)


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype, in sizes that 2, 3 and 4 ranks divide and do not divide, smaller than the world, empty and 0-d."""
    made = {f"{dtype}".removeprefix("torch."): random((7, 3), dtype) for dtype in DTYPES}
    sizes = {
        "even": (12, 2),
        "one_row": (1, 5),
        "two_rows": (2, 3),
        "flat": (10,),
        "deep": (5, 2, 3, 2),
        "empty": (0, 4),
    }
    made |= {name: random(size, torch.float32) for name, size in sizes.items()}
    made |= {f"scalar.{dtype}": random((), dtype) for dtype in DTYPES}
    made |= {name: random((3,), torch.float32) for name in ODD_NAMES}
    return made


def save_in_world(checkpoint: layout.Checkpoint, nprocs: int, place: Callable[[str, torch.Tensor], object]) -> None:
    def rank() -> None:
        state = {name: place(name, tensor) for name, tensor in tensors().items()}
        dcp.save({"model": state}, checkpoint_id=checkpoint.model_shards)

    run_world(rank, nprocs, init=True)


def local_pieces(tensor: torch.Tensor, dim: int, parts: int) -> list[torch.Tensor]:
    return list(torch.chunk(tensor, parts, dim))


def sharded(tensor: torch.Tensor, mesh: object, placements: list) -> DTensor:
    """Built from the local part, without a collective: gloo does not know every dtype."""
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard)]
    local = tensor
    for axis in axes:
        pieces = local_pieces(local, placements[axis].dim, mesh.size(axis))
        rank = mesh.get_local_rank(axis)
        local = pieces[rank] if rank < len(pieces) else local.narrow(placements[axis].dim, 0, 0)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def place_fsdp(name: str, tensor: torch.Tensor) -> object:
    if tensor.dim() == 0:
        return tensor
    return sharded(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def place_hsdp(name: str, tensor: torch.Tensor) -> object:
    if tensor.dim() == 0:
        return tensor
    return sharded(tensor, init_device_mesh("cpu", (2, dist.get_world_size() // 2)), [Replicate(), Shard(0)])


def place_other_dims(name: str, tensor: torch.Tensor) -> object:
    """Columns, and a grid of both: what tensor parallelism leaves, and what no byte range of the file is."""
    if tensor.dim() < 2 or 0 in tensor.shape:
        return tensor
    if name in ("even", "deep"):
        return sharded(tensor, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
    return sharded(tensor, init_device_mesh("cpu", (4,)), [Shard(1)])


WORLDS = {
    "1 rank": (1, place_fsdp),
    "2 ranks": (2, place_fsdp),
    "3 ranks": (3, place_fsdp),
    "4 ranks": (4, place_fsdp),
    "2x2 HSDP": (4, place_hsdp),
    "other dims": (4, place_other_dims),
    "plain tensors on 2 ranks": (2, lambda name, tensor: tensor),
}


@pytest.mark.parametrize("world", WORLDS)
def test_file_equals_what_safetensors_writes_itself(tmp_path: Path, world: str) -> None:
    checkpoint = checkpoint_in(tmp_path)
    save_in_world(checkpoint, *WORLDS[world])
    result = convert(checkpoint.path, verify=True)
    expected = safetensors.torch.save(tensors(), {"format": "pt"})
    assert checkpoint.model_file.read_bytes() == expected
    assert result == ConvertResult(
        source=checkpoint.path,
        path=checkpoint.model_file,
        files=(WrittenFile("model.safetensors", len(expected), f"{zlib.crc32(expected):08x}"),),
        tensors=len(tensors()),
        bytes=len(expected),
        seconds=result.seconds,
        converted=True,
        verified=True,
        deleted_dcp=False,
        tied={},
        left_out={},
    )
    assert sorted(path.name for path in checkpoint.pretrained.iterdir()) == [
        "config.json",
        "model.safetensors",
        "policy_preprocessor.json",
        "pytorch_model_fsdp_0",
        "train_config.json",
    ]


def test_uneven_worlds_store_what_the_test_means(tmp_path: Path) -> None:
    """Else the test above shows nothing about uneven and empty shards, replicas and grids."""
    from lerobot_parallel.checkpoint.safe_read import read_metadata, tensor_entries

    def sizes(world: str, name: str) -> list[tuple[int, ...]]:
        checkpoint = checkpoint_in(tmp_path / world)
        save_in_world(checkpoint, *WORLDS[world])
        entry = tensor_entries(read_metadata(checkpoint.model_shards))[f"model.{name}"]
        return sorted((tuple(chunk.sizes) for chunk in entry.chunks), reverse=True)

    assert sizes("4 ranks", "float32") == [(2, 3), (2, 3), (2, 3), (1, 3)]
    assert [size for size in sizes("3 ranks", "two_rows") if size[0]] == [(1, 3), (1, 3)]
    assert sizes("2x2 HSDP", "even") == [(6, 2), (6, 2)]
    assert sizes("other dims", "even") == [(6, 1)] * 4


def test_strided_and_shared_tensors(tmp_path: Path) -> None:
    """Transposed, expanded and sliced views, and two views of one storage."""
    base = torch.arange(24.0).reshape(4, 6)
    state = {"t": base.t(), "slice": base[1:3, 2:], "expanded": base[:1].expand(3, 6), "whole": base, "row": base[0]}
    checkpoint = checkpoint_in(tmp_path)
    save_alone(checkpoint.model_shards, {"model": state})
    convert(checkpoint.path, verify=True)
    loaded = safetensors.torch.load_file(checkpoint.model_file)
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {name: bits(t) for name, t in state.items()}


def test_gathered_tensor_in_padded_storage(tmp_path: Path) -> None:
    """A first dim that does not divide: the gathered tensor is a view, which other writers refuse."""
    checkpoint = checkpoint_in(tmp_path)

    def rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        full = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)]).full_tensor()
        dcp.save({"model": {"w": full}}, checkpoint_id=checkpoint.model_shards)

    run_world(rank, 2, init=True)
    convert(checkpoint.path)
    loaded = safetensors.torch.load_file(checkpoint.model_file)["w"]
    assert torch.equal(loaded, torch.arange(15.0).reshape(5, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_load_tied_as_the_host_loads_them(tmp_path: Path) -> None:
    """The host's `from_pretrained` is `load_model`, not strict by default."""
    saved, loaded = Tied(), Tied()
    checkpoint = checkpoint_in(tmp_path)
    save_alone(checkpoint.model_shards, {"model": saved.state_dict()})
    convert(checkpoint.path)
    missing, _ = safetensors.torch.load_model(loaded, checkpoint.model_file, strict=False)
    assert not missing
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(loaded.head.weight, saved.head.weight)


def test_names_of_wrappers_are_not_part_of_the_policy(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    save_alone(checkpoint.model_shards, {"model": {"_orig_mod.a._checkpoint_wrapped_module.weight": torch.ones(2)}})
    convert(checkpoint.path)
    assert list(safetensors.torch.load_file(checkpoint.model_file)) == ["a.weight"]


def test_shards_without_planner_data_are_named_by_their_keys(tmp_path: Path) -> None:
    import pickle

    checkpoint = checkpoint_in(tmp_path)
    save_alone(checkpoint.model_shards, {"model": {"a.weight": torch.ones(2)}})
    metadata = dcp.FileSystemReader(checkpoint.model_shards).read_metadata()
    metadata.planner_data = None
    (checkpoint.model_shards / ".metadata").write_bytes(pickle.dumps(metadata))
    convert(checkpoint.path)
    assert list(safetensors.torch.load_file(checkpoint.model_file)) == ["a.weight"]


def test_checkpoint_of_other_software_equals_what_torch_reads_and_loads_in_the_host(tmp_path: Path) -> None:
    from lerobot.policies.act.modeling_act import ACTPolicy

    checkpoint = layout.Checkpoint(copy_peer(tmp_path) / "fsdp2/000004")
    convert(checkpoint.path, verify=True)
    expected = torch_read(peer_dir() / "fsdp2/000004/pretrained_model/pytorch_model_fsdp_0")["model"]
    found = safetensors.torch.load_file(checkpoint.model_file)
    assert {name: (t.dtype, t.shape, bits(t)) for name, t in found.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in expected.items()
    }
    policy = ACTPolicy.from_pretrained(checkpoint.pretrained, strict=True)
    loaded = policy.state_dict()
    assert set(loaded) == set(expected)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    batch = {"observation.state": torch.zeros(1, 6), "observation.environment_state": torch.zeros(1, 4)}
    assert policy.select_action(batch).shape == (1, 6)


def test_output_is_a_new_directory_that_the_host_loads(tmp_path: Path) -> None:
    from lerobot.policies.act.modeling_act import ACTPolicy

    source = copy_peer(tmp_path) / "fsdp2/000004"
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    output = tmp_path / "new" / "out"
    result = convert(source, output=output)
    assert result.path == output / "model.safetensors"
    names = {path.name for path in (source / "pretrained_model").iterdir() if path.is_file()}
    assert {path.name for path in output.iterdir()} == names | {"model.safetensors"}
    assert all((output / name).read_bytes() == (source / "pretrained_model" / name).read_bytes() for name in names)
    assert ACTPolicy.from_pretrained(output, strict=True)
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def small(folder: Path) -> layout.Checkpoint:
    checkpoint = checkpoint_in(folder)
    save_alone(checkpoint.model_shards, {"model": {"a": torch.arange(6.0), "b": torch.ones(2, 2)}})
    return checkpoint


def test_output_that_exists_is_refused(tmp_path: Path) -> None:
    checkpoint = small(tmp_path)
    (tmp_path / "out").mkdir()
    convert(checkpoint.path, output=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--output=.*exists already"):
        convert(checkpoint.path, output=tmp_path / "out")
    with pytest.raises(ConfigError, match="--delete-dcp"):
        convert(checkpoint.path, output=tmp_path / "other", delete_dcp=True)


def test_delete_dcp_verifies_and_then_removes_the_shards(tmp_path: Path) -> None:
    checkpoint = small(tmp_path)
    result = convert(checkpoint.path, delete_dcp=True)
    assert result.deleted_dcp and result.verified
    assert torch.equal(safetensors.torch.load_file(checkpoint.model_file)["a"], torch.arange(6.0))
    assert not checkpoint.model_shards.exists()
    assert not any(path.name.startswith(".") for path in checkpoint.pretrained.iterdir())
    again = convert(checkpoint.path)
    assert (again.converted, again.tensors, again.path) == (False, 2, checkpoint.model_file)


def a_disk_that_stores_one_wrong_byte(write: Callable) -> Callable:
    def pwrite(descriptor: int, data: bytes, position: int) -> int:
        count = write(descriptor, data, position)
        if bytes(data[:4]) == torch.ones(1).numpy().tobytes():
            write(descriptor, b"\x01", position)
        return count

    return pwrite


def test_file_that_reads_back_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = small(tmp_path)
    checkpoint.model_file.write_bytes(b"old")
    monkeypatch.setattr(os, "pwrite", a_disk_that_stores_one_wrong_byte(os.pwrite))
    with pytest.raises(CheckpointError, match="'b' reads back differently"):
        convert(checkpoint.path, delete_dcp=True)
    assert checkpoint.model_file.read_bytes() == b"old"
    assert checkpoint.model_shards.exists()
    assert not layout.staging_path(checkpoint.model_file).exists()


@pytest.mark.parametrize("output", [None, "out"])
def test_full_disk_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None) -> None:
    checkpoint = small(tmp_path)
    checkpoint.model_file.write_bytes(b"old")
    target = None if output is None else tmp_path / output

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="No space left"):
        convert(checkpoint.path, output=target)
    assert checkpoint.model_file.read_bytes() == b"old"
    assert sorted(tmp_path.rglob("*")) == before


def test_leftovers_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    checkpoint = small(tmp_path)
    layout.staging_path(checkpoint.model_file).write_bytes(b"half" * 1000)
    layout.staging_path(tmp_path / "out").mkdir()
    (layout.staging_path(tmp_path / "out") / "stale").write_text("")
    convert(checkpoint.path, verify=True)
    convert(checkpoint.path, output=tmp_path / "out", verify=True)
    assert not (tmp_path / "out" / "stale").exists()
    assert not layout.staging_path(checkpoint.model_file).exists()


def test_damaged_shard_leaves_the_old_file(tmp_path: Path) -> None:
    checkpoint = small(tmp_path)
    checkpoint.model_file.write_bytes(b"old")
    shard = checkpoint.model_shards / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="__0_0.distcp: is truncated"):
        convert(checkpoint.path)
    assert checkpoint.model_file.read_bytes() == b"old"


BAD_STATES = {
    "a value that is no tensor": ({"model": {"a": torch.ones(1), "extra": 3}}, "'model.extra' is no tensor"),
    "two models": ({name: {"model": {"a": torch.ones(1)}} for name in "ab"}, "more than one model: a.model"),
    "no model": ({"optimizer": {"a": torch.ones(1)}}, "holds no tensors of a model"),
    "a dtype without a name": ({"model": {"a": torch.ones(1, dtype=torch.complex128)}}, "complex128"),
    "a reserved name": ({"model": {"__metadata__": torch.ones(1)}}, "'__metadata__', which is taken"),
    "one name twice": ({"model": {"a": torch.ones(1), "_orig_mod.a": torch.ones(1)}}, "'a', which is taken"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_what_no_weights_file_can_hold_is_refused(tmp_path: Path, case: str) -> None:
    state, expected = BAD_STATES[case]
    checkpoint = checkpoint_in(tmp_path)
    with pytest.warns(UserWarning):
        dcp.save(state, checkpoint_id=checkpoint.model_shards, no_dist=True)
    with pytest.raises(CheckpointError, match=expected):
        convert(checkpoint.path)
    assert not checkpoint.model_file.exists()


def test_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds neither pytorch_model_fsdp_0 nor model.safetensors"):
        convert(checkpoint_in(tmp_path).path)


def test_damaged_file_and_no_shards_is_not_called_done(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    checkpoint.model_file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        convert(checkpoint.path)


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = convert(small(tmp_path).path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (result.bytes, result.bytes)


class TestLayout:
    """In this file because nothing but names is in that module."""

    def test_names_are_the_hosts(self) -> None:
        from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
        from lerobot.configs.train import TRAIN_CONFIG_NAME
        from lerobot.utils import constants

        assert layout.CHECKPOINTS_DIR == constants.CHECKPOINTS_DIR
        assert layout.LAST_LINK == constants.LAST_CHECKPOINT_LINK
        assert layout.PRETRAINED_DIR == constants.PRETRAINED_MODEL_DIR
        assert layout.TRAINING_STATE_DIR == constants.TRAINING_STATE_DIR
        assert layout.OPTIMIZER_FILE == constants.OPTIMIZER_STATE
        assert layout.OPTIMIZER_GROUPS == constants.OPTIMIZER_PARAM_GROUPS
        assert layout.SCHEDULER_FILE == constants.SCHEDULER_STATE
        assert layout.RNG_FILE == constants.RNG_STATE
        assert layout.STEP_FILE == constants.TRAINING_STEP
        assert layout.MODEL_FILE == SAFETENSORS_SINGLE_FILE
        assert layout.POLICY_CONFIG == CONFIG_NAME
        assert layout.TRAIN_CONFIG == TRAIN_CONFIG_NAME

    @pytest.mark.parametrize(("total", "step"), [(8, 4), (100_000, 100_000), (1_000_000, 5), (12_345_678, 1_234_567)])
    def test_step_directory_is_the_hosts(self, total: int, step: int) -> None:
        from lerobot.common.train_utils import get_step_checkpoint_dir

        assert layout.step_dir(Path("out"), total, step) == get_step_checkpoint_dir(Path("out"), total, step)

    def test_locate_accepts_every_form(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint = small(tmp_path)
        last = layout.last_link(tmp_path)
        older = Path(shutil.copytree(checkpoint.path, checkpoint.path.with_name("000003")))
        last.symlink_to(checkpoint.path.name)
        staging = layout.staging_dir(tmp_path, 8, 8)
        shutil.copytree(checkpoint.path, staging)
        forms = [tmp_path, tmp_path / "checkpoints", last, last / "pretrained_model", checkpoint.path]
        forms += [checkpoint.pretrained, checkpoint.train_config, checkpoint.model_shards, str(last)]
        forms += [last / "pretrained_model" / "train_config.json", last / "pretrained_model" / "pytorch_model_fsdp_0"]
        assert {layout.locate(form).path.resolve() for form in forms} == {checkpoint.path.resolve()}
        for inside in (
            tmp_path,
            tmp_path / "checkpoints",
            checkpoint.path,
            checkpoint.pretrained,
            checkpoint.model_shards,
        ):
            monkeypatch.chdir(inside)
            assert layout.locate(".").path.resolve() == checkpoint.path.resolve(), inside
        assert layout.locate("..").path.resolve() == checkpoint.path.resolve()
        assert layout.locate("../../pretrained_model").path.resolve() == checkpoint.path.resolve()
        last.unlink()
        assert layout.locate(tmp_path).path == checkpoint.path
        shutil.rmtree(checkpoint.path)
        assert layout.locate(tmp_path).path == older
        with pytest.raises(ConfigError, match="never finished"):
            layout.locate(staging)

    @pytest.mark.parametrize("name", ["nothing", "empty", "empty/file", "run/checkpoints/000001/training_state"])
    def test_locate_refuses_the_rest(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "file").write_text("")
        (checkpoint_in(tmp_path / "run").path.with_name("000001") / "training_state").mkdir(parents=True)
        with pytest.raises(ConfigError, match=f"^--config_path={tmp_path / name}: .*; give a step directory"):
            layout.locate(tmp_path / name, flag="--config_path")

    def test_rank_files_differ_from_the_hosts(self) -> None:
        checkpoint = layout.Checkpoint(Path("c"))
        files = {checkpoint.rng_file, *map(checkpoint.rank_rng_file, range(3))}
        assert len(files) == 4

    def test_module_knows_nothing_of_torch(self) -> None:
        import subprocess
        import sys

        script = "import sys, json, lerobot_parallel.checkpoint.layout; print(json.dumps(list(sys.modules)))"
        modules = json.loads(subprocess.check_output([sys.executable, "-c", script]))
        assert not {"torch", "lerobot", "numpy"} & set(modules)
