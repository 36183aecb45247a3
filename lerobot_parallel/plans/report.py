"""What a plan does to a policy, in numbers; nothing is sharded for it."""

import math
from dataclasses import dataclass

from torch import nn

from lerobot_parallel.plans.plan import ResolvedPlan

# A trainable parameter's fp32 master, its gradient and the two moments of AdamW.
_TRAINED_BYTES = 4 * 4


@dataclass(frozen=True)
class PlanReport:
    """Sizes are numbers of parameters, each tied weight counted once.

    Attributes:
        units: number of units besides the root; `classes` counts them by class, groups of leaves by their place.
        coverage: share of the parameters that is in units, 0 to 1.
        root: parameters that are gathered for the whole step; `largest_unit` those of the largest unit.
        per_rank_bytes: sharded weights, gradients and AdamW moments on each of `dp_shard` ranks.
        gathered_bytes: root and largest unit whole, in bf16: what comes on top of that while a step runs.
    """

    policy: str
    source: str
    units: int
    classes: dict[str, int]
    parameters: int
    trainable: int
    coverage: float
    root: int
    largest_unit: int
    largest_unit_name: str
    dp_shard: int
    per_rank_bytes: int
    gathered_bytes: int


def report(policy_type: str, policy: nn.Module, plan: ResolvedPlan, *, dp_shard: int) -> PlanReport:
    """Measure `plan` on a built policy, which may be on meta."""
    everything = {id(p): p for p in policy.parameters()}
    taken: dict[int, int] = {}
    sizes: dict[str, int] = {}
    for unit in plan.units:
        mine = {id(p): p.numel() for p in unit.parameters() if id(p) not in taken}
        taken |= mine
        sizes[unit.name] = sum(mine.values())
    total = sum(p.numel() for p in everything.values())
    trainable = sum(p.numel() for p in everything.values() if p.requires_grad)
    frozen_bytes = sum(p.numel() * p.element_size() for p in everything.values() if not p.requires_grad)
    largest = max(sizes, key=sizes.get, default="")
    root = total - sum(taken.values())
    return PlanReport(
        policy=policy_type,
        source=plan.source,
        units=len(plan.units),
        classes=_by_class(plan),
        parameters=total,
        trainable=trainable,
        coverage=sum(taken.values()) / max(total, 1),
        root=root,
        largest_unit=sizes.get(largest, 0),
        largest_unit_name=largest,
        dp_shard=dp_shard,
        per_rank_bytes=math.ceil((trainable * _TRAINED_BYTES + frozen_bytes) / dp_shard),
        gathered_bytes=2 * (root + sizes.get(largest, 0)),
    )


def _by_class(plan: ResolvedPlan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for unit in plan.units:
        name = type(unit.modules[0]).__name__ if len(unit.modules) == 1 else f"leaves of {unit.name.rpartition('.')[0]}"
        counts[name] = counts.get(name, 0) + 1
    return counts
