"""Which checkpoint a run goes on from: the one it names, or the newest good one."""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lerobot_parallel.checkpoint.check import check_resumable, is_spare
from lerobot_parallel.checkpoint.commit import restore_replaced
from lerobot_parallel.checkpoint.layout import (
    CHECKPOINTS_DIR,
    LAST_LINK,
    PRETRAINED_DIR,
    TRAIN_CONFIG,
    Checkpoint,
    checkpoints_dir,
    read_pointer,
    steps_in,
)
from lerobot_parallel.checkpoint.manifest import Problem, verify
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError

Say = Callable[[str], None]


def resolve(path: Path, *, checksums: bool, say: Say) -> Checkpoint:
    """The checkpoint to resume from.

    Args:
        path: a step directory or something in it, which is taken or refused; or a `last`, a `checkpoints` or a
            run's output directory, which mean what `last` names, and the newest good checkpoint if that is damaged.
        checksums: read every byte of it, where it has a manifest.
        say: told about each damaged checkpoint, and about falling back.

    Raises:
        ConfigError: there is no good one.
    """
    checkpoints = _checkpoints_of(path)
    if checkpoints is None:
        checkpoint = Checkpoint(_step_of(path).resolve())
        if problem := damage(checkpoint, checksums=checksums):
            way_out = f"name another one, or {checkpoint.path.parent / LAST_LINK} for the newest good one"
            raise ConfigError("--config_path", path, f"is damaged or incomplete: {problem}", way_out)
        return checkpoint
    found = newest_good(checkpoints, checksums=checksums, say=say)
    if found is None:
        raise ConfigError(
            "--config_path", path, "there is no good checkpoint", "start the run again, or name another run's"
        )
    return found


def newest_good(checkpoints: Path, *, checksums: bool, say: Say) -> Checkpoint | None:
    """What `last` names if that is good, else the newest step that is; None if none is."""
    restore_replaced(checkpoints)
    candidates = _candidates(checkpoints)
    for candidate in candidates:
        problem = damage(candidate, checksums=checksums)
        if problem is None:
            if candidate is not candidates[0]:
                say(f"falling back to {candidate.path}, the newest good checkpoint")
            return candidate
        say(f"{candidate.path} is damaged or incomplete: {problem}")
    return None


def damage(checkpoint: Checkpoint, *, checksums: bool) -> str | None:
    """What is wrong with a checkpoint, on one line; None for one that can be resumed from."""
    if not checkpoint.is_there:
        return f"has no {PRETRAINED_DIR}"
    problems = [p for p in verify(checkpoint, checksums=checksums) if not _is_harmless(checkpoint, p)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{problems[0]}{more}"
    try:
        check_resumable(checkpoint)
        _check_headers(checkpoint)
    except ConfigError as error:
        return error.problem
    except CheckpointError as error:
        return str(error)
    return None


def _is_harmless(checkpoint: Checkpoint, problem: Problem) -> bool:
    return problem.kind == "extra" or (problem.kind == "missing" and is_spare(checkpoint, problem.path))


def _check_headers(checkpoint: Checkpoint) -> None:
    """Truncated files of a checkpoint without a manifest show in their headers."""
    for path in (checkpoint.model_file, checkpoint.optimizer_file, checkpoint.rng_file):
        if path.is_file():
            try:
                with safe_open(path, framework="pt"):
                    pass
            except (OSError, SafetensorError) as error:
                raise CheckpointError(path, f"cannot be read ({error})") from None


def _step_of(path: Path) -> Path:
    path = path.absolute()
    if path.name == TRAIN_CONFIG:
        path = path.parent
    return path.parent if path.name == PRETRAINED_DIR else path


def _checkpoints_of(path: Path) -> Path | None:
    """The directory of checkpoints if `path` leaves the choice to us, None if it names one."""
    step = _step_of(path)
    if step.name == LAST_LINK:
        return step.parent
    if checkpoints_dir(step).is_dir():
        return checkpoints_dir(step)
    return step if step.name == CHECKPOINTS_DIR or (step / LAST_LINK).exists() else None


def _candidates(checkpoints: Path) -> list[Checkpoint]:
    named = read_pointer(checkpoints / LAST_LINK)
    others = [step for step in steps_in(checkpoints) if step.name != named]
    first = [checkpoints / named] if named is not None else []
    return [Checkpoint(step.resolve()) for step in [*first, *others]]
