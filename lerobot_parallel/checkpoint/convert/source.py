"""What a user points at, and what was taken for it."""

import json
from dataclasses import dataclass
from pathlib import Path

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """`path` is what was taken: a step directory, a directory with a policy, or shards of other software alone.

    `pretrained` holds config and weights, where there is such a directory; `shards` need not exist.
    """

    path: Path
    shards: Path
    pretrained: Path | None
    checkpoint: layout.Checkpoint | None

    @property
    def has_shards(self) -> bool:
        return self.shards.is_dir()

    def weights(self) -> list[Path]:
        """The files of weights that are there: the single one, or those that an index lists; else none.

        Raises:
            CheckpointError: an index that is none, or lists a file that is missing.
        """
        if self.pretrained is None:
            return []
        single, index = self.pretrained / layout.MODEL_FILE, self.pretrained / layout.MODEL_INDEX
        if single.is_file() or not index.is_file():
            return [single] if single.is_file() else []
        return _listed(index)

    def adapter(self) -> list[Path]:
        """The file of adapters, where there is one in place of whole weights."""
        path = self.pretrained / layout.ADAPTER_FILE if self.pretrained is not None else None
        return [path] if path is not None and path.is_file() else []

    def tied(self) -> list[list[str]]:
        """Groups of names of one weight each, as the manifest of the checkpoint lists them; shards do not say."""
        try:
            groups = json.loads(self.checkpoint.manifest.read_bytes())["tied"] if self.checkpoint else []
            return [[name for name in group if isinstance(name, str)] for group in groups]
        except (OSError, ValueError, KeyError, TypeError):
            return []


def _listed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(index, f"is no index of weights ({type(error).__name__})") from None
    for name in names:
        if not layout.is_weights_part(str(name)):
            raise CheckpointError(index, f"lists {name!r}, which is not the name of a file of weights beside it")
        if not (index.parent / name).is_file():
            raise CheckpointError(index, f"lists {name}, which is missing")
    return [index.parent / name for name in names]


def find_source(path: Path | str, *, flag: str = "checkpoint") -> Source:
    """What `path` means: any form of `layout.locate`, a directory with weights or shards, or a directory of shards.

    Raises:
        ConfigError: it is none of these; `flag` is how the text names it.
    """
    path = Path(path)
    try:
        checkpoint = layout.locate(path, flag=flag)
    except ConfigError:
        if source := _foreign(path):
            return source
        raise
    return Source(checkpoint.path, checkpoint.model_shards, checkpoint.pretrained, checkpoint)


def _foreign(path: Path) -> Source | None:
    path = path.absolute()
    if (path / layout.SHARD_METADATA).is_file():
        return Source(path, path, None, None)
    parts = (layout.MODEL_SHARDS, layout.MODEL_FILE, layout.MODEL_INDEX, layout.ADAPTER_CONFIG)
    if path.is_dir() and any((path / part).exists() for part in parts):
        return Source(path, path / layout.MODEL_SHARDS, path, None)
    return None
