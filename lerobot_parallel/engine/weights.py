"""Building a policy without its weights, and giving every rank its part of rank 0's."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules built inside have their parameters on meta and their buffers for real.

    Peak host memory is that of one parameter. Ties survive: a parameter already on meta is registered as it
    is. Conversions (`.to(dtype)`, `.half()`) change the dtype, moves leave meta alone. A constructor may run a
    forward of its own to learn a shape; what it computes from a parameter is on meta too.

    Raises:
        RuntimeError: a buffer would get values that depend on parameters.
    """
    register, register_buffer, apply = nn.Module.register_parameter, nn.Module.register_buffer, nn.Module._apply
    twins: dict[int, tuple[weakref.ref, nn.Parameter]] = {}

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta:
            return
        known = twins.get(id(param))
        if known is None or known[0]() is not param:
            twins[id(param)] = known = (weakref.ref(param), _meta_twin(param))
        module._parameters[name] = known[1]

    def register_real(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if tensor is not None and tensor.is_meta:
            raise RuntimeError(f"the values of the buffer {name} depend on parameters")
        register_buffer(module, name, tensor, persistent)

    def apply_empty(module: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
        def keep_meta(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta:
                return fn(tensor)
            return tensor.to(dtype=fn(torch.empty((), dtype=tensor.dtype)).dtype)

        return apply(module, keep_meta, recurse)

    nn.Module.register_parameter, nn.Module.register_buffer, nn.Module._apply = (
        register_empty,
        register_real,
        apply_empty,
    )
    try:
        with _MetaWins():
            yield
    finally:
        nn.Module.register_parameter, nn.Module.register_buffer, nn.Module._apply = register, register_buffer, apply


class _MetaWins(TorchFunctionMode):
    """Where tensors on meta meet others, the others join them. Writing into one that holds data is an error: torch
    itself leaves some of them as they were."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        on_meta = {leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if len(on_meta) == 2:
            if _writes_data(func, args, kwargs):
                raise RuntimeError("a tensor that holds data would get values that depend on parameters")
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _writes_data(func: Callable, args: tuple, kwargs: dict) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))
    return kwargs.get("out") is not None or (in_place and isinstance(args[0], torch.Tensor) and not args[0].is_meta)


def _meta_twin(param: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    twin.__dict__.update(param.__dict__)
    return twin


def take_weights(policy: nn.Module) -> dict[str, torch.Tensor]:
    """Move the parameters of a built policy out, keyed by FQN, leaving meta twins in their places.

    Ties and `requires_grad` are kept. Parameters that are on meta already are left out.
    """
    weights: dict[str, torch.Tensor] = {}
    twins: dict[int, nn.Parameter] = {}
    for module_name, module in policy.named_modules():
        for name, param in list(module._parameters.items()):
            if param is None or param.is_meta:
                continue
            if id(param) not in twins:
                twins[id(param)] = _meta_twin(param)
                weights[f"{module_name}.{name}" if module_name else name] = param.detach()
            module._parameters[name] = twins[id(param)]
    return weights


def materialize(policy: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Allocate the (sharded) parameters that are on meta; buffers and sharded host memory stay where they belong."""

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor if tensor.device.type == device.type or offload else tensor.to(device)
        home = torch.device("cpu") if offload and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=home)

    ties = _plain_ties(policy)
    with torch.no_grad():
        policy._apply(allocate)
    # A parameter that leaves meta becomes another object in every place; `fully_shard` ties those it owns itself.
    for (owner, own_name), *others in ties:
        for module, name in others:
            module._parameters[name] = owner._parameters[own_name]


def _plain_ties(policy: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each parameter that stands in several places is, by module and name; sharded ones left out."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in policy.modules():
        for name, param in module._parameters.items():
            if param is not None and not isinstance(param, DTensor):
                places[id(param)].append((module, name))
    return [owners for owners in places.values() if len(owners) > 1]


def distribute_weights(policy: nn.Module, weights: dict[str, torch.Tensor], device: torch.device) -> None:
    """Fill every rank's parameters from rank 0's `weights`, one tensor at a time. Collective.

    Args:
        policy: sharded and materialized, alike on all ranks.
        weights: on rank 0, full tensors by FQN; elsewhere ignored. Cast to the parameter's dtype on the way.
    """
    is_source = not dist.is_initialized() or dist.get_rank() == 0
    with torch.no_grad():
        for name, param in policy.named_parameters():
            if is_source:
                full = weights[name].to(device=device, dtype=param.dtype)
            else:
                full = torch.empty(param.shape, device=device, dtype=param.dtype)
            if isinstance(param, DTensor):
                part = distribute_tensor(full.contiguous(), param.device_mesh, param.placements)
                param.to_local().copy_(part.to_local())
            else:
                param.copy_(_broadcast(full))


def broadcast_buffers(policy: nn.Module) -> None:
    """Rank 0's buffers, persistent or not, on every rank. Collective. FSDP2 broadcasts none itself."""
    with torch.no_grad():
        for buffer in policy.buffers():
            if not isinstance(buffer, DTensor):
                buffer.copy_(_broadcast(buffer.contiguous()))


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        tensor = tensor.clone()
        dist.broadcast(tensor, src=0)
    return tensor
