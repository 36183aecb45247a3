"""`--accelerator.*`: precision, accumulation and what the engines can be told."""

import re
from dataclasses import dataclass, field

from lerobot_parallel.config.errors import ConfigError

MIXED_PRECISIONS = ("no", "bf16", "fp16")
CHECKPOINTING_MODES = ("none", "full")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# These capture CUDA graphs.
_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_GRAPH_BACKEND = "cudagraphs"


@dataclass
class GradientAccumulationConfig:
    """Micro-batches per optimizer update, at least 1; windows run on across epoch ends."""

    steps: int = 1


@dataclass
class FSDPConfig:
    """What a sharded run (`dp_shard` > 1) can be told.

    `wrap_modules` (class names) or `min_num_params` (size in parameters) replace the policy's plan;
    `ignored_modules` is a regex on module names whose parameters every rank keeps whole.
    """

    # Free the gathered weights of a unit after its forward, and gather them again for its backward.
    reshard_after_forward: bool = True
    wrap_modules: list[str] | None = None
    min_num_params: int | None = None
    # Keep shards, gradients and optimizer state in host memory.
    cpu_offload: bool = False
    ignored_modules: str | None = None


@dataclass
class DDPConfig:
    """Passed through to torch's DistributedDataParallel."""

    find_unused_parameters: bool = True
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass
class CompileConfig:
    """torch.compile: `regional` compiles each unit, otherwise the whole policy."""

    enabled: bool = False
    backend: str = "inductor"
    mode: str | None = None
    regional: bool = True


@dataclass
class ActivationCheckpointingConfig:
    """`full` recomputes each unit's activations in backward; `none` keeps them."""

    mode: str = "none"


@dataclass
class AcceleratorConfig:
    """The run's precision and engines. `mixed_precision` (`no`, `bf16`, `fp16`) alone owns training autocast."""

    mixed_precision: str = "no"
    gradient_accumulation: GradientAccumulationConfig = field(default_factory=GradientAccumulationConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)

    def __post_init__(self) -> None:
        # draccus reads the command line as YAML 1.1, in which a bare `no` is a boolean.
        if str(self.mixed_precision) == "False":
            self.mixed_precision = "no"


def check_runtime(runtime: AcceleratorConfig, *, sharded: bool, device: str) -> None:
    """Refuse what cannot be trained.

    Args:
        sharded: whether `dp_shard` > 1.
        device: the policy's device type (`cpu`, `cuda`, `mps`).

    Raises:
        ConfigError: names the flag, the value and the way out.
    """
    _check_precision(runtime.mixed_precision, sharded=sharded, device=device)
    steps = runtime.gradient_accumulation.steps
    if steps < 1:
        raise ConfigError(
            "--accelerator.gradient_accumulation.steps",
            steps,
            "at least one micro-batch makes an update",
            "use 1 or more",
        )
    _check_fsdp(runtime.fsdp)
    _check_unit_transforms(runtime, sharded=sharded)


def _check_precision(precision: str, *, sharded: bool, device: str) -> None:
    flag = "--accelerator.mixed_precision"
    if precision not in MIXED_PRECISIONS:
        raise ConfigError(flag, precision, "unknown precision", f"use one of {', '.join(MIXED_PRECISIONS)}")
    if precision == "fp16" and sharded:
        raise ConfigError(flag, precision, "loss scaling over sharded gradients is not proven", "use bf16 or no")
    if precision == "fp16" and device == "cpu":
        raise ConfigError(flag, precision, "fp16 training needs a GPU", "use bf16 or no")


def _check_fsdp(fsdp: FSDPConfig) -> None:
    if fsdp.wrap_modules is not None and fsdp.min_num_params is not None:
        raise ConfigError(
            "--accelerator.fsdp.wrap_modules",
            fsdp.wrap_modules,
            f"excludes --accelerator.fsdp.min_num_params={fsdp.min_num_params}, both form the units",
            "give one of the two",
        )
    if fsdp.wrap_modules is not None and not fsdp.wrap_modules:
        raise ConfigError(
            "--accelerator.fsdp.wrap_modules", "[]", "names no class", "name at least one or leave it out"
        )
    if fsdp.min_num_params is not None and fsdp.min_num_params < 1:
        raise ConfigError(
            "--accelerator.fsdp.min_num_params", fsdp.min_num_params, "a unit has parameters", "use 1 or more"
        )
    if fsdp.ignored_modules is not None:
        try:
            re.compile(fsdp.ignored_modules)
        except re.error as error:
            raise ConfigError(
                "--accelerator.fsdp.ignored_modules",
                fsdp.ignored_modules,
                f"not a regular expression ({error})",
                "mend it",
            ) from None


def _check_unit_transforms(runtime: AcceleratorConfig, *, sharded: bool) -> None:
    mode = runtime.activation_checkpointing.mode
    if mode not in CHECKPOINTING_MODES:
        flag = "--accelerator.activation_checkpointing.mode"
        raise ConfigError(flag, mode, "unknown mode", f"use one of {', '.join(CHECKPOINTING_MODES)}")
    if runtime.compile.enabled:
        _check_compile(runtime.compile, sharded=sharded, accumulation=runtime.gradient_accumulation.steps)


def _check_compile(config: CompileConfig, *, sharded: bool, accumulation: int) -> None:
    flag = "--accelerator.compile.mode"
    if config.mode is not None and config.mode not in COMPILE_MODES:
        raise ConfigError(flag, config.mode, "unknown mode", f"use one of {', '.join(COMPILE_MODES)}")
    if config.mode is not None and config.backend != "inductor":
        raise ConfigError(flag, config.mode, f"is one of inductor's, not of {config.backend}", "leave it out")
    if config.mode not in _GRAPH_MODES and config.backend != _GRAPH_BACKEND:
        return
    if config.backend == _GRAPH_BACKEND:
        flag = "--accelerator.compile.backend"
    value, way_out = (
        config.mode or config.backend,
        "use --accelerator.compile.mode=max-autotune-no-cudagraphs or default",
    )
    if sharded:
        raise ConfigError(
            flag, value, "a CUDA graph keeps addresses of weights that sharding frees and gathers anew", way_out
        )
    if accumulation > 1:
        raise ConfigError(
            flag, value, f"a CUDA graph overwrites what gradient_accumulation.steps={accumulation} has to keep", way_out
        )
