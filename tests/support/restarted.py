"""A rank that torchrun starts again: it meets the others as the engine does, and the last one dies the first time."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lerobot_parallel.config.runtime import AcceleratorConfig
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.engine.accelerator import build_accelerator, release_process_group


def main(died: Path) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    accelerator = build_accelerator(AcceleratorConfig(), Degrees(world_size, 1), device_type="cpu")
    met = torch.ones(1)
    dist.all_reduce(met)
    if accelerator.process_index == world_size - 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()
    print(f"met {int(met)} ranks after a restart: {died.exists()}", flush=True)
    accelerator.end_training()
    release_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
