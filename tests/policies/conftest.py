"""A folder for tiny models, and the heavy imports, once."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.policies.builds.common import FOLDERS


@pytest.fixture(scope="session", autouse=True)
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tiny-models")
    os.environ[FOLDERS] = str(folder)
    yield folder
    del os.environ[FOLDERS]


@pytest.fixture(scope="session", autouse=True)
def heavy_imports(warmed: None) -> None:
    """Worlds fork from here: what the policies import counts once."""
    for name in ("transformers.models.qwen3_vl.modeling_qwen3_vl", "diffusers", "torch.utils.checkpoint"):
        importlib.import_module(name)
