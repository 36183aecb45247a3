"""The one place that configures accelerate, and the guard against variables that would do so behind it."""

import gc
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, GradientAccumulationPlugin

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import AcceleratorConfig
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.engine.ranks import forget_groups
from lerobot_parallel.engine.rendezvous import store_arguments
from lerobot_parallel.engine.topology import rank_from_env

ALLOW_VARIABLE = "LEROBOT_ALLOW_ACCELERATE_ENV"
# What `accelerate launch` sets without a config file configures nothing; anything else does.
_INERT = {"", "0", "false", "no"}
_GUARDED = {
    "ACCELERATE_USE_FSDP": _INERT,
    "ACCELERATE_USE_DEEPSPEED": _INERT,
    "ACCELERATE_USE_PARALLELISM_CONFIG": _INERT,
    "ACCELERATE_MIXED_PRECISION": _INERT,
    "ACCELERATE_DYNAMO_BACKEND": _INERT,
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _INERT | {"1"},
}


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse variables of accelerate that would configure the engine behind the config's back.

    Raises:
        ConfigError: names the variable and its value.
    """
    if environ.get(ALLOW_VARIABLE) == "1":
        return
    for name, value in sorted(environ.items()):
        inert = _GUARDED.get(name, set() if name.startswith("FSDP_") else None)
        if inert is not None and value.strip().lower() not in inert:
            raise ConfigError(
                name,
                value,
                "this variable of accelerate would configure the run behind its config",
                f"unset it and use --accelerator.* and --parallelism.*, or set {ALLOW_VARIABLE}=1",
            )


def build_accelerator(runtime: AcceleratorConfig, degrees: Degrees, *, device_type: str) -> Accelerator:
    """Start the process group and accelerate around it. Collective.

    accelerate owns device, DDP, autocast and dataloader sharding; it never sees that parameters are sharded:
    its own FSDP path wraps by class name only and does not engage on CPU.
    """
    _init_process_group(degrees, device_type)
    return Accelerator(
        cpu=device_type == "cpu",
        mixed_precision=runtime.mixed_precision,
        dataloader_config=DataLoaderConfiguration(
            # Every rank reads a whole stream and keeps its part: rank 0 could hand out tensors only, and no task texts.
            dispatch_batches=False,
            # A blocking copy of a batch queues behind the step before it, and waits for that one to end.
            non_blocking=device_type == "cuda",
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=runtime.gradient_accumulation.steps,
            # Windows run on across epoch ends, and the scheduler steps once per loop step.
            sync_with_dataloader=False,
            adjust_scheduler=False,
        ),
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                find_unused_parameters=runtime.ddp.find_unused_parameters,
                gradient_as_bucket_view=runtime.ddp.gradient_as_bucket_view,
                static_graph=runtime.ddp.static_graph,
            )
        ],
    )


# DDP's reducer holds the group too, and frees it with the GIL in its hand if it is the last to go: gloo's threads,
# which the group then joins, may wait for the GIL themselves (seen: a rank that never ends). Python's own reference
# lets go of the GIL first, so ours is the last one.
_KEPT: list[dist.ProcessGroup] = []


def release_process_group() -> None:
    """Let the process group go, after everything that uses it: the policy, its optimizer and its loaders."""
    # A cycle would keep a reducer until after this.
    gc.collect()
    forget_groups()
    _KEPT.clear()


def _init_process_group(degrees: Degrees, device_type: str) -> None:
    if degrees.world_size == 1 or dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank_from_env())))
        # Host tensors (offloaded shards, agreement between ranks) travel over gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl", **store_arguments())
    else:
        dist.init_process_group("gloo", **store_arguments())
    _KEPT.append(dist.group.WORLD)
