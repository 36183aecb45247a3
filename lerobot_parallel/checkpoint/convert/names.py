"""Which keys of a DCP state dict are the model's weights, under which names, and what is beside them.

Trainers nest differently: `{"model": {fqn: …}}` (accelerate, this engine), `{"state_dict": …}`,
`{"app": {"model": …}}`, or the FQNs at the top with the optimizer beside them.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.safe_read import CheckpointError, bytes_entries, tensor_entries

# What torch.compile, activation checkpointing and FSDP put into names, and no loader of the policy expects.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_MODEL_ROOTS = {layout.MODEL_KEY, "state_dict", "model_state_dict"}
_OTHER_ROOTS = {
    layout.OPTIMIZER_KEY,
    *("optim", "optimizers", "optimizer_states", "optimizer_state_dict", "optim_state"),
    *("scheduler", "lr_scheduler", "lr_schedulers", "dataloader", "train_state", "rng_state", "ema"),
}
_RESERVED = "__metadata__"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Names:
    """`keys`: flat key of each tensor by its name; `left_out`: how many values lie beside the model, by their root."""

    keys: dict[str, str]
    left_out: dict[str, int]


def model_names(shards: Path, metadata: Metadata) -> Names:
    """
    Raises:
        CheckpointError: there is no model, more than one, or something in it that no weights file can hold.
    """
    path = shards / layout.SHARD_METADATA
    paths = _paths(metadata)
    root = _root(path, {key: paths[key] for key in tensor_entries(metadata)})
    inside = {key: parts for key, parts in paths.items() if _is_inside(parts, root)}
    values = bytes_entries(metadata)
    if root:
        _refuse_values(path, [key for key in inside if key in values])
    keys = _by_name(path, {key: parts[len(root) :] for key, parts in inside.items() if key not in values})
    beside = Counter(str(parts[0]) for key, parts in paths.items() if key not in keys.values())
    return Names(keys, dict(sorted(beside.items())))


def _paths(metadata: Metadata) -> dict[str, KeyPath]:
    """Without the planner's data only the dots are left: a first part that names a model is taken for its root."""
    planned = metadata.planner_data or {}
    paths = {}
    for key in metadata.state_dict_metadata:
        first, _, rest = key.partition(".")
        guessed = (first, rest) if rest and first in _MODEL_ROOTS | _OTHER_ROOTS else (key,)
        paths[key] = planned.get(key) or guessed
    return paths


def _root(path: Path, tensors: dict[str, KeyPath]) -> KeyPath:
    roots = {parts[: i + 1] for parts in tensors.values() if (i := _root_index(parts)) is not None}
    if len(roots) > 1:
        found = ", ".join(sorted(".".join(map(str, root)) for root in roots))
        raise CheckpointError(path, f"holds more than one model: {found}")
    return next(iter(roots), ())


def _root_index(parts: KeyPath) -> int | None:
    if parts[0] in _OTHER_ROOTS:
        return None
    return next((i for i, part in enumerate(parts[:-1]) if part in _MODEL_ROOTS), None)


def _is_inside(parts: KeyPath, root: KeyPath) -> bool:
    if root:
        return parts[: len(root)] == root and len(parts) > len(root)
    return parts[0] not in _OTHER_ROOTS


def _refuse_values(path: Path, keys: list[str]) -> None:
    others = sorted(key for key in keys if not key.endswith("_extra_state"))
    if others:
        raise CheckpointError(path, f"{others[0]!r} is no tensor, and {layout.MODEL_FILE} holds nothing else")


def _by_name(path: Path, paths: dict[str, KeyPath]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for key, parts in paths.items():
        name = ".".join(part for part in ".".join(map(str, parts)).split(".") if part not in _WRAPPERS)
        if name in keys or name == _RESERVED:
            raise CheckpointError(path, f"{key!r} has the name {name!r}, which is taken")
        keys[name] = key
    if not keys:
        raise CheckpointError(path, "holds no tensors of a model")
    return keys
