"""Elementwise optimizers step on the rank's own parts of sharded parameters, past DTensor's dispatch."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def step_on_local_parts(optimizer: torch.optim.Optimizer) -> None:
    """Hand plain tensors to every step of an optimizer that treats each element on its own.

    Each op on a DTensor goes through Python, and a step has a dozen of them for each parameter. torch's list ops,
    its default on GPUs, also refuse a group of sharded and unsharded parameters. Outside of `step()` parameters,
    gradients and state are DTensors as ever. Optimizers of other kinds are left alone.
    """
    if type(optimizer) not in _ELEMENTWISE:
        return
    swapped: list[_Swapped] = []

    @torch.no_grad()
    def unwrap(*_: Any) -> None:
        for group in optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                if isinstance(param, DTensor) and param.grad is not None:
                    swapped.append(_Swapped(optimizer, params, index))

    def wrap(*_: Any) -> None:
        with torch.no_grad():
            for parameter in swapped:
                parameter.restore()
        swapped.clear()

    optimizer.register_step_pre_hook(unwrap)
    optimizer.register_step_post_hook(wrap)


class _Swapped:
    """A parameter whose place in its group and in the optimizer's state is taken by its local part."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[nn.Parameter], index: int) -> None:
        self._optimizer, self._params, self._index = optimizer, params, index
        self._param = params[index]
        self._state = optimizer.state.pop(self._param, {})
        self._local = self._param.to_local().detach()
        self._local.grad = self._param.grad.to_local()
        params[index] = self._local
        if self._state:
            optimizer.state[self._local] = {key: _local(value) for key, value in self._state.items()}

    def restore(self) -> None:
        self._params[self._index] = self._param
        state = self._optimizer.state.pop(self._local, None)
        if state is not None:
            self._optimizer.state[self._param] = {key: self._wrapped(key, value) for key, value in state.items()}

    def _wrapped(self, key: str, value: Any) -> Any:
        before = self._state.get(key)
        if before is not None and _local(before) is value:
            return before
        if not isinstance(value, torch.Tensor) or value.shape != self._local.shape:
            return value
        like = self._param
        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
