"""Held-out loss on all ranks; rollouts in an environment on rank 0."""

import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.training.fakes import fake_wandb
from tests.training.runs import QUIET, act_args, assert_close, last_checkpoint, launch, payload, train, weights_file
from tests.training.toy_env import STEPS, ToyReach

pytestmark = pytest.mark.usefixtures("warmed")

# fp32 sums in another order.
ROUNDING = 1e-6
HELD_OUT = ["--dataset.eval_split=0.3", "--eval_steps=2", "--wandb.enable=true"]


def _wandb() -> Any:
    calls = fake_wandb()
    return lambda: {(step, key): value for name, step, data in calls if name == "log" for key, value in data.items()}


def _losses(logged: dict[tuple[int, str], Any]) -> list[tuple[int, float]]:
    return [(step, value) for (step, key), value in logged.items() if key == "eval/eval_loss"]


@pytest.mark.parametrize(("samples", "workers"), [(0, 0), (5, 0), (0, 1)])
def test_held_out_loss_is_the_hosts(small_dataset: Path, tmp_path: Path, samples: int, workers: int):
    """10 held-out frames in batches of 3: the last one is uneven. With noise in training."""
    flags = [f"--max_eval_samples={samples}", f"--num_workers={workers}", "--dataloader_multiprocessing_context=fork"]
    args = act_args(small_dataset, *HELD_OUT, *flags)
    (host,) = train(args, "host", tmp_path / "host", _wandb)
    (ours,) = train(args, "single", tmp_path / "ours", _wandb)
    assert [step for step, _ in _losses(ours.value)] == [2, 4]
    assert _losses(ours.value) == _losses(host.value)
    assert f"step 2: eval_loss={_losses(host.value)[0][1]:.4f}" in ours.stderr
    assert payload(weights_file(tmp_path / "ours")) == payload(weights_file(tmp_path / "host"))


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_between_evaluations_is_the_uninterrupted_run(small_dataset: Path, tmp_path: Path, workers: int):
    """An evaluation draws from the training's random state; with persistent workers only the first one does."""
    flags = ["--dataset.eval_split=0.3", "--eval_steps=2", f"--num_workers={workers}"]
    args = act_args(small_dataset, *flags, "--dataloader_multiprocessing_context=fork", "--save_freq=3", "--steps=5")
    train(args, "single", tmp_path / "whole")
    resume = "--config_path=../whole/out/checkpoints/000003/pretrained_model/train_config.json"
    train(["--resume=true", resume, "--output_dir=out"], "single", tmp_path / "resumed")
    assert_close(weights_file(tmp_path / "resumed"), weights_file(tmp_path / "whole"), 0)


def _evaluations() -> Any:
    """Loss and state of the policy after each evaluation."""
    from lerobot_parallel.training import loop

    seen, evaluate = [], loop.held_out_loss

    def watched(run: Any) -> float:
        loss = evaluate(run)
        params = list(run.module.parameters())
        seen.append(
            {
                "loss": loss,
                "training": all(m.training for m in run.module.modules()),
                "gathered": [p.numel() for p in params if not isinstance(p, DTensor)],
                "units": sum(isinstance(m, FSDPModule) for m in run.module.modules()),
            }
        )
        return loss

    loop.held_out_loss = watched
    return lambda: seen


def test_held_out_loss_is_the_same_on_any_topology_and_leaves_training_alone(small_dataset: Path, tmp_path: Path):
    args = act_args(small_dataset, *QUIET, "--dataset.eval_split=0.3", "--eval_steps=2")
    (reference,) = train(args, "host_ddp2", tmp_path / "host_ddp2", None)[:1]
    seen = {engine: train(args, engine, tmp_path / engine, _evaluations) for engine in ("ddp2", "fsdp2")}
    for engine, ranks in seen.items():
        expected = [evaluation["loss"] for evaluation in seen["ddp2"][0].value]
        assert len(expected) == 2
        for rank in ranks:
            assert [evaluation["loss"] for evaluation in rank.value] == pytest.approx(expected, rel=ROUNDING)
            assert all(evaluation["training"] for evaluation in rank.value)
        for step, loss in zip((2, 4), expected, strict=True):
            line = f"step {step}: eval_loss={loss:.4f}"
            assert line in reference.stderr and line in ranks[0].stderr
        train([*args, "--eval_steps=0"], engine, tmp_path / f"{engine}_without")
        assert_close(weights_file(tmp_path / engine), weights_file(tmp_path / f"{engine}_without"), 0)
    for rank in seen["fsdp2"]:
        assert all(evaluation["units"] > 1 and not evaluation["gathered"] for evaluation in rank.value)


ROLLOUTS = [
    "--env.type=toy_reach",
    "--env_eval_freq=2",
    "--eval.n_episodes=2",
    "--eval.batch_size=2",
    "--eval.use_async_envs=false",
]


def test_rollouts_are_the_hosts(small_dataset: Path, tmp_path: Path):
    args = act_args(small_dataset, *ROLLOUTS, "--wandb.enable=true")
    (host,) = train(args, "host", tmp_path / "host", _wandb)
    (ours,) = train(args, "single", tmp_path / "ours", _wandb)
    expected, got = (
        {k: v for k, v in side.value.items() if "eval/" in k[1] and "eval_s" not in k[1]} for side in (host, ours)
    )
    assert got == expected
    assert got[2, "eval/avg_sum_reward"] < 0 and got[2, "eval/pc_success"] == 100
    assert got[2, "eval/video"] == "out/eval/videos_step_000002/toy_reach_0/eval_episode_0.mp4"
    videos = sorted(
        path.relative_to(tmp_path / "ours/out/eval") for path in (tmp_path / "ours/out/eval").rglob("*.mp4")
    )
    assert [str(path) for path in videos] == [
        f"videos_step_00000{s}/toy_reach_0/eval_episode_{e}.mp4" for s in (2, 4) for e in (0, 1)
    ]
    assert payload(weights_file(tmp_path / "ours")) == payload(weights_file(tmp_path / "host"))


def _clock() -> Any:
    """When steps began and rollouts ended on this rank, and how often the environment was stepped."""
    from lerobot_parallel.training import loop

    times: dict[str, list[float]] = {"step": [], "rolled": []}
    stepped: list[int] = []
    step, evaluate, env_step = loop.train_step, loop.evaluate_in_environment, ToyReach.step

    def timed_step(*args: Any) -> Any:
        times["step"].append(time.monotonic())
        return step(*args)

    def timed_rollout(*args: Any) -> None:
        evaluate(*args)
        times["rolled"].append(time.monotonic())

    def counted(self: ToyReach, action: Any) -> Any:
        stepped.append(1)
        return env_step(self, action)

    loop.train_step, loop.evaluate_in_environment, ToyReach.step = timed_step, timed_rollout, counted
    return lambda: {**times, "stepped": len(stepped)}


def test_rank_0_rolls_out_while_the_others_wait(small_dataset: Path, tmp_path: Path):
    args = act_args(small_dataset, *QUIET, *ROLLOUTS)
    main, other = train(args, "ddp2", tmp_path / "with", _clock)
    assert main.value["stepped"] == 2 * 2 * STEPS and len(main.value["rolled"]) == 2
    assert other.value["stepped"] == 0 and other.value["rolled"] == []
    assert other.value["step"][2] > main.value["rolled"][0]
    train([*args, "--env_eval_freq=0"], "ddp2", tmp_path / "without")
    assert_close(weights_file(tmp_path / "with"), weights_file(tmp_path / "without"), 0)


def test_an_error_in_the_environment_ends_all_ranks_and_keeps_the_checkpoint(small_dataset: Path, tmp_path: Path):
    def broken() -> None:
        ToyReach.fails = True

    main, other = launch(act_args(small_dataset, *ROLLOUTS, "--save_freq=2"), "ddp2", tmp_path, broken)
    assert "RuntimeError: the simulator is gone" in main.error
    assert "rank 0 failed while evaluating in the environment: RuntimeError: the simulator is gone" in other.error
    assert not main.stopped and not other.stopped
    assert last_checkpoint(tmp_path).readlink() == Path("000002")


def test_rollouts_of_a_sharded_policy_are_refused(small_dataset: Path, tmp_path: Path):
    main, other = launch(act_args(small_dataset, *ROLLOUTS), "fsdp2", tmp_path)
    assert (main.exitcode, other.exitcode) == (1, 1)
    (line,) = [line for line in (main.stderr + other.stderr).splitlines() if "lerobot-train:" in line]
    assert "--parallelism.dp_shard=2" in line and "--env" in line
    assert not (tmp_path / "out").exists()
