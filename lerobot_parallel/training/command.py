"""What `lerobot-train` runs when a run asks for the engine."""

import contextlib
import io
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from draccus.utils import ParsingError
from lerobot.configs import parser
from lerobot.jobs import submit_to_hf
from yaml import YAMLError

from lerobot_parallel.checkpoint.check import check_resumable
from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.progress import Progress
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.checkpoint.save import SaveError
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.config.train import ParallelTrainPipelineConfig, check_config, check_config_path
from lerobot_parallel.engine.accelerator import check_environment, release_process_group
from lerobot_parallel.engine.topology import rank_from_env, world_size_from_env
from lerobot_parallel.engine.units import needs_units
from lerobot_parallel.plans.registry import check_plan_exists
from lerobot_parallel.training.arguments import apply_given_preset, settle_checkpoint
from lerobot_parallel.training.assemble import assemble
from lerobot_parallel.training.loop import train_loop
from lerobot_parallel.training.preflight import check_names, check_trainable, trained_class
from lerobot_parallel.training.publish import publish_trained_model
from lerobot_parallel.training.start_log import log_start

# How long a rank that refuses waits for the launcher to end it after rank 0 has said why.
_GRACE_S = 5.0


class _HostRefusalError(Exception):
    """What the host says of something that a user can mend."""


def train() -> None:
    """Parse the command line, refuse or run. The whole of `lerobot-train` under this engine."""
    try:
        sys.argv[1:] = settle_checkpoint(sys.argv[1:])
        cfg = _parse_once()
        if cfg.job.is_remote:
            if rank_from_env() == 0:
                submit_to_hf(cfg)
            return
        degrees, resumed = preflight(cfg)
        run_training(cfg, degrees, resumed)
        release_process_group()
    except (ConfigError, CheckpointError, _HostRefusalError) as refusal:
        refuse(str(refusal))
    except SaveError as error:
        # Each rank knows what happened, and which one it happened to may be what helps.
        print(f"lerobot-train: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def preflight(cfg: ParallelTrainPipelineConfig) -> tuple[Degrees, Progress | None]:
    """Every refusal that needs no process group, no dataset and no GPU.

    Returns:
        The degrees in effect, and what the checkpoint to resume from says of itself, if there is one.

    Raises:
        ConfigError, CheckpointError: alike on every rank.
    """
    check_environment()
    world_size = world_size_from_env()
    check_config(cfg, world_size=world_size)
    _validate_by_host(cfg)
    # Presets and the policy's own config are known only now.
    degrees = check_config(cfg, world_size=world_size)
    check_trainable(cfg)
    resumed = _check_checkpoint(cfg) if cfg.resume else None
    if resumed is not None:
        apply_given_preset(cfg, sys.argv[1:])
    if degrees.sharded or needs_units(cfg.accelerator):
        check_plan_exists(
            cfg.trainable_config.type,
            trained_class(cfg),
            cfg.accelerator.fsdp,
            sharded=degrees.sharded,
            precision=cfg.accelerator.mixed_precision,
        )
    if degrees.sharded and rank_from_env() == 0:
        check_names(cfg)
    return degrees, resumed


def run_training(cfg: ParallelTrainPipelineConfig, degrees: Degrees, resumed: Progress | None) -> None:
    """Assemble, train, publish, and leave the process group. Collective.

    A run that a scheduler stopped saves and publishes nothing.
    """
    run = assemble(cfg, degrees, resumed)
    log_start(run)
    finished = train_loop(run)
    logging.info("End of training" if finished else f"Stopped at step {run.step} of {cfg.steps}, as asked by a signal")
    if finished and getattr(cfg.trainable_config, "push_to_hub", False):
        peft_model = run.module if cfg.policy is not None and cfg.policy.use_peft else None
        publish_trained_model(
            cfg, run.module, run.preprocessor, run.postprocessor, run.dataset.meta, peft_model=peft_model
        )
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


@parser.wrap()
def _parse(cfg: ParallelTrainPipelineConfig) -> ParallelTrainPipelineConfig:
    return cfg


def _parse_once() -> ParallelTrainPipelineConfig:
    """Parse on every rank, let rank 0 alone speak of what is wrong."""
    check_config_path(parser.parse_arg("config_path"))
    speaks, said, code = rank_from_env() == 0, io.StringIO(), None
    try:
        shown = sys.stdout if speaks else io.StringIO()
        with _host_refusals(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
            cfg = _parse()
    except SystemExit as done:
        code = int(done.code or 0)
    # A value that the host cannot read is the last thing it says before it exits with 1.
    text, _, problem = said.getvalue().rpartition("error: ") if code == 1 else (said.getvalue(), "", "")
    if speaks:
        sys.stderr.write(text)
    if problem:
        refuse(problem)
    if code is not None:
        _leave(code)
    return cfg


def _validate_by_host(cfg: ParallelTrainPipelineConfig) -> None:
    # The host refuses a directory that exists, which one that starts by itself again and again does.
    hidden = cfg.output_dir if cfg.checkpoint.auto_resume and not cfg.resume else None
    with _host_refusals():
        if hidden is not None:
            cfg.output_dir = None
        cfg.validate()
        cfg.output_dir = hidden if hidden is not None else cfg.output_dir


@contextlib.contextmanager
def _host_refusals() -> Iterator[None]:
    """The host's complaints become refusals: one line, once for the world."""
    try:
        yield
    except (ConfigError, CheckpointError):
        raise
    except (ValueError, OSError, NotImplementedError, YAMLError) as error:
        raise _HostRefusalError(str(error)) from error
    except ParsingError as error:
        raise _HostRefusalError(f"{error} {error.__cause__ or ''}") from error


def _check_checkpoint(cfg: ParallelTrainPipelineConfig) -> Progress:
    # `last` may move while the run starts.
    cfg.checkpoint_path = Path(cfg.checkpoint_path).resolve()
    checkpoint = Checkpoint(cfg.checkpoint_path)
    progress = check_resumable(checkpoint)
    cfg.trainable_config.pretrained_path = (
        checkpoint.pretrained
        if cfg.policy is not None and not cfg.is_reward_model_training
        else str(checkpoint.pretrained)
    )
    return progress


def refuse(text: str) -> NoReturn:
    """One line for the whole world, on rank 0's stderr; exit code 1 on every rank."""
    if rank_from_env() == 0:
        _say(text)
    _leave(1, last_words=f"rank {rank_from_env()}: {text}" if dist.is_initialized() else None)


def _leave(code: int, *, last_words: str | None = None) -> NoReturn:
    if rank_from_env() != 0 and code != 0:
        # A launcher ends the whole world at the first rank that is gone: let that be the one that speaks.
        time.sleep(_GRACE_S)
        if last_words is not None:
            # Still here: what went wrong on this rank is not known to rank 0.
            _say(last_words)
    sys.exit(code)


def _say(text: str) -> None:
    print(f"lerobot-train: {' '.join(text.split())}", file=sys.stderr, flush=True)
