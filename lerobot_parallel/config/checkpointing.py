"""`--checkpoint.*`: when and how checkpoints are written, kept and read. This project's own flags."""

from dataclasses import dataclass

from lerobot_parallel.config.errors import ConfigError


@dataclass
class CheckpointConfig:
    """How a run treats its checkpoints.

    `async_save` copies the state and writes it while training goes on; one save is in flight at a time.
    `keep_last` removes all but the newest N after each save (null keeps all); what `last` names stays.
    `verify` compares checksums before resuming, and falls back to the newest good checkpoint where the command
    names `last` or the `checkpoints` directory. `auto_resume` lets the same command with the same output
    directory go on from the newest good checkpoint, or start where there is none.
    """

    async_save: bool = False
    keep_last: int | None = None
    verify: bool = True
    auto_resume: bool = False


def check_checkpointing(config: CheckpointConfig) -> None:
    """
    Raises:
        ConfigError: names the flag, the value and the way out.
    """
    if config.keep_last is not None and config.keep_last < 1:
        raise ConfigError(
            "--checkpoint.keep_last", config.keep_last, "would keep no checkpoint", "use 1 or more, or null for all"
        )
