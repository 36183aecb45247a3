"""What a run says of itself before its first step."""

import logging

import torch
import torch.distributed as dist
from lerobot.utils.utils import format_big_number
from torch.distributed.tensor import DTensor

from lerobot_parallel.training.assemble import Run

_ENGINES = {"single": "one process", "ddp": "DDP", "fsdp2": "FSDP2", "hsdp": "HSDP"}


def log_start(run: Run) -> None:
    """Sizes and topology; rank 0's console only (the host's logging is silent elsewhere)."""
    cfg = run.cfg
    params = list(run.module.parameters())
    learnable = sum(p.numel() for p in params if p.requires_grad)
    total = sum(p.numel() for p in params)
    logging.info("Output dir: %s", cfg.output_dir)
    logging.info("steps: %d (%s)", cfg.steps, format_big_number(cfg.steps))
    logging.info("frames: %d, episodes: %d", run.dataset.num_frames, run.dataset.num_episodes)
    logging.info(
        "learnable parameters: %d (%s), all: %d (%s)",
        learnable,
        format_big_number(learnable),
        total,
        format_big_number(total),
    )
    logging.info("\n%s", topology_table(run))
    if run.report is not None:
        logging.info("%s", run.report)
    accumulation = cfg.accelerator.gradient_accumulation.steps
    left_over = (cfg.steps - run.step) % accumulation
    if left_over:
        logging.warning(
            "%d steps are no multiple of gradient_accumulation.steps=%d: the last %d micro-batches reach no update",
            cfg.steps - run.step,
            accumulation,
            left_over,
        )
    if getattr(cfg.policy, "use_amp", False) and cfg.accelerator.mixed_precision == "no":
        logging.warning("policy.use_amp is not used here: precision is --accelerator.mixed_precision (no)")


def topology_table(run: Run) -> str:
    """Ranks, degrees, devices, effective batch, parameters per rank and in the root, precision in effect."""
    cfg, degrees = run.cfg, run.degrees
    steps = cfg.accelerator.gradient_accumulation.steps
    batch = cfg.batch_size * degrees.world_size
    backend = dist.get_backend() if dist.is_initialized() else "none"
    here = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in run.module.parameters())
    rows = {
        "engine": _ENGINES[degrees.engine],
        "ranks": f"{degrees.world_size} = dp_replicate {degrees.dp_replicate} x dp_shard {degrees.dp_shard}",
        "devices": f"{_device_name(run)}, backend {backend}",
        "effective batch": f"{batch * steps} = {cfg.batch_size} x {degrees.world_size} ranks x {steps} micro-batches",
        "parameters": f"{here:,} on each rank, {run.report.in_root if run.report else here:,} in the root",
        "precision": _precision(run),
        "checkpoints": cfg.checkpoint_format,
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def _device_name(run: Run) -> str:
    device = run.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{run.degrees.world_size} x {name}"


def _precision(run: Run) -> str:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in run.module.parameters()})
    mixed = run.cfg.accelerator.mixed_precision
    if mixed == "no":
        return f"parameters {', '.join(dtypes)}, no autocast"
    return f"parameters {', '.join(dtypes)}, autocast {mixed}" + (
        ", gradients reduced in float32" if run.degrees.sharded else ""
    )
