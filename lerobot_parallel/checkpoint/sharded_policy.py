"""`save_pretrained` on a sharded policy: every rank calls it, one full model.safetensors appears."""

from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from lerobot.rewards.pretrained import PreTrainedRewardModel
from safetensors.torch import save_file
from torch import nn

from lerobot_parallel.checkpoint.layout import MODEL_FILE
from lerobot_parallel.checkpoint.state import gather_model_state
from lerobot_parallel.engine.buffers import agree_on_buffers
from lerobot_parallel.engine.ranks import raised_together


def make_savable(policy: nn.Module) -> None:
    """Let the host's `policy.save_pretrained(directory)` gather first. It becomes collective.

    With a `state_dict` given the call stays local, as the host has it.
    """
    save = policy._save_pretrained

    def gather_and_save(self: nn.Module, directory: Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if state_dict is not None:
            save(directory, state_dict=state_dict)
            return
        agree_on_buffers(self)
        full = gather_model_state(self)
        with raised_together(f"writing {directory}"):
            if dist.get_rank() == 0:
                _write_files(self, directory, full, save)

    policy._save_pretrained = MethodType(gather_and_save, policy)


def write_whole(policy: nn.Module, directory: Path, state: dict[str, torch.Tensor] | None) -> None:
    """Config and model.safetensors as the host's `save_pretrained` writes them. Local.

    Args:
        state: the gathered weights of a sharded policy, or None for the policy's own.
    """
    if state is None:
        policy.save_pretrained(directory)
    elif isinstance(policy, PreTrainedRewardModel):
        _write_files(policy, directory, state, None)
    else:
        policy.save_pretrained(directory, state_dict=state)


def _write_files(policy: nn.Module, directory: Path, state: dict[str, torch.Tensor], save: object) -> None:
    if not isinstance(policy, PreTrainedRewardModel):
        save(directory, state_dict=state)
        return
    # The host's own takes no state_dict here.
    policy.config._save_pretrained(directory)
    save_file(state, directory / MODEL_FILE, metadata={"format": "pt"})
