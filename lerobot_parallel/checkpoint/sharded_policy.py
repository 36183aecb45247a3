"""`save_pretrained` on a sharded policy: every rank calls it, one full model.safetensors appears."""

from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from torch import nn

from lerobot_parallel.checkpoint.state import gather_model_state
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
        full = gather_model_state(self)
        with raised_together(f"writing {directory}"):
            if dist.get_rank() == 0:
                save(directory, state_dict=full)

    policy._save_pretrained = MethodType(gather_and_save, policy)
