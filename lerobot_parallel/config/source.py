"""Which file a `--config_path` means; imports nothing heavy unless the hub has to be asked."""

import os
from collections.abc import Iterator
from pathlib import Path

TRAIN_CONFIG = "train_config.json"
PRETRAINED_DIR = "pretrained_model"
CHECKPOINTS_DIR = "checkpoints"
LAST = "last"

# A pointer holds the name of a step directory; anything longer is no pointer.
_POINTER_BYTES = 64


def config_file(config_path: str) -> Path | None:
    """The file that a `--config_path` means: itself, the one in a directory, or one of the hub.

    A directory is that of the config, a step directory, `checkpoints` or a run's output directory; the latter
    two mean the checkpoint that `last` names, the newest where there is none. `last` may be a link or a small
    file with the name of a step. None where there is no such file; the host says what is wrong then.
    """
    path = follow_pointer(Path(config_path))
    if not path.exists():
        return None if _is_local(config_path) else _hub_config_file(config_path)
    if not path.is_dir():
        return path
    places = [path, path / PRETRAINED_DIR, *(step / PRETRAINED_DIR for step in _newest_first(path))]
    return next((place / TRAIN_CONFIG for place in places if (place / TRAIN_CONFIG).is_file()), None)


def follow_pointer(path: Path) -> Path:
    """`path` with a `last` that is a file replaced by the directory it names."""
    for index, part in enumerate(path.parts):
        if part == LAST:
            pointer = Path(*path.parts[: index + 1])
            step = read_pointer(pointer)
            return path if step is None else Path(pointer.with_name(step), *path.parts[index + 1 :])
    return path


def read_pointer(pointer: Path) -> str | None:
    """The name of the step directory that a `last` names, as a link or as a file; None if it names none."""
    try:
        if pointer.is_symlink():
            return Path(os.readlink(pointer)).name
        if not pointer.is_file() or pointer.stat().st_size > _POINTER_BYTES:
            return None
        name = pointer.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if name.isdecimal() else None


def steps_in(checkpoints: Path) -> list[Path]:
    """Step directories, newest first."""
    if not checkpoints.is_dir():
        return []
    steps = [path for path in checkpoints.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(steps, key=lambda path: int(path.name), reverse=True)


def _newest_first(directory: Path) -> Iterator[Path]:
    for checkpoints in (directory, directory / CHECKPOINTS_DIR):
        if (name := read_pointer(checkpoints / LAST)) is not None:
            yield checkpoints / name
        yield from steps_in(checkpoints)


def _is_local(config_path: str) -> bool:
    """Whether it cannot be a repo of the hub, which has at most one slash and no leading dot."""
    return config_path.startswith((".", "/", "~")) or config_path.count("/") > 1


def _hub_config_file(repo_id: str) -> Path | None:
    """The config of a training repo, or of its latest checkpoint where the run was interrupted."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from lerobot.utils.hub import find_latest_hub_checkpoint

    try:
        return Path(hf_hub_download(repo_id, TRAIN_CONFIG))
    except HfHubHTTPError:
        latest = find_latest_hub_checkpoint(repo_id)
        return Path(hf_hub_download(repo_id, f"{latest}/{PRETRAINED_DIR}/{TRAIN_CONFIG}")) if latest else None
    except (HFValidationError, LocalEntryNotFoundError):
        return None
