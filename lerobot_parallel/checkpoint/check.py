"""Whether a checkpoint can be resumed from, before anything is built: all that resuming reads is there."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME

from lerobot_parallel.checkpoint import safe_read
from lerobot_parallel.checkpoint.layout import SHARD_METADATA, Checkpoint
from lerobot_parallel.checkpoint.manifest import Manifest
from lerobot_parallel.checkpoint.progress import Progress
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.engine.topology import rank_from_env


def check_resumable(checkpoint: Checkpoint) -> Progress:
    """Refuse a directory that cannot be resumed from; reads small files only. Returns how far it had come.

    Raises:
        ConfigError: a partial or foreign directory, or one that lacks what its own config says it has.
        CheckpointError: a file that is not what it should be, or shards that are missing or too short.
    """
    for path in (checkpoint.policy_config, checkpoint.train_config, checkpoint.step_file):
        _need(checkpoint, path)
    config = _read_object(checkpoint.train_config)
    # The host before its engine knew one format only.
    _check_weights(checkpoint, str(config.get("checkpoint_format", "safetensors")))
    if not has_sharded_optimizer(checkpoint) and not checkpoint.optimizer_file.is_file():
        _refuse(checkpoint, "has no optimizer state")
    for path in _read_late(checkpoint, config):
        _need(checkpoint, path)
    _check_shards(checkpoint)
    return Progress.read(checkpoint)


def _check_weights(checkpoint: Checkpoint, checkpoint_format: str) -> None:
    """What the config says is there, or what `convert` left on purpose: the manifest knows which shards it deleted."""
    expected = {"safetensors": checkpoint.model_file, "dcp": checkpoint.model_shards / SHARD_METADATA}
    missing = [kind for kind in checkpoint_format.split("_") if kind in expected and not expected[kind].is_file()]
    if not missing or _is_adapter(checkpoint):
        return
    path = expected[missing[0]].relative_to(checkpoint.path)
    manifest = Manifest.read(checkpoint)
    on_purpose = manifest is not None and path.as_posix() not in manifest.files
    may_lack = on_purpose or is_spare(checkpoint, expected[missing[0]])
    said = f"lacks {path}, which its config (checkpoint_format={checkpoint_format}) says it has"
    others = [path.relative_to(checkpoint.path) for path in expected.values() if path.is_file()]
    if not others or not may_lack:
        _refuse(checkpoint, said)
    if rank_from_env() == 0:
        logging.warning("%s %s; resuming from %s", checkpoint.path, said, others[0])


def is_spare(checkpoint: Checkpoint, path: Path) -> bool:
    """Whether it is the weights file of a checkpoint whose manifest vouches for shards, which resuming prefers."""
    manifest = Manifest.read(checkpoint) if path == checkpoint.model_file and has_sharded_weights(checkpoint) else None
    shards = (checkpoint.model_shards / SHARD_METADATA).relative_to(checkpoint.path)
    return manifest is not None and shards.as_posix() in manifest.files


def _read_late(checkpoint: Checkpoint, config: dict[str, Any]) -> Iterator[Path]:
    """Files that resuming opens only after the model is built."""
    if not has_sharded_optimizer(checkpoint):
        yield checkpoint.optimizer_groups
    if config.get("scheduler") is not None:
        yield checkpoint.scheduler_file
    # Reward models build their processors anew.
    wanted = config.get("reward_model") is None
    for name in (POLICY_PREPROCESSOR_DEFAULT_NAME, POLICY_POSTPROCESSOR_DEFAULT_NAME) if wanted else ():
        processor = checkpoint.pretrained / f"{name}.json"
        yield processor
        yield from (checkpoint.pretrained / name for name in _state_files(processor))


def _state_files(processor: Path) -> list[str]:
    try:
        return [str(step["state_file"]) for step in _read_object(processor).get("steps", []) if "state_file" in step]
    except TypeError:
        raise CheckpointError(processor, "does not list its steps") from None


def _check_shards(checkpoint: Checkpoint) -> None:
    """Shards that are missing or too short show in their metadata."""
    if has_sharded_weights(checkpoint):
        safe_read.read_metadata(checkpoint.model_shards)
    if has_sharded_optimizer(checkpoint):
        safe_read.read_metadata(checkpoint.optimizer_shards)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, "is not a JSON object")
    return value


def _is_adapter(checkpoint: Checkpoint) -> bool:
    return checkpoint.adapter_config.is_file()


def _need(checkpoint: Checkpoint, path: Path) -> None:
    if not path.is_file():
        _refuse(checkpoint, f"is no complete checkpoint, {path.relative_to(checkpoint.path)} is missing")


def _refuse(checkpoint: Checkpoint, problem: str) -> NoReturn:
    raise ConfigError("--config_path", checkpoint.path, problem, "name another checkpoint of the run")


def has_sharded_weights(checkpoint: Checkpoint) -> bool:
    return (checkpoint.model_shards / SHARD_METADATA).is_file()


def has_sharded_optimizer(checkpoint: Checkpoint) -> bool:
    return (checkpoint.optimizer_shards / SHARD_METADATA).is_file()
