"""The command line of a run that goes on: which checkpoint it means, and what it sets by itself."""

import logging
from pathlib import Path
from typing import Any

import draccus
from draccus.cfgparsing import load_config
from lerobot.configs.parser import filter_arg, parse_arg

from lerobot_parallel.checkpoint.layout import Checkpoint, checkpoints_dir
from lerobot_parallel.checkpoint.select import newest_good, resolve
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.source import config_file, follow_pointer
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.topology import rank_from_env

_AUTO_RESUME, _VERIFY = "checkpoint.auto_resume", "checkpoint.verify"
_TRUE = {"true", "yes", "on", "1"}
# Options that say where a run comes from, not what it does.
_ORIGINS = {"config_path", "resume", "output_dir", "job_name"}


def settle_checkpoint(argv: list[str]) -> list[str]:
    """The arguments with `--config_path` naming one good checkpoint, where the run goes on from one.

    That is a run with `--resume=true`, or one with `--checkpoint.auto_resume=true` whose output directory has a
    good checkpoint. Alike on every rank; rank 0 says what was passed over.

    Raises:
        ConfigError: the checkpoint that was named is damaged, or there is none.
    """
    stated = _stated_values(parse_arg("config_path", argv))
    checksums = _truth(argv, _VERIFY, stated, default=True)
    resume_asked = _truth(argv, "resume", {}, default=False)
    if _truth(argv, _AUTO_RESUME, {} if resume_asked else stated, default=False):
        found = newest_good(_auto_directory(argv, stated), checksums=checksums, say=_say)
        if found is not None:
            _say(f"--{_AUTO_RESUME}: going on from {found.path}")
            return _resuming(argv, found)
    config_path = parse_arg("config_path", argv)
    if config_path is None or not _truth(argv, "resume", stated, default=False):
        return argv
    if not _is_local(Path(config_path)):
        return argv
    return _resuming(argv, resolve(Path(config_path), checksums=checksums, say=_say))


def _is_local(path: Path) -> bool:
    """Whether it is a path at all, be it one whose checkpoint is gone, and no repo of the hub."""
    return path.exists() or follow_pointer(path).exists() or (path.parent != Path() and path.parent.exists())


def _resuming(argv: list[str], checkpoint: Checkpoint) -> list[str]:
    for option in ("config_path", "resume", "policy.path", "reward_model.path"):
        argv = filter_arg(option, argv)
    return [*argv, "--resume=true", f"--config_path={checkpoint.train_config}"]


def _auto_directory(argv: list[str], stated: dict[str, Any]) -> Path:
    output_dir = parse_arg("output_dir", argv) or stated.get("output_dir")
    if not output_dir:
        raise ConfigError(
            f"--{_AUTO_RESUME}", True, "needs a directory that is the same at every start", "give --output_dir"
        )
    return checkpoints_dir(Path(output_dir))


def _say(text: str) -> None:
    if rank_from_env() == 0:
        logging.warning(text)


def _truth(argv: list[str], option: str, stated: dict[str, Any], *, default: bool) -> bool:
    """The value that the command line gives, else the config file."""
    given = parse_arg(option, argv)
    if given is None and f"--{option}" in argv:
        return True
    value: Any = given
    if value is None:
        value = stated
        for part in option.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    return default if value is None else str(value).strip().lower() in _TRUE


def _stated_values(config_path: str | None) -> dict[str, Any]:
    """What the config file of the command line says; empty where it says nothing that can be read."""
    try:
        file = config_file(config_path) if config_path else None
        if file is None:
            return {}
        with draccus.config_type("json"), file.open(encoding="utf-8") as text:
            values = load_config(text, file=str(file))
    except Exception:  # the parser will say what is wrong with it
        return {}
    return values if isinstance(values, dict) else {}


def given_options(argv: list[str]) -> list[str]:
    """Names of the options on the command line."""
    return [arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")]


def given_to_optimizer(argv: list[str]) -> set[str]:
    """Entries of optimizer groups that the command line sets: `lr`, `weight_decay`, `betas`, ..."""
    names = set()
    for option in given_options(argv):
        for prefix in ("optimizer.", "policy.optimizer_", "reward_model.optimizer_"):
            if option.startswith(prefix):
                entry = option.removeprefix(prefix)
                names.add("lr" if entry.startswith("lr") else entry.partition(".")[0])
    return names


def apply_given_preset(cfg: ParallelTrainPipelineConfig, argv: list[str]) -> None:
    """Let optimizer and scheduler follow the policy's options of a resumed command line.

    The host builds them from the checkpoint's own sections on resume, whatever `--policy.optimizer_lr` says.
    """
    options = given_options(argv)
    prefixes = ("policy.optimizer_", "policy.scheduler_", "reward_model.optimizer_", "reward_model.scheduler_")
    asked = [option.partition("optimizer_")[2] for option in options if option.startswith(prefixes)]
    if not cfg.use_policy_training_preset or not asked:
        return
    preset = cfg.trainable_config.get_optimizer_preset()
    for entry in asked:
        if entry and hasattr(preset, entry) and hasattr(cfg.optimizer, entry) and f"optimizer.{entry}" not in options:
            setattr(cfg.optimizer, entry, getattr(preset, entry))
    if not any(option.startswith("scheduler.") for option in options):
        cfg.scheduler = cfg.trainable_config.get_scheduler_preset()


def log_differences(cfg: ParallelTrainPipelineConfig, saved: dict[str, Any], argv: list[str]) -> None:
    """One line for each option of the command line that is not what the checkpoint's config says."""
    now = cfg.to_dict()
    for option in dict.fromkeys(given_options(argv)):
        before, after = _lookup(saved, option), _lookup(now, option)
        if option not in _ORIGINS and before != after:
            logging.info("--%s: %s from the command line, the checkpoint has %s", option, after, before)


def _lookup(values: Any, option: str) -> Any:
    for part in option.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
