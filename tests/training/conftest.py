from pathlib import Path

import pytest

from tests.support.datasets import make_dataset


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 frames: 3 episodes of 10. Read only."""
    return make_dataset(tmp_path_factory.mktemp("data") / "toy", episodes=3, frames=10)
