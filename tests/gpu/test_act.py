"""ACT on one GPU: bf16 unsharded and as a world of one under `fully_shard`, checkpoints, memory, and no waiting.

The commands refuse to shard over one rank. What is done here instead is the whole of them, parsing, loop, checkpoints
and resume, with degrees that say that dp_shard=1 is sharded; only the process group is opened by the test, which the
engine leaves out for a single process. Every run has a process of its own. A few minutes in all.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import train_command
from tests.support.datasets import make_dataset

DEVICE = "cuda"
RUN_S = 150

_SMALL = [
    "--policy.type=act",
    "--policy.pretrained_backbone_weights=null",
    "--policy.dim_model=128",
    "--policy.dim_feedforward=256",
    "--policy.n_heads=4",
    "--policy.chunk_size=8",
    "--policy.n_action_steps=8",
]
_STATE, _ENV, _IMAGE = "observation.state", "observation.environment_state", "observation.images.top"


@dataclass
class Seen:
    """What a run of `_train` looked like from inside; weights are full, in host memory."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    end: dict[str, torch.Tensor] = field(default_factory=dict)
    chunk: torch.Tensor | None = None
    compute_dtypes: set[torch.dtype] = field(default_factory=set)
    parameter_dtypes: set[torch.dtype] = field(default_factory=set)
    parameter_devices: set[str] = field(default_factory=set)
    units: int = 0
    backend: str | None = None
    numbers: int = 0
    peak_bytes: int = 0
    guarded: int = 0
    clipped_norms: list[float] = field(default_factory=list)


def _args(dataset: Path, *flags: str, steps: int, output: str) -> list[str]:
    return [
        "--dataset.repo_id=local/toy",
        f"--dataset.root={dataset}",
        f"--policy.device={DEVICE}",
        "--policy.push_to_hub=false",
        "--batch_size=4",
        f"--steps={steps}",
        "--num_workers=0",
        "--wandb.enable=false",
        "--seed=3",
        f"--output_dir={output}",
        *flags,
    ]


def _resume(output: str, steps: int) -> list[str]:
    config = f"{output}/checkpoints/last/pretrained_model/train_config.json"
    return ["--resume=true", f"--config_path={config}", f"--steps={steps}"]


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a fresh process, which may use CUDA and take it along when it ends."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply_async(_without_exit, (function, *args)).get(RUN_S)


def _without_exit(function: Callable[..., Any], *args: Any) -> Any:
    """A pool waits for ever for a worker that exits."""
    try:
        return function(*args)
    except SystemExit as stop:
        raise RuntimeError(f"it exited with {stop.code}; its reason is in the captured stderr") from None


def _train(
    args: list[str], cwd: Path, device: str, sharded: bool, prepare: Callable[[Any, Seen], None] | None = None
) -> Seen:
    """`lerobot-train ARGS`; `sharded` over the one rank that there is."""
    from lerobot_parallel.training import command

    _know_the_toy()
    os.chdir(cwd)
    if sharded:
        _open_world_of_one(device)
    seen, train_loop = Seen(), command.train_loop

    def watched(run: Any) -> None:
        _look_before(run, seen)
        with _steps_noted(run, seen):
            if prepare is not None:
                prepare(run, seen)
            train_loop(run)
        _look_after(run, seen, device)

    command.train_loop = watched
    sys.argv = ["lerobot-train", *args]
    command.train()
    return seen


def _know_the_toy() -> None:
    """Registers the policy and a plan for it in this process."""
    from lerobot_parallel.plans.builtin import BUILTIN_PLANS
    from lerobot_parallel.plans.plan import WrapPlan
    from tests.support.toy import TOY_PLAN

    BUILTIN_PLANS["toy_nasty"] = WrapPlan(**TOY_PLAN | {"keep_gathered": ["joint.prefix.{last}"]})


def _open_world_of_one(device: str) -> None:
    import torch.distributed as dist

    from lerobot_parallel.config.topology import Degrees

    Degrees.sharded = True
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _look_before(run: Any, seen: Seen) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    parameters = list(run.module.parameters())
    seen.start = _weights(run)
    seen.numbers = sum(p.numel() for p in parameters)
    seen.units = sum(isinstance(m, FSDPModule) for m in run.module.modules())
    seen.parameter_dtypes = {p.dtype for p in parameters}
    seen.parameter_devices = {p.device.type for p in parameters}
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()
        seen.backend = group._get_backend(torch.device(run.accelerator.device.type)).name()
    if run.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def _steps_noted(run: Any, seen: Seen) -> Iterator[None]:
    from lerobot_parallel.training import loop

    losses, step = [], loop.train_step

    def noted(run: Any, batch: dict) -> tuple:
        result = step(run, batch)
        losses.append(result[0])
        return result

    def note_dtype(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        seen.compute_dtypes.add(output.dtype)

    linears = [m for name, m in run.module.named_modules() if name.endswith("linear1")]
    handles = [m.register_forward_hook(note_dtype) for m in linears]
    loop.train_step = noted
    try:
        yield
    finally:
        loop.train_step = step
        if run.accelerator.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        for handle in handles:
            handle.remove()
        seen.losses = [loss.item() for loss in losses]


def _look_after(run: Any, seen: Seen, device: str) -> None:
    seen.steps = run.step
    if device == "cuda":
        seen.peak_bytes = torch.cuda.max_memory_allocated()
    seen.end = _weights(run)
    if run.cfg.policy.type == "act":
        run.module.eval()
        seen.chunk = run.module.predict_action_chunk(_observation(run.module.config, device)).float().cpu()


def _weights(run: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    from lerobot_parallel.checkpoint.state import model_state

    full = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
    # Offloaded shards are gathered by the backend of host memory.
    return {name: full(tensor.detach()).cpu().clone() for name, tensor in model_state(run.module).items()}


def _observation(config: Any, device: str) -> dict[str, torch.Tensor]:
    """Two samples as the preprocessor hands them over."""
    draw = torch.Generator().manual_seed(0)
    shapes = {name: feature.shape for name, feature in config.input_features.items()}
    return {name: torch.rand(2, *shape, generator=draw).to(device) for name, shape in shapes.items()}


def _chunk_of_the_host(pretrained: Path, device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Weights, action chunk and one action of the policy, loaded by the host alone."""
    from lerobot.policies.act.modeling_act import ACTPolicy

    policy = ACTPolicy.from_pretrained(pretrained).to(device).eval()
    observation = _observation(policy.config, device)
    chunk = policy.predict_action_chunk(observation)
    policy.reset()
    action = policy.select_action(observation)
    return {name: t.cpu() for name, t in policy.state_dict().items()}, chunk.cpu(), action.cpu()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 frames with a camera."""
    return make_dataset(tmp_path_factory.mktemp("data") / "toy", image=True)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 frames without a camera."""
    return make_dataset(tmp_path_factory.mktemp("states") / "toy")


def _assert_same_weights(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == saved.keys()
    assert [name for name, tensor in saved.items() if not torch.equal(ours[name], tensor)] == []


def test_bf16_unsharded_through_the_command(dataset: Path, tmp_path: Path):
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") or "0"} if DEVICE == "cuda" else {}
    flags = [*_SMALL, "--accelerator.mixed_precision=bf16", "--log_freq=2", "--save_freq=4"]
    for args in (_args(dataset, *flags, steps=4, output="out"), _resume("out", 8)):
        done = train_command(args, tmp_path, env=visible, timeout=RUN_S)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "autocast bf16" in done.stderr + done.stdout
    last = tmp_path / "out/checkpoints/last"
    assert last.resolve().name == "000008"
    weights, chunk, action = in_process(_chunk_of_the_host, last / "pretrained_model", DEVICE)
    assert {t.dtype for t in weights.values() if t.is_floating_point()} == {torch.float32}
    assert chunk.isfinite().all()
    torch.testing.assert_close(action, chunk[:, 0])


def test_a_world_of_one_under_fully_shard_trains_resumes_and_converts(dataset: Path, tmp_path: Path):
    from lerobot_parallel.checkpoint.convert import convert

    flags = [*_SMALL, "--accelerator.mixed_precision=bf16", "--checkpoint_format=dcp", "--log_freq=2", "--save_freq=4"]
    first = in_process(_train, _args(dataset, *flags, steps=4, output="out"), tmp_path, DEVICE, True)
    assert first.units > 10
    assert first.backend == ("nccl" if DEVICE == "cuda" else "gloo")
    assert first.parameter_devices == {DEVICE}
    assert first.parameter_dtypes == {torch.float32}
    assert first.compute_dtypes == {torch.bfloat16}
    assert not (tmp_path / "out/checkpoints/last/pretrained_model/model.safetensors").exists()

    second = in_process(_train, _resume("out", 8), tmp_path, DEVICE, True)
    _assert_same_weights(second.start, first.end)
    assert (first.steps, second.steps) == (4, 8)
    assert all(map(math.isfinite, first.losses + second.losses))
    assert len(second.losses) == 4

    convert(tmp_path / "out/checkpoints/last", verify=True)
    weights, chunk, action = in_process(_chunk_of_the_host, tmp_path / "out/checkpoints/last/pretrained_model", DEVICE)
    _assert_same_weights(weights, second.end)
    # The sharded policy computes in bf16 (8 bits), the host's copy in fp32; outputs are normalised actions.
    torch.testing.assert_close(second.chunk, chunk, rtol=0, atol=5e-2)
    torch.testing.assert_close(action, chunk[:, 0])


_LARGE = [
    "--policy.type=act",
    "--policy.dim_model=512",
    "--policy.dim_feedforward=2048",
    "--policy.chunk_size=16",
    "--policy.n_action_steps=16",
    "--policy.dropout=0",
    "--accelerator.mixed_precision=bf16",
    "--save_checkpoint=false",
    "--log_freq=0",
]


def test_memory_and_cpu_offload(states: Path, tmp_path: Path):
    whole = in_process(_train, _args(states, *_LARGE, steps=3, output="whole"), tmp_path, DEVICE, False)
    shards = in_process(_train, _args(states, *_LARGE, steps=3, output="shards"), tmp_path, DEVICE, True)
    offload = [*_LARGE, "--accelerator.fsdp.cpu_offload=true"]
    offloaded = in_process(_train, _args(states, *offload, steps=3, output="offloaded"), tmp_path, DEVICE, True)
    assert whole.units == 0
    assert shards.units == offloaded.units > 5
    assert offloaded.parameter_devices == {"cpu"}
    # One noise stream, one set of weights: only the order of bf16 rounding differs.
    assert shards.losses == pytest.approx(whole.losses, rel=2e-2)
    assert offloaded.losses == pytest.approx(shards.losses, rel=2e-2)
    if DEVICE == "cuda":
        # fp32 weights, gradients and two moments; shards add no copy of them, offload keeps none on the device.
        state = 4 * 4 * whole.numbers
        assert state < whole.peak_bytes < 2 * state
        assert state < shards.peak_bytes < 1.25 * whole.peak_bytes
        assert offloaded.peak_bytes < whole.peak_bytes - state / 2


_TOY = ["--policy.type=toy_nasty", "--policy.grad_clip_norm=0.01", "--save_checkpoint=false", "--log_freq=4"]


def _note_clipped_norms(run: Any, seen: Seen) -> None:
    """Measure the gradients once more after each clipping, which meets a device that is behind the host."""
    from lerobot_parallel.engine.gradients import clip_grad_norm

    finish = run.window.finish

    def noted(max_norm: float) -> torch.Tensor:
        if run.accelerator.device.type == "cuda":
            torch.cuda._sleep(100_000_000)
        norm = finish(max_norm)
        seen.clipped_norms.append(clip_grad_norm(run.module.parameters(), math.inf).item())
        return norm

    run.window.finish = noted


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_gradients_are_clipped_wherever_they_are(states: Path, tmp_path: Path, offload: bool):
    flags = [*_TOY, f"--accelerator.fsdp.cpu_offload={str(offload).lower()}"]
    seen = in_process(_train, _args(states, *flags, steps=4, output="out"), tmp_path, DEVICE, True, _note_clipped_norms)
    assert seen.clipped_norms == pytest.approx([0.01] * 4, rel=1e-3)


# Allocators, NCCL and lazy initialisation may wait in the first steps.
_WARM_STEPS = 2


def _complain_of_waiting(run: Any, seen: Seen) -> None:
    """From the first steps on, whatever waits for the device raises, except while a log line is written."""
    from lerobot_parallel.training import loop

    step, log = loop.train_step, loop._log

    def set_mode(mode: str) -> None:
        if run.accelerator.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)

    def stepped(run: Any, batch: dict) -> tuple:
        if run.step >= _WARM_STEPS:
            set_mode("error")
            seen.guarded += 1
        return step(run, batch)

    def logged(run: Any, metrics: Any) -> None:
        set_mode("default")
        log(run, metrics)
        # The last step writes a line too; after it the run is taken apart.
        if run.step < run.cfg.steps:
            set_mode("error")

    loop.train_step, loop._log = stepped, logged


def _complain_and_read(run: Any, seen: Seen) -> None:
    from lerobot_parallel.training import loop

    compute_loss = loop.compute_loss

    def reading(run: Any, batch: dict) -> tuple:
        loss, outputs = compute_loss(run, batch)
        loss.item()
        return loss, outputs

    _complain_of_waiting(run, seen)
    loop.compute_loss = reading


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sharded", [False, True], ids=["unsharded", "fully_shard"])
def test_nothing_waits_for_the_device_between_log_lines(states: Path, tmp_path: Path, sharded: bool, accumulation: int):
    flags = [*_TOY, f"--accelerator.gradient_accumulation.steps={accumulation}"]
    seen = in_process(
        _train, _args(states, *flags, steps=12, output="out"), tmp_path, DEVICE, sharded, _complain_of_waiting
    )
    assert seen.steps == 12
    assert seen.guarded == 12 - _WARM_STEPS
    assert bool(seen.units) == sharded


def test_a_number_read_in_every_step_is_complained_of(states: Path, tmp_path: Path):
    with pytest.raises(RuntimeError, match="synchroniz"):
        in_process(_train, _args(states, *_TOY, steps=12, output="out"), tmp_path, DEVICE, False, _complain_and_read)
