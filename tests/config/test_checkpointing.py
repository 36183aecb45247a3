"""`--checkpoint.*`, and the files that a `--config_path` means."""

import json
from pathlib import Path

import pytest

from lerobot_parallel import hooks
from lerobot_parallel.config.checkpointing import CheckpointConfig, check_checkpointing
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.source import config_file, follow_pointer, read_pointer


def test_the_flags_and_their_defaults():
    assert vars(CheckpointConfig()) == {"async_save": False, "keep_last": None, "verify": True, "auto_resume": False}


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(keep: int):
    with pytest.raises(ConfigError, match=f"--checkpoint.keep_last={keep}"):
        check_checkpointing(CheckpointConfig(keep_last=keep))


def test_every_form_of_a_config_path(tmp_path: Path):
    checkpoints = tmp_path / "run/checkpoints"
    for step in ("000001", "000002", "000003"):
        (checkpoints / step / "pretrained_model").mkdir(parents=True)
        (checkpoints / step / "pretrained_model/train_config.json").write_text("{}")
    expected = checkpoints / "000002/pretrained_model/train_config.json"
    (checkpoints / "last").write_text("000002\n")
    forms = [
        "run",
        "run/checkpoints",
        "run/checkpoints/last",
        "run/checkpoints/last/pretrained_model",
        "run/checkpoints/000002",
    ]
    for form in [*forms, "run/checkpoints/last/pretrained_model/train_config.json"]:
        assert config_file(str(tmp_path / form)) == expected, form
    (checkpoints / "last").unlink()
    assert config_file(str(checkpoints)) == checkpoints / "000003/pretrained_model/train_config.json"
    assert config_file(str(tmp_path / "nothing/at/all")) is None


@pytest.mark.parametrize("text", ["", "../../etc", "000002\n000003", "x" * 100, "\xff"])
def test_a_pointer_names_a_step_and_nothing_else(tmp_path: Path, text: str):
    (tmp_path / "last").write_text(text, encoding="latin-1")
    assert read_pointer(tmp_path / "last") is None
    assert follow_pointer(tmp_path / "last/pretrained_model") == tmp_path / "last/pretrained_model"


@pytest.mark.parametrize("form", ["run", "run/checkpoints", "run/checkpoints/last", "run/checkpoints/000002"])
def test_the_hook_finds_our_keys_behind_every_form(tmp_path: Path, form: str):
    folder = tmp_path / "run/checkpoints/000002/pretrained_model"
    folder.mkdir(parents=True)
    (tmp_path / "run/checkpoints/last").write_text("000002")
    config = folder / "train_config.json"
    for key, ours in (("parallelism", True), ("steps", False)):
        config.write_text(json.dumps({key: {}}))
        assert hooks.engine_requested(["--resume=true", f"--config_path={tmp_path / form}"]) == ours
