"""Activation checkpointing and compile act on units, change no number beyond rounding, and leave no trace in names."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lerobot_parallel.checkpoint.state import model_state
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    CompileConfig,
    GradientAccumulationConfig,
    check_runtime,
)
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.engine.units import needs_units, transform_units, transformable
from lerobot_parallel.plans.plan import WrapPlan, resolve_plan
from tests.support.toy import TOY_PLAN, make_toy, toy_batch

PLAN = WrapPlan(**TOY_PLAN | {"keep_gathered": ["joint.prefix.{last}"]})
ENGINES = {"single": Degrees(1, 1), "ddp2": Degrees(2, 1), "fsdp2": Degrees(1, 2), "hsdp2x2": Degrees(2, 2)}
# A compiler may fuse and reorder fp32 operations.
COMPILED = 2e-5


def runtime(*, recompute: bool = False, steps: int = 1, **compiled: Any) -> AcceleratorConfig:
    return AcceleratorConfig(
        activation_checkpointing=ActivationCheckpointingConfig("full" if recompute else "none"),
        gradient_accumulation=GradientAccumulationConfig(steps),
        compile=CompileConfig(enabled=bool(compiled), **compiled),
    )


def train(degrees: Degrees, config: AcceleratorConfig, dropout: float = 0.1) -> dict[str, Any]:
    """Two SGD updates of the toy on this rank, with dropout, and what happened in its blocks."""
    from lerobot_parallel.engine.accelerator import build_accelerator
    from lerobot_parallel.engine.sharding import shard_policy
    from lerobot_parallel.engine.topology import build_mesh

    accelerator = build_accelerator(config, degrees, device_type="cpu")
    module = policy = make_toy(seed=0, dropout=dropout)
    calls: list[str] = []
    for name in ("blocks.0.up", "joint.suffix.0.mlp.0", "unused"):
        module.get_submodule(name).register_forward_pre_hook(lambda *_, n=name: calls.append(n))
    plan = resolve_plan(PLAN, policy, source="test")
    transform_units(policy, plan, config)
    if degrees.sharded:
        mesh = build_mesh(degrees, "cpu")
        shard_policy(policy, plan, mesh=mesh, runtime=config, device=accelerator.device, autocast=accelerator.autocast)
    optimizer = torch.optim.SGD(policy.get_optim_params(), lr=0.1)
    if not degrees.sharded:
        policy, optimizer = accelerator.prepare(policy, optimizer)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        batch = {k: v.chunk(degrees.world_size)[accelerator.process_index] for k, v in toy_batch(8, seed=step).items()}
        loss, _ = policy(batch)
        accelerator.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = model_state(module)
    whole = {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for k, v in state.items()}
    return {"state": whole, "losses": losses, "calls": calls}


def same(ours: dict[str, Any], theirs: dict[str, Any], atol: float) -> None:
    assert ours["state"].keys() == theirs["state"].keys() == make_toy().state_dict().keys()
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=0, atol=atol)
    for name, tensor in theirs["state"].items():
        torch.testing.assert_close(ours["state"][name], tensor, rtol=0, atol=atol)


@pytest.mark.parametrize("name", list(ENGINES))
def test_recomputing_units_changes_no_bit_with_dropout(world: Callable, name: str) -> None:
    degrees = ENGINES[name]
    run = functools.partial(train, degrees)
    plain = world(run, degrees.world_size, runtime())
    for ours, theirs in zip(world(run, degrees.world_size, runtime(recompute=True)), plain, strict=True):
        same(ours, theirs, 0.0)
        # Whole blocks and the MLPs of layers that nobody calls run twice a step; single projections do not.
        assert theirs["calls"] == ["blocks.0.up", "joint.suffix.0.mlp.0"] * 2
        assert sorted(ours["calls"]) == sorted(theirs["calls"] * 2)


@pytest.mark.parametrize("name", list(ENGINES))
@pytest.mark.parametrize("regional", [True, False], ids=["regional", "whole"])
def test_compiled_units_give_the_same_updates(world: Callable, name: str, regional: bool) -> None:
    degrees = ENGINES[name]
    run = functools.partial(train, degrees, dropout=0.0)
    plain = world(run, degrees.world_size, runtime())
    compiled = runtime(recompute=True, backend="aot_eager", regional=regional)
    for ours, theirs in zip(world(run, degrees.world_size, compiled, timeout=200), plain, strict=True):
        same(ours, theirs, COMPILED)


@pytest.mark.parametrize("name", ["single", "fsdp2"])
def test_inductor_compiles_units(world: Callable, name: str) -> None:
    degrees = ENGINES[name]
    run = functools.partial(train, degrees, dropout=0.0)
    plain = world(run, degrees.world_size, runtime())
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for ours, theirs in zip(
        world(run, degrees.world_size, runtime(backend="inductor"), timeout=280, env=env), plain, strict=True
    ):
        same(ours, theirs, COMPILED)


def test_units_within_units_and_leaves_are_left_alone() -> None:
    policy = make_toy()
    names = {id(module): name for name, module in policy.named_modules()}
    blocks, mlps = (
        {"blocks.0", "blocks.1"},
        {f"joint.{stack}.{i}.mlp" for stack in ("prefix", "suffix") for i in (0, 1)},
    )
    for units, expected in ((("ToyBlock",), blocks | mlps), (("ToyBlock", "ToyJoint"), blocks | {"joint"})):
        plan = resolve_plan(PLAN.model_copy(update={"units": units}), policy, source="test")
        assert {names[id(module)] for module in transformable(plan)} == expected


def test_no_wrapper_appears_and_signatures_stay() -> None:
    policy = make_toy()
    before = [type(module) for module in policy.modules()], list(policy.state_dict())
    transform_units(policy, resolve_plan(PLAN, policy, source="test"), runtime(recompute=True, backend="eager"))
    assert ([type(module) for module in policy.modules()], list(policy.state_dict())) == before


def _statistics(recompute: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    host = nn.ModuleDict({"block": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())})
    plan = resolve_plan(WrapPlan(modules=("block",)), host, source="test")
    transform_units(host, plan, runtime(recompute=recompute))
    for step in range(2):
        host["block"](torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    grads = {f"{name}.grad": param.grad for name, param in host.named_parameters()}
    return dict(host.state_dict()) | grads


def test_recomputing_counts_no_batch_twice(world: Callable) -> None:
    (plain,), (recomputed,) = world(_statistics, 1, False), world(_statistics, 1, True)
    assert plain["block.1.num_batches_tracked"] == 2
    assert all(torch.equal(recomputed[name], tensor) for name, tensor in plain.items())


def _cached(recompute: bool) -> tuple[torch.Tensor, int]:
    """The gradient of two layers that share a key-value cache, as transformers passes it, and the cache's length."""
    from transformers import DynamicCache

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.inner = index, nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor, past_key_values: DynamicCache) -> torch.Tensor:
            key = self.inner(x)[:, None]
            key, value = past_key_values.update(key, key, self.index)
            return x + nn.functional.scaled_dot_product_attention(x[:, None], key, value)[:, 0]

    torch.manual_seed(0)
    host = nn.ModuleList([Layer(0), Layer(1)])
    transform_units(host, resolve_plan(WrapPlan(units=("Layer",)), host, source="test"), runtime(recompute=recompute))
    cache, x = DynamicCache(), torch.ones(2, 3, 4)
    for layer in host:
        x = layer(x, past_key_values=cache)
    x.square().sum().backward()
    return host[0].inner[0].weight.grad, cache.get_seq_length()


def test_recomputing_leaves_a_key_value_cache_as_it_was(world: Callable) -> None:
    (plain,), (recomputed,) = world(_cached, 1, False), world(_cached, 1, True)
    assert torch.equal(recomputed[0], plain[0])
    assert recomputed[1] == plain[1] == 3


def test_nothing_is_recomputed_without_gradients() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    host = nn.ModuleDict({"block": block})
    transform_units(host, resolve_plan(WrapPlan(modules=("block",)), host, source="test"), runtime(recompute=True))
    with torch.no_grad():
        assert torch.equal(block(torch.ones(1, 2)), nn.Sequential.forward(block, torch.ones(1, 2)))


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--accelerator.compile.backend=nosuch.*inductor"):
        transform_units(make_toy(), resolve_plan(PLAN, make_toy(), source="test"), runtime(backend="nosuch"))


@pytest.mark.parametrize(
    ("compiled", "steps", "sharded", "words"),
    [
        ({"mode": "reduce-overhead"}, 1, True, "CUDA graph"),
        ({"mode": "max-autotune"}, 4, False, "gradient_accumulation.steps=4"),
        ({"backend": "cudagraphs"}, 1, True, "--accelerator.compile.backend=cudagraphs"),
        ({"mode": "fast"}, 1, False, "max-autotune-no-cudagraphs"),
        ({"mode": "default", "backend": "aot_eager"}, 1, False, "inductor"),
    ],
)
def test_graph_capturing_and_unknown_modes_are_refused(compiled: dict, steps: int, sharded: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_runtime(runtime(steps=steps, **compiled), sharded=sharded, device="cpu")


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_other_modes_go_with_sharding_and_accumulation(mode: str | None) -> None:
    check_runtime(runtime(mode=mode, backend="inductor", steps=4, recompute=True), sharded=True, device="cpu")


def test_graph_capturing_modes_go_without_sharding_and_accumulation() -> None:
    check_runtime(runtime(mode="reduce-overhead"), sharded=False, device="cpu")


def test_only_what_acts_on_units_needs_a_plan() -> None:
    assert not needs_units(runtime())
    assert not needs_units(runtime(backend="eager", regional=False))
    assert needs_units(runtime(recompute=True)) and needs_units(runtime(backend="eager"))
    assert not dist.is_initialized()
