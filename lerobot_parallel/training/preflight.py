"""What is confirmed before a run touches anything, though a config alone does not show it."""

import logging

from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.policies.factory import get_policy_class
from lerobot.rewards.factory import get_reward_model_class
from lerobot.rewards.pretrained import PreTrainedRewardModel
from torch import nn

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
