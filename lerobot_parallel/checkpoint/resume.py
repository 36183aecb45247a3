"""The second phase of a resume: weights, optimizer and scheduler, once the model is sharded."""

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch
from lerobot.optim import load_scheduler_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES as SAFETENSORS_DTYPES
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lerobot_parallel.checkpoint import safe_read
from lerobot_parallel.checkpoint.check import has_sharded_optimizer, has_sharded_weights
from lerobot_parallel.checkpoint.layout import MODEL_KEY, OPTIMIZER_KEY, Checkpoint
from lerobot_parallel.checkpoint.manifest import Manifest
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.checkpoint.state import (
    canonical_fqn,
    local_part,
    local_rows,
    model_state,
    parameter_names,
    room_for,
    tied_names,
)


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
    kinds = {
        key.removeprefix(prefix): (tuple(entry.size), entry.properties.dtype)
        for key, entry in saved.items()
        if key.startswith(prefix)
    }
    state = _pick_tied(model_state(policy), kinds, policy)
    _check_kinds(state, kinds, directory)
    safe_read.load({MODEL_KEY: state}, directory)


def _load_file(policy: nn.Module, checkpoint: Checkpoint) -> None:
    path = checkpoint.model_file
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            kinds = {name: _kind(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
            state = _pick_tied(model_state(policy), kinds, policy)
            _check_kinds(state, kinds, path)
            for name, tensor in state.items():
                _copy_rows(file, name, tensor)
    except (OSError, KeyError, SafetensorError) as error:
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


def _kind(part: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of one tensor of a safetensors file, from its header."""
    return tuple(part.get_shape()), SAFETENSORS_DTYPES[part.get_dtype()]


def _check_kinds(
    state: dict[str, torch.Tensor], saved: dict[str, tuple[tuple[int, ...], torch.dtype]], where: object
) -> None:
    """Keys, shapes and dtypes, before anything is read: torch ignores extra keys, and casts without a word."""
    missing, extra = [n for n in state if n not in saved], [n for n in saved if n not in state]
    if missing or extra:
        raise CheckpointError(
            str(where),
            f"is of another policy: it lacks {len(missing)} tensors ({', '.join(missing[:3])}), "
            f"and has {len(extra)} others ({', '.join(extra[:3])})",
        )
    rounded = []
    for name, tensor in state.items():
        shape, dtype = saved[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(str(where), f"{name} has shape {shape}, the policy's has {tuple(tensor.shape)}")
        if not torch.can_cast(dtype, tensor.dtype) or (dtype == torch.bool) != (tensor.dtype == torch.bool):
            raise CheckpointError(str(where), f"{name} is {dtype}, the policy's is {tensor.dtype}")
        if torch.promote_types(dtype, tensor.dtype) != tensor.dtype:
            rounded.append(f"{name} ({dtype} to {tensor.dtype})")
    if rounded:
        logging.warning("%s: %d tensors lose precision: %s", where, len(rounded), ", ".join(rounded[:3]))


def load_optimizer(
    policy: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, *, given: Collection[str] = ()
) -> None:
    """Restore state and groups of a freshly built optimizer, from shards or the host's own file. Collective.

    Parameters that never had a gradient have no state, there as here. Those that train now and did not, or did
    and do not, are listed in one warning: the first start without state, the state of the others is left.

    Args:
        given: names of group entries (`lr`, `weight_decay`, ...) that the command line sets: they stay as built.

    Raises:
        CheckpointError: state of another shape, or of another policy.
    """
    if has_sharded_optimizer(checkpoint):
        _load_sharded_optimizer(policy, optimizer, checkpoint, given)
    else:
        _load_optimizer_file(policy, optimizer, checkpoint, given)


def _load_sharded_optimizer(
    policy: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, given: Collection[str]
) -> None:
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
    _restore(optimizer, named, state, groups, given, directory)


def _room(param: nn.Parameter, field: str, metadata: Metadata, key: str, directory: object) -> Any:
    entry = safe_read.tensor_entries(metadata).get(key) if key in metadata.state_dict_metadata else None
    if entry is None:
        return None
    if entry.size not in (param.shape, torch.Size([])) and len(entry.size) == param.dim():
        raise CheckpointError(
            str(directory), f"{key} has shape {tuple(entry.size)}, the parameter's is {tuple(param.shape)}"
        )
    return room_for(param, field, entry.size, entry.properties.dtype)


def _group_template(paths: dict[str, tuple]) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for path in paths.values():
        if path[:2] == (OPTIMIZER_KEY, "param_groups"):
            groups.setdefault(int(path[2]), {})[path[3]] = None
    return [groups[index] for index in sorted(groups)]


def _load_optimizer_file(
    policy: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, given: Collection[str]
) -> None:
    """The host's layout: state numbered in the order of the groups, or by FQN from its own FSDP path."""
    path = checkpoint.optimizer_file
    named = dict(parameter_names(policy, optimizer))
    state: dict[str, dict[str, Any]] = {}
    try:
        groups = _named_groups(json.loads(checkpoint.optimizer_groups.read_text()), optimizer, named, checkpoint)
        numbers = dict(enumerate(name for group in groups for name in group["params"]))
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                number, _, entry = key.removeprefix("state/").rpartition("/")
                name = numbers.get(int(number)) if number.isdecimal() else canonical_fqn(number)
                if key.startswith("state/") and name in named:
                    state.setdefault(name, {})[entry] = _sharded_like(file.get_tensor(key), named[name], entry, path)
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointError(path, f"cannot be read ({error})") from None
    _restore(optimizer, named, state, groups, given, path)


def _named_groups(
    groups: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    named: dict[str, nn.Parameter],
    checkpoint: Checkpoint,
) -> list[dict[str, Any]]:
    """Groups with FQNs for the numbers that the host gives to parameters, in the order of the run that saved them.

    Our manifest has that order; without it, equal sizes mean that it is the one of now.
    """
    if not any(type(param) is int for group in groups for param in group["params"]):
        return groups
    manifest = Manifest.read(checkpoint)
    sizes = [len(group["params"]) for group in groups]
    if manifest is not None and sizes == [len(names) for names in manifest.optimizer_parameters]:
        names = iter(name for group in manifest.optimizer_parameters for name in group)
    elif sizes == [len(group["params"]) for group in optimizer.param_groups]:
        names = iter(named)
    else:
        now = [len(group["params"]) for group in optimizer.param_groups]
        raise CheckpointError(
            checkpoint.optimizer_groups,
            f"numbers {sizes} parameters in its groups, the optimizer has {now}, and nothing says which are which: "
            "train the same parameters as the run that wrote it",
        )
    return [{**group, "params": [next(names) for _ in group["params"]]} for group in groups]


def _sharded_like(full: torch.Tensor, param: nn.Parameter, field: str, where: object) -> torch.Tensor:
    if full.dim() == param.dim() and full.shape != param.shape and full.numel() > 1:
        raise CheckpointError(
            str(where), f"{field} has shape {tuple(full.shape)}, its parameter's is {tuple(param.shape)}"
        )
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
    given: Collection[str],
    where: object,
) -> None:
    saved_in = {canonical_fqn(name): index for index, group in enumerate(groups) for name in group["params"]}
    if named and not named.keys() & saved_in.keys():
        raise CheckpointError(str(where), "is of another policy: it knows none of the parameters that train")
    _list_changes([n for n in named if n not in saved_in], [n for n in saved_in if n not in named])
    names = {id(param): name for name, param in named.items()}
    kept = {*given, *({"initial_lr"} if "lr" in given else ())}
    for group in optimizer.param_groups:
        homes = Counter(saved_in[n] for n in (names[id(p)] for p in group["params"]) if n in saved_in)
        if homes:
            saved = groups[homes.most_common(1)[0][0]]
            group.update({k: _as_in(group.get(k), v) for k, v in saved.items() if k != "params" and k not in kept})
    for name, fields in state.items():
        optimizer.state[named[name]] = fields


def _list_changes(unfrozen: list[str], frozen: list[str]) -> None:
    if unfrozen:
        logging.warning(
            "%d parameters did not train before and start without optimizer state: %s",
            len(unfrozen),
            ", ".join(unfrozen),
        )
    if frozen:
        logging.warning(
            "%d parameters do not train any more, their optimizer state is left: %s", len(frozen), ", ".join(frozen)
        )


def _as_in(current: Any, value: Any) -> Any:
    """JSON has lists only; betas are a tuple."""
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def load_scaler(scaler: torch.amp.GradScaler | None, checkpoint: Checkpoint) -> None:
    """Restore the loss scale of fp16; one that the saved run did not have begins anew, and a log line says so."""
    if scaler is None:
        return
    path = checkpoint.scaler_file
    if not path.is_file():
        logging.info("%s has no loss scale of fp16, it begins at %g", checkpoint.path, scaler.get_scale())
        return
    try:
        state = json.loads(path.read_bytes())
        if not all(type(state[name]) in (int, float) for name in scaler.state_dict()):
            raise TypeError("an entry is no number")
        scaler.load_state_dict(state)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(path, f"is no state of a loss scale ({error})") from None


def load_scheduler(scheduler: LRScheduler | None, checkpoint: Checkpoint, *, given: Collection[str] = ()) -> None:
    """Restore the scheduler; one that the saved run did not have starts where it stands.

    With `lr` in `given`, the learning rates that the optimizer was built with stay the base of the schedule.
    """
    if scheduler is None or not checkpoint.scheduler_file.is_file():
        return
    base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
    try:
        load_scheduler_state(scheduler, checkpoint.training_state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(checkpoint.scheduler_file, f"is of another scheduler ({error})") from None
    if "lr" in given:
        _rebase(scheduler, base_lrs)


def _rebase(scheduler: LRScheduler, base_lrs: list[float]) -> None:
    """Move a schedule to other base learning rates, keeping its place in it."""
    before = zip(scheduler.base_lrs, scheduler.get_last_lr(), strict=True)
    factors = [last / base if base else 1.0 for base, last in before]
    if isinstance(scheduler, LambdaLR):
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    scheduler.base_lrs = base_lrs
    scheduler._last_lr = [base * factor for base, factor in zip(base_lrs, factors, strict=True)]
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = lr
