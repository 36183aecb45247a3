"""One opinion on buffers: what ranks update on their own data becomes the same everywhere before it counts."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

_RUNNING = ("running_mean", "running_var")


def agree_on_buffers(policy: nn.Module) -> None:
    """Make the persistent buffers of a sharded policy alike on all ranks, in place. Collective.

    Called before evaluation and before a checkpoint, so that neither shows what rank 0 alone has seen. The rule:

    - running statistics (`running_mean`, `running_var` of batch norms) become their mean over the ranks: each rank
      estimates the same distribution from its own samples. Training does not read them, only adds to them, so a run
      that evaluates makes the same updates as one that does not;
    - every other persistent buffer becomes rank 0's, as under DDP: counters, and code books whose entries have no
      meaning one by one across ranks (VQ-BeT keeps its own in step with collectives of its own).

    Buffers that no checkpoint has are left alone: caches may differ in shape from rank to rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    averaged, copied = _persistent_buffers(policy)
    with torch.no_grad():
        for group in _by_dtype(averaged):
            _reduce(group, lambda flat: (dist.all_reduce(flat), flat.div_(dist.get_world_size())))
        for group in _by_dtype(copied):
            _reduce(group, lambda flat: dist.broadcast(flat, src=0))


def _persistent_buffers(policy: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    averaged, copied, seen = [], [], set()
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            if (
                buffer is None
                or name in module._non_persistent_buffers_set
                or id(buffer) in seen
                or isinstance(buffer, DTensor)
            ):
                continue
            seen.add(id(buffer))
            (averaged if name in _RUNNING and buffer.is_floating_point() else copied).append(buffer)
    return averaged, copied


def _by_dtype(buffers: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    dtypes = dict.fromkeys(buffer.dtype for buffer in buffers)
    return [[buffer for buffer in buffers if buffer.dtype == dtype] for dtype in dtypes]


def _reduce(buffers: list[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
    """One call for all buffers of a dtype; bools travel as bytes."""
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    carrier = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
    collective(carrier)
    for buffer, part in zip(buffers, carrier.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))
