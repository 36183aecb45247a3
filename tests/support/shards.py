"""Small checkpoints with weights in DCP shards, and an independent reader of shards: torch's own."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lerobot_parallel.checkpoint import layout


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_bits(state: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (tensor.dtype, tuple(tensor.shape), bits(tensor)) for name, tensor in state.items()}


def checkpoint_in(folder: Path) -> layout.Checkpoint:
    checkpoint = layout.Checkpoint(folder / "checkpoints" / "000004")
    checkpoint.pretrained.mkdir(parents=True)
    checkpoint.policy_config.write_text('{"type": "act"}')
    checkpoint.train_config.write_text("{}")
    (checkpoint.pretrained / "policy_preprocessor.json").write_text("{}")
    return checkpoint


def save_alone(directory: Path, state: dict) -> None:
    """With torch's own writer, one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)


def torch_read(directory: Path) -> dict:
    """The whole nested state dict, as torch itself reads it."""
    state: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = dcp.FileSystemReader(directory)
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def checkpoint_of(folder: Path, tensors: dict[str, torch.Tensor]) -> layout.Checkpoint:
    checkpoint = checkpoint_in(folder)
    save_alone(checkpoint.model_shards, {"model": tensors})
    return checkpoint
