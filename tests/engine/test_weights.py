"""Building without weights, taking them out, and giving every rank its part of rank 0's."""

import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lerobot_parallel.config.runtime import AcceleratorConfig, FSDPConfig
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.engine.weights import empty_parameters, materialize, take_weights
from tests.support.toy import make_toy

pytestmark = pytest.mark.usefixtures("warmed")


class Parts(nn.Module):
    """One of everything that a constructor does with parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        shared = nn.Parameter(torch.ones(3))
        self.one, self.two = nn.Module(), nn.Module()
        self.one.scale = shared
        self.two.scale = shared
        self.half = nn.Linear(3, 3).half()
        self.double = nn.Linear(3, 3).to(torch.float64)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.late = nn.Linear(3, 3)
        self.late.weight.requires_grad = False
        self.none = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.list = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
        self.norm.running_mean.fill_(7)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)
        self.tagged = nn.Parameter(torch.zeros(2))
        self.tagged.kind = "special"


def shape_of(module: nn.Module) -> dict[str, tuple]:
    return {
        name: (tuple(p.shape), p.dtype, p.requires_grad, type(p).__name__)
        for name, p in module.named_parameters(remove_duplicate=False)
    }


def test_an_empty_build_differs_from_a_whole_one_in_values_only():
    whole = Parts()
    with empty_parameters():
        empty = Parts()
    assert shape_of(empty) == shape_of(whole)
    assert all(p.is_meta for p in empty.parameters())
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in whole.named_parameters()]


def test_ties_survive_an_empty_build():
    with empty_parameters():
        empty = Parts()
    assert empty.head.weight is empty.embed.weight
    assert empty.one.scale is empty.two.scale
    assert empty.tagged.kind == "special"


def test_buffers_of_an_empty_build_are_real():
    with empty_parameters():
        empty = Parts()
    expected = dict(Parts().named_buffers())
    for name, buffer in empty.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert empty.state_dict().keys() == Parts().state_dict().keys()


def test_conversions_after_the_build_change_dtypes_and_leave_meta_alone():
    with empty_parameters():
        model = Parts().to(torch.bfloat16).to("cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in model.parameters())
    assert model.table.dtype == torch.bfloat16
    assert torch.equal(model.table, torch.arange(4.0).bfloat16())


def test_outside_of_the_block_modules_are_whole_again():
    before = nn.Module.register_parameter, nn.Module.register_buffer, nn.Module._apply
    with pytest.raises(ZeroDivisionError), empty_parameters():
        raise ZeroDivisionError
    assert (nn.Module.register_parameter, nn.Module.register_buffer, nn.Module._apply) == before
    assert not nn.Linear(2, 2).weight.is_meta


class Probing(nn.Module):
    """Learns a size by a forward of its own, as the host's diffusion policy does with its backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        out = self.backbone(torch.zeros(1, 3, 9, 9)) + torch.ones(1)
        self.head = nn.Linear(out.flatten(1).shape[1], 2)


def test_a_constructor_may_probe_its_own_shapes():
    with empty_parameters():
        empty = Probing()
    assert shape_of(empty) == shape_of(Probing())
    assert not any(buffer.is_meta for buffer in empty.buffers())


class Derived(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if how == "buffer":
            self.register_buffer("norm", self.weight.norm())
        elif how == "copied":
            self.register_buffer("copy", torch.zeros(3))
            self.copy.copy_(self.weight)
        elif how == "item":
            self.register_buffer("start", torch.zeros(3))
            self.start[0] = self.weight[0]
        else:
            self.register_buffer("sum", torch.zeros(3))
            self.sum += self.weight


@pytest.mark.parametrize("how", ["buffer", "copied", "item", "added"])
def test_a_buffer_made_from_weights_is_an_error_and_never_wrong(how: str):
    Derived(how)
    with pytest.raises((RuntimeError, NotImplementedError)), empty_parameters():
        Derived(how)


def _peak_of_building(build: Callable[[], nn.Module]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = build()
    assert sum(p.numel() for p in model.parameters()) > 0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def _big() -> nn.Module:
    return nn.ModuleList(nn.Linear(2048, 1024) for _ in range(48))


def _empty_big() -> nn.Module:
    with empty_parameters():
        return _big()


def test_an_empty_build_needs_the_memory_of_one_parameter(world: Callable):
    total, one = 48 * 2048 * 1024 * 4, 2048 * 1024 * 4
    (whole,) = world(_peak_of_building, 1, _big)
    (empty,) = world(_peak_of_building, 1, _empty_big)
    assert whole > 0.9 * total
    assert empty < 2 * one


# take_weights


def test_taken_weights_are_the_parameters_themselves_and_leave_twins_on_meta():
    model = Parts()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    described = shape_of(model)
    weights = take_weights(model)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert {w.untyped_storage().data_ptr() for w in weights.values()} == storages
    assert not any(w.requires_grad for w in weights.values())
    assert all(p.is_meta for p in model.parameters())
    assert shape_of(model) == described
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_taking_weights_frees_them_as_soon_as_they_are_dropped():
    model = nn.Linear(4, 4)
    weights = take_weights(model)
    storage = weakref.ref(weights["weight"])
    weights.clear()
    assert storage() is None


def test_parameters_on_meta_are_left_out():
    with empty_parameters():
        model = Parts()
    assert take_weights(model) == {}


def test_plain_parameters_are_materialized_with_their_ties():
    model = Parts()
    described = shape_of(model)
    take_weights(model)
    materialize(model, torch.device("cpu"), offload=False)
    assert not any(p.is_meta for p in model.parameters())
    assert shape_of(model) == described
    assert model.head.weight is model.embed.weight
    assert model.one.scale is model.two.scale


# Every rank's part


def _shard(fsdp: FSDPConfig, *, empty: bool) -> dict[str, Any]:
    from lerobot_parallel.engine.accelerator import build_accelerator
    from lerobot_parallel.plans.plan import WrapPlan, resolve_plan
    from tests.support.sharding import shard_on_cpu

    degrees = Degrees(1, 2)
    runtime = AcceleratorConfig(fsdp=fsdp)
    accelerator = build_accelerator(runtime, degrees, device_type="cpu")
    rank = dist.get_rank()
    if empty and rank:
        with empty_parameters():
            policy = make_toy(seed=rank)
    else:
        policy = make_toy(seed=rank)
    plan = resolve_plan(WrapPlan(units=("ToyBlock",)), policy, source="test")
    shard_on_cpu(policy, plan, degrees, accelerator, runtime)
    named = dict(policy.named_parameters()) | dict(policy.named_buffers())
    return {
        "tensors": {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named.items()},
        "tied": policy.head.weight is policy.embed.weight,
        "trained": {name for name, p in policy.named_parameters() if p.requires_grad},
        "whole": {name for name, p in policy.named_parameters() if not isinstance(p, DTensor)},
    }


@pytest.mark.parametrize("empty", [True, False], ids=["rank 1 empty", "both whole"])
@pytest.mark.parametrize("ignored", [None, "^(embed|head|joint)$"])
def test_every_rank_starts_from_rank_0s_weights_and_buffers(world: Callable, empty: bool, ignored: str | None):
    first = make_toy(seed=0)
    expected = dict(first.named_parameters()) | dict(first.named_buffers())
    for result in world(lambda: _shard(FSDPConfig(ignored_modules=ignored), empty=empty), 2):
        assert result["tensors"].keys() == expected.keys()
        assert all(torch.equal(result["tensors"][name], tensor) for name, tensor in expected.items())
        assert result["tied"]
        assert result["trained"] == {name for name, p in first.named_parameters() if p.requires_grad}
        whole = {
            name for name in dict(first.named_parameters()) if name.partition(".")[0] in ("embed", "head", "joint")
        }
        assert result["whole"] == {"gain"} | (whole if ignored else set())
