"""Resume in two phases: the step before the model is sharded; weights, optimizer and scheduler after."""

import json
import logging
from collections.abc import Iterable
from typing import Any

import torch
from lerobot.optim import load_scheduler_state
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from lerobot_parallel.checkpoint import safe_read
from lerobot_parallel.checkpoint.layout import MODEL_KEY, OPTIMIZER_KEY, SHARD_METADATA, Checkpoint
from lerobot_parallel.checkpoint.progress import Progress
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.checkpoint.state import (
    canonical_fqn,
    room_for,
    local_part,
    local_rows,
    model_state,
    parameter_names,
    tied_names,
)
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.engine.topology import rank_from_env


def check_resumable(checkpoint: Checkpoint) -> Progress:
    """Refuse a directory that cannot be resumed from; reads small files only. Returns how far it had come.

    Raises:
        ConfigError: a partial or foreign directory, or one that lacks what its own config says it has.
        CheckpointError: a file that is not what it should be.
    """
    for path in (checkpoint.policy_config, checkpoint.train_config, checkpoint.step_file):
        if not path.is_file():
            _refuse(checkpoint, f"is no complete checkpoint, {path.relative_to(checkpoint.path)} is missing")
    _check_weights(checkpoint, _saved_format(checkpoint))
    if not has_sharded_optimizer(checkpoint) and not checkpoint.optimizer_file.is_file():
        _refuse(checkpoint, "has no optimizer state")
    return Progress.read(checkpoint)


def _check_weights(checkpoint: Checkpoint, checkpoint_format: str) -> None:
    """Weights in another format than the config says will do: `convert` may have been told to delete the shards."""
    expected = {"safetensors": checkpoint.model_file, "dcp": checkpoint.model_shards / SHARD_METADATA}
    missing = [kind for kind in checkpoint_format.split("_") if kind in expected and not expected[kind].is_file()]
    if not missing or _is_adapter(checkpoint):
        return
    path = expected[missing[0]].relative_to(checkpoint.path)
    said = f"lacks {path}, which its config (checkpoint_format={checkpoint_format}) says it has"
    others = [path.relative_to(checkpoint.path) for path in expected.values() if path.is_file()]
    if not others:
        _refuse(checkpoint, said)
    if rank_from_env() == 0:
        logging.warning("%s %s; resuming from %s", checkpoint.path, said, others[0])


def _saved_format(checkpoint: Checkpoint) -> str:
    """The format that the checkpoint's own config claims; the host before its engine knew one only."""
    try:
        config = json.loads(checkpoint.train_config.read_bytes())
        return str(config.get("checkpoint_format", "safetensors"))
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(checkpoint.train_config, f"is no config ({error})") from None


def _is_adapter(checkpoint: Checkpoint) -> bool:
    return (checkpoint.pretrained / "adapter_config.json").is_file()


def _refuse(checkpoint: Checkpoint, problem: str) -> None:
    raise ConfigError("--config_path", checkpoint.path, problem, "name another checkpoint of the run")


def has_sharded_weights(checkpoint: Checkpoint) -> bool:
    return (checkpoint.model_shards / SHARD_METADATA).is_file()


def has_sharded_optimizer(checkpoint: Checkpoint) -> bool:
    return (checkpoint.optimizer_shards / SHARD_METADATA).is_file()


def load_weights(policy: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill the parameters and persistent buffers of a (sharded) policy. Collective.

    Every rank reads what it keeps, and never the whole model.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than the policy's.
    """
    if has_sharded_weights(checkpoint):
        _load_shards(policy, checkpoint)
    else:
        _load_file(policy, checkpoint)


def _load_shards(policy: nn.Module, checkpoint: Checkpoint) -> None:
    directory = checkpoint.model_shards
    saved = safe_read.tensor_entries(safe_read.read_metadata(directory))
    prefix = f"{MODEL_KEY}."
    shapes = {key.removeprefix(prefix): tuple(entry.size) for key, entry in saved.items() if key.startswith(prefix)}
    state = model_state(policy)
    state = _pick_tied(state, shapes, policy)
    _check_shapes(state, shapes, directory)
    safe_read.load({MODEL_KEY: state}, directory)


def _load_file(policy: nn.Module, checkpoint: Checkpoint) -> None:
    path = checkpoint.model_file
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            state = _pick_tied(model_state(policy), shapes, policy)
            _check_shapes(state, shapes, path)
            for name, tensor in state.items():
                _copy_rows(file, name, tensor)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(path, f"cannot be read ({error})") from None


def _copy_rows(file: safe_open, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(file.get_tensor(name))
        return
    rows = local_rows(tensor)
    if all(size for _, size in rows):
        part = file.get_slice(name)[tuple(slice(start, start + size) for start, size in rows)]
        tensor.to_local().copy_(part)


def _pick_tied(state: dict[str, torch.Tensor], saved: Iterable[str], policy: nn.Module) -> dict[str, torch.Tensor]:
    """Drop a tied parameter's names that the checkpoint does not have, where it has another of them."""
    saved = set(saved)
    missing = {n for names in tied_names(policy) if saved & set(names) for n in names if n not in saved}
    return {name: tensor for name, tensor in state.items() if name not in missing}


def _check_shapes(state: dict[str, torch.Tensor], saved: dict[str, tuple[int, ...]], where: object) -> None:
    missing = [name for name in state if name not in saved]
    extra = [name for name in saved if name not in state]
    if missing or len(extra) == len(saved):
        raise CheckpointError(
            str(where), f"is of another policy: lacks {len(missing)} tensors ({', '.join(missing[:3])}), has {len(extra)} others"
        )
    for name, tensor in state.items():
        if tuple(tensor.shape) != saved[name]:
            raise CheckpointError(str(where), f"{name} has shape {saved[name]}, the policy's has {tuple(tensor.shape)}")


def load_optimizer(policy: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Restore state and groups of a freshly built optimizer, from shards or the host's own file. Collective.

    Parameters that never had a gradient have no state, there as here.

    Raises:
        CheckpointError: state of another shape, or groups that do not match.
    """
    if has_sharded_optimizer(checkpoint):
        _load_sharded_optimizer(policy, optimizer, checkpoint)
    else:
        _load_optimizer_file(policy, optimizer, checkpoint)


def _load_sharded_optimizer(policy: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    directory = checkpoint.optimizer_shards
    metadata = safe_read.read_metadata(directory)
    paths = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
    named = dict(parameter_names(policy, optimizer))
    state: dict[str, dict[str, Any]] = {}
    for key, path in paths.items():
        if path[:2] == (OPTIMIZER_KEY, "state") and path[2] in named:
            state.setdefault(path[2], {})[path[3]] = _room(named[path[2]], path[3], metadata, key, directory)
    groups = _group_template(paths)
    template = {OPTIMIZER_KEY: {"state": state, "param_groups": groups}}
    safe_read.load(template, directory)
    _restore(optimizer, named, state, groups, directory)


def _room(param: nn.Parameter, field: str, metadata: Metadata, key: str, directory: object) -> Any:
    entry = safe_read.tensor_entries(metadata).get(key) if key in metadata.state_dict_metadata else None
    if entry is None:
        return None
    if entry.size not in (param.shape, torch.Size([])) and len(entry.size) == param.dim():
        raise CheckpointError(str(directory), f"{key} has shape {tuple(entry.size)}, the parameter's is {tuple(param.shape)}")
    return room_for(param, field, entry.size, entry.properties.dtype)


def _group_template(paths: dict[str, tuple]) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for path in paths.values():
        if path[:2] == (OPTIMIZER_KEY, "param_groups"):
            groups.setdefault(int(path[2]), {})[path[3]] = None
    return [groups[index] for index in sorted(groups)]


def _load_optimizer_file(policy: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """The host's layout: state numbered in the order of the groups, or by FQN from its own FSDP path."""
    path = checkpoint.optimizer_file
    named = parameter_names(policy, optimizer)
    by_key = {str(index): param for index, (_, param) in enumerate(named)} | {name: param for name, param in named}
    state: dict[str, dict[str, Any]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                name, _, field = key.removeprefix("state/").rpartition("/")
                if key.startswith("state/") and name in by_key:
                    state.setdefault(name, {})[field] = _sharded_like(file.get_tensor(key), by_key[name], field)
        groups = json.loads(checkpoint.optimizer_groups.read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(path, f"cannot be read ({error})") from None
    _restore(optimizer, by_key, state, groups, path)


def _sharded_like(full: torch.Tensor, param: nn.Parameter, field: str) -> torch.Tensor:
    room = room_for(param, field, full.shape, full.dtype)
    if isinstance(room, DTensor):
        room.to_local().copy_(local_part(full, param))
        return room
    return room.copy_(full)


def _restore(
    optimizer: torch.optim.Optimizer,
    named: dict[str, nn.Parameter],
    state: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    where: object,
) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if sizes != saved_sizes:
        raise CheckpointError(str(where), f"has parameter groups of {saved_sizes} parameters, the optimizer has {sizes}")
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: _as_in(group.get(key), value) for key, value in saved.items() if key != "params"})
    for name, fields in state.items():
        optimizer.state[named[name]] = fields


def _as_in(current: Any, value: Any) -> Any:
    """JSON has lists only; betas are a tuple."""
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def load_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler | None, checkpoint: Checkpoint) -> None:
    """Restore the scheduler; one that the saved run did not have starts where it stands."""
    if scheduler is None or not checkpoint.scheduler_file.is_file():
        return
    try:
        load_scheduler_state(scheduler, checkpoint.training_state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(checkpoint.scheduler_file, f"is of another scheduler ({error})") from None
