"""One norm over sharded and plain gradients, clipping, averaging what is not sharded, and windows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import AcceleratorConfig, GradientAccumulationConfig
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.engine.accelerator import build_accelerator
from lerobot_parallel.engine.gradients import (
    AccumulationWindow,
    average_gradients,
    clip_grad_norm,
    replicated_parameters,
)
from lerobot_parallel.engine.topology import build_mesh

INF = float("inf")
# First dims that divide by no world, or are smaller than it; no dim at all.
SHAPES = [(7, 3), (1, 5), (3,), (16, 2), ()]

pytestmark = pytest.mark.usefixtures("warmed")


def gradients(seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def parameters(grads: list[torch.Tensor | None]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES[: len(grads)]]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    return params


# One process, against torch


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e3, INF])
def test_plain_gradients_are_clipped_as_torch_does(max_norm: float):
    ours, theirs = parameters(gradients()), parameters(gradients())
    norm = clip_grad_norm(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)


def test_the_norm_is_one_number_without_dims_in_fp32():
    ours = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    ours.grad = torch.ones(3, dtype=torch.bfloat16)
    norm = clip_grad_norm([ours], INF)
    assert (norm.shape, norm.dtype, norm.requires_grad) == (torch.Size(), torch.float32, False)
    assert norm.item() == pytest.approx(3**0.5)
    assert ours.grad.dtype == torch.bfloat16


def test_parameters_without_gradients_count_as_nothing():
    assert clip_grad_norm(parameters([None, None]), 1.0).item() == 0.0
    assert clip_grad_norm([], 1.0).item() == 0.0


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_a_gradient_that_is_not_finite_shows(bad: float):
    ours, theirs = parameters(gradients()), parameters(gradients())
    for params in (ours, theirs):
        params[1].grad[0, 0] = bad
    norm = clip_grad_norm(ours, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(norm.isnan(), expected.isnan())
    assert torch.equal(norm.isinf(), expected.isinf())
    assert [p.grad.isfinite().all().item() for p in ours] == [p.grad.isfinite().all().item() for p in theirs]


# Sharded


def _clip(
    degrees: Degrees, max_norm: float, grads: list[torch.Tensor], plain: set[int]
) -> tuple[float, list[torch.Tensor]]:
    dist.init_process_group("gloo")
    mesh = build_mesh(degrees, "cpu")
    placements = [Replicate(), Shard(0)] if degrees.dp_replicate > 1 else [Shard(0)]
    params = []
    for index, grad in enumerate(grads):
        grad = grad if index in plain else distribute_tensor(grad, mesh, placements)
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        params.append(param)
    norm = clip_grad_norm(params, max_norm)
    full = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in params]
    return norm.item(), full


@pytest.mark.parametrize("degrees", [Degrees(1, 2), Degrees(1, 4), Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("plain", [{4}, {0, 4}])
def test_sharded_gradients_are_clipped_as_one_process_would(world: Callable, degrees: Degrees, plain: set[int]):
    whole = parameters(gradients())
    expected = torch.nn.utils.clip_grad_norm_(whole, 0.5).item()
    for norm, grads in world(_clip, degrees.world_size, degrees, 0.5, gradients(), plain):
        assert norm == pytest.approx(expected, rel=1e-6)
        for mine, other in zip(grads, whole, strict=True):
            torch.testing.assert_close(mine, other.grad, rtol=1e-6, atol=0)


# Averaging


def _average(grads_of: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    params = parameters(grads_of[dist.get_rank()])
    average_gradients(params)
    return [p.grad for p in params]


def test_replicated_gradients_are_averaged_with_zeros_where_a_rank_has_none(world: Callable):
    first, second = gradients(1), gradients(2)
    both = [first[0], second[0]]
    grads_of = [[both[0], first[1], None, None], [both[1], None, second[2], None]]
    for averaged in world(_average, 2, grads_of, init=True):
        torch.testing.assert_close(averaged[0], (both[0] + both[1]) / 2)
        torch.testing.assert_close(averaged[1], first[1] / 2)
        torch.testing.assert_close(averaged[2], second[2] / 2)
        assert averaged[3] is None


def test_without_replicated_parameters_nothing_is_sent(world: Callable):
    # Rank 0 alone: a collective would never end.
    assert world(lambda: average_gradients([]) if dist.get_rank() == 0 else None, 2, init=True, timeout=20) == [
        None,
        None,
    ]


def test_replicated_parameters_are_the_trainable_ones_that_are_not_sharded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    assert {id(p) for p in replicated_parameters(model)} == {id(p) for p in model[0].parameters()}


# Windows


def _updates(steps: int, micro_batches: int) -> list[tuple[bool, float]]:
    runtime = AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(steps))
    accelerator = build_accelerator(runtime, Degrees(1, 1), device_type="cpu")
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    window = AccumulationWindow(accelerator, model)
    seen = []
    for number in range(1, micro_batches + 1):
        with window.micro_batch():
            accelerator.backward(model(torch.full((1, 1), float(number))).sum())
            norm = window.finish(0.0).item() if window.is_update else -1.0
        seen.append((window.is_update, norm))
        if window.is_update:
            model.zero_grad()
    return seen


@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_ends_every_window_and_sees_the_mean_of_it(world: Callable, steps: int):
    ((*seen,),) = world(lambda: tuple(_updates(steps, 6)), 1, launcher=False)
    assert [update for update, _ in seen] == [(number % steps) == 0 for number in range(1, 7)]
    means = [sum(range(end - steps + 1, end + 1)) / steps for end in range(steps, 7, steps)]
    assert [norm for update, norm in seen if update] == pytest.approx(means)


def _measure(max_norm: float) -> Any:
    accelerator = build_accelerator(AcceleratorConfig(), Degrees(1, 1), device_type="cpu")
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    window = AccumulationWindow(accelerator, model)
    with window.micro_batch():
        accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
        return window.finish(max_norm).item(), model.weight.grad.item()


@pytest.mark.parametrize(("max_norm", "left"), [(0.0, 4.0), (-1.0, 4.0), (2.0, 2.0), (8.0, 4.0)])
def test_a_limit_of_zero_measures_without_clipping(world: Callable, max_norm: float, left: float):
    ((norm, grad),) = world(_measure, 1, max_norm, launcher=False)
    assert norm == pytest.approx(4.0)
    assert grad == pytest.approx(left, rel=1e-5)


class _Turns(nn.Module):
    """Parts of a unit, and a unit of its own, that run when they are told to."""

    def __init__(self, degrees: Degrees) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("a", "b", "own")})
        fully_shard(self.parts["own"], mesh=build_mesh(degrees, "cpu"))
        fully_shard(self, mesh=build_mesh(degrees, "cpu"))

    def forward(self, x: torch.Tensor, parts: str) -> torch.Tensor:
        return sum(self.parts[name](x).square().sum() for name in parts.split())


def _window_of(degrees: Degrees, windows: list[list[str]]) -> Any:
    """What the last window's gradients are, or the refusal."""
    runtime = AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(steps=len(windows[0])))
    accelerator = build_accelerator(runtime, degrees, device_type="cpu")
    model = _Turns(degrees)
    window = AccumulationWindow(accelerator, model)
    try:
        for micro_batches in windows:
            model.zero_grad()
            for number, parts in enumerate(micro_batches):
                with window.micro_batch():
                    accelerator.backward(model(torch.full((2, 4), 1.0 + number + dist.get_rank()), parts))
                    if window.is_update:
                        window.finish(0.0)
    except ConfigError as error:
        return str(error)
    return {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "windows",
    [
        [["a b own", "a b own"]] * 2,
        [["a own", "b own"]] * 2,
        [["a b", "a b own"]] * 2,
    ],
    ids=["all", "parts of a unit by turns", "one more at the end"],
)
def test_hsdp_accumulates_the_gradients_of_fsdp2(world: Callable, windows: list[list[str]]):
    expected = world(_window_of, 4, Degrees(1, 4), windows)
    for ours, theirs in zip(world(_window_of, 4, Degrees(2, 2), windows), expected, strict=True):
        assert {name for name, grad in ours.items() if grad is None} == {n for n, g in theirs.items() if g is None}
        for name, grad in ours.items():
            torch.testing.assert_close(grad, theirs[name])


@pytest.mark.parametrize(
    "later", [["a b own", "a b"], ["a own", "b own"]], ids=["a unit left out at the end", "parts by turns"]
)
def test_a_unit_that_hsdp_would_mix_up_stops_the_run_with_its_name(world: Callable, later: list[str]):
    for said in world(_window_of, 4, Degrees(2, 2), [["a b own", "a b own"], later]):
        assert said.startswith("--accelerator.gradient_accumulation.steps=2: the unit ")
        assert ("parts.own" if "own" not in later[1] else "root") in said
        assert "--parallelism.dp_replicate=1" in said
