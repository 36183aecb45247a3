"""Degrees bound to a world: the device mesh."""

import os

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lerobot_parallel.config.topology import Degrees


def world_size_from_env() -> int:
    """The number of processes that a launcher started, 1 without a launcher; needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_env() -> int:
    return int(os.environ.get("RANK", "0"))


def build_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """The mesh that `fully_shard` takes: `(dp_shard,)`, or `(dp_replicate, dp_shard)` for HSDP. Collective."""
    if degrees.dp_replicate == 1:
        return init_device_mesh(device_type, (degrees.dp_shard,), mesh_dim_names=("dp_shard",))
    shape = (degrees.dp_replicate, degrees.dp_shard)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
