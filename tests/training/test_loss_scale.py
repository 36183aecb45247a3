"""A resumed run with a loss scale is the run that was not interrupted."""

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.training.runs import act_args, train


def _scaled() -> None:
    """The scaler of fp16, which needs a GPU, put into a run on a CPU; it doubles at every third step."""
    import torch

    from lerobot_parallel.training import assemble

    build = assemble.build_accelerator

    def with_scaler(*args: object, **kwargs: object) -> object:
        accelerator = build(*args, **kwargs)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return accelerator

    assemble.build_accelerator = with_scaler


def test_a_resumed_run_scales_as_the_one_that_was_not_interrupted(small_dataset: Path, tmp_path: Path, warmed: None):
    args = act_args(small_dataset, "--steps=7", "--save_freq=4")
    train(args, "single", tmp_path, _scaled)
    whole = tmp_path / "out/checkpoints"
    scales = [json.loads((whole / f"{step:06d}/training_state/scaler_state.json").read_text()) for step in (4, 7)]
    assert [(s["scale"], s["_growth_tracker"]) for s in scales] == [(16.0, 1), (32.0, 1)]
    config = whole / "000004/pretrained_model/train_config.json"
    train(["--resume=true", f"--config_path={config}", "--output_dir=again"], "single", tmp_path, _scaled)
    again = tmp_path / "again/checkpoints/000007"
    assert json.loads((again / "training_state/scaler_state.json").read_text()) == scales[1]
    ours, expected = (load_file(c / "pretrained_model/model.safetensors") for c in (again, whole / "000007"))
    assert all(ours[name].equal(tensor) for name, tensor in expected.items())
