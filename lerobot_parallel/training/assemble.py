"""Config -> a run ready to step. Each stage needs the one before it; their order is the point of this file."""

import json
import logging
import sys
from dataclasses import dataclass
from pprint import pformat
from typing import Any

import torch
from accelerate import Accelerator
from lerobot.common.wandb_utils import WandBLogger
from lerobot.optim.factory import make_optimizer_and_scheduler
from lerobot.utils.random_utils import set_seed
from lerobot.utils.sample_weighting import make_sample_weighter
from lerobot.utils.utils import init_logging
from torch import nn

from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.progress import Progress
from lerobot_parallel.checkpoint.resume import load_optimizer, load_scaler, load_scheduler, load_weights
from lerobot_parallel.checkpoint.rng import restore_rng
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.checkpoint.save import Saver
from lerobot_parallel.checkpoint.sharded_policy import make_savable
from lerobot_parallel.checkpoint.snapshot import RunState
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.accelerator import build_accelerator
from lerobot_parallel.engine.gradients import AccumulationWindow
from lerobot_parallel.engine.optimizer import step_on_local_parts
from lerobot_parallel.engine.ranks import broadcast_from_main, raised_together, seed_rank
from lerobot_parallel.engine.sharding import ShardReport, shard_policy
from lerobot_parallel.engine.topology import build_mesh
from lerobot_parallel.engine.units import needs_units, transform_units
from lerobot_parallel.plans import registry
from lerobot_parallel.plans.plan import ResolvedPlan
from lerobot_parallel.training.arguments import given_to_optimizer, log_differences
from lerobot_parallel.training.data import DataOrder, held_out_subset, make_datasets, make_loader, make_order
from lerobot_parallel.training.policy import build_policy, make_processors


@dataclass
class Run:
    """Everything that the loop needs. `policy` is what is called; `module` the policy inside DDP."""

    cfg: ParallelTrainPipelineConfig
    degrees: Degrees
    accelerator: Accelerator
    wandb: WandBLogger | None
    dataset: Any
    policy: nn.Module
    optimizer: Any
    scheduler: Any
    preprocessor: Any
    postprocessor: Any
    loader: Any
    eval_loader: Any | None
    order: DataOrder | None
    window: AccumulationWindow
    sample_weighter: Any | None
    step: int
    saved: RunState
    saver: Saver
    report: ShardReport | None
    checkpoint: Checkpoint | None

    @property
    def module(self) -> nn.Module:
        return self.saved.policy


def assemble(cfg: ParallelTrainPipelineConfig, degrees: Degrees, resumed: Progress | None) -> Run:
    """Build the run. Collective.

    Args:
        resumed: what the checkpoint at `cfg.checkpoint_path` says of itself, or None for a new run.

    Raises:
        ConfigError, CheckpointError: on every rank alike.
    """
    accelerator = build_accelerator(cfg.accelerator, degrees, device_type=_device_type(cfg))
    init_logging(accelerator=accelerator)
    # Each rank made up a name from its own clock.
    cfg.output_dir, cfg.job_name = broadcast_from_main((cfg.output_dir, cfg.job_name))
    logging.info(pformat(cfg.to_dict()))
    wandb = _start_wandb(cfg, accelerator)
    _seed(cfg, accelerator)
    logging.info("Creating dataset")
    dataset, eval_dataset = make_datasets(cfg, accelerator)
    checkpoint = _agreed_checkpoint(cfg, degrees, resumed) if resumed is not None else None
    saved, report = _assemble_state(cfg, degrees, accelerator, dataset.meta, checkpoint)
    weighter = _make_weighter(cfg, saved.policy, accelerator)
    order = make_order(cfg, dataset, accelerator, resumed)
    loader, eval_loader = _make_loaders(cfg, accelerator, dataset, eval_dataset, order)
    policy, optimizer = saved.policy, saved.optimizer
    if not degrees.sharded:
        policy, optimizer = accelerator.prepare(policy, optimizer)
    return Run(
        cfg=cfg,
        degrees=degrees,
        accelerator=accelerator,
        wandb=wandb,
        dataset=dataset,
        policy=policy,
        optimizer=optimizer,
        scheduler=saved.scheduler,
        preprocessor=saved.preprocessor,
        postprocessor=saved.postprocessor,
        loader=loader,
        eval_loader=eval_loader,
        order=order,
        window=AccumulationWindow(accelerator, policy),
        sample_weighter=weighter,
        step=resumed.step if resumed is not None else 0,
        saved=saved,
        saver=Saver(saved),
        report=report,
        checkpoint=checkpoint,
    )


def _assemble_state(
    cfg: ParallelTrainPipelineConfig,
    degrees: Degrees,
    accelerator: Accelerator,
    ds_meta: Any,
    checkpoint: Checkpoint | None,
) -> tuple[RunState, ShardReport | None]:
    """Policy, processors, optimizer and scheduler, filled from the checkpoint. Collective.

    The optimizer is built on the sharded parameters; one built before would go on updating the unsharded ones.
    """
    # The host loads adapters itself; policies and reward models are filled from the checkpoint, shard by shard.
    adapted = cfg.peft is not None or getattr(cfg.policy, "use_peft", False)
    weights_follow = checkpoint is not None and not adapted
    logging.info("Creating policy")
    policy = build_policy(
        cfg, ds_meta, sharded=degrees.sharded, weights_follow=weights_follow, is_main=accelerator.is_main_process
    )
    preprocessor, postprocessor = make_processors(cfg, policy, ds_meta, accelerator.device)
    plan = None
    if degrees.sharded or needs_units(cfg.accelerator):
        plan = registry.resolve(policy, cfg.trainable_config.type, cfg.accelerator.fsdp)
    transform_units(policy, plan, cfg.accelerator)
    report = _shard(cfg, degrees, accelerator, policy, plan, weights_follow) if degrees.sharded else None
    if weights_follow:
        load_weights(policy, checkpoint)
    logging.info("Creating optimizer and scheduler")
    optimizer, scheduler = make_optimizer_and_scheduler(cfg, policy)
    if isinstance(optimizer, dict):
        raise ConfigError(
            "--optimizer.type", cfg.optimizer.type, "builds several optimizers, the loop drives one", "use a single one"
        )
    if degrees.sharded:
        step_on_local_parts(optimizer)
    if checkpoint is not None:
        given = given_to_optimizer(sys.argv[1:])
        load_optimizer(policy, optimizer, checkpoint, given=given)
        load_scheduler(scheduler, checkpoint, given=given)
        load_scaler(accelerator.scaler, checkpoint)
    return RunState(cfg, policy, optimizer, scheduler, preprocessor, postprocessor, accelerator.scaler), report


def _agreed_checkpoint(cfg: ParallelTrainPipelineConfig, degrees: Degrees, resumed: Progress) -> Checkpoint:
    """The checkpoint that every rank found for itself; says what the run does differently. Collective."""
    path = broadcast_from_main(str(cfg.checkpoint_path))
    with raised_together("choosing a checkpoint"):
        if path != str(cfg.checkpoint_path):
            raise CheckpointError(path, f"is what rank 0 resumes from, this rank found {cfg.checkpoint_path}")
    checkpoint = Checkpoint(cfg.checkpoint_path)
    log_differences(cfg, json.loads(checkpoint.train_config.read_bytes()), sys.argv[1:])
    if difference := resumed.difference(degrees):
        logging.warning(
            "resuming on another topology: %s; weights and optimizer state are those saved, noise is not", difference
        )
    return checkpoint


def start_noise(run: Run) -> None:
    """Set this rank's random state; the last thing before the first step, since building a loader draws from it."""
    rank = run.accelerator.process_index
    seed = run.cfg.seed
    if run.checkpoint is not None and restore_rng(run.checkpoint, rank):
        return
    if seed is not None:
        # A resumed run without a state for this rank must not repeat the noise it began with.
        seed_rank(seed if run.checkpoint is None else seed + run.step, rank)


def _device_type(cfg: ParallelTrainPipelineConfig) -> str:
    return str(cfg.trainable_config.device).split(":")[0]


def _start_wandb(cfg: ParallelTrainPipelineConfig, accelerator: Accelerator) -> WandBLogger | None:
    if cfg.wandb.enable and cfg.wandb.project and accelerator.is_main_process:
        return WandBLogger(cfg)
    logging.info("Logs will be saved locally.")
    return None


def _seed(cfg: ParallelTrainPipelineConfig, accelerator: Accelerator) -> None:
    if cfg.seed is not None:
        set_seed(cfg.seed, accelerator=accelerator)
    torch.backends.cudnn.deterministic = cfg.cudnn_deterministic
    torch.backends.cudnn.benchmark = not cfg.cudnn_deterministic
    torch.backends.cuda.matmul.allow_tf32 = True


def _shard(
    cfg: ParallelTrainPipelineConfig,
    degrees: Degrees,
    accelerator: Accelerator,
    policy: nn.Module,
    plan: ResolvedPlan,
    weights_follow: bool,
) -> ShardReport:
    report = shard_policy(
        policy,
        plan,
        mesh=build_mesh(degrees, accelerator.device.type),
        runtime=cfg.accelerator,
        device=accelerator.device,
        autocast=accelerator.autocast,
        weights_follow=weights_follow,
    )
    make_savable(policy)
    return report


def _make_weighter(cfg: ParallelTrainPipelineConfig, policy: nn.Module, accelerator: Accelerator) -> Any | None:
    if cfg.sample_weighting is None:
        return None
    logging.info("Creating sample weighter: %s", cfg.sample_weighting.type)
    return make_sample_weighter(
        cfg.sample_weighting,
        policy,
        accelerator.device,
        dataset_root=cfg.dataset.root,
        dataset_repo_id=cfg.dataset.repo_id,
    )


def _make_loaders(
    cfg: ParallelTrainPipelineConfig, accelerator: Accelerator, dataset: Any, eval_dataset: Any, order: DataOrder | None
) -> tuple[Any, Any | None]:
    loader = accelerator.prepare(make_loader(cfg, dataset, accelerator.device, order=order, like=dataset))
    if eval_dataset is None:
        return loader, None
    subset = held_out_subset(eval_dataset, cfg.max_eval_samples)
    return loader, accelerator.prepare(make_loader(cfg, subset, accelerator.device, order=None, like=dataset))
