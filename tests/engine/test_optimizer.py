"""Steps on local parts are the steps that the optimizer makes on DTensors, and leave no trace."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lerobot_parallel.engine.optimizer import step_on_local_parts

pytestmark = pytest.mark.usefixtures("warmed")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adam in lists": functools.partial(torch.optim.Adam, lr=0.1, foreach=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}


def _model() -> nn.Module:
    """On two ranks: shards of unequal size, one of them empty, and a parameter that gets no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model.unused = nn.Parameter(torch.ones(4))
    return model


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, look: Callable[[], Any] = lambda: None) -> list[Any]:
    seen = []
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        model(torch.randn(3, 5, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(look())
    return seen


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state in full."""
    found = {name: _full(param) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": _full(value) for key, value in optimizer.state.get(param, {}).items()}
    return found


def _plain(make: Callable) -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = make(model.parameters())
    _losses(model, optimizer)
    return _state(model, optimizer)


def _sharded(make: Callable, ignore: bool) -> dict[str, torch.Tensor]:
    model = _model()
    ignored = set(model[2].parameters()) if ignore else None
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=ignored)
    optimizer = make(model.parameters())
    step_on_local_parts(optimizer)
    params = list(model.parameters())

    def kept() -> bool:
        group = optimizer.param_groups[0]["params"]
        states = [optimizer.state[p] for p in params if p in optimizer.state]
        return (
            all(a is b for a, b in zip(group, params, strict=True))
            and set(optimizer.state) <= set(params)
            and all(isinstance(v, DTensor) for p in params if isinstance(p, DTensor) for v in _moments(optimizer, p))
            and len(states) == len(params) - 1
        )

    assert all(_losses(model, optimizer, kept))
    return _state(model, optimizer)


def _moments(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> list[Any]:
    return [value for key, value in optimizer.state.get(param, {}).items() if key != "step"]


@pytest.mark.parametrize("ignore", [False, True], ids=["all sharded", "one layer whole"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_on_plain_tensors(world: Callable, name: str, ignore: bool):
    expected = _plain(OPTIMIZERS[name])
    for state in world(_sharded, 2, OPTIMIZERS[name], ignore, init=True):
        assert state.keys() == expected.keys()
        for key, tensor in expected.items():
            # Gradients are means over two equal ranks; everything after that is the same arithmetic.
            torch.testing.assert_close(state[key], tensor, rtol=1e-6, atol=1e-7, msg=lambda text, k=key: f"{k}: {text}")


class _OwnKind(torch.optim.AdamW):
    """May mix elements, for all that anybody knows."""


def test_an_optimizer_of_another_kind_keeps_its_dtensors(world: Callable):
    assert world(_types_seen, 2, _OwnKind, init=True) == [{DTensor}] * 2
    assert world(_types_seen, 2, torch.optim.AdamW, init=True) == [{torch.Tensor}] * 2


def _types_seen(optimizer_type: type) -> set[type]:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = optimizer_type(model.parameters())
    step_on_local_parts(optimizer)
    seen: set[type] = set()
    optimizer.register_step_pre_hook(
        lambda *_: seen.update(type(p.detach()) for p in optimizer.param_groups[0]["params"])
    )
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return seen
