"""The same two updates by plain torch in one process, and by the engine on every rank of a world."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lerobot_parallel.checkpoint.layout import MODEL_KEY, OPTIMIZER_KEY, Checkpoint
from lerobot_parallel.checkpoint.resume import load_optimizer, load_weights
from lerobot_parallel.checkpoint.state import model_state, optimizer_state, tied_names
from lerobot_parallel.config.runtime import AcceleratorConfig, ActivationCheckpointingConfig, CompileConfig, FSDPConfig
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.engine.accelerator import build_accelerator
from lerobot_parallel.engine.buffers import agree_on_buffers
from lerobot_parallel.engine.sharding import ShardReport, reshard, upcast_trainable
from lerobot_parallel.engine.units import transform_units
from lerobot_parallel.plans import registry
from tests.policies.builds.common import Batch, Case, make
from tests.support.sharding import shard_on_cpu

STEPS = 2
SAMPLES = 2
"""Samples of an inference batch."""


def loss_of(case: Case, policy: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of one rank's micro-batch, with the same noise wherever it is computed.

    Noise is drawn in fp32 and rounded: some policies ask for it in the dtype of their parameters, and bf16 noise of
    the same seed is other noise.
    """
    torch.manual_seed(10_000 * (step + 1) + rank)
    random.seed(100 * step + rank)
    with mock.patch.multiple(torch, randn=_rounded(torch.randn), randn_like=_rounded(torch.randn_like)):
        return case.loss(policy, copied(case.batch(case.samples, 10 * step + rank)))


def _rounded(draw: Callable) -> Callable:
    @functools.wraps(draw)
    def call(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        if torch.bfloat16 not in (dtype, getattr(next(iter(args), None), "dtype", None)):
            return draw(*args, dtype=dtype, **kwargs)
        return draw(*args, dtype=torch.float32, **kwargs).bfloat16()

    return call


def optimizer_for(policy: nn.Module) -> torch.optim.Optimizer:
    """AdamW with a large eps: at 1e-8 it turns rounding noise of near-zero gradients into whole steps."""
    trainable = [p for p in policy.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-3, eps=1e-4, foreach=False)


def reference(case: Case, ranks: int) -> dict[str, Any]:
    """Plain torch: each update accumulates the gradients of every rank's batch, drawn with that rank's noise.

    This equals the average of any loss over ranks, also where the loss is no mean over samples.
    """
    policy = make(case, seed=0)
    started = infer(case, policy)
    if case.precision != "no":
        upcast_trainable(policy)
    policy.train()
    optimizer = optimizer_for(policy)
    losses = []
    for step in range(STEPS):
        for rank in range(ranks):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
                loss = loss_of(case, policy, step, rank)
            (loss / ranks).backward()
            losses.append(loss.item())
        update(policy, optimizer)
    state = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    return {"state": state, "losses": losses, "started": started, "ended": infer(case, policy)}


def copied(batch: Batch) -> Batch:
    """Some policies write into their batch."""
    return {
        k: copied(v) if isinstance(v, dict) else v.clone() if isinstance(v, torch.Tensor) else v
        for k, v in batch.items()
    }


def update(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
    if hasattr(policy, "update"):
        policy.update()


def infer(case: Case, policy: nn.Module) -> dict[str, torch.Tensor]:
    policy.eval()
    results = {}
    for method in case.infer:
        policy.reset()
        torch.manual_seed(5)
        with torch.no_grad():
            results[method] = getattr(policy, method)(copied((case.observe or case.batch)(SAMPLES, 99))).clone()
    return results


def sharded_run(case: Case, degrees: Degrees, *, checkpoint: Path | None = None, **runtime: Any) -> dict[str, Any]:
    """One rank's part of the same updates. Ranks build policies of different seeds; `checkpoint` gets DCP shards.

    Args:
        runtime: `precision`, `recompute`, `compiled`; see `runtime_for`.
    """
    accelerator, policy, report, plan = shard(case, degrees, runtime_for(**{"precision": case.precision} | runtime))
    # The reference infers before it trains; state that methods leave behind must not differ.
    started = infer(case, policy)
    optimizer = optimizer_for(policy)
    losses = [train_step(case, accelerator, policy, optimizer, step) for step in range(STEPS)]
    agree_on_buffers(policy)
    ended = infer(case, policy)
    reshard(policy)
    state = model_state(policy)
    whole = {name: full(tensor) for name, tensor in state.items()}
    if checkpoint is not None:
        save(Checkpoint(checkpoint), policy, optimizer)
        train_step(case, accelerator, policy, optimizer, STEPS)
    return {
        "state": whole,
        "third": {name: full(tensor) for name, tensor in model_state(policy).items()},
        "losses": losses,
        "started": started,
        "ended": ended,
        "units": [unit.name for unit in plan.units],
        "fsdp": len({id(m._get_fsdp_state()) for m in policy.modules() if isinstance(m, FSDPModule)}),
        "dtensors": sum(isinstance(p, DTensor) for p in policy.parameters()),
        "plain": [name for name, p in policy.named_parameters() if not isinstance(p, DTensor)],
        "ties": len(tied_names(policy)),
        "report": report,
    }


def train_step(case: Case, accelerator: Any, policy: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    policy.train()
    with accelerator.autocast():
        loss = loss_of(case, policy, step, dist.get_rank())
    loss.backward()
    update(policy, optimizer)
    return loss.item()


def save(checkpoint: Checkpoint, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What the engine's own save writes of a sharded policy in format dcp, without a training config around it."""
    shards = {
        checkpoint.model_shards: {MODEL_KEY: model_state(policy)},
        checkpoint.optimizer_shards: {OPTIMIZER_KEY: optimizer_state(policy, optimizer)},
    }
    for folder, state in shards.items():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    if dist.get_rank() == 0:
        policy.config._save_pretrained(checkpoint.pretrained)


def resumed_run(case: Case, degrees: Degrees, checkpoint: Path) -> dict[str, torch.Tensor]:
    """The third update, from the checkpoint of the second, by policies that were built without weights."""
    accelerator, policy, _, _ = shard(case, degrees, runtime_for(precision=case.precision), weights_follow=True)
    load_weights(policy, Checkpoint(checkpoint))
    optimizer = optimizer_for(policy)
    load_optimizer(policy, optimizer, Checkpoint(checkpoint))
    train_step(case, accelerator, policy, optimizer, STEPS)
    return {name: full(tensor) for name, tensor in model_state(policy).items()}


def runtime_for(
    *, precision: str = "no", recompute: bool = False, compiled: str = "", reshard: bool = True
) -> AcceleratorConfig:
    return AcceleratorConfig(
        mixed_precision=precision,
        activation_checkpointing=ActivationCheckpointingConfig("full" if recompute else "none"),
        compile=CompileConfig(enabled=bool(compiled), backend=compiled or "inductor"),
        fsdp=FSDPConfig(reshard_after_forward=reshard),
    )


def shard(
    case: Case, degrees: Degrees, runtime: AcceleratorConfig, *, weights_follow: bool = False
) -> tuple[Any, nn.Module, ShardReport, Any]:
    accelerator = build_accelerator(runtime, degrees, device_type="cpu")
    policy = make(case, seed=dist.get_rank())
    plan = registry.resolve(policy, case.policy, runtime.fsdp)
    transform_units(policy, plan, runtime)
    report = shard_on_cpu(policy, plan, degrees, accelerator, runtime, weights_follow=weights_follow)
    return accelerator, policy, report, plan


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
