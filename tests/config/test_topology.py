"""Degrees bound to a world: what fills itself, which engine they mean, and every refusal."""

import pytest

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.topology import ContextParallelConfig, Degrees, ParallelismConfig, resolve_degrees


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "resolved", "engine"),
    [
        (1, 1, 1, (1, 1), "single"),
        (1, -1, 1, (1, 1), "single"),
        (1, 1, 2, (2, 1), "ddp"),
        (2, 1, 2, (2, 1), "ddp"),
        (2, -1, 2, (2, 1), "ddp"),
        (1, 2, 2, (1, 2), "fsdp2"),
        (1, -1, 8, (1, 8), "fsdp2"),
        (2, 2, 4, (2, 2), "hsdp"),
        (2, -1, 8, (2, 4), "hsdp"),
        (3, 2, 6, (3, 2), "hsdp"),
    ],
)
def test_degrees_decide_the_engine(replicate: int, shard: int, world: int, resolved: tuple, engine: str):
    degrees = resolve_degrees(ParallelismConfig(dp_replicate=replicate, dp_shard=shard), world)
    assert (degrees.dp_replicate, degrees.dp_shard) == resolved
    assert degrees.engine == engine
    assert degrees.world_size == world
    assert degrees.sharded == (engine in ("fsdp2", "hsdp"))


def refusal(world: int = 2, *, context: dict | None = None, **degrees: int) -> str:
    config = ParallelismConfig(context_parallel=ContextParallelConfig(**(context or {})), **degrees)
    with pytest.raises(ConfigError) as refused:
        resolve_degrees(config, world)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("degree", [0, -1, -2])
def test_a_replicate_degree_below_one_is_refused(degree: int):
    assert refusal(dp_replicate=degree).startswith(f"--parallelism.dp_replicate={degree}: ")


@pytest.mark.parametrize("degree", [0, -2])
def test_a_shard_degree_below_one_is_refused_unless_it_fills_itself(degree: int):
    assert refusal(dp_shard=degree).startswith(f"--parallelism.dp_shard={degree}: ")


@pytest.mark.parametrize(("replicate", "world"), [(2, 3), (3, 2), (4, 6)])
def test_filling_what_does_not_divide_is_refused(replicate: int, world: int):
    text = refusal(world, dp_replicate=replicate, dp_shard=-1)
    assert text.startswith("--parallelism.dp_shard=-1: ")
    assert f"dp_replicate={replicate}" in text
    assert f"world of {world} processes" in text


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "blamed", "way_out"),
    [
        (1, 3, 2, "dp_shard=3", "start 3 processes or use --parallelism.dp_shard=-1"),
        (2, 2, 8, "dp_shard=2", "start 4 processes or use --parallelism.dp_shard=-1"),
        (3, 1, 2, "dp_replicate=3", "start 3 processes or choose degrees whose product is 2"),
        (2, 1, 1, "dp_replicate=2", "start 2 processes or choose degrees whose product is 1"),
        (3, 2, 4, "dp_shard=2", "start 6 processes or choose degrees whose product is 4"),
        (1, 2, 1, "dp_shard=2", "start 2 processes or use --parallelism.dp_shard=-1"),
    ],
)
def test_another_product_than_the_world_is_refused_with_every_degree(
    replicate: int, shard: int, world: int, blamed: str, way_out: str
):
    text = refusal(world, dp_replicate=replicate, dp_shard=shard)
    assert text.startswith(f"--parallelism.{blamed}: ")
    assert f"dp_replicate={replicate} x dp_shard={shard} x ring_degree=1 x ulysses_degree=1 x cfg_parallel=1" in text
    assert f"= {replicate * shard} processes, but the world has {world};" in text
    assert text.endswith(way_out)
    if "-1" in way_out:
        filled = resolve_degrees(ParallelismConfig(dp_replicate=replicate, dp_shard=-1), world)
        assert filled.world_size == world


@pytest.mark.parametrize("name", ["ring_degree", "ulysses_degree"])
@pytest.mark.parametrize("degree", [2, 0, -1])
def test_context_parallelism_is_reserved(name: str, degree: int):
    text = refusal(context={name: degree})
    assert text.startswith(f"--parallelism.context_parallel.{name}={degree}: ")
    assert ("reserved" in text) == (degree > 1)


@pytest.mark.parametrize("degree", [2, 3, 0])
def test_guidance_on_two_ranks_is_reserved(degree: int):
    assert refusal(cfg_parallel=degree).startswith(f"--parallelism.cfg_parallel={degree}: ")


def test_degrees_are_values():
    assert Degrees(2, 3) == Degrees(2, 3)
    assert Degrees(2, 3).world_size == 6
