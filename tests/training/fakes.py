"""What the loop talks to outside the machine, replaced inside a rank: wandb and the hub."""

import sys
import types
from collections.abc import Callable
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


def fake_hub(look: Callable[[Path], Any]) -> Calls:
    """Lets nothing reach the hub; notes uploads as (repository, names of the files, `look(folder)`)."""
    from huggingface_hub import HfApi, ModelCard

    calls: Calls = []

    def create_repo(self: HfApi, repo_id: str, **_: Any) -> Any:
        return types.SimpleNamespace(repo_id=repo_id)

    def upload_folder(self: HfApi, *, repo_id: str, folder_path: Path, **_: Any) -> Any:
        folder = Path(folder_path)
        calls.append((repo_id, sorted(path.name for path in folder.iterdir()), look(folder)))
        return types.SimpleNamespace(repo_url=types.SimpleNamespace(url=f"https://hub.test/{repo_id}"))

    HfApi.create_repo, HfApi.upload_folder = create_repo, upload_folder
    ModelCard.validate = lambda self, **_: None  # asks the hub
    return calls
