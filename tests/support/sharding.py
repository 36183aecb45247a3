"""Sharding on CPU as a run does it."""

from accelerate import Accelerator
from torch import nn

from lerobot_parallel.config.runtime import AcceleratorConfig
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.engine.sharding import ShardReport, shard_policy
from lerobot_parallel.engine.topology import build_mesh
from lerobot_parallel.plans.plan import ResolvedPlan


def shard_on_cpu(
    policy: nn.Module,
    plan: ResolvedPlan,
    degrees: Degrees,
    accelerator: Accelerator,
    runtime: AcceleratorConfig,
    *,
    weights_follow: bool = False,
) -> ShardReport:
    """Shard `policy` in place with what the accelerator of the run gives. Collective."""
    return shard_policy(
        policy,
        plan,
        mesh=build_mesh(degrees, "cpu"),
        runtime=runtime,
        device=accelerator.device,
        autocast=accelerator.autocast,
        weights_follow=weights_follow,
    )
