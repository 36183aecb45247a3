"""PEFT: LoRA adapters on a local pretrained ACT, trained, saved and resumed."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training.runs import QUIET, act_args, assert_close, common_args, files, last_checkpoint, launch, train

pytestmark = pytest.mark.usefixtures("warmed")

LORA = ["--peft.method_type=LORA", "--peft.r=2", "--peft.target_modules=.*encoder.layers.*linear[12]"]


@pytest.fixture(scope="module")
def pretrained(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by the host. Imports peft here, not in every rank."""
    import peft.tuners.lora  # noqa: F401

    folder = tmp_path_factory.mktemp("pretrained")
    train(act_args(small_dataset, *QUIET, "--steps=1"), "host", folder)
    return last_checkpoint(folder) / "pretrained_model"


def _args(dataset: Path, pretrained: Path, *flags: str) -> list[str]:
    return common_args(dataset, f"--policy.path={pretrained}", "--policy.push_to_hub=false", *LORA, *flags)


def adapters(cwd: Path) -> Path:
    return last_checkpoint(cwd) / "pretrained_model/adapter_model.safetensors"


@pytest.mark.parametrize("engine", ["single", "ddp2"])
def test_adapters_are_the_hosts_and_resume(small_dataset: Path, pretrained: Path, tmp_path: Path, engine: str):
    host = {"single": "host", "ddp2": "host_ddp2"}[engine]
    args = _args(small_dataset, pretrained, "--save_freq=2")
    train(args, host, tmp_path / "host")
    train(args, engine, tmp_path / "ours")
    assert_close(adapters(tmp_path / "ours"), adapters(tmp_path / "host"), 0)
    moved = load_file(adapters(tmp_path / "ours"))
    assert moved and all("lora" in name for name in moved)
    assert any(tensor.abs().max() > 0 for name, tensor in moved.items() if "lora_B" in name)
    expected, got = (files(last_checkpoint(tmp_path / side)) for side in ("host", "ours"))
    assert expected <= got and "pretrained_model/adapter_config.json" in got and "pretrained_model/config.json" in got
    assert "pretrained_model/model.safetensors" not in got
    assert json.loads((adapters(tmp_path / "ours").parent / "config.json").read_text())["use_peft"] is True

    resume = "--config_path=../ours/out/checkpoints/000002/pretrained_model/train_config.json"
    train(["--resume=true", resume, "--output_dir=out"], engine, tmp_path / "resumed")
    assert_close(adapters(tmp_path / "resumed"), adapters(tmp_path / "ours"), 0)


def test_adapters_trained_further_by_path_can_be_resumed(small_dataset: Path, pretrained: Path, tmp_path: Path):
    """`--policy.path` to adapters, without `--peft`: the adapters themselves say what they are."""
    train(_args(small_dataset, pretrained), "single", tmp_path / "first")
    further = [
        flag.replace(str(pretrained), str(adapters(tmp_path / "first").parent))
        for flag in _args(small_dataset, pretrained, "--save_freq=2")
        if not flag.startswith("--peft.")
    ]
    train(further, "single", tmp_path / "second")
    resume = "--config_path=../second/out/checkpoints/000002/pretrained_model/train_config.json"
    train(["--resume=true", resume, "--output_dir=out"], "single", tmp_path / "resumed")
    assert_close(adapters(tmp_path / "resumed"), adapters(tmp_path / "second"), 0)


def test_adapters_of_a_sharded_policy_are_refused(small_dataset: Path, pretrained: Path, tmp_path: Path):
    ranks = launch(_args(small_dataset, pretrained), "fsdp2", tmp_path)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    (line,) = [line for rank in ranks for line in rank.stderr.splitlines() if "lerobot-train:" in line]
    assert "--parallelism.dp_shard=2" in line and "PEFT" in line
