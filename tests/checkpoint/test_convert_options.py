"""What is written on request: other dtypes, several files, tied names once; and what is refused or left out."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert import convert, copy, find_source
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError
from tests.support.shards import all_bits, checkpoint_in, checkpoint_of, save_alone

STATE = {
    "w": torch.linspace(-3, 3, 35).reshape(5, 7),
    "column": torch.arange(12.0).reshape(3, 4).t(),
    "half": torch.linspace(-1, 1, 9).bfloat16(),
    "eighth": torch.linspace(-1, 1, 6).to(torch.float8_e4m3fn),
    "double": torch.tensor(1 / 3, dtype=torch.float64),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_casts_floating_tensors_as_torch_does_and_no_others(tmp_path: Path, dtype: str) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    convert(checkpoint.path, dtype=dtype, verify=True)
    wanted = {n: t.to(DTYPES[dtype]) if t.is_floating_point() else t for n, t in STATE.items()}
    assert all_bits(safetensors.torch.load_file(checkpoint.model_file)) == all_bits(wanted)


def test_values_beyond_the_range_of_fp16_are_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"w": torch.tensor([1.0, 7e4]), "inf": torch.tensor([float("inf")])})
    with pytest.raises(CheckpointError, match="'w' holds values that are too large"):
        convert(checkpoint.path, dtype="fp16")
    assert not checkpoint.model_file.exists()
    convert(checkpoint.path, dtype="bf16")


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize(("piece", "band"), [(64, 16), (1000, 96)])
def test_pieces_bands_and_jobs_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, piece: int, band: int
) -> None:
    monkeypatch.setattr(copy, "PIECE", piece)
    monkeypatch.setattr(copy, "BAND", band)
    monkeypatch.setattr(copy, "_SHORTEST_RANGE", 1 << 30)
    state = STATE | {"deep": torch.randn(3, 5, 2, 7), "long": torch.randn(1, 1, 1000)}
    checkpoint = checkpoint_of(tmp_path, state)
    convert(checkpoint.path, jobs=jobs, verify=True)
    assert all_bits(safetensors.torch.load_file(checkpoint.model_file)) == all_bits(state)
    convert(checkpoint.path, jobs=jobs, verify=True, dtype="fp32")
    wanted = {n: t.float() if t.is_floating_point() else t for n, t in state.items()}
    assert all_bits(safetensors.torch.load_file(checkpoint.model_file)) == all_bits(wanted)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4, 5), (1, 1, 9), (2, 1, 6), (5, 0)])
@pytest.mark.parametrize("limit", [1, 2, 7, 1000])
def test_boxes_follow_each_other_and_cover_the_tensor(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = []
    for offsets, sizes in copy.boxes(shape, limit):
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert part.numel() <= limit
        parts.append(part.flatten())
    assert torch.equal(torch.cat(parts), whole.flatten())


def load_sharded(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / layout.MODEL_INDEX).read_text())
    state = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as opened:
            state[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    return state


def test_max_shard_size_gives_an_index_and_files_up_to_the_size(tmp_path: Path) -> None:
    state = {f"layer.{i}": torch.full((100,), float(i)) for i in range(5)} | {"big": torch.ones(700)}
    checkpoint = checkpoint_of(tmp_path, state)
    checkpoint.model_file.write_bytes(b"old")
    result = convert(checkpoint.path, max_shard_size=900, verify=True)
    assert result.path == checkpoint.pretrained / "model.safetensors.index.json"
    assert [file.name for file in result.files] == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert all_bits(load_sharded(checkpoint.pretrained)) == all_bits(state)
    assert not checkpoint.model_file.exists()
    again = convert(checkpoint.path, max_shard_size=10**6)
    assert again.path == checkpoint.model_file
    assert not [p for p in checkpoint.pretrained.iterdir() if "model-" in p.name or p.name == layout.MODEL_INDEX]


def test_index_is_what_transformers_tools_read(tmp_path: Path) -> None:
    from huggingface_hub import load_torch_model

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    source = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    checkpoint = checkpoint_of(tmp_path, source.state_dict())
    convert(checkpoint.path, output=tmp_path / "out", max_shard_size=60)
    load_torch_model(model, tmp_path / "out")
    assert all_bits(model.state_dict()) == all_bits(source.state_dict())


def test_tied_names_of_the_manifest_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    checkpoint = checkpoint_of(tmp_path, {"head": weight, "embed": weight, "z": torch.ones(1), "other": torch.ones(2)})
    tied = [["head", "embed"], ["z", "other"], ["z", "absent"]]
    checkpoint.manifest.write_text(json.dumps({"tied": tied}))
    result = convert(checkpoint.path, verify=True, output=tmp_path / "out")
    assert result.tied == {"head": "embed"}
    with safe_open(tmp_path / "out" / layout.MODEL_FILE, framework="pt") as file:
        assert sorted(file.keys()) == ["embed", "other", "z"]
        assert file.metadata() == {"format": "pt", "head": "embed"}


@pytest.mark.parametrize("content", ["", "[]", '{"tied": 3}', '{"tied": [3, ["a", 4]]}', "{}"])
def test_manifest_without_tied_names_changes_nothing(tmp_path: Path, content: str) -> None:
    checkpoint = checkpoint_of(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    checkpoint.manifest.write_text(content)
    assert convert(checkpoint.path, output=tmp_path / "out").tensors == 2


WEIGHTS = {"model.encoder.weight": torch.ones(2, 3), "head.bias": torch.zeros(2)}
PREFIXED = {f"model.{name}": tensor for name, tensor in WEIGHTS.items()}
OPTIMIZER = {"state": {"head.bias": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
FOREIGN = {
    "a nested model, optimizer beside": (
        {"model": WEIGHTS, "optimizer": OPTIMIZER, "step": 4},
        {"optimizer": 2, "step": 1},
    ),
    "names at the top": (WEIGHTS, {}),
    "names at the top, with a prefix of their own": (PREFIXED, {}),
    "names at the top, optimizer beside": (
        WEIGHTS | {"optimizer": OPTIMIZER, "lr_scheduler": {"n": 1}},
        {"lr_scheduler": 1, "optimizer": 2},
    ),
    "lightning": (
        {"state_dict": WEIGHTS, "optimizer_states": [OPTIMIZER], "epoch": 3},
        {"epoch": 1, "optimizer_states": 2},
    ),
    "torch's tutorial": ({"app": {"model": WEIGHTS, "optim": OPTIMIZER}}, {"app": 2}),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_shards_of_other_trainers(tmp_path: Path, case: str) -> None:
    state, beside = FOREIGN[case]
    save_alone(tmp_path / "shards", state)
    result = convert(tmp_path / "shards", output=tmp_path / "out", verify=True)
    expected = PREFIXED if "prefix" in case else WEIGHTS
    assert all_bits(safetensors.torch.load_file(result.path)) == all_bits(expected)
    assert result.left_out == beside
    assert result.source == tmp_path / "shards"


def test_shards_alone_need_an_output(tmp_path: Path) -> None:
    save_alone(tmp_path / "shards", WEIGHTS)
    with pytest.raises(ConfigError, match="--output.*a directory of shards alone"):
        convert(tmp_path / "shards")


def test_extra_state_that_is_no_tensor_is_left_out(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    save_alone(checkpoint.model_shards, {"model": {"a": torch.ones(1), "norm._extra_state": {"scale": 1}}})
    with pytest.raises(CheckpointError, match="is no tensor"):
        convert(checkpoint.path)
    save_alone(tmp_path / "shards", {"model": {"a": torch.ones(1), "norm._extra_state": 3}})
    assert convert(tmp_path / "shards", output=tmp_path / "out").left_out == {"model": 1}


def test_dry_run_writes_nothing_and_knows_the_sizes(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    planned = convert(checkpoint.path, dry_run=True, max_shard_size=64, delete_dcp=False)
    assert not planned.converted
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    written = convert(checkpoint.path, max_shard_size=64)
    assert [(f.name, f.bytes) for f in planned.files] == [(f.name, f.bytes) for f in written.files]
    assert all((checkpoint.pretrained / file.name).stat().st_size == file.bytes for file in written.files)


DELETIONS = {"dtype": {"dtype": "bf16"}, "max-shard-size": {"max_shard_size": 10}}


@pytest.mark.parametrize("option", DELETIONS)
def test_shards_are_not_deleted_where_something_would_be_lost(tmp_path: Path, option: str) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    with pytest.raises(ConfigError, match=f"--delete-dcp.*--{option}"):
        convert(checkpoint.path, delete_dcp=True, **DELETIONS[option])
    assert not checkpoint.model_file.exists() and checkpoint.model_shards.exists()


def test_shards_with_more_than_the_model_are_not_deleted(tmp_path: Path) -> None:
    checkpoint = checkpoint_in(tmp_path)
    save_alone(checkpoint.model_shards, {"model": WEIGHTS, "optimizer": OPTIMIZER})
    with pytest.raises(ConfigError, match="would delete optimizer too"):
        convert(checkpoint.path, delete_dcp=True)
    assert checkpoint.model_shards.exists()


def test_every_form_of_a_source_is_taken_and_named(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, WEIGHTS)
    layout.last_link(tmp_path).symlink_to(checkpoint.path.name)
    forms = [tmp_path, tmp_path / "checkpoints", layout.last_link(tmp_path), checkpoint.path, checkpoint.pretrained]
    assert {convert(form, dry_run=True).source for form in [*forms, checkpoint.model_shards]} == {checkpoint.path}
    out = convert(checkpoint.path, output=tmp_path / "out").path.parent
    assert find_source(out).weights() == [out / layout.MODEL_FILE]
    assert not convert(out).converted
