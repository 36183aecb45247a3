"""Between two log steps the loop reads no number back from the device.

Here, without a device to wait for, the reads themselves are recorded, with whose code asks for them: torch's ops that
give Python a number, and the methods that copy a tensor out. tests/gpu has the same with a device that complains.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.commands import quiet_env
from tests.support.datasets import make_dataset
from tests.support.toy import TOY_PLAN
from tests.support.world import run_world

pytestmark = pytest.mark.usefixtures("warmed")

ENGINES = {
    "single": (1, ["--parallelism.dp_shard=1"]),
    "ddp2": (2, ["--parallelism.dp_shard=1"]),
    "fsdp2": (2, ["--parallelism.dp_shard=2"]),
}
STEPS, LOG_FREQ = 8, 4

_OPS = {
    torch.ops.aten._local_scalar_dense,  # item, bool, float, int, an index
    torch.ops.aten.nonzero,  # its shape depends on values, as does that of a masked selection
    torch.ops.aten.masked_select,
    torch.ops.aten.equal,
}
# In host memory these are no ops.
_METHODS = ("tolist", "numpy", "cpu")

# Whose code a read is, by the innermost frame that is in one of these; torch, accelerate and the host's meters
# read on behalf of their callers.
_OWNERS = {
    "/lerobot_parallel/": "loop",
    "/lerobot/policies/": "policy",
    "/lerobot/datasets/": "data",
    "/torch/utils/data/": "data",
    "/torch/optim/": "optimizer",  # step counts, which it keeps in host memory
    "/torch/autograd/": "backward",  # DDP's map of unused parameters, which it keeps in host memory
}
# They read tensors that they made in host memory, and that travel there: which rank has a gradient, or a signal.
_HOST_MEMORY = {"average_gradients", "true_anywhere"}


@dataclass(frozen=True)
class Read:
    """A number that Python asked for: after which step, by whom, and whether for a log line."""

    step: int
    owner: str
    function: str
    for_log: bool


class _Recorder(TorchDispatchMode):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run
        self.reads: list[Read] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket in _OPS:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        stack = list(_stack(sys._getframe(1)))
        owner, function = next(filter(None, map(_owner, stack)), ("nobody", ""))
        for_log = any(frame.f_code.co_name == "_log" and _owner(frame) for frame in stack)
        if function not in _HOST_MEMORY:
            self.reads.append(Read(self.run.step, owner, function, for_log))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owner(frame: FrameType) -> tuple[str, str] | None:
    path = frame.f_code.co_filename
    return next(((owner, frame.f_code.co_name) for part, owner in _OWNERS.items() if part in path), None)


@contextmanager
def _recording(run: Any) -> Iterator[_Recorder]:
    recorder = _Recorder(run)
    originals = {name: getattr(torch.Tensor, name) for name in _METHODS}

    def noting(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.note()
            return method(*args, **kwargs)

        return call

    for name, method in originals.items():
        setattr(torch.Tensor, name, noting(method))
    try:
        with recorder:
            yield recorder
    finally:
        for name, method in originals.items():
            setattr(torch.Tensor, name, method)


def reads_of_training(args: list[str], engine: str, cwd: Path, *, spoiled: bool = False) -> list[list[Read]]:
    """What each rank reads while it trains; `spoiled` slips a `loss.item()` into every step."""
    nprocs, flags = ENGINES[engine]
    run = functools.partial(_train, [*args, *flags], cwd, spoiled)
    return run_world(run, nprocs, env=quiet_env(), launcher=nprocs > 1)


def _train(args: list[str], cwd: Path, spoiled: bool) -> list[Read]:
    from lerobot_parallel.plans.builtin import BUILTIN_PLANS
    from lerobot_parallel.plans.plan import WrapPlan
    from lerobot_parallel.training import command, loop

    BUILTIN_PLANS["toy_nasty"] = WrapPlan(**TOY_PLAN | {"keep_gathered": ["joint.prefix.{last}"]})
    train_loop, compute_loss, reads = command.train_loop, loop.compute_loss, []

    def recorded(run: Any) -> None:
        with _recording(run) as recorder:
            train_loop(run)
        reads.extend(recorder.reads)

    def reading(run: Any, batch: dict) -> tuple:
        loss, outputs = compute_loss(run, batch)
        loss.item()
        return loss, outputs

    command.train_loop = recorded
    if spoiled:
        loop.compute_loss = reading
    os.chdir(cwd)
    sys.argv = ["lerobot-train", *args]
    command.train()
    return reads


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 frames: on two ranks the steps below go through more than one epoch."""
    return make_dataset(tmp_path_factory.mktemp("data") / "toy", episodes=3, frames=10)


def _args(dataset: Path, *policy: str) -> list[str]:
    return [
        "--dataset.repo_id=local/toy",
        f"--dataset.root={dataset}",
        *policy,
        "--policy.device=cpu",
        "--policy.push_to_hub=false",
        "--accelerator.gradient_accumulation.steps=2",
        "--batch_size=3",
        f"--steps={STEPS}",
        f"--log_freq={LOG_FREQ}",
        "--save_checkpoint=false",
        "--num_workers=0",
        "--wandb.enable=false",
        "--seed=3",
        "--output_dir=out",
    ]


TOY = ("--policy.type=toy_nasty", "--policy.grad_clip_norm=0.01")
ACT = (
    "--policy.type=act",
    "--policy.dim_model=32",
    "--policy.dim_feedforward=64",
    "--policy.n_heads=4",
    "--policy.chunk_size=8",
    "--policy.n_action_steps=8",
)


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_are_read_for_log_lines_only(dataset: Path, tmp_path: Path, engine: str):
    theirs = {"data", "optimizer", *(["backward"] if engine == "ddp2" else [])}
    for reads in reads_of_training(_args(dataset, *TOY), engine, tmp_path):
        ours = [read for read in reads if read.owner not in theirs]
        assert [read for read in ours if not read.for_log] == []
        assert {read.step for read in ours} == {LOG_FREQ, STEPS}


def test_what_a_policy_reads_itself_is_not_the_loops(dataset: Path, tmp_path: Path):
    for reads in reads_of_training(_args(dataset, *ACT), "fsdp2", tmp_path):
        assert [read for read in reads if read.owner in ("loop", "nobody") and not read.for_log] == []
        # ACT reads its two losses for its own log, in every step.
        assert [read.step for read in reads if read.owner == "policy"] == [
            step for step in range(STEPS) for _ in range(2)
        ]


def test_a_number_read_in_every_step_is_seen(dataset: Path, tmp_path: Path):
    (reads,) = reads_of_training(_args(dataset, *TOY), "single", tmp_path, spoiled=True)
    outside = [read for read in reads if read.owner == "loop" and not read.for_log]
    assert [(read.step, read.function) for read in outside] == [(step, "train_step") for step in range(STEPS)]
