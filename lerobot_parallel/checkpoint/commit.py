"""The one moment at which a checkpoint becomes visible, and what is tidied around it. One process's work: rank 0's."""

import contextlib
import ctypes
import errno
import logging
import os
import shutil
from pathlib import Path

from lerobot_parallel.checkpoint.durable import flush, write_durably
from lerobot_parallel.checkpoint.layout import (
    Checkpoint,
    discard_path,
    last_link,
    leftovers,
    read_pointer,
    replaced_path,
    replaced_steps,
    staging_path,
    steps_in,
)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# What file systems without links (FAT, some network shares) answer to symlink().
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EACCES, errno.EINVAL}


def restore_replaced(checkpoints: Path) -> None:
    """Put back what was moved aside for a checkpoint that never came, where the two could not be swapped at once."""
    for aside, name in replaced_steps(checkpoints):
        # Ranks that start together all come here; the first one wins.
        with contextlib.suppress(OSError):
            aside.rename(name)
            logging.warning("put %s back: the attempt to replace it had died", name)


def sweep(checkpoints: Path) -> None:
    """Delete what attempts that died have left; nobody else may be writing here."""
    if not checkpoints.is_dir():
        return
    restore_replaced(checkpoints)
    for path in leftovers(checkpoints):
        logging.info("sweeping %s, left by an attempt that died", path)
        _delete(path)


def publish(staging: Path, target: Path) -> None:
    """Give a finished and flushed directory its name, then point `last` at it.

    A published `target` is never touched in place: the two swap their names in one step where the file system
    can; elsewhere the old one is moved aside, and put back by `restore_replaced` if this process dies between.
    """
    if not target.exists():
        staging.rename(target)
        old = None
    elif _exchange(staging, target):
        old = staging
    else:
        old = replaced_path(target)
        target.rename(old)
        staging.rename(target)
    flush(target.parent)
    _point_last_at(target)
    if old is not None:
        _delete(old)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _point_last_at(target: Path) -> None:
    link = last_link(target.parent.parent)
    fresh = staging_path(link)
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target.name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        write_durably(fresh, target.name.encode())
    if link.is_dir() and not link.is_symlink():
        # A copy made by a tool that follows links; nothing of ours ever is one.
        link.rename(discard_path(link))
    fresh.replace(link)
    flush(link.parent)


def retain(checkpoints: Path, keep: int) -> list[Path]:
    """Set aside all but the `keep` newest complete checkpoints, and what `last` names. A failure is a warning.

    Returns what `remove` shall delete, which takes long; whatever it does not come to is swept at the next save.
    """
    named = read_pointer(checkpoints / last_link(checkpoints.parent).name)
    steps = steps_in(checkpoints)
    kept = [step for step in steps if Checkpoint(step).step_file.is_file()][:keep]
    doomed: list[Path] = []
    for step in steps if kept else []:
        if step not in kept and step.name != named and int(step.name) < int(kept[0].name):
            try:
                doomed.append(step.rename(discard_path(step)))
                logging.info("removing %s, older than the checkpoints to keep", step)
            except OSError as error:
                _warn_kept(step, error)
    if doomed:
        # Else a power loss might leave a half-deleted one under its old name.
        with contextlib.suppress(OSError):
            flush(checkpoints)
    return doomed


def remove(doomed: list[Path]) -> None:
    """Delete what `retain` has set aside. A failure is a warning."""
    for path in doomed:
        try:
            shutil.rmtree(path)
        except OSError as error:
            _warn_kept(path, error)


def _warn_kept(path: Path, error: OSError) -> None:
    logging.warning("could not remove the old checkpoint %s (%s)", path, error)


def _delete(path: Path) -> None:
    """Best effort: whatever stays is swept at the next save."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
