"""The random state of this rank: python, numpy, torch, and the device it computes on."""

from pathlib import Path

import numpy as np
import torch
from lerobot.utils.random_utils import deserialize_rng_state, serialize_rng_state
from safetensors.torch import load_file, save_file

from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.safe_read import CheckpointError


def save_rng(checkpoint: Checkpoint, rank: int) -> None:
    """Write this rank's state; rank 0 also writes the file that the host reads."""
    state = serialize_rng_state()
    # The host rounds numpy's spare normal number to single precision.
    exact = {"np_rng_cached_gaussian": torch.tensor([np.random.get_state()[4]], dtype=torch.float64)}
    save_file({**state, **exact}, checkpoint.rank_rng_file(rank))
    if rank == 0:
        save_file(state, checkpoint.rng_file)


def restore_rng(checkpoint: Checkpoint, rank: int) -> bool:
    """Restore the state that this rank had; False where the checkpoint has none for it.

    Rank 0 falls back to the host's file. The other ranks never take rank 0's: all would draw the same noise.
    """
    path = checkpoint.rank_rng_file(rank)
    if not path.is_file():
        path = checkpoint.rng_file if rank == 0 else Path()
    if not path.is_file():
        return False
    try:
        deserialize_rng_state(load_file(path))
    except Exception as error:
        raise CheckpointError(path, f"holds no random state of this software ({error})") from error
    return True
