"""The loss scale of fp16 goes on from where it was."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch

from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.manifest import Manifest
from lerobot_parallel.checkpoint.resume import load_scaler
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from tests.support.checkpoints import save_toy, toy_run
from tests.support.world import run_world


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


def _step(scaler: torch.amp.GradScaler, gradient: float) -> float:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.fixture
def scaler() -> torch.amp.GradScaler:
    """Halved once, and two good steps on its way to the next doubling."""
    used = _scaler()
    assert [_step(used, gradient) for gradient in (float("inf"), 1.0, 1.0)] == [512.0] * 3
    return used


def _saved(scaler: torch.amp.GradScaler | None, folder: Path) -> Checkpoint:
    def save() -> Path:
        return save_toy(dataclasses.replace(toy_run(folder), scaler=scaler), 1)

    return Checkpoint(run_world(save, 1)[0])


def test_a_resumed_scale_grows_at_the_same_step(scaler: torch.amp.GradScaler, tmp_path: Path, warmed: None):
    checkpoint = _saved(scaler, tmp_path)
    assert "training_state/scaler_state.json" in Manifest.read(checkpoint).files
    resumed = _scaler()
    load_scaler(resumed, checkpoint)
    assert resumed.state_dict() == scaler.state_dict()
    assert [_step(s, 1.0) for s in (resumed, scaler)] == [1024.0] * 2


def test_without_a_saved_scale_it_begins_anew_and_says_so(
    tmp_path: Path, warmed: None, caplog: pytest.LogCaptureFixture
):
    checkpoint = _saved(None, tmp_path)
    assert not checkpoint.scaler_file.exists()
    load_scaler(None, checkpoint)
    fresh = _scaler()
    with caplog.at_level(logging.INFO):
        load_scaler(fresh, checkpoint)
    assert fresh.state_dict() == _scaler().state_dict()
    (said,) = caplog.messages
    assert "has no loss scale of fp16, it begins at 1024" in said


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"scale": "1", **dict.fromkeys("abcd", 1)}), "null"])
def test_a_file_that_is_no_scale_is_named(tmp_path: Path, text: str):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.training_state.mkdir()
    checkpoint.scaler_file.write_text(text)
    with pytest.raises(CheckpointError, match="scaler_state.json: is no state of a loss scale"):
        load_scaler(_scaler(), checkpoint)
