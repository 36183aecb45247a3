"""`--parallelism.*`: how many ranks hold what. The degrees decide the engine; there is no mode flag."""

from dataclasses import dataclass, field

from lerobot_parallel.config.errors import ConfigError


@dataclass
class ContextParallelConfig:
    """Reserved: splitting one sample's sequence over ranks. Anything above 1 is refused."""

    ring_degree: int = 1
    ulysses_degree: int = 1


@dataclass
class ParallelismConfig:
    """Degrees of parallelism; their product must equal the number of processes.

    `dp_replicate` is how many copies of the (sharded) model there are, `dp_shard` over how many ranks one
    copy is sharded (-1: all that is left of the world). An untouched `dp_replicate` with `dp_shard=1` fills
    itself to the world size, which is plain DDP.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    # Reserved: classifier-free guidance on two ranks. 1 and 2 parse; training refuses 2.
    cfg_parallel: int = 1


@dataclass(frozen=True)
class Degrees:
    """Degrees bound to a world size: what a run really uses.

    Mesh order is `(dp_replicate, dp_shard)`, replicate outermost, so that the ranks of one sharded copy are
    neighbours and normally share a node.
    """

    dp_replicate: int
    dp_shard: int

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def sharded(self) -> bool:
        return self.dp_shard > 1

    @property
    def engine(self) -> str:
        """`single`, `ddp`, `fsdp2` or `hsdp`."""
        if self.sharded:
            return "hsdp" if self.dp_replicate > 1 else "fsdp2"
        return "ddp" if self.dp_replicate > 1 else "single"


def resolve_degrees(parallelism: ParallelismConfig, world_size: int) -> Degrees:
    """Bind the degrees to `world_size` processes.

    Raises:
        ConfigError: a degree below 1, a reserved degree, a `dp_shard=-1` that does not divide, or a product
            that differs from the world size.
    """
    _refuse_reserved(parallelism)
    replicate, shard = parallelism.dp_replicate, parallelism.dp_shard
    if replicate < 1:
        raise ConfigError("--parallelism.dp_replicate", replicate, "a degree is at least 1", "use 1 or more")
    if shard < 1 and shard != -1:
        raise ConfigError(
            "--parallelism.dp_shard", shard, "a degree is at least 1", "use 1 or more, or -1 for all that is left"
        )
    if shard == -1:
        shard = _fill_shard(replicate, world_size)
    if shard == 1 and replicate == 1:
        replicate = world_size
    if replicate * shard != world_size:
        raise _other_product(replicate, shard, world_size)
    return Degrees(dp_replicate=replicate, dp_shard=shard)


def _other_product(replicate: int, shard: int, world_size: int) -> ConfigError:
    name, degree = ("dp_shard", shard) if shard > 1 else ("dp_replicate", replicate)
    fits = (
        "use --parallelism.dp_shard=-1"
        if world_size % replicate == 0
        else f"choose degrees whose product is {world_size}"
    )
    return ConfigError(
        f"--parallelism.{name}",
        degree,
        f"dp_replicate={replicate} x dp_shard={shard} x ring_degree=1 x ulysses_degree=1 x cfg_parallel=1"
        f" = {replicate * shard} processes, but the world has {world_size}",
        f"start {replicate * shard} processes or {fits}",
    )


def _fill_shard(replicate: int, world_size: int) -> int:
    if world_size % replicate:
        raise ConfigError(
            "--parallelism.dp_shard",
            -1,
            f"dp_replicate={replicate} does not divide the world of {world_size} processes",
            "choose a dp_replicate that divides it",
        )
    return world_size // replicate


def _refuse_reserved(parallelism: ParallelismConfig) -> None:
    context = parallelism.context_parallel
    for name, degree in (("ring_degree", context.ring_degree), ("ulysses_degree", context.ulysses_degree)):
        if degree != 1:
            raise ConfigError(
                f"--parallelism.context_parallel.{name}",
                degree,
                "context parallelism is reserved: no host policy can split one sample's sequence yet"
                if degree > 1
                else "a degree is at least 1",
                "use 1",
            )
    if parallelism.cfg_parallel not in (1, 2):
        raise ConfigError("--parallelism.cfg_parallel", parallelism.cfg_parallel, "only 1 and 2 exist", "use 1")
    if parallelism.cfg_parallel == 2:
        raise ConfigError(
            "--parallelism.cfg_parallel",
            2,
            "classifier-free guidance has two branches at inference only",
            "train with 1",
        )
