"""Names and paths of a checkpoint on disk; nothing else knows a file name.

The names are the host's own where it has one, and those of its later releases for sharded runs. Those by which
a config is found stand in `config.source`, which knows no checkpoints.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.source import (
    CHECKPOINTS_DIR,
    LAST,
    PRETRAINED_DIR,
    TRAIN_CONFIG,
    follow_pointer,
    read_pointer,
    steps_in,
)

LAST_LINK = LAST
TRAINING_STATE_DIR = "training_state"

MODEL_SHARDS = "pytorch_model_fsdp_0"
MODEL_FILE = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
"""Which tensor is in which file, where the weights are in several (the layout of transformers and huggingface_hub)."""
SOURCE_HEADER = "source_header.bin"
"""In shards made from a weights file: that file's header, so that the way back gives the same bytes."""
POLICY_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
MODEL_CARD = "README.md"
PROCESSOR_CONFIGS = "policy_*processor.json"
"""Matches the configs of both processors."""

OPTIMIZER_SHARDS = "optimizer_0"
OPTIMIZER_FILE = "optimizer_state.safetensors"
OPTIMIZER_GROUPS = "optimizer_param_groups.json"
SCHEDULER_FILE = "scheduler_state.json"
SCALER_FILE = "scaler_state.json"
RNG_FILE = "rng_state.safetensors"
STEP_FILE = "training_step.json"
RANK_RNG_FILES = "rng_state_rank_*.safetensors"
"""Matches the files of `Checkpoint.rank_rng_file`."""

MANIFEST = "manifest.json"
SHARD_METADATA = ".metadata"

MODEL_KEY = "model"
"""The top-level key of the state dict in `MODEL_SHARDS`."""
OPTIMIZER_KEY = "optimizer"
"""The top-level key of the state dict in `OPTIMIZER_SHARDS`."""

_STAGING_PREFIX = ".incoming-"
_REPLACED_PREFIX = ".replaced-"
_DISCARD_PREFIX = ".discarded-"


@dataclass(frozen=True)
class Checkpoint:
    """One step directory. Paths only: what is in it depends on the format and on the run."""

    path: Path

    @property
    def pretrained(self) -> Path:
        return self.path / PRETRAINED_DIR

    @property
    def training_state(self) -> Path:
        return self.path / TRAINING_STATE_DIR

    @property
    def model_shards(self) -> Path:
        return self.pretrained / MODEL_SHARDS

    @property
    def model_file(self) -> Path:
        return self.pretrained / MODEL_FILE

    @property
    def policy_config(self) -> Path:
        return self.pretrained / POLICY_CONFIG

    @property
    def adapter_config(self) -> Path:
        return self.pretrained / ADAPTER_CONFIG

    @property
    def train_config(self) -> Path:
        return self.pretrained / TRAIN_CONFIG

    @property
    def optimizer_shards(self) -> Path:
        return self.training_state / OPTIMIZER_SHARDS

    @property
    def optimizer_file(self) -> Path:
        return self.training_state / OPTIMIZER_FILE

    @property
    def optimizer_groups(self) -> Path:
        return self.training_state / OPTIMIZER_GROUPS

    @property
    def scheduler_file(self) -> Path:
        return self.training_state / SCHEDULER_FILE

    @property
    def scaler_file(self) -> Path:
        return self.training_state / SCALER_FILE

    @property
    def rng_file(self) -> Path:
        return self.training_state / RNG_FILE

    def rank_rng_file(self, rank: int) -> Path:
        return self.training_state / f"rng_state_rank_{rank:05d}.safetensors"

    @property
    def is_there(self) -> bool:
        """Whether the directory is that of a checkpoint at all."""
        return self.pretrained.is_dir()

    @property
    def step_file(self) -> Path:
        return self.training_state / STEP_FILE

    @property
    def manifest(self) -> Path:
        return self.path / MANIFEST


def checkpoints_dir(output_dir: Path) -> Path:
    return output_dir / CHECKPOINTS_DIR


def published_dir(output_dir: Path) -> Path:
    """What goes to the hub at the end of a run; it stays where that fails."""
    return output_dir / "published_model"


def last_link(output_dir: Path) -> Path:
    return checkpoints_dir(output_dir) / LAST_LINK


def step_dir(output_dir: Path, total_steps: int, step: int) -> Path:
    """The host's rule: the step, in as many digits as the last step of the run has, and at least six."""
    digits = max(6, len(str(total_steps)))
    return checkpoints_dir(output_dir) / f"{step:0{digits}d}"


def staging_dir(output_dir: Path, total_steps: int, step: int) -> Path:
    """Where a checkpoint is written until it is complete, but for the attempt's own word."""
    return staging_path(step_dir(output_dir, total_steps, step))


def staging_path(target: Path, attempt: str = "") -> Path:
    """A name beside `target`, on the same file system, that no reader takes for a checkpoint or a part of one.

    With an `attempt`, a word of its own for every try, a process of a dead run that still writes does not
    write into a later one's.
    """
    return target.with_name(f"{_STAGING_PREFIX}{target.name}" + (f"-{attempt}" if attempt else ""))


def replaced_path(target: Path) -> Path:
    """Where a published `target` waits while another takes its name; put back if that other never came."""
    return target.with_name(_REPLACED_PREFIX + target.name)


def discard_path(target: Path) -> Path:
    """The name that `target` gets before it is deleted, so that nobody meets it half deleted."""
    return target.with_name(_DISCARD_PREFIX + target.name)


def weights_file(number: int, total: int) -> str:
    """The name of one of `total` files of weights; numbers begin at 1."""
    return MODEL_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def is_weights_part(name: str) -> bool:
    """Whether this is one of several files of weights."""
    return re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None


def shard_file(number: int) -> str:
    """The name that torch gives to a file of shards that rank 0 writes."""
    return f"__0_{number}.distcp"


def leftovers(checkpoints: Path) -> list[Path]:
    """What attempts that died have left beside the checkpoints; nobody reads it."""
    prefixes = (_STAGING_PREFIX, _REPLACED_PREFIX, _DISCARD_PREFIX)
    return sorted(path for path in checkpoints.iterdir() if path.name.startswith(prefixes))


def replaced_steps(checkpoints: Path) -> list[tuple[Path, Path]]:
    """Published step directories that were moved aside for one that never came, each with its own name."""
    if not checkpoints.is_dir():
        return []
    aside = [path for path in checkpoints.iterdir() if re.fullmatch(re.escape(_REPLACED_PREFIX) + r"\d+", path.name)]
    names = [(path, path.with_name(path.name.removeprefix(_REPLACED_PREFIX))) for path in aside]
    return [(path, name) for path, name in names if not name.exists()]


def companion_files(pretrained: Path) -> list[Path]:
    """The files that go with the weights: configs, processors, cards; no weights and no hidden files."""
    return sorted(
        path
        for path in pretrained.iterdir()
        if path.is_file()
        and path.name not in (MODEL_FILE, MODEL_INDEX)
        and not is_weights_part(path.name)
        and not path.name.startswith(".")
    )


def locate(path: Path | str, *, flag: str = "checkpoint") -> Checkpoint:
    """The checkpoint that `path` means.

    `path` is a step directory, its `pretrained_model`, its `train_config.json`, its shard directory, the link
    `last`, or a run's output directory or `checkpoints` in it, which mean the checkpoint `last` points at (the
    newest step where there is no such link). The path of the result is absolute, and a link to a step is followed
    here, once, so that a `last` that moves later changes nothing.

    Raises:
        ConfigError: it is none of these; `flag` is how the text names it.
    """
    path = follow_pointer(Path(path))
    if not path.exists():
        raise ConfigError(flag, path, "there is no such file or directory", _WAY_OUT)
    step = _step_of(path)
    if step is None:
        raise ConfigError(flag, path, "is not a checkpoint and holds none", _WAY_OUT)
    step = step.resolve() if step.is_symlink() else step
    if step.name.startswith(_STAGING_PREFIX):
        raise ConfigError(flag, path, "is a checkpoint whose writing was never finished", "give a complete one")
    return Checkpoint(step)


_WAY_OUT = f"give a step directory, its {PRETRAINED_DIR}, {CHECKPOINTS_DIR}/{LAST_LINK} or the run's output directory"


def _step_of(path: Path) -> Path | None:
    path = path.resolve() if path.name in ("", "..") else path.absolute()
    if path.name in (TRAIN_CONFIG, MODEL_SHARDS):
        path = path.parent
    if path.name == PRETRAINED_DIR:
        path = path.parent
    candidates = (path, _newest(path), _newest(path / CHECKPOINTS_DIR))
    return next((step for step in candidates if step and (step / PRETRAINED_DIR).is_dir()), None)


def _newest(checkpoints: Path) -> Path | None:
    named = read_pointer(checkpoints / LAST_LINK)
    if named is not None and (checkpoints / named).is_dir():
        return checkpoints / LAST_LINK if (checkpoints / LAST_LINK).is_symlink() else checkpoints / named
    return next(iter(steps_in(checkpoints)), None)
