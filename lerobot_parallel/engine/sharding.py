"""Policy + plan + mesh -> a module whose parameters are sharded by torch's `fully_shard`."""

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import AcceleratorConfig
from lerobot_parallel.engine.weights import broadcast_buffers, distribute_weights, materialize, take_weights
from lerobot_parallel.plans.plan import ResolvedPlan, Unit


@dataclass(frozen=True)
class ShardReport:
    """What sharding did, in numbers of parameters of the whole model.

    Attributes:
        units: number of units besides the root.
        in_units, in_root, replicated: parameters by where they went; their sum is the model.
        largest_unit: parameters of the largest unit.
        per_rank: parameters that one rank keeps.
    """

    source: str
    units: int
    in_units: int
    in_root: int
    replicated: int
    largest_unit: int
    per_rank: int

    def __str__(self) -> str:
        total = max(self.in_units + self.in_root + self.replicated, 1)
        return (
            f"plan: {self.source}; {self.units} units with {self.in_units / total:.1%} of {total:,} parameters, "
            f"largest unit {self.largest_unit:,}, root {self.in_root:,}, unsharded {self.replicated:,}, "
            f"per rank {self.per_rank:,}"
        )


def shard_policy(
    policy: nn.Module,
    plan: ResolvedPlan,
    *,
    mesh: DeviceMesh,
    runtime: AcceleratorConfig,
    device: torch.device,
    autocast: Callable,
    weights_follow: bool = False,
) -> ShardReport:
    """Shard `policy` in place over `mesh`. Collective.

    Rank 0's weights and buffers end up on every rank; the other ranks may have built theirs on meta
    (`empty_parameters`). Trainable parameters become fp32 masters and compute in the dtype that mixed
    precision or the policy itself asks for.

    Args:
        device: where a rank computes; shards live there, or in host memory with `fsdp.cpu_offload`.
        autocast: returns a context manager, entered around the plan's forward methods.
        weights_follow: a checkpoint fills the parameters later; they are left uninitialised.

    Raises:
        ConfigError: `fsdp.ignored_modules` matches no module.
    """
    compute_dtypes = _compute_dtypes(policy, runtime.mixed_precision, mesh.device_type)
    weights = take_weights(policy)
    upcast_trainable(policy)
    ignored = ignored_parameters(policy, runtime.fsdp.ignored_modules)
    _apply_fully_shard(policy, plan, mesh, runtime, ignored, compute_dtypes)
    materialize(policy, device, offload=runtime.fsdp.cpu_offload)
    if not weights_follow:
        distribute_weights(policy, weights, device)
    weights.clear()
    broadcast_buffers(policy)
    _register_forward_methods(policy, plan, autocast)
    report = _report(policy, plan)
    if plan.pointless:
        logging.warning("sharding %s gains nothing: %s", type(policy).__name__.removeprefix("FSDP"), plan.pointless)
    if report.in_units < report.in_root:
        logging.warning("more than half of the parameters stay in the root unit and are gathered for the whole step")
    return report


def upcast_trainable(policy: nn.Module) -> None:
    """Trainable floating-point parameters to fp32: master weights, and one dtype in every unit."""
    for param in policy.parameters():
        if param.requires_grad and param.is_floating_point() and param.dtype != torch.float32:
            param.data = param.data.to(torch.float32)


def _compute_dtypes(policy: nn.Module, precision: str, device_type: str) -> dict[str, torch.dtype]:
    """The dtype in which each parameter computes, by FQN; asked before trainable parameters are upcast.

    Without mixed precision that is the dtype it is kept in, fp32 for trainable ones, which is also what code
    that reads `weight.dtype` sees. With bf16 it is bf16, but for the fp32 parameters of a policy that has
    narrower ones too: that policy keeps them in fp32 on purpose. Norms that cannot mix stay in fp32, as under DDP.
    """
    floating = {n: p for n, p in policy.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    if precision == "no":
        return {name: torch.float32 if p.requires_grad else p.dtype for name, p in floating.items()}
    mixed = any(p.dtype.itemsize < 4 for p in floating.values())
    wide = {n for n, p in floating.items() if mixed and p.dtype.itemsize >= 4} | _fp32_norms(policy, device_type)
    return {n: torch.float32 if n in wide else torch.bfloat16 for n in floating}


def _fp32_norms(policy: nn.Module, device_type: str) -> set[str]:
    """Parameters of norms that take no bf16 weights: batch norms keep fp32 statistics, and on CPU neither kernel nor
    autocast lets a norm have bf16 weights and an fp32 input."""
    classes = (_BatchNorm,) if device_type != "cpu" else (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
    norms = ((name, module) for name, module in policy.named_modules() if isinstance(module, classes))
    return {f"{name}.{parameter}" for name, module in norms for parameter in module._parameters}


def ignored_parameters(policy: nn.Module, pattern: str | None) -> set[nn.Parameter]:
    """Parameters that every rank keeps whole: those of the user's modules, and 0-dim ones, which no dim shards."""
    ignored = {p for p in policy.parameters() if p.dim() == 0}
    if pattern is None:
        return ignored
    modules = [module for name, module in policy.named_modules() if name and re.search(pattern, name)]
    if not modules:
        raise ConfigError(
            "--accelerator.fsdp.ignored_modules", pattern, "matches no module name", "mend the expression"
        )
    return ignored | {p for module in modules for p in module.parameters()}


def _apply_fully_shard(
    policy: nn.Module,
    plan: ResolvedPlan,
    mesh: DeviceMesh,
    runtime: AcceleratorConfig,
    ignored: set[nn.Parameter],
    compute_dtypes: dict[str, torch.dtype],
) -> None:
    uncalled = {id(module) for module in plan.uncalled}
    dtype_of = {p: compute_dtypes[n] for n, p in policy.named_parameters() if n in compute_dtypes}
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if runtime.fsdp.cpu_offload else OffloadPolicy()
    taken: set[nn.Parameter] = set(ignored)

    def shard(modules: list[nn.Module], *, reshard: bool) -> None:
        mine = [p for module in modules for p in module.parameters() if p not in taken]
        sizes: Counter[torch.dtype] = Counter()
        for param in filter(dtype_of.__contains__, mine):
            sizes[dtype_of[param]] += param.numel()
        main = sizes.most_common(1)[0][0] if sizes else torch.float32
        odd = [(dtype, leaf) for dtype, leaf in _odd_leaves(modules, main, dtype_of, taken) if id(leaf) not in uncalled]
        carved = {id(leaf) for _, leaf in odd}
        groups = [(dtype, [leaf]) for dtype, leaf in odd]
        for dtype, group in [*groups, (main, [m for m in modules if id(m) not in carved])]:
            fully_shard(
                group,
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=_precision(dtype),
                offload_policy=offload,
                ignored_params=ignored,
            )
        taken.update(mine)

    for unit in plan.units:
        shard(list(unit.modules), reshard=runtime.fsdp.reshard_after_forward and not unit.keep_gathered)
    shard([policy], reshard=False)


def _odd_leaves(
    modules: list[nn.Module], main: torch.dtype, dtype_of: dict[nn.Parameter, torch.dtype], taken: set[nn.Parameter]
) -> list[tuple[torch.dtype, nn.Module]]:
    """Leaf modules of a unit whose own parameters all compute in another dtype than most of it.

    `fully_shard` casts a whole communication group to one dtype, so each becomes a group of its own. Not one group
    together: the modules of a group must all run in every call, and a layer of two experts runs one of them alone.
    """
    leaves = {id(m): m for root in modules for m in root.modules() if not any(True for _ in m.children())}
    odd = []
    for leaf in leaves.values():
        own = {dtype_of[p] for p in leaf.parameters(recurse=False) if p in dtype_of and p not in taken}
        if len(own) == 1 and main not in own:
            odd.append((own.pop(), leaf))
    return odd


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Gather in `dtype`, reduce in fp32. Inputs are left alone: autocast casts them where an op wants it, and the
    batch must reach the loss in fp32."""
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _register_forward_methods(policy: nn.Module, plan: ResolvedPlan, autocast: Callable) -> None:
    depth = 0

    def outermost(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(_self: nn.Module, *args: object, **kwargs: object) -> object:
            nonlocal depth
            depth += 1
            try:
                with autocast():
                    return method(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    reshard(policy)

        return call

    for name in plan.forward_methods:
        if name in plan.gathered_methods:
            setattr(policy, name, MethodType(_gathered_first(getattr(policy, name)), policy))
        register_fsdp_forward_method(policy, name)
        setattr(policy, name, MethodType(outermost(getattr(policy, name)), policy))


def _gathered_first(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(policy: nn.Module, *args: object, **kwargs: object) -> object:
        with all_gathered(policy):
            return method(*args, **kwargs)

    return call


@contextmanager
def all_gathered(policy: nn.Module) -> Iterator[None]:
    """Every unit is whole inside, and calling one does not communicate: ranks may make different numbers of calls.

    Entering is collective, inside a forward method of the policy; `reshard` ends it. In between, the whole policy is
    on the device in its compute dtype.
    """
    units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    before = [group is not None and group.post_forward_mesh_info is not None for group in groups]
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit, resharded in zip(units, before, strict=True):
            unit.set_reshard_after_forward(resharded, recurse=False)


def reshard(policy: nn.Module) -> None:
    """Free what a forward without backward leaves gathered: the root, and units that do not reshard themselves."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _report(policy: nn.Module, plan: ResolvedPlan) -> ShardReport:
    params = list(policy.parameters())
    sharded = {p for p in params if isinstance(p, DTensor)}
    unit_sizes = [_size(unit, sharded) for unit in plan.units]
    in_units = sum(p.numel() for p in {p for unit in plan.units for p in unit.parameters()} & sharded)
    return ShardReport(
        source=plan.source,
        units=len(plan.units),
        in_units=in_units,
        in_root=sum(p.numel() for p in sharded) - in_units,
        replicated=sum(p.numel() for p in params if p not in sharded),
        largest_unit=max(unit_sizes, default=0),
        per_rank=sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in params),
    )


def _size(unit: Unit, sharded: set[nn.Parameter]) -> int:
    return sum(p.numel() for p in set(unit.parameters()) & sharded)
