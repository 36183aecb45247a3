"""Model and optimizer state by FQN, alike for sharded and unsharded policies."""

import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Names that wrappers put into FQNs; a file that holds them "loads" and is of no use.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def canonical_fqn(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_state(policy: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by FQN; sharded ones as DTensors. Values alias the policy's memory.

    A tied parameter stands under each of its names.
    """
    return get_model_state_dict(policy)


def gather_model_state(policy: nn.Module) -> dict[str, torch.Tensor]:
    """The full state of a sharded policy in host memory of rank 0, an empty dict elsewhere. Collective.

    Tensors are copies and own exactly their bytes (a gathered tensor whose first dim does not divide is a view
    into padded storage, which safetensors writers refuse), and a tied parameter stands under one name only, the
    one that the safetensors library would keep.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(policy, options=options)
    dropped = {name for names in tied_names(policy) for name in sorted(names)[1:]}
    alive = {tensor.data_ptr() for tensor in model_state(policy).values() if not isinstance(tensor, DTensor)}
    return {name: _own_bytes(tensor, alive) for name, tensor in full.items() if name not in dropped}


def _own_bytes(tensor: torch.Tensor, alive: set[int]) -> torch.Tensor:
    if tensor.data_ptr() in alive:
        return tensor.clone()
    exact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if exact and tensor.is_contiguous() else tensor.contiguous().clone()


def tied_names(policy: nn.Module) -> list[list[str]]:
    """The FQNs under which each tied parameter, or shared buffer, is known."""
    names: dict[int, list[str]] = defaultdict(list)
    tensors = (policy.named_parameters(remove_duplicate=False), policy.named_buffers(remove_duplicate=False))
    for name, tensor in itertools.chain(*tensors):
        names[id(tensor)].append(canonical_fqn(name))
    return [aliases for aliases in names.values() if len(aliases) > 1]


def parameter_names(policy: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """FQN and parameter of everything that the optimizer updates, in the order of its groups.

    The host numbers optimizer state in this order.
    """
    names = {id(param): canonical_fqn(name) for name, param in policy.named_parameters()}
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`{"state": {fqn: {...}}, "param_groups": [{..., "params": [fqn, ...]}]}`; values alias the optimizer's.

    Read straight from the optimizer: torch's `get_optimizer_state_dict` fills a fresh optimizer by a dummy
    step, which leaves its `step` at 1, and a template made like that asks for state that a parameter without
    gradients never had.
    """
    named = parameter_names(policy, optimizer)
    names = {id(param): name for name, param in named}
    state = {name: dict(optimizer.state[param]) for name, param in named if optimizer.state.get(param)}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def room_for(param: nn.Parameter, field: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Room for one tensor of a parameter's optimizer state: like the parameter where it has its shape.

    Anything else, and the step count, is a plain tensor in host memory, as torch's optimizers make it.
    """
    if field == "step" or shape != param.shape:
        return torch.zeros(shape, dtype=dtype)
    return torch.zeros_like(param, dtype=dtype, requires_grad=False)


def local_part(full: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The part of a full tensor, on every rank alike, that belongs here by the sharding of `param`. Local."""
    if not isinstance(param, DTensor):
        return full
    (start, size), *_ = local_rows(param)
    return full.narrow(0, start, size)


def local_rows(param: DTensor) -> list[tuple[int, int]]:
    """Offset and size of this rank's shard in each dim of the full tensor."""
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return [(min(o, full), n) for o, n, full in zip(offset, shape, param.shape, strict=True)]
