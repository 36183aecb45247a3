"""Whole runs of the loop over the nasty policy: accumulation over epochs, memory, checkpoints, resume."""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.support.commands import quiet_env
from tests.support.datasets import make_dataset
from tests.support.toy import TOY_PLAN
from tests.support.world import run_world

pytestmark = pytest.mark.usefixtures("warmed")

TOPOLOGIES = {
    "single": (1, ["--parallelism.dp_shard=1"]),
    "ddp2": (2, ["--parallelism.dp_shard=1"]),
    "fsdp2": (2, ["--parallelism.dp_shard=2"]),
    "fsdp4": (4, ["--parallelism.dp_shard=4"]),
    "hsdp2x2": (4, ["--parallelism.dp_replicate=2", "--parallelism.dp_shard=2"]),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 frames: 3 episodes of 10."""
    return make_dataset(tmp_path_factory.mktemp("data") / "toy", episodes=3, frames=10)


def toy_args(dataset: Path, *flags: str, steps: int, output: str = "out") -> list[str]:
    return [
        "--dataset.repo_id=local/toy",
        f"--dataset.root={dataset}",
        "--policy.type=toy_nasty",
        "--policy.device=cpu",
        "--policy.push_to_hub=false",
        "--num_workers=0",
        "--wandb.enable=false",
        "--seed=3",
        f"--steps={steps}",
        "--log_freq=1",
        f"--output_dir={output}",
        *flags,
    ]


def train(
    args: list[str], topology: str, cwd: Path, look: Callable[[Any, dict], Any] | None = None, *, when: str = "after"
) -> list[list[Any]]:
    """Runs a training in a world where the toy has a plan; what `look` saw after (before) each step, by rank."""
    nprocs, flags = TOPOLOGIES[topology]
    run = functools.partial(_train, [*args, *flags], cwd, look, when)
    return run_world(run, nprocs, env=quiet_env(), launcher=nprocs > 1, timeout=120)


def _train(args: list[str], cwd: Path, look: Callable[[Any, dict], Any] | None, when: str) -> list[Any]:
    from lerobot_parallel.plans.builtin import BUILTIN_PLANS
    from lerobot_parallel.plans.plan import WrapPlan
    from lerobot_parallel.training import command, loop

    BUILTIN_PLANS["toy_nasty"] = WrapPlan(**TOY_PLAN | {"keep_gathered": ["joint.prefix.{last}"]})
    seen, step = [], loop.train_step

    def watched(run: Any, batch: dict) -> tuple:
        if look is not None and when == "before":
            seen.append(look(run, batch))
        result = step(run, batch)
        if look is not None and when == "after":
            seen.append(look(run, batch))
        return result

    loop.train_step = watched
    os.chdir(cwd)
    sys.argv = ["lerobot-train", *args]
    command.train()
    return seen


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_state(run: Any) -> dict[str, torch.Tensor]:
    from lerobot_parallel.checkpoint.state import model_state

    return {name: full(tensor) for name, tensor in model_state(run.module).items()}


def _batches_and_start(run: Any, batch: dict) -> dict[str, Any]:
    """The batch of a step and, in the first one of a run, the weights."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    return {"batch": tensors, "start": full_state(run)}


@pytest.mark.parametrize("topology", ["single", "ddp2", "fsdp2", "hsdp2x2"])
def test_windows_run_on_across_epochs_and_equal_large_batches(dataset: Path, tmp_path: Path, topology: str):
    """30 frames in batches of 3: an epoch ends inside a window of 4 in every topology."""
    flags = ["--policy.optimizer=sgd", "--policy.grad_clip_norm=0.3", "--accelerator.gradient_accumulation.steps=4"]
    seen = train(
        toy_args(dataset, *flags, "--batch_size=3", steps=16), topology, tmp_path, _batches_and_start, when="before"
    )
    expected = _plain_sgd([[step["batch"] for step in rank] for rank in seen], seen[0][0]["start"], window=4)
    saved = load_file(tmp_path / "out/checkpoints/last/pretrained_model/model.safetensors")
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=5e-6, msg=lambda t, n=name: f"{n}: {t}")
    assert {name for name in expected if name not in saved} == {"head.weight"}


def _plain_sgd(batches: list[list[dict]], start: dict[str, torch.Tensor], *, window: int) -> dict[str, torch.Tensor]:
    """One process of plain torch on the concatenation of what all ranks saw in each window."""
    from tests.support.toy import make_toy

    policy = make_toy()
    policy.load_state_dict(start)
    optimizer = torch.optim.SGD(policy.get_optim_params(), lr=1e-2, weight_decay=1e-2)
    for first in range(0, len(batches[0]), window):
        parts = [rank[i] for i in range(first, first + window) for rank in batches]
        keys = ("observation.state", "observation.environment_state", "action")
        policy({key: torch.cat([part[key] for part in parts]) for key in keys})[0].backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        policy.update()
    return policy.state_dict()


def _bytes(run: Any, batch: dict) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank after a step; and of the largest unit."""
    tensors = list(run.module.parameters())
    tensors += [p.grad for p in tensors if p.grad is not None]
    tensors += [
        t for fields in run.saved.optimizer.state.values() for t in fields.values() if torch.is_tensor(t) and t.dim()
    ]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return {"held": sum(storages.values()), "unit": run.report.largest_unit * 4}


@pytest.mark.parametrize("topology", ["fsdp2", "fsdp4", "hsdp2x2"])
def test_a_rank_holds_its_part_and_one_unit_also_between_micro_batches(dataset: Path, tmp_path: Path, topology: str):
    flags = ["--accelerator.gradient_accumulation.steps=4", "--batch_size=2", "--policy.dim=48"]
    total = _total_bytes(dim=48)
    shard = 4 if topology == "fsdp4" else 2
    for rank in train(toy_args(dataset, *flags, "--save_checkpoint=false", steps=8), topology, tmp_path, _bytes):
        assert len(rank) == 8
        for step in rank:
            assert step["held"] <= total / shard + step["unit"]


def _total_bytes(**toy: Any) -> int:
    """Of a run that shards nothing: every parameter, and gradient and two Adam moments of the trainable ones."""
    from tests.support.toy import make_toy

    return sum(p.numel() * 4 * (4 if p.requires_grad else 1) for p in make_toy(**toy).parameters())


def _weights(run: Any, batch: dict) -> dict[str, torch.Tensor]:
    return full_state(run)


@pytest.mark.parametrize("checkpoint_format", ["safetensors", "dcp", "safetensors_dcp"])
def test_formats_hold_what_their_name_says_and_the_weights_of_the_run(
    dataset: Path, tmp_path: Path, checkpoint_format: str
):
    flags = [f"--checkpoint_format={checkpoint_format}", "--batch_size=2", "--save_freq=2"]
    seen = train(toy_args(dataset, *flags, steps=4), "fsdp2", tmp_path, _weights)
    step = tmp_path / "out/checkpoints/000004"
    assert (tmp_path / "out/checkpoints/last").readlink() == Path("000004")
    assert (step / "pretrained_model/model.safetensors").exists() == ("safetensors" in checkpoint_format)
    assert (step / "pretrained_model/pytorch_model_fsdp_0/.metadata").exists() == ("dcp" in checkpoint_format)
    expected = {name for name in _LAYOUT if "model" not in name.split("/")[-1]}
    assert expected <= {str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()}
    if "dcp" in checkpoint_format:
        from lerobot_parallel.checkpoint.convert import convert

        file = convert(step, output=tmp_path / "converted").path
    else:
        file = step / "pretrained_model/model.safetensors"
    saved = load_file(file)
    for name, tensor in saved.items():
        assert torch.equal(tensor, seen[0][-1][name]), name
    assert json.loads((step / "training_state/training_step.json").read_text()) == {
        "step": 4,
        "dp_world_size": 2,
        "num_processes": 2,
        "batch_size": 2,
        "grad_accum_steps": 1,
        "parallelism": {"dp_replicate": 1, "dp_shard": 2, "ring_degree": 1, "ulysses_degree": 1},
        "data_position": {"epoch": 0, "start_index": 16},
    }


_LAYOUT = [
    "pretrained_model/config.json",
    "pretrained_model/train_config.json",
    "pretrained_model/policy_preprocessor.json",
    "pretrained_model/policy_postprocessor.json",
    "training_state/optimizer_0/.metadata",
    "training_state/rng_state.safetensors",
    "training_state/training_step.json",
]


def _indices_and_weights(run: Any, batch: dict) -> dict[str, Any]:
    return {
        "index": batch["index"].tolist(),
        "weights": full_state(run),
        "lr": run.optimizer.param_groups[0]["lr"],
        "steps": sorted({int(f["step"]) for f in run.saved.optimizer.state.values() if "step" in f}),
    }


@pytest.mark.parametrize("topology", ["single", "ddp2", "fsdp2", "hsdp2x2"])
def test_resume_in_the_middle_of_an_uneven_epoch_is_the_uninterrupted_run(dataset: Path, tmp_path: Path, topology: str):
    """30 frames in batches of 4: the last batch of an epoch is uneven, and the save falls into an epoch's middle."""
    flags = ["--batch_size=4", "--save_freq=3", "--policy.scheduler_warmup_steps=4"]
    whole = train(toy_args(dataset, *flags, steps=11, output="whole"), topology, tmp_path, _indices_and_weights)
    resume = ["--resume=true", "--config_path=whole/checkpoints/000003/pretrained_model/train_config.json"]
    resumed = train([*resume, "--output_dir=part"], topology, tmp_path, _indices_and_weights)
    for before, after in zip(whole, resumed, strict=True):
        for expected, got in zip(before[3:], after, strict=True):
            assert got["index"] == expected["index"]
            assert got["lr"] == expected["lr"]
            assert got["steps"] == expected["steps"]
            for name, tensor in expected["weights"].items():
                assert torch.equal(got["weights"][name], tensor), name


@pytest.mark.parametrize("target", ["single", "ddp2", "fsdp4", "hsdp2x2"])
def test_resume_on_another_topology_keeps_weights_optimizer_and_sample_order(
    dataset: Path, tmp_path: Path, target: str
):
    flags = ["--batch_size=2", "--save_freq=4", "--checkpoint_format=dcp"]
    saved = train(toy_args(dataset, *flags, steps=4), "fsdp2", tmp_path, _indices_and_weights)
    resume = ["--resume=true", "--config_path=out/checkpoints/last/pretrained_model/train_config.json", "--steps=5"]
    unsharded = ["--checkpoint_format=safetensors"] if target in ("single", "ddp2") else []
    seen = train([*resume, *unsharded], target, tmp_path, _batches_and_start, when="before")
    for rank in seen:
        for name, tensor in saved[0][-1]["weights"].items():
            assert torch.equal(rank[0]["start"][name], tensor), name
    order = _epoch_order(dataset)
    taken = [index for step in zip(*saved, strict=True) for rank in step for index in rank["index"]]
    assert taken == order[:16]
    assert [index for rank in seen for index in rank[0]["batch"]["index"].tolist()] == order[16 : 16 + 2 * len(seen)]


def _epoch_order(dataset: Path) -> list[int]:
    """The first epoch of the host's own sampler."""
    from lerobot.datasets import EpisodeAwareSampler

    return list(EpisodeAwareSampler([0, 10, 20], [10, 20, 30], shuffle=True, seed=3))
