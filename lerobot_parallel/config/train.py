"""The host's training config with this project's groups on top, and what it refuses."""

import dataclasses
import json
import logging
import tempfile
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lerobot.configs.train import TrainPipelineConfig

from lerobot_parallel.config.checkpointing import CheckpointConfig, check_checkpointing
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import AcceleratorConfig, check_runtime
from lerobot_parallel.config.source import TRAIN_CONFIG, config_file
from lerobot_parallel.config.topology import Degrees, ParallelismConfig, resolve_degrees

CHECKPOINT_FORMATS = ("safetensors", "dcp", "safetensors_dcp")


@dataclass
class ParallelTrainPipelineConfig(TrainPipelineConfig):
    """Everything a run can be told: the host's own fields, then where and how it runs in parallel.

    `checkpoint_format` is how weights are saved: `safetensors` (gathered, one file), `dcp` (every rank its
    shards) or `safetensors_dcp` (both). Unsharded runs know `safetensors` only.
    """

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    checkpoint_format: str = "safetensors"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def to_dict(self) -> dict[str, Any]:
        """What train_config.json holds: this project's own flags only where they are not at their default, so that
        a run that uses none of them stays readable for the host's later releases."""
        encoded = super().to_dict()
        defaults = dataclasses.asdict(CheckpointConfig())
        own = {key: value for key, value in encoded.pop("checkpoint").items() if value != defaults[key]}
        return {**encoded, "checkpoint": own} if own else encoded

    def _save_pretrained(self, save_directory: Path) -> None:
        (Path(save_directory) / TRAIN_CONFIG).write_text(json.dumps(self.to_dict(), indent=4))

    @classmethod
    def from_pretrained(cls, pretrained_name_or_path: str | Path, **kwargs: Any) -> "ParallelTrainPipelineConfig":
        """Read a train_config.json (file, directory or hub repo), also one of the host's later releases.

        A key that this host does not know is dropped with a warning where its value switches nothing on, and
        refused otherwise.

        Raises:
            ConfigError: an unknown key with an active value, or a file that is no JSON object.
        """
        path = config_file(str(pretrained_name_or_path))
        if path is None or path.suffix != ".json":
            return super().from_pretrained(pretrained_name_or_path, **kwargs)
        known = _without_unknown_keys(cls, _read_json(path), path)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            copy.write_text(json.dumps(known))
            return super().from_pretrained(copy, **kwargs)


def check_config_path(config_path: str | None) -> None:
    """Refuse a `--config_path` that is given and cannot be read.

    Raises:
        ConfigError: there is no such file, here or on the hub, or it is no JSON object.
    """
    if not config_path:
        return
    try:
        path = config_file(config_path)
    # The hub and the network fail in many ways, none of which is worth a traceback.
    except Exception as error:
        raise ConfigError("--config_path", config_path, f"cannot be had from the hub ({error})", _CONFIG_PATH) from None
    if path is None:
        raise ConfigError("--config_path", config_path, "is no config here, and none that the hub gives", _CONFIG_PATH)
    if path.suffix == ".json":
        _read_json(path)


_CONFIG_PATH = f"name a {TRAIN_CONFIG}, its directory, or a repo that has one"


def check_config(cfg: ParallelTrainPipelineConfig, *, world_size: int) -> Degrees:
    """Refuse everything that the config alone shows to be wrong; touches no device, dataset or process group.

    Returns:
        The degrees that the run uses in a world of `world_size` processes.

    Raises:
        ConfigError: names the flag, the value and the way out.
    """
    degrees = resolve_degrees(cfg.parallelism, world_size)
    device = cfg.trainable_config.device if cfg.trainable_config is not None else "cpu"
    check_runtime(cfg.accelerator, sharded=degrees.sharded, device=str(device).split(":")[0])
    _check_checkpoint_format(cfg.checkpoint_format, degrees)
    check_checkpointing(cfg.checkpoint)
    if getattr(cfg.optimizer, "type", None) == "multi_adam":
        raise ConfigError("--optimizer.type", "multi_adam", "the loop drives one optimizer", "use a single one")
    if cfg.peft is not None and cfg.is_reward_model_training:
        raise ConfigError("--peft", "set", "adapters are for policies only", "drop --peft.* or train a policy")
    if degrees.sharded:
        _refuse_unsharded_paths(cfg, degrees)
    return degrees


def _check_checkpoint_format(checkpoint_format: str, degrees: Degrees) -> None:
    flag = "--checkpoint_format"
    if checkpoint_format not in CHECKPOINT_FORMATS:
        raise ConfigError(flag, checkpoint_format, "unknown format", f"use one of {', '.join(CHECKPOINT_FORMATS)}")
    if checkpoint_format != "safetensors" and not degrees.sharded:
        raise ConfigError(
            flag,
            checkpoint_format,
            f"an unsharded run (dp_shard={degrees.dp_shard}) has no shards to save",
            "use safetensors, or shard with --parallelism.dp_shard=-1",
        )


def _refuse_unsharded_paths(cfg: ParallelTrainPipelineConfig, degrees: Degrees) -> None:
    """The host's paths that hold or save whole models: no shards can pass through them."""
    way_out = "use --parallelism.dp_shard=1"
    shown = degrees.dp_shard
    if cfg.peft is not None or getattr(cfg.policy, "use_peft", False):
        raise ConfigError("--parallelism.dp_shard", shown, "PEFT adapters cannot be sharded yet", way_out)
    if cfg.env is not None:
        raise ConfigError(
            "--parallelism.dp_shard",
            shown,
            "environment evaluation of a sharded policy is not in this version",
            f"drop --env.*, evaluate a converted checkpoint with lerobot-eval, or {way_out}",
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("--config_path", path, f"cannot be read ({error})", _CONFIG_PATH) from None
    if not isinstance(data, dict):
        raise ConfigError("--config_path", path, "is not a JSON object", _CONFIG_PATH)
    return data


def _without_unknown_keys(cls: type, data: dict[str, Any], path: Path) -> dict[str, Any]:
    dropped: list[str] = []
    known = _known(cls, data, "", path, dropped)
    if dropped:
        logging.warning(
            "%s: dropped what this host does not know and the run does not use: %s", path, ", ".join(dropped)
        )
    return known


def _known(cls: type, data: dict[str, Any], prefix: str, path: Path, dropped: list[str]) -> dict[str, Any]:
    annotations = {f.name: f.type for f in dataclasses.fields(cls)}
    known = {}
    for key, value in data.items():
        if key in annotations:
            group = _group_type(annotations[key], value)
            known[key] = _known(group, value, f"{prefix}{key}.", path, dropped) if group else value
        elif key in _ALWAYS_KNOWN:
            known[key] = value
        elif _inactive(value):
            dropped.append(f"{prefix}{key}")
        else:
            raise ConfigError(
                "--config_path",
                path,
                f"its key {prefix}{key}={value!r} is unknown to this host",
                "remove the key or update lerobot",
            )
    return known


def _group_type(annotation: Any, value: Any) -> type | None:
    """The dataclass that a JSON object stands for; None for anything else, or an unknown choice."""
    if not isinstance(value, dict):
        return None
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    for candidate in typing.get_args(annotation) if union else (annotation,):
        if hasattr(candidate, "get_known_choices"):
            return candidate.get_known_choices().get(value.get("type"))
        if dataclasses.is_dataclass(candidate):
            return candidate
    return None


# Of a choice, of a pretrained source, and what the host migrates itself (RA-BC before sample_weighting).
_ALWAYS_KNOWN = {"type", "path", "use_rabc", "rabc_progress_path", "rabc_kappa", "rabc_epsilon", "rabc_head_mode"}


def _inactive(value: Any) -> bool:
    if isinstance(value, dict):
        return not value or value.get("enable") is False or value.get("enabled") is False
    return value in (None, False, [], "")
