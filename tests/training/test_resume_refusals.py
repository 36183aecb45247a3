"""Directories that no run can go on from are refused like wrong flags: partial ones, foreign ones, broken ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import train_in_world
from tests.training.refusing import FSDP2, quiet, refusal, untouched  # noqa: F401
from tests.training.runs import toy_args


@pytest.fixture(scope="module")
def checkpoints(warmed: None, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Complete checkpoints of a sharded run and of one process, to be copied."""
    made = {}
    runs = {
        "sharded": (2, [FSDP2, "--accelerator.fsdp.wrap_modules=[ToyBlock]", "--checkpoint_format=safetensors_dcp"]),
        "whole": (1, ["--parallelism.dp_shard=1"]),
    }
    for name, (nprocs, flags) in runs.items():
        cwd = tmp_path_factory.mktemp(name)
        args = toy_args(small_dataset, "--steps=1", "--save_freq=1", "--policy.scheduler_warmup_steps=5", *flags)
        results = train_in_world(args, nprocs, cwd)
        assert [r.exitcode for r in results] == [0] * nprocs, results[0].describe()
        made[name] = cwd / "out/checkpoints/000001"
    return made


NEEDED = {
    "sharded": [
        "pretrained_model/config.json",
        "pretrained_model/train_config.json",
        "pretrained_model/model.safetensors",
        "pretrained_model/pytorch_model_fsdp_0/.metadata",
        "pretrained_model/pytorch_model_fsdp_0/__0_0.distcp",
        "pretrained_model/pytorch_model_fsdp_0/__1_0.distcp",
        "pretrained_model/policy_preprocessor.json",
        "pretrained_model/policy_preprocessor_step_*_normalizer_processor.safetensors",
        "pretrained_model/policy_postprocessor.json",
        "training_state/training_step.json",
        "training_state/scheduler_state.json",
        "training_state/optimizer_0/.metadata",
        "training_state/optimizer_0/__0_0.distcp",
        "training_state/optimizer_0/__1_0.distcp",
        "training_state",
    ],
    "whole": [
        "pretrained_model/config.json",
        "pretrained_model/train_config.json",
        "pretrained_model/model.safetensors",
        "pretrained_model/policy_preprocessor.json",
        "pretrained_model/policy_postprocessor.json",
        "pretrained_model/policy_postprocessor_step_*_unnormalizer_processor.safetensors",
        "training_state/training_step.json",
        "training_state/scheduler_state.json",
        "training_state/optimizer_state.safetensors",
        "training_state/optimizer_param_groups.json",
        "training_state",
    ],
}


def resume(checkpoint: Path, kind: str) -> list[str]:
    flags = [FSDP2] if kind == "sharded" else ["--parallelism.dp_shard=1"]
    return [
        "--resume=true",
        f"--config_path={checkpoint / 'pretrained_model'}",
        "--output_dir=out",
        "--steps=2",
        *flags,
    ]


def copied(checkpoint: Path, cwd: Path) -> Path:
    """Without its manifest, as other software writes it: nothing but its own config says what belongs to it."""
    copy = Path(shutil.copytree(checkpoint, cwd / checkpoint.name))
    (copy / "manifest.json").unlink()
    return copy


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NEEDED.items() for name in names])
def test_a_checkpoint_without_a_file_it_needs(
    untouched: None, checkpoints: dict[str, Path], tmp_path: Path, kind: str, name: str
):
    partial = copied(checkpoints[kind], tmp_path)
    (gone,) = partial.glob(name)
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    text = refusal(resume(partial, kind), tmp_path)
    assert str(partial) in text
    where = {
        ".metadata": "",
        "optimizer_state.safetensors": "no optimizer state",
        "training_state": "training_step.json",
    }
    assert where.get(gone.name, gone.name) in text


@pytest.mark.parametrize("name", ["training_state/rng_state.safetensors", "pretrained_model/policy_postprocessor.json"])
def test_a_checkpoint_without_a_file_of_its_manifest(
    untouched: None, checkpoints: dict[str, Path], tmp_path: Path, name: str
):
    partial = Path(shutil.copytree(checkpoints["whole"], tmp_path / "000001"))
    (partial / name).unlink()
    text = refusal(resume(partial, "whole"), tmp_path)
    assert text.startswith(f"--config_path={partial}")
    assert Path(name).name in text


@pytest.mark.parametrize("kind", NEEDED)
def test_nothing_else_is_asked_for(checkpoints: dict[str, Path], tmp_path: Path, kind: str):
    """What is left when everything needed is there resumes, so that the list above is the whole list."""
    complete = copied(checkpoints[kind], tmp_path)
    needed = {path for name in NEEDED[kind] for path in complete.glob(name) if path.is_file()}
    state_files = set(complete.glob("pretrained_model/policy_*.safetensors"))
    for path in [path for path in complete.rglob("*") if path.is_file()]:
        if path not in needed | state_files:
            path.unlink()
    nprocs = 2 if kind == "sharded" else 1
    results = train_in_world(resume(complete, kind), nprocs, tmp_path)
    assert [r.exitcode for r in results] == [0] * nprocs, results[0].describe()


def test_a_checkpoint_with_shards_cut_short(untouched: None, checkpoints: dict[str, Path], tmp_path: Path):
    partial = copied(checkpoints["sharded"], tmp_path)
    shard = partial / "pretrained_model/pytorch_model_fsdp_0/__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-200])
    assert "__1_0.distcp" in refusal(resume(partial, "sharded"), tmp_path)


@pytest.mark.parametrize("name", ["training_state/training_step.json", "pretrained_model/policy_preprocessor.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_checkpoint_with_a_broken_file(
    untouched: None, checkpoints: dict[str, Path], tmp_path: Path, name: str, content: str
):
    broken = copied(checkpoints["whole"], tmp_path)
    (broken / name).write_text(content)
    assert Path(name).name in refusal(resume(broken, "whole"), tmp_path)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "a folder with a config only": lambda folder: None,
    "a model from the hub": lambda folder: [
        (folder / name).write_text("{}") for name in ("config.json", "model.safetensors")
    ],
    "another tool's checkpoint": lambda folder: (folder.parent / "pytorch_model.bin").write_text("x"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_directory(untouched: None, checkpoints: dict[str, Path], tmp_path: Path, kind: str):
    folder = tmp_path / "some/pretrained_model"
    folder.mkdir(parents=True)
    shutil.copy(checkpoints["sharded"] / "pretrained_model/train_config.json", folder)
    FOREIGN[kind](folder)
    text = refusal(resume(tmp_path / "some", "sharded"), tmp_path)
    assert text.startswith(f"--config_path={tmp_path / 'some'}")
    assert "is no complete checkpoint, " in text
    assert "; name another one" in text


def test_an_unknown_key_that_is_switched_on(untouched: None, checkpoints: dict[str, Path], tmp_path: Path):
    later = copied(checkpoints["sharded"], tmp_path)
    file = later / "pretrained_model/train_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ema": {"enable": True}}))
    text = refusal(resume(later, "sharded"), tmp_path)
    assert text.startswith(f"--config_path={file}: its key ema=")
