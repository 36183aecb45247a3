"""How the unmodified host finds us, without a file of it touched.

torch loads the entry points of the group `torch.backends` at the end of `import torch`: `install` is ours. It
waits for the host's module with the plugin discovery, which then also loads the group `lerobot.plugins`: there
`activate` puts a dispatcher in the place of the `train` that the host's `main()` is about to call.

torch, lerobot and everything else that is heavy is imported inside functions, once it is sure to be needed.
"""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

SUPPORTED_HOSTS = ">=0.6.0,<0.7"

_TRAIN_MODULE = "lerobot.scripts.lerobot_train"
_DISCOVERY = "register_third_party_plugins"
_ENTRY_POINTS = {"torch.backends": "install", "lerobot.plugins": "activate"}
_GROUPS = {"parallelism", "accelerator", "checkpoint"}
_KEYS = {*_GROUPS, "checkpoint_format"}
_MARK = "_lerobot_parallel"


def _one_process_speaks() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


@functools.cache
def _warn(text: str) -> None:
    if _one_process_speaks():
        logging.getLogger("lerobot_parallel").warning("lerobot-parallel: %s", text)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _step_aside(reason: str) -> None:
    _warn(f"{reason}; stepping aside, the host runs as if this package were not installed")


def _harmless(function: Callable) -> Callable:
    """Makes of an exception one warning: whatever breaks in here, the host goes on."""

    @functools.wraps(function)
    def guarded(*args: object) -> None:
        try:
            function(*args)
        except Exception as error:
            _step_aside(_one_line(error))

    return guarded


def _switched_off() -> bool:
    return os.environ.get("LEROBOT_PARALLEL") == "0"


@_harmless
def install() -> None:
    """Entry point of `torch.backends`: waits for the host's plugin discovery to be imported."""
    if not _switched_off():
        from wrapt import when_imported

        when_imported("lerobot.utils.import_utils")(_extend_discovery)


@_harmless
def activate() -> None:
    """Entry point of `lerobot.plugins`: takes the place of `train` in the module that runs the host's training
    command. Does nothing in any other command, nor when called again."""
    modules = [] if _switched_off() else _training_modules()
    if not modules:
        return
    if _host_has_engine():
        _announce_plans()
    elif problem := _version_problem():
        _step_aside(problem)
    else:
        for module in modules:
            if not hasattr(module.train, _MARK):
                module.train = _dispatcher(module.train)


def status() -> dict[str, bool | str]:
    """Whether the hook acts on this environment's training command, and why; does not import torch."""
    reason = _why_inactive()
    return {"active": reason is None, "reason": reason or "in place: lerobot-train takes this engine's flags"}


def _why_inactive() -> str | None:
    if _switched_off():
        return "LEROBOT_PARALLEL=0 is set"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "torch loads no entry points: TORCH_DEVICE_BACKEND_AUTOLOAD is set, and not to 1"
    for group, name in _ENTRY_POINTS.items():
        if f"{__name__}:{name}" not in {entry.value for entry in importlib.metadata.entry_points(group=group)}:
            return f"the installed metadata lacks our entry point in {group}: reinstall lerobot-parallel"
    return "lerobot trains with an engine of its own" if _host_has_engine() else _version_problem()


def _version_problem() -> str | None:
    from packaging.specifiers import SpecifierSet

    try:
        version = importlib.metadata.version("lerobot")
    except importlib.metadata.PackageNotFoundError:
        return "lerobot is not installed"
    supported = SpecifierSet(SUPPORTED_HOSTS).contains(version, prereleases=True)
    return None if supported else f"lerobot {version} is not supported, only {SUPPORTED_HOSTS}"


def _host_has_engine() -> bool:
    return importlib.util.find_spec("lerobot.distributed") is not None


@_harmless
def _extend_discovery(module: ModuleType) -> None:
    discover = getattr(module, _DISCOVERY)
    if hasattr(discover, _MARK):
        return

    @functools.wraps(discover)
    def discover_entry_points_too(*args: object, **kwargs: object) -> None:
        discover(*args, **kwargs)
        _load_plugins()

    setattr(discover_entry_points_too, _MARK, True)
    setattr(module, _DISCOVERY, discover_entry_points_too)


@_harmless
def _load_plugins() -> None:
    if _version_problem() and not _host_has_engine():
        return activate()  # says so, in the command where it matters
    for entry in importlib.metadata.entry_points(group="lerobot.plugins"):
        try:
            entry.load()()
        except Exception as error:
            owner = entry.dist.name if entry.dist else entry.value
            _warn(f"plugin {entry.name} of {owner} failed, going on without it: {_one_line(error)}")


def _training_modules() -> list[ModuleType]:
    """The host's training module under its own name and, under `python -m`, as `__main__`."""
    main = sys.modules.get("__main__")
    runs_as_main = getattr(getattr(main, "__spec__", None), "name", None) == _TRAIN_MODULE
    modules = [sys.modules.get(_TRAIN_MODULE), main if runs_as_main else None]
    return [module for module in modules if module is not None]


def _announce_plans() -> None:
    try:
        from lerobot_parallel.plans.registry import announce_to_host
    except ImportError:
        return
    announce_to_host()


def _dispatcher(host_train: Callable) -> Callable:
    @functools.wraps(host_train)
    def train(*args: object, **kwargs: object) -> object:
        argv = sys.argv[1:]
        help_wanted = "--help" in argv or "-h" in argv
        if args or kwargs or not (help_wanted or engine_requested(argv)):
            return host_train(*args, **kwargs)
        return _our_train(instead=host_train if help_wanted else None)()

    setattr(train, _MARK, True)
    return train


def _our_train(instead: Callable | None) -> Callable:
    """Our command, or `instead` where it cannot be imported: without one, a run that asked for the engine stops
    here, as it must not silently become one of the host's."""
    try:
        from lerobot_parallel.training.command import train
    except Exception as error:
        reason = f"cannot be imported: {_one_line(error)}"
        if instead is None:
            text = f"lerobot-parallel: this run asks for the parallel engine, which {reason}"
            raise SystemExit(text if _one_process_speaks() else 1) from None
        _step_aside(f"the parallel engine {reason}")
        return instead
    return train


def engine_requested(argv: list[str]) -> bool:
    """Whether a run with these arguments (without the program's name) asks for this engine: with one of our flags, or
    one of our keys at the top of its `--config_path`, which may have to come from the hub. A config that cannot be
    read does not ask: the host will say what is wrong with it."""
    if any(_is_our_flag(argument) for argument in argv):
        return True
    try:
        from lerobot.configs.parser import parse_arg

        from lerobot_parallel.config.source import config_file

        config_path = parse_arg("config_path", argv)
        file = config_file(config_path) if config_path else None
        return file is not None and not _KEYS.isdisjoint(_read_config(file))
    except Exception:
        return False


def _is_our_flag(argument: str) -> bool:
    name = argument.partition("=")[0].removeprefix("--")
    return argument.startswith("--") and (name in _KEYS or name.partition(".")[0] in _GROUPS)


def _read_config(path: Path) -> dict:
    import draccus
    from draccus.cfgparsing import load_config

    with draccus.config_type("json"), open(path, encoding="utf-8") as file:
        return load_config(file, file=str(path))
