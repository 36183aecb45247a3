"""A policy from its config alone: no weight is read, made or moved, parameters and buffers are on meta."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.configs.rewards import RewardModelConfig
from lerobot.policies.factory import get_policy_class, make_policy_config
from lerobot.rewards.factory import get_reward_model_class, make_reward_model_config
from torch import nn
from torch.overrides import TorchFunctionMode

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.source import config_file

REWARD_MODELS = ("reward_classifier", "robometer", "sarm", "topreward")
# What a policy insists on, where a camera of 224 x 224 will not do.
_SQUARE = {"diffusion": 96, "tdmpc": 64, "vqbet": 96}


def default_config(policy_type: str) -> Any:
    """The host's defaults for a type, with a robot of 7 joints and one camera.

    Raises:
        ConfigError: the host has no such type.
    """
    make = make_reward_model_config if policy_type in REWARD_MODELS else make_policy_config
    side = _SQUARE.get(policy_type, 224)
    inputs = {
        "observation.state": PolicyFeature(FeatureType.STATE, (7,)),
        "observation.images.top": PolicyFeature(FeatureType.VISUAL, (3, side, side)),
    }
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (7,))}
    try:
        return make(policy_type, input_features=inputs, output_features=outputs)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(
            "POLICY", policy_type, f"the host makes no config of it ({error})", "give --config, or another type"
        ) from None


def read_config(path: str) -> Any:
    """A policy's or reward model's config, from its config.json, a train_config.json, or a directory with one.

    Raises:
        ConfigError: no such file, or no such config in it.
    """
    folder = Path(path)
    policy_config = folder / "config.json"
    file = policy_config if policy_config.is_file() else config_file(path)
    try:
        data = json.loads(Path(file).read_text())
        data = data.get("policy") or data.get("reward_model") or data
        base = RewardModelConfig if data["type"] in REWARD_MODELS else PreTrainedConfig
        with tempfile.TemporaryDirectory() as copy:
            (Path(copy) / "config.json").write_text(json.dumps(data))
            return base.from_pretrained(copy)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "--config", path, f"no policy's config can be read from it ({error})", "name a config.json"
        ) from None


def build_skeleton(config: Any) -> nn.Module:
    """The policy of `config` on meta. What it asks the hub for is configs and tokenizers, never weights.

    Raises:
        ConfigError: the policy cannot be built that way.
    """
    config.device = "meta"
    if hasattr(config, "pretrained_backbone_weights"):
        config.pretrained_backbone_weights = None
    get_class = get_reward_model_class if config.type in REWARD_MODELS else get_policy_class
    try:
        with torch.device("meta"), _UnknownNumbers(), _configs_only():
            return get_class(config.type)(config)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            "POLICY",
            config.type,
            f"cannot be built from its config alone ({first})",
            "give --config with local folders for what it would load from the hub",
        ) from error


class _UnknownNumbers(TorchFunctionMode):
    """What a constructor reads from a tensor on meta, where there is nothing to read: schedules and checks do so."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta:
            return 1.0
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _configs_only() -> Iterator[None]:
    """`from_pretrained` of a transformers model reads its config and leaves the weights."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        yield
        return
    original = PreTrainedModel.__dict__["from_pretrained"]

    def from_config(cls: type, name: str, *_: object, config: Any = None, **__: object) -> nn.Module:
        return cls(config if config is not None else cls.config_class.from_pretrained(name))

    PreTrainedModel.from_pretrained = classmethod(from_config)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original
