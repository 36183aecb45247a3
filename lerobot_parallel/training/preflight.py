"""What is confirmed before a run touches anything, though a config alone does not show it: files that resuming
reads late, and names that only a built policy has."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.policies.factory import get_policy_class
from lerobot.rewards.factory import get_reward_model_class
from lerobot.rewards.pretrained import PreTrainedRewardModel
from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME
from torch import nn

from lerobot_parallel.checkpoint import safe_read
from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.resume import has_sharded_optimizer, has_sharded_weights
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.sharding import ignored_parameters
from lerobot_parallel.plans import registry
from lerobot_parallel.training.policy import build_policy


def check_names(cfg: ParallelTrainPipelineConfig) -> None:
    """Resolve the user's unit and module names on a policy without weights, from the dataset's metadata alone.

    A policy or metadata that cannot be had that way is no refusal: sharding resolves the same names again.

    Raises:
        ConfigError: a name that matches nothing.
    """
    fsdp = cfg.accelerator.fsdp
    if fsdp.wrap_modules is None and fsdp.ignored_modules is None:
        return
    policy = _skeleton(cfg)
    if policy is not None:
        registry.resolve(policy, cfg.trainable_config.type, fsdp)
        ignored_parameters(policy, fsdp.ignored_modules)


def trained_class(cfg: ParallelTrainPipelineConfig) -> type:
    get_class = get_reward_model_class if cfg.is_reward_model_training else get_policy_class
    return get_class(cfg.trainable_config.type)


def check_trainable(cfg: ParallelTrainPipelineConfig) -> None:
    """Refuse a reward model that is used as it is.

    Raises:
        ConfigError: it has no forward of its own, by which the host tells them apart too.
    """
    if cfg.is_reward_model_training and trained_class(cfg).forward is PreTrainedRewardModel.forward:
        raise ConfigError(
            "--reward_model.type",
            cfg.reward_model.type,
            "is zero-shot and has nothing to train",
            "use its compute_reward() as it is",
        )


def check_files(checkpoint: Checkpoint, *, processors: bool) -> None:
    """Refuse a checkpoint that lacks a file which resuming reads only after the model is built.

    Args:
        processors: whether the run takes its processors from the checkpoint; reward models build theirs anew.

    Raises:
        ConfigError: a file is missing.
        CheckpointError: shards are missing or too short, or metadata is not what it should be.
    """
    if has_sharded_weights(checkpoint):
        safe_read.read_metadata(checkpoint.model_shards)
    if has_sharded_optimizer(checkpoint):
        safe_read.read_metadata(checkpoint.optimizer_shards)
    for path in _read_late(checkpoint, processors):
        if not path.is_file():
            missing = path.relative_to(checkpoint.path)
            raise ConfigError(
                "--config_path",
                checkpoint.path,
                f"is no complete checkpoint, {missing} is missing",
                "name another checkpoint of the run",
            )


def _read_late(checkpoint: Checkpoint, processors: bool) -> Iterator[Path]:
    if not has_sharded_optimizer(checkpoint):
        yield checkpoint.optimizer_groups
    if _read_object(checkpoint.train_config).get("scheduler") is not None:
        yield checkpoint.scheduler_file
    for name in (POLICY_PREPROCESSOR_DEFAULT_NAME, POLICY_POSTPROCESSOR_DEFAULT_NAME) if processors else ():
        processor = checkpoint.pretrained / f"{name}.json"
        yield processor
        steps = _read_object(processor).get("steps", [])
        yield from (checkpoint.pretrained / step["state_file"] for step in steps if "state_file" in step)


def _read_object(path: Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, "is not a JSON object")
    return value


def _skeleton(cfg: ParallelTrainPipelineConfig) -> nn.Module | None:
    features = cfg.trainable_config.input_features, cfg.trainable_config.output_features
    try:
        meta = LeRobotDatasetMetadata(
            cfg.dataset.repo_id, root=cfg.dataset.root, revision=cfg.dataset.revision, repo_type=cfg.dataset.repo_type
        )
        return build_policy(cfg, meta, sharded=True, weights_follow=True, is_main=False)
    except ConfigError:
        raise
    except Exception as error:
        logging.debug("names are checked when the policy is sharded: %s", error)
        return None
    finally:
        cfg.trainable_config.input_features, cfg.trainable_config.output_features = features
