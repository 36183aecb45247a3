"""What leaves the machine during a run: a job for elsewhere, and checkpoints as they are written."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.training.runs import act_args, last_checkpoint, train

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
        from lerobot_parallel.training import publish

        calls: list[Any] = []

        def push(directory: Path, repo_id: str, *, private: bool | None) -> None:
            weights = load_file(directory / "pretrained_model/model.safetensors")
            calls.append((directory.name, repo_id, private, len(weights) > 0))
            if int(directory.name) == fails_at:
                raise OSError("no route to the hub")

        publish.push_checkpoint_to_hub = push
        return lambda: calls

    return setup


UPLOAD = ["--save_checkpoint_to_hub=true", "--policy.repo_id=me/act", "--policy.private=true", "--save_freq=2"]


@pytest.mark.parametrize("engine", ["single", "ddp2", "fsdp2"])
def test_checkpoints_are_uploaded_once_per_save_by_rank_0(small_dataset: Path, tmp_path: Path, engine: str):
    main, *others = train(act_args(small_dataset, *UPLOAD), engine, tmp_path, _uploads())
    assert main.value == [("000002", "me/act", True, True), ("000004", "me/act", True, True)]
    assert all(other.value == [] for other in others)


def test_a_failing_upload_is_said_and_training_goes_on(small_dataset: Path, tmp_path: Path):
    main, other = train(act_args(small_dataset, *UPLOAD), "fsdp2", tmp_path, _uploads(fails_at=2))
    assert [call[0] for call in main.value] == ["000002", "000004"] and other.value == []
    assert "000002 was not uploaded (no route to the hub); training goes on" in main.stderr
    assert last_checkpoint(tmp_path).readlink() == Path("000004")
    assert (tmp_path / "out/checkpoints/000002/pretrained_model/model.safetensors").is_file()
