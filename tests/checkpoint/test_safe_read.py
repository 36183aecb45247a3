"""What a checkpoint says is checked, and nothing in it is executed."""

import dataclasses
import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from lerobot_parallel.checkpoint.safe_read import (
    CheckpointError,
    bytes_entries,
    load,
    read_metadata,
    read_tensor,
    tensor_entries,
)
from tests.support.datasets import peer_dir
from tests.support.world import run_world

SHARD = "__0_0.distcp"


def state() -> dict:
    return {"model": {"weight": torch.arange(12.0).reshape(4, 3), "scale": torch.tensor(2.5)}, "lr": 1e-3}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "shards"
    with pytest.warns(UserWarning):
        dcp.save(state(), checkpoint_id=directory, no_dist=True)
    return directory


def rewrite(shards: Path, change: Callable[[object], None]) -> None:
    """Changes the metadata as someone who has torch would."""
    metadata = FileSystemReader(shards).read_metadata()
    change(metadata)
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))


def refusal(shards: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_metadata(shards)
    assert "\n" not in str(refused.value)
    return str(refused.value)


class Marker:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, call: Callable, *args: object) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple:
        return self.call, self.args


def test_metadata_equals_what_torch_reads(shards: Path) -> None:
    mine, expected = read_metadata(shards), FileSystemReader(shards).read_metadata()
    assert dataclasses.replace(mine, storage_meta=None) == dataclasses.replace(expected, storage_meta=None)
    assert set(tensor_entries(mine)) == {"model.weight", "model.scale"}
    assert set(bytes_entries(mine)) == {"lr"}


@pytest.mark.parametrize("part", ["pretrained_model/pytorch_model_fsdp_0", "training_state/optimizer_0"])
def test_metadata_of_other_software_equals_what_torch_reads(part: str) -> None:
    directory = peer_dir() / "fsdp2/000004" / part
    mine, expected = read_metadata(directory), FileSystemReader(directory).read_metadata()
    assert dataclasses.replace(mine, storage_meta=None) == dataclasses.replace(expected, storage_meta=None)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_is_read(shards: Path, protocol: int) -> None:
    metadata = FileSystemReader(shards).read_metadata()
    (shards / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    assert read_metadata(shards).state_dict_metadata == metadata.state_dict_metadata


def test_enum_members_as_python_3_11_pickled_them_are_read(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)))
    metadata = FileSystemReader(shards).read_metadata()
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    assert b"getattr" in (shards / ".metadata").read_bytes()
    assert read_metadata(shards).state_dict_metadata == metadata.state_dict_metadata


def test_load_restores_tensors_and_values(shards: Path) -> None:
    target = {"model": {"weight": torch.zeros(4, 3), "scale": torch.tensor(0.0)}, "lr": 0.0}
    load(target, shards)
    assert torch.equal(target["model"]["weight"], state()["model"]["weight"])
    assert target["model"]["scale"] == 2.5
    assert target["lr"] == 1e-3


HOSTILE = {
    "os.system": lambda marker: Marker(os.system, f"touch {marker}"),
    "eval": lambda marker: Marker(eval, f"open({str(marker)!r}, 'w')"),
    "exec": lambda marker: Marker(exec, f"open({str(marker)!r}, 'w')"),
    "open": lambda marker: Marker(open, str(marker), "w"),
    "torch.save": lambda marker: Marker(torch.save, 1, str(marker)),
    "torch.load": lambda marker: Marker(torch.load, str(marker)),
    "torch.hub.load": lambda marker: Marker(torch.hub.load, str(marker), "x"),
    "path method": lambda marker: Marker(Path.touch, marker),
    "import": lambda marker: Marker(__import__, "this"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["root", "field"])
def test_hostile_pickle_is_refused_and_runs_nothing(shards: Path, tmp_path: Path, name: str, place: str) -> None:
    marker = tmp_path / "executed"
    bomb = HOSTILE[name](marker)
    metadata = bomb if place == "root" else FileSystemReader(shards).read_metadata()
    if place == "field":
        metadata.planner_data = {"model.weight": bomb}
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    text = refusal(shards)
    assert str(shards / ".metadata") in text
    assert not marker.exists()


def test_the_hostile_pickles_would_have_run(tmp_path: Path) -> None:
    """Else the test above shows nothing."""
    pickle.loads(pickle.dumps(HOSTILE["os.system"](tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_a_method_taken_by_getattr_from_an_allowed_class_is_refused(shards: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    path = b"(cpathlib\nPosixPath\nV" + str(marker).encode() + b"\no"
    (shards / ".metadata").write_bytes(
        b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nVtouch\ntR(" + path + b"tR."  # getattr(PosixPath, "touch")(path)
    )
    assert str(shards / ".metadata") in refusal(shards)
    assert not marker.exists()
    pickle.loads((shards / ".metadata").read_bytes())
    assert marker.exists(), "the test shows nothing"


def test_dotted_names_and_lazy_modules_of_torch_are_refused(shards: Path) -> None:
    for name in ("serialization.load", "_dynamo", "Tensor", "os.system"):
        (shards / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93.")
        assert f"torch.{name}" in refusal(shards)


def test_a_pickle_cannot_change_the_classes_it_names(shards: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    module = b"torch.distributed.checkpoint.metadata"
    (shards / ".metadata").write_bytes(
        b"\x80\x04c" + module + b"\nMetadata\nN}\x8c\x08__init__K\x01s\x86b."  # BUILD with (None, {"__init__": 1})
    )
    refusal(shards)
    assert callable(Metadata.__init__) and Metadata({}).state_dict_metadata == {}


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"not a pickle", b"\x80\x04N.", b"\x80\x04]" + b"]" * 5, b"\0" * 99]
)
def test_garbage_is_an_error_that_names_the_file(shards: Path, data: bytes) -> None:
    (shards / ".metadata").write_bytes(data)
    assert str(shards / ".metadata") in refusal(shards)


def test_truncated_metadata_is_refused(shards: Path) -> None:
    path = shards / ".metadata"
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        refusal(shards)


def test_missing_metadata_is_named(shards: Path) -> None:
    (shards / ".metadata").unlink()
    assert f"{shards / '.metadata'}: is missing" in refusal(shards)


def test_missing_shard_is_named(shards: Path) -> None:
    (shards / SHARD).unlink()
    assert f"{shards / SHARD}: is missing" in refusal(shards)


def test_truncated_shard_is_named(shards: Path) -> None:
    whole = (shards / SHARD).read_bytes()
    (shards / SHARD).write_bytes(whole[:-1])
    assert f"{shards / SHARD}: is truncated: {len(whole) - 1} bytes" in refusal(shards)


def weight(metadata: object) -> TensorStorageMetadata:
    return metadata.state_dict_metadata["model.weight"]


def set_path(metadata: object, name: object) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = name


def set_info(metadata: object, **values: object) -> None:
    vars(metadata.storage_data[MetadataIndex("model.weight", [0, 0])]).update(values)


def chunk(offsets: tuple, sizes: tuple) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets, sizes)


LIES = {
    "a name above": (lambda m: set_path(m, "../shards/" + SHARD), "is not the name of a file"),
    "dots": (lambda m: set_path(m, ".."), "is not the name of a file"),
    "an absolute name": (lambda m: set_path(m, "/etc/passwd"), "is not the name of a file"),
    "a windows name": (lambda m: set_path(m, "a\\b"), "is not the name of a file"),
    "no name": (lambda m: set_path(m, ""), "is not the name of a file"),
    "a number as name": (lambda m: set_path(m, 1), "is a int, not str"),
    "a negative offset": (lambda m: set_info(m, offset=-1), "has the offset -1"),
    "a negative length": (lambda m: set_info(m, length=-1), "the length -1"),
    "an offset beyond the end": (lambda m: set_info(m, offset=1 << 40), "is truncated"),
    "an item too small for its tensor": (lambda m: set_info(m, length=47), "does not fit into the 47 bytes"),
    "a compressed item": (lambda m: set_info(m, transform_descriptors=["stream.zstd"]), "compressed"),
    "an absurd size": (lambda m: setattr(weight(m), "size", torch.Size([1 << 60, 3])), "hold 12 of"),
    "an absurd chunk": (
        lambda m: (setattr(weight(m), "size", (1 << 60,)), setattr(weight(m), "chunks", [chunk((0,), (1 << 60,))])),
        "is stored",
    ),
    "a negative size": (lambda m: setattr(weight(m), "size", (-4, -3)), "is no size"),
    "a size that is no number": (lambda m: setattr(weight(m), "size", ("4", 3)), "is no size"),
    "a size that is a flag": (lambda m: setattr(weight(m), "size", (True, 12)), "is no size"),
    "a chunk out of bounds": (lambda m: setattr(weight(m), "chunks", [chunk((1, 0), (4, 3))]), "is not within (4, 3)"),
    "a chunk of other dims": (lambda m: setattr(weight(m), "chunks", [chunk((0,), (12,))]), "is not within (4, 3)"),
    "no chunks": (lambda m: setattr(weight(m), "chunks", []), "hold 0 of 12"),
    "half of the chunks": (lambda m: setattr(weight(m), "chunks", [chunk((0, 0), (2, 3))]), "hold 6 of 12"),
    "overlapping chunks": (
        lambda m: setattr(weight(m), "chunks", [chunk((0, 0), (3, 3)), chunk((2, 0), (1, 3))]),
        "overlap",
    ),
    "chunks that overlap across": (
        lambda m: setattr(weight(m), "chunks", [chunk((0, 0), (4, 2)), chunk((1, 1), (2, 2))]),
        "overlap",
    ),
    "a chunk that is stored nowhere": (
        lambda m: m.storage_data.pop(MetadataIndex("model.weight", [0, 0])),
        "says nothing about where the shard at (0, 0)",
    ),
    "a value that is stored nowhere": (lambda m: m.storage_data.pop(MetadataIndex("lr")), "where 'lr' is stored"),
    "a dtype that is none": (lambda m: setattr(weight(m).properties, "dtype", "float32"), "properties"),
    "entries that are no dict": (lambda m: setattr(m, "state_dict_metadata", [1]), "state_dict_metadata is a list"),
    "storage that is no dict": (lambda m: setattr(m, "storage_data", None), "storage_data is a NoneType"),
    "planner data that is no path": (lambda m: setattr(m, "planner_data", {"lr": "lr"}), "planner_data"),
    "another object": (lambda m: m.state_dict_metadata.update(lr=m.storage_meta), "holds a StorageMeta"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_refused(shards: Path, lie: str) -> None:
    change, expected = LIES[lie]
    rewrite(shards, change)
    assert expected in refusal(shards)


@pytest.mark.parametrize("cuts", [1000, 1])
def test_many_shards_are_checked_quickly(shards: Path, cuts: int) -> None:
    """Every pair of a thousand shards would be tested against each other without the sweep."""
    size = (2, 1000)

    def cut(metadata: object) -> None:
        entry = weight(metadata)
        entry.size = torch.Size(size)
        width = size[1] // cuts
        entry.chunks = [chunk((0, start), (2, width)) for start in range(0, size[1], width)]
        entry.chunks.append(entry.chunks[0])  # a replica's copy

    rewrite(shards, cut)
    assert "overlap" not in refusal(shards) and "hold" not in refusal(shards)


def corrupt(path: Path, needle: bytes, patch: bytes) -> None:
    data = path.read_bytes()
    assert needle in data
    path.write_bytes(data.replace(needle, patch))


def test_damaged_shard_is_named(shards: Path) -> None:
    corrupt(shards / SHARD, b"PK\x05\x06", b"PK\x00\x00")
    metadata = read_metadata(shards)
    with pytest.raises(CheckpointError, match=SHARD):
        read_tensor(shards, metadata, "model.weight")
    with pytest.raises(CheckpointError, match=SHARD):
        load({"model": {"weight": torch.zeros(4, 3)}}, shards)


def test_tensor_of_other_shape_or_dtype_than_the_metadata_says_is_refused(shards: Path) -> None:
    rewrite(shards, lambda m: setattr(weight(m).properties, "dtype", torch.int32))
    with pytest.raises(CheckpointError, match="model.weight.*float32.*int32"):
        read_tensor(shards, read_metadata(shards), "model.weight")


class Call:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def replace_item(shards: Path, key: str, value: object) -> None:
    """Stores another object in place of an item, as `torch.save` would write it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    assert zipfile.is_zipfile(buffer)
    path = shards / SHARD
    offset = path.stat().st_size
    with path.open("ab") as file:
        file.write(buffer.getvalue())

    def point(metadata: object) -> None:
        info = next(i for index, i in metadata.storage_data.items() if index.fqn == key)
        info.offset, info.length = offset, len(buffer.getvalue())

    rewrite(shards, point)


@pytest.mark.parametrize(("key", "value"), [("model.weight", torch.zeros(4, 3)), ("lr", 0.0)])
def test_hostile_item_is_refused_and_runs_nothing(shards: Path, tmp_path: Path, key: str, value: object) -> None:
    marker = tmp_path / "executed"
    replace_item(shards, key, Call(f"touch {marker}"))
    target = {"model": {"weight": value}} if key == "model.weight" else {key: value}
    with pytest.raises(CheckpointError, match=SHARD):
        load(target, shards)
    if key == "model.weight":
        with pytest.raises(CheckpointError, match=SHARD):
            read_tensor(shards, read_metadata(shards), key)
    assert not marker.exists()


def test_item_that_is_no_tensor_is_refused(shards: Path) -> None:
    replace_item(shards, "model.weight", [0.0] * 20)
    with pytest.raises(CheckpointError, match="model.weight.*no plain tensor"):
        read_tensor(shards, read_metadata(shards), "model.weight")


def test_missing_key_and_other_shape_are_one_line(shards: Path) -> None:
    for target in ({"nothing": torch.zeros(1)}, {"model": {"weight": torch.zeros(3, 3)}}):
        with pytest.raises(CheckpointError, match=str(shards)) as refused:
            load(target, shards)
        assert "\n" not in str(refused.value)


def test_error_is_picklable() -> None:
    """It travels between ranks."""
    error = pickle.loads(pickle.dumps(CheckpointError(Path("/a/b"), "is\n bad")))
    assert str(error) == "/a/b: is bad"


def test_an_error_on_one_rank_is_raised_on_all(shards: Path) -> None:
    broken = shards.with_name("broken")
    shutil.copytree(shards, broken)
    (broken / ".metadata").write_bytes(b"garbage")
    damaged = shards.with_name("damaged")
    shutil.copytree(shards, damaged)
    corrupt(damaged / SHARD, b"PK\x05\x06", b"PK\x00\x00")

    def rank() -> list[str]:
        mine = torch.distributed.get_rank() == 1
        texts = []
        for bad in (broken, damaged):
            try:
                load({"model": {"weight": torch.zeros(4, 3)}}, bad if mine else shards)
                texts.append("")
            except CheckpointError as error:
                texts.append(str(error))
        return texts

    for texts in run_world(rank, 2, init=True):
        assert str(broken / ".metadata") in texts[0]
        assert str(damaged / SHARD) in texts[1]
