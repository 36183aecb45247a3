"""What leaves the machine: a job elsewhere, checkpoints as they are written, the trained model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.fakes import fake_hub
from tests.training.runs import act_args, last_checkpoint, launch, train, weights_file

pytestmark = pytest.mark.usefixtures("warmed")


def _job() -> Any:
    """Notes submissions; anything else that starts is an error."""
    from lerobot_parallel.training import command

    submitted: list[Any] = []

    def started(*_: Any) -> None:
        raise AssertionError("the run was started here")

    command.submit_to_hf = lambda cfg: submitted.append((cfg.job.target, cfg.parallelism.dp_shard, cfg.steps))
    command.preflight = command.run_training = started
    return lambda: submitted


@pytest.mark.parametrize("engine", ["single", "ddp2"])
def test_a_remote_target_is_submitted_once_and_nothing_starts_here(small_dataset: Path, tmp_path: Path, engine: str):
    ranks = train(act_args(small_dataset, "--job.target=a10g-small"), engine, tmp_path, _job)
    assert [call for rank in ranks for call in rank.value] == [("a10g-small", 1, 4)]
    assert list(tmp_path.iterdir()) == []


def _uploads(fails_at: int = 0) -> Any:
    """Notes what is uploaded; the upload of step `fails_at` fails."""

    def setup() -> Any:
        from lerobot_parallel.training import loop

        calls: list[Any] = []

        def push(directory: Path, repo_id: str, *, private: bool | None) -> None:
            complete = (directory / "training_state/training_step.json").is_file()
            calls.append((directory.name, repo_id, private, complete and load_file(directory / "pretrained_model/model.safetensors") != {}))
            if int(directory.name) == fails_at:
                raise OSError("no route to the hub")

        loop.push_checkpoint_to_hub = push
        return lambda: calls

    return setup


UPLOAD = ["--save_checkpoint_to_hub=true", "--policy.repo_id=me/act", "--policy.private=true", "--save_freq=2"]


@pytest.mark.parametrize("engine", ["single", "ddp2", "fsdp2"])
def test_checkpoints_are_uploaded_once_per_save_by_rank_0(small_dataset: Path, tmp_path: Path, engine: str):
    main, *others = train(act_args(small_dataset, *UPLOAD), engine, tmp_path, _uploads())
    assert main.value == [("000002", "me/act", True, True), ("000004", "me/act", True, True)]
    assert all(other.value == [] for other in others)


def test_a_failing_upload_is_raised_on_all_ranks_and_leaves_the_checkpoint(small_dataset: Path, tmp_path: Path):
    main, other = launch(act_args(small_dataset, *UPLOAD), "fsdp2", tmp_path, _uploads(fails_at=2))
    assert "OSError: no route to the hub" in main.error
    assert "rank 0 failed while uploading" in other.error and "no route to the hub" in other.error
    assert not main.stopped and not other.stopped
    assert last_checkpoint(tmp_path).readlink() == Path("000002")
    assert load_file(weights_file(tmp_path))


@pytest.mark.parametrize("engine", ["single", "fsdp2"])
def test_the_trained_model_is_uploaded_whole_by_rank_0(small_dataset: Path, tmp_path: Path, engine: str):
    def hub() -> Any:
        calls = fake_hub(lambda folder: {p.name: load_file(p) for p in folder.glob("model.safetensors")})
        return lambda: calls

    flags = ["--policy.push_to_hub=true", "--policy.repo_id=me/act"]
    if engine == "fsdp2":
        flags.append("--checkpoint_format=safetensors_dcp")
    main, *others = train(act_args(small_dataset, *flags), engine, tmp_path, hub)
    (repo, names, seen), *processors = main.value
    assert (repo, names) == ("me/act", ["README.md", "config.json", "model.safetensors", "train_config.json"])
    expected = load_file(weights_file(tmp_path))
    assert seen["model.safetensors"].keys() == expected.keys()
    assert all(torch.equal(seen["model.safetensors"][name], tensor) for name, tensor in expected.items())
    assert [name for _, files, _ in processors for name in files if name.endswith(".json")] == [
        "policy_preprocessor.json",
        "policy_postprocessor.json",
    ]
    assert "Model pushed to https://hub.test/me/act" in main.stderr
    assert all(other.value == [] for other in others)


def test_a_failing_last_upload_is_raised_on_all_ranks(small_dataset: Path, tmp_path: Path):
    def no_hub() -> None:
        from huggingface_hub import HfApi

        def refuse(self: HfApi, *_: Any, **__: Any) -> None:
            raise OSError("no route to the hub")

        HfApi.create_repo = refuse

    args = act_args(small_dataset, "--policy.push_to_hub=true", "--policy.repo_id=me/act")
    main, other = launch(args, "fsdp2", tmp_path, no_hub)
    assert "OSError: no route to the hub" in main.error
    assert "rank 0 failed while publishing the trained model" in other.error
    assert last_checkpoint(tmp_path).readlink() == Path("000004")
