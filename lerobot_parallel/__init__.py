"""A parallel training engine for the unmodified LeRobot host.

Importing the package imports neither torch nor lerobot: the names below are resolved on first use.
"""

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "ParallelismConfig": "lerobot_parallel.config.topology",
    "AcceleratorConfig": "lerobot_parallel.config.runtime",
    "CheckpointConfig": "lerobot_parallel.config.checkpointing",
    "ParallelTrainPipelineConfig": "lerobot_parallel.config.train",
    "ConfigError": "lerobot_parallel.config.errors",
    "WrapPlan": "lerobot_parallel.plans.plan",
    "convert": "lerobot_parallel.checkpoint.convert",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
