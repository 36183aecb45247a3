"""A weights file becomes shards that torch and the engine load, and that convert back to the same bytes."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert import convert, shard, to_dcp
from lerobot_parallel.checkpoint.resume import load_weights
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError
from tests.checkpoint.test_convert import tensors
from tests.support.datasets import copy_peer, peer_dir
from tests.support.shards import all_bits, checkpoint_in, torch_read
from tests.support.toy import make_toy
from tests.support.world import run_world

FILES = {
    "with the metadata that transformers want": lambda: safetensors.torch.save(tensors(), {"format": "pt"}),
    "as the host writes it": lambda: safetensors.torch.save({"b": torch.ones(3), "a": torch.zeros(2).bfloat16()}),
    "in an order of its own": lambda: own_order(),
}


def own_order() -> bytes:
    """Valid, with spaces in the header, and no library would write it like this."""
    content = {
        "z": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "__metadata__": {"what": "ever", "format": "pt"},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + torch.arange(3.0).numpy().tobytes()


def checkpoint_with(folder: Path, data: bytes) -> layout.Checkpoint:
    checkpoint = checkpoint_in(folder)
    checkpoint.model_file.write_bytes(data)
    return checkpoint


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("file", FILES)
def test_round_trip_gives_the_same_bytes(tmp_path: Path, file: str, jobs: int) -> None:
    data = FILES[file]()
    checkpoint = checkpoint_with(tmp_path, data)
    result = to_dcp(checkpoint.path, verify=True, jobs=jobs)
    assert result.path == checkpoint.model_shards
    expected = safetensors.torch.load(data)
    assert all_bits(torch_read(checkpoint.model_shards)["model"]) == all_bits(expected)
    checkpoint.model_file.unlink()
    assert convert(checkpoint.path, verify=True).tensors == len(expected)
    assert checkpoint.model_file.read_bytes() == data


def test_kept_header_is_not_believed_where_the_shards_are_others(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, own_order())
    to_dcp(checkpoint.path)
    expected = safetensors.torch.load(own_order())
    for header in (b"", b"\0" * 8, own_order()[:-12].replace(b'"z"', b'"y"'), b"\xff" * 9 + own_order()):
        (checkpoint.model_shards / layout.SOURCE_HEADER).write_bytes(header)
        convert(checkpoint.path)
        assert all_bits(safetensors.torch.load_file(checkpoint.model_file)) == all_bits(expected)


def test_the_hosts_checkpoint_round_trips(tmp_path: Path) -> None:
    source = copy_peer(tmp_path) / "host1/000004"
    to_dcp(source, verify=True)
    output = convert(source, output=tmp_path / "back", verify=True).path
    assert output.read_bytes() == (peer_dir() / "host1/000004/pretrained_model/model.safetensors").read_bytes()


def test_large_items_have_their_sizes_in_the_long_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of more than 2 GiB, made small here."""
    monkeypatch.setattr(shard, "_LARGE", 0)
    checkpoint = checkpoint_with(tmp_path, FILES["with the metadata that transformers want"]())
    to_dcp(checkpoint.path, verify=True)
    assert all_bits(torch_read(checkpoint.model_shards)["model"]) == all_bits(tensors())


def test_several_files_become_one_set_of_shards(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, safetensors.torch.save(tensors()))
    to_dcp(checkpoint.path)
    convert(checkpoint.path, output=tmp_path / "parts", max_shard_size=100)
    to_dcp(tmp_path / "parts", output=tmp_path / "back", verify=True)
    assert all_bits(torch_read(tmp_path / "back" / layout.MODEL_SHARDS)["model"]) == all_bits(tensors())
    index = tmp_path / "parts" / layout.MODEL_INDEX
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(CheckpointError, match="is not the name of a file of weights beside it"):
        to_dcp(tmp_path / "parts", output=tmp_path / "again")


WORLDS = {"1": (1, (1, 1)), "3": (3, (1, 3)), "2x2": (4, (2, 2))}


@pytest.mark.parametrize("world", WORLDS)
def test_the_engine_loads_the_shards_on_any_topology(tmp_path: Path, warmed: None, world: str) -> None:
    nprocs, degrees = WORLDS[world]
    checkpoint = checkpoint_in(tmp_path)
    make_toy(seed=3).save_pretrained(checkpoint.pretrained)
    to_dcp(checkpoint.path)
    checkpoint.model_file.unlink()

    def rank() -> dict:
        policy = make_toy(seed=5)
        if nprocs > 1:
            mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("replicate", "shard"))
            ignored = {policy.gain}
            fully_shard(policy, mesh=mesh if degrees[0] > 1 else mesh["shard"], ignored_params=ignored)
        load_weights(policy, checkpoint)
        full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in policy.state_dict().items()}
        return all_bits({name: tensor.detach() for name, tensor in full.items()})

    expected = all_bits(make_toy(seed=3).state_dict())
    assert all(state == expected for state in run_world(rank, nprocs, init=True))


def test_refusals(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, own_order())
    before = sorted(tmp_path.rglob("*"))
    assert not to_dcp(checkpoint.path, dry_run=True).converted
    assert sorted(tmp_path.rglob("*")) == before
    to_dcp(checkpoint.path)
    with pytest.raises(ConfigError, match="--to=dcp.*exists already"):
        to_dcp(checkpoint.path)
    with pytest.raises(ConfigError, match="--output.*exists already"):
        to_dcp(checkpoint.path, output=checkpoint.pretrained)
    checkpoint.model_file.write_bytes(own_order()[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        to_dcp(checkpoint.path, output=tmp_path / "out")
    checkpoint.model_file.unlink()
    with pytest.raises(CheckpointError, match=r"holds no model.safetensors"):
        to_dcp(checkpoint.path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_that_read_back_differently_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoint_with(tmp_path, own_order())
    write = shard._copy

    def wrong(tensor: object, out: object) -> None:
        write(tensor, _Flipping(out) if tensor.name == "a" else out)

    monkeypatch.setattr(shard, "_copy", wrong)
    with pytest.raises(CheckpointError, match="'a' reads back differently from the file"):
        to_dcp(checkpoint.path, verify=True)
    assert not checkpoint.model_shards.exists()


class _Flipping:
    def __init__(self, out: object) -> None:
        self.out = out

    def write(self, data: bytes) -> None:
        self.out.write(bytes([data[0] ^ 1]) + data[1:])
