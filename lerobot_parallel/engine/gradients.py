"""Accumulation windows, one correct norm over sharded and plain gradients, and clipping."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from lerobot_parallel.config.errors import ConfigError


class AccumulationWindow:
    """N micro-batches, one optimizer update; windows run on across epoch ends.

    Under sharding every micro-batch reduce-scatters, so no full gradient outlives its unit's backward; HSDP's
    all-reduce over replicas waits for the last micro-batch, where it can. Under DDP the all-reduce waits.

    A new object begins with an empty window: checkpoints hold no half-filled one.
    """

    def __init__(self, accelerator: Accelerator, policy: nn.Module) -> None:
        self._accelerator = accelerator
        self._policy = policy
        self._replicated = replicated_parameters(policy) if isinstance(policy, FSDPModule) else []
        self._units = {name: module for name, module in policy.named_modules() if isinstance(module, FSDPModule)}
        self._can_wait: dict[str, int] | None = None
        self._waiting: dict[str, int] = {}

    @property
    def is_update(self) -> bool:
        """Whether the running micro-batch is the last of its window."""
        return self._accelerator.sync_gradients

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around forward and backward of one micro-batch.

        Raises:
            ConfigError: under HSDP, a unit that waits for its all-reduce did not get all of its gradients.
        """
        with self._accelerator.accumulate(self._policy):
            for name, unit in self._units.items():
                unit.set_requires_all_reduce(self.is_update or name not in self._waiting, recurse=False)
            yield
            if self._can_wait is None:
                self._can_wait = self._units_that_can_wait()
            if self.is_update:
                # Not within the first window: it would hold two sums, what is reduced and what waits.
                self._waiting = self._can_wait
            else:
                self._check(lambda name, summed: summed.numel() == self._waiting.get(name))

    def finish(self, max_norm: float) -> torch.Tensor:
        """Complete the window's gradients and clip them. Collective; on update steps only.

        Args:
            max_norm: upper bound of the total norm; 0 or less measures without clipping, as in the host.

        Returns:
            The total norm before clipping, 0-dim, the same on every rank, not synchronised with the host.

        Raises:
            ConfigError: under HSDP, a unit that ran in this window got no gradients in its last micro-batch.
        """
        limit = max_norm if max_norm > 0 else float("inf")
        if not isinstance(self._policy, FSDPModule):
            return self._accelerator.clip_grad_norm_(self._policy.parameters(), limit)
        # One that waits still has no gradient from the last micro-batch, and would go into the next window.
        self._check(lambda name, summed: False)
        average_gradients(self._replicated)
        return clip_grad_norm(self._policy.parameters(), limit)

    def _units_that_can_wait(self) -> dict[str, int]:
        """The units in which every trainable parameter has a gradient by now, with the elements of their flat gradient.

        FSDP2 adds the flat gradients of micro-batches without names: those of a unit whose parameters take turns
        would be mixed up. Such a unit all-reduces in every micro-batch.
        """
        found = {}
        for name, group in self._groups():
            trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
            if all(param.sharded_param.grad is not None for param in trained):
                found[name] = sum(param.padded_sharded_param_size.numel() for param in trained)
        return found

    def _groups(self) -> Iterator[tuple[str, Any]]:
        groups = ((name, unit._get_fsdp_state()._fsdp_param_group) for name, unit in self._units.items())
        return ((name, group) for name, group in groups if group is not None)

    def _check(self, right: Callable[[str, torch.Tensor], bool]) -> None:
        """Every flat gradient that waits for its all-reduce is as it should be."""
        for name, group in self._groups():
            summed = group._partial_reduce_output
            if summed is not None and not right(name, summed):
                raise ConfigError(
                    "--accelerator.gradient_accumulation.steps",
                    self._accelerator.gradient_accumulation_steps,
                    f"the unit {name or 'root'} did not get all of its gradients in a micro-batch: over replicas they "
                    "would be mixed up or left out",
                    "use 1, or --parallelism.dp_replicate=1",
                )


def replicated_parameters(policy: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of a sharded policy that every rank keeps whole."""
    return [p for p in policy.parameters() if p.requires_grad and not isinstance(p, DTensor)]


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Mean of the gradients over the world, in place. Collective; FSDP2 leaves parameters it ignores alone.

    A parameter without a gradient on any rank keeps none; one that has it on some ranks counts as zero on the
    others. Who has one is agreed on in host memory, so that no device is waited for.
    """
    if not parameters or dist.get_world_size() == 1:
        return
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
    for param, somewhere in zip(parameters, has_gradient.tolist(), strict=True):
        if not somewhere:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad)
        param.grad.div_(dist.get_world_size())


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their total 2-norm is at most `max_norm`. Collective.

    Local parts are summed over the shard axis of the mesh; replicated gradients count once. Works over any
    mixture of DTensors and plain tensors, on which torch's own function raises.

    Returns:
        The total norm before clipping, 0-dim fp32 on the mesh's device.
    """
    params = [p for p in parameters if p.grad is not None]
    sharded = [p.grad for p in params if isinstance(p.grad, DTensor)]
    plain = [p.grad for p in params if not isinstance(p.grad, DTensor)]
    local = [g.to_local() for g in sharded]
    device = plain[0].device if plain else (local[0].device if local else torch.device("cpu"))
    total = _sum_of_squares(plain, device)
    if sharded:
        mesh = sharded[0].device_mesh
        device = _mesh_device(mesh.device_type)
        part = _sum_of_squares(local, local[0].device).to(device)
        axis = next(i for i, placement in enumerate(sharded[0].placements) if isinstance(placement, Shard))
        dist.all_reduce(part, group=mesh.get_group(axis))
        total = total.to(device) + part
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if max_norm != float("inf"):
        for grads in (local, plain):
            if grads:
                # To offloaded gradients this waits: a copy on its way to the host has no value there yet.
                torch._foreach_mul_(grads, scale.to(grads[0].device))
    return norm


def _mesh_device(device_type: str) -> torch.device:
    return (
        torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    )


def _sum_of_squares(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    return torch.stack(norms).square().sum()
