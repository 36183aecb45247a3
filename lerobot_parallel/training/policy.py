"""The policy of a run: built, sharded or wrapped, with its processors and optimizer."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lerobot.policies import PreTrainedPolicy, make_policy, make_pre_post_processors
from lerobot.rewards import make_reward_model, make_reward_pre_post_processors
from lerobot.rewards.pretrained import PreTrainedRewardModel
from lerobot.utils.import_utils import require_package
from torch import nn

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.weights import empty_parameters


def build_policy(
    cfg: ParallelTrainPipelineConfig, ds_meta: Any, *, sharded: bool, weights_follow: bool, is_main: bool
) -> nn.Module:
    """The policy or reward model, with adapters where the config wants them.

    Under sharding it is built in host memory, and with weights on rank 0 only: the others get theirs from it.
    With `weights_follow` nobody loads weights, since a checkpoint brings them later.
    """
    with ExitStack() as stack:
        if weights_follow:
            stack.enter_context(_no_weight_files())
        if cfg.is_reward_model_training:
            # Small: built whole everywhere, filled from rank 0's.
            return _build_reward_model(cfg, ds_meta)
        if sharded:
            stack.enter_context(_device(cfg.policy, "cpu"))
        if sharded and (weights_follow or not is_main):
            return _build_empty(cfg, ds_meta)
        return _with_adapters(cfg, make_policy(cfg=cfg.policy, ds_meta=ds_meta, rename_map=cfg.rename_map))


def _build_empty(cfg: ParallelTrainPipelineConfig, ds_meta: Any) -> nn.Module:
    try:
        with empty_parameters(), _no_weight_files():
            return make_policy(cfg=cfg.policy, ds_meta=ds_meta, rename_map=cfg.rename_map)
    except Exception as error:
        logging.warning(
            "the policy cannot be built without weights (%s: %s), building it whole", type(error).__name__, error
        )
        return make_policy(cfg=cfg.policy, ds_meta=ds_meta, rename_map=cfg.rename_map)


@contextmanager
def _no_weight_files() -> Iterator[None]:
    """The host's `from_pretrained` builds the policy and leaves its weight file unread."""
    bases = (PreTrainedPolicy, PreTrainedRewardModel)
    originals = [base.__dict__["_load_as_safetensor"] for base in bases]
    for base in bases:
        base._load_as_safetensor = classmethod(lambda cls, model, *args: model)
    try:
        yield
    finally:
        for base, original in zip(bases, originals, strict=True):
            base._load_as_safetensor = original


@contextmanager
def _device(config: Any, device: str) -> Iterator[None]:
    before, config.device = config.device, device
    try:
        yield
    finally:
        config.device = before


def _with_adapters(cfg: ParallelTrainPipelineConfig, policy: nn.Module) -> nn.Module:
    if cfg.peft is None:
        return policy
    require_package("peft", extra="peft")
    from peft import PeftModel

    if isinstance(policy, PeftModel):
        return policy
    return policy.wrap_with_peft(peft_cli_overrides=dataclasses.asdict(cfg.peft))


def _build_reward_model(cfg: ParallelTrainPipelineConfig, ds_meta: Any) -> nn.Module:
    model = make_reward_model(cfg=cfg.reward_model, dataset_stats=ds_meta.stats, dataset_meta=ds_meta)
    if not model.is_trainable:
        raise ConfigError(
            "--reward_model.type",
            cfg.reward_model.type,
            "is zero-shot and has nothing to train",
            "use its compute_reward() as it is",
        )
    return model


def make_processors(
    cfg: ParallelTrainPipelineConfig, policy: nn.Module, ds_meta: Any, device: torch.device
) -> tuple[Any, Any]:
    """Pre- and postprocessor: the checkpoint's statistics on resume, the dataset's otherwise.

    The host never reads a saved processor of a reward model. Its own loop resumes one without any statistics.
    """
    if cfg.is_reward_model_training:
        return make_reward_pre_post_processors(cfg.reward_model, dataset_stats=ds_meta.stats, dataset_meta=ds_meta)
    active = cfg.policy
    kwargs: dict[str, Any] = {}
    if not (active.pretrained_path and cfg.resume):
        kwargs["dataset_stats"] = ds_meta.stats
    if active.pretrained_path is not None:
        kwargs.update(_processor_overrides(cfg, policy.config, ds_meta, device))
    return make_pre_post_processors(
        policy_cfg=cfg.policy,
        pretrained_path=active.pretrained_path,
        pretrained_revision=getattr(cfg.policy, "pretrained_revision", None),
        **kwargs,
    )


def _processor_overrides(
    cfg: ParallelTrainPipelineConfig, config: Any, ds_meta: Any, device: torch.device
) -> dict[str, Any]:
    """What a saved processor must take from this run: device, features, names, and statistics but for resume."""
    stats = {} if cfg.resume else {"stats": ds_meta.stats}
    norm_map = config.normalization_mapping
    pre: dict[str, Any] = {
        "device_processor": {"device": device.type},
        "normalizer_processor": {
            "features": {**config.input_features, **config.output_features},
            "norm_map": norm_map,
            **stats,
        },
        "rename_observations_processor": {"rename_map": cfg.rename_map},
    }
    post: dict[str, Any] = {
        "unnormalizer_processor": {"features": config.output_features, "norm_map": norm_map, **stats}
    }
    if getattr(config, "use_relative_actions", False):
        pre["relative_actions_processor"] = {
            "enabled": True,
            "exclude_joints": getattr(config, "relative_exclude_joints", []),
            "action_names": getattr(config, "action_feature_names", None),
        }
        post["absolute_actions_processor"] = {"enabled": True}
    return {"preprocessor_overrides": pre, "postprocessor_overrides": post}
