"""A run with loader workers ends, well or badly, though its workers ignore a scheduler's signals."""

import sys
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.datasets import make_dataset
from tests.training.runs import act_args

_FAILING = (
    "import sys; from lerobot_parallel.training import command, loop\n"
    "def fail(run, batch): raise RuntimeError('the third of May')\n"
    "loop.train_step = fail\n"
    "if __name__ == '__main__': sys.argv[0] = 'lerobot-train'; command.train()"
)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["well", "with an error"])
def test_a_command_with_persistent_workers_ends(tmp_path: Path, ending: str):
    dataset = make_dataset(tmp_path / "data", episodes=2, frames=10)
    script = tmp_path / "train.py"
    script.write_text(_FAILING if ending != "well" else _FAILING.replace("loop.train_step = fail\n", ""))
    flags = ["--num_workers=2", "--steps=2", "--accelerator.gradient_accumulation.steps=1", "--output_dir=out"]
    args = [a for a in act_args(dataset, *flags) if not a.startswith("--num_workers=0")]
    result = run_command([sys.executable, str(script), *args], tmp_path, timeout=120)
    assert result.returncode == (0 if ending == "well" else 1), result.stderr[-2000:]
    assert ("End of training" if ending == "well" else "the third of May") in result.stderr
