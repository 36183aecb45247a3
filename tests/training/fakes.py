"""A wandb that only takes notes, put in place inside a rank."""

import sys
import types
from pathlib import Path
from typing import Any

Calls = list[tuple[Any, ...]]


def fake_wandb() -> Calls:
    """Puts a module `wandb` in place that notes what it is told: (function, step, data)."""
    calls: Calls = []
    module = types.ModuleType("wandb")
    module.run = types.SimpleNamespace(id="run-1", get_url=lambda: "https://wandb.test/run-1")
    module.init = lambda **settings: calls.append(("init", None, sorted(settings)))
    module.log = lambda data, step=None: calls.append(("log", step, dict(data)))
    module.Video = lambda path, fps, format: str(path)
    module.Artifact = lambda name, type: _Artifact(name)
    module.log_artifact = lambda artifact: calls.append(("artifact", artifact.name, artifact.files))
    sys.modules["wandb"] = module
    return calls


class _Artifact:
    def __init__(self, name: str) -> None:
        self.name = name
        self.files: list[str] = []

    def add_file(self, path: Path) -> None:
        self.files.append(Path(path).name)
