"""A stand-in for the host, a few lines in a folder on PYTHONPATH, and commands on it or on the real one.

The stand-in imports fast and can be of any version; torch and the launchers are real.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CONSOLE_SCRIPT = Path(sysconfig.get_path("scripts")) / "lerobot-train"
MODULE = ["-m", "lerobot.scripts.lerobot_train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
WARNING = "lerobot-parallel: "

# Lines are written in one piece: torchrun's workers are unbuffered, where `print` writes the text and the line's end
# apart, and those of two workers interleave.
HOST_DISCOVERY = """
import sys

def register_third_party_plugins():
    sys.stdout.write("host discovers\\n")
    sys.stdout.flush()
"""
HOST_TRAIN = """
import sys
import torch
from lerobot.utils.import_utils import register_third_party_plugins

def train(*args):
    sys.stdout.write("host trains\\n")

def main():
    register_third_party_plugins()
    train()

if __name__ == "__main__":
    main()
"""
# Stands in for our command without replacing it: `sitecustomize` is imported before anything else.
STAND_IN_COMMAND = """
import sys, types
command = types.ModuleType("lerobot_parallel.training.command")
command.train = lambda: sys.stdout.write("we train\\n") and None
sys.modules[command.__name__] = command
"""
BROKEN_COMMAND = "import sys\nsys.modules['lerobot_parallel.training.command'] = None\n"


def run(command: list[str], cwd: Path, *, path: Path | None = None, timeout: float = 120, **env: str):
    """Runs a command as a user would; past the timeout only its own process group is killed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LEROBOT_") and k != "LOCAL_RANK"}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env
    if path is not None:
        clean["PYTHONPATH"] = str(path)
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end within {timeout} s: {command}\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def distribution(name: str, version: str, entry_points: str = "") -> dict[str, str]:
    folder = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return {f"{folder}/METADATA": metadata, f"{folder}/entry_points.txt": entry_points}


def stand_in_host(root: Path, version: str = "0.6.1", **files: str) -> Path:
    package = {
        "lerobot/__init__.py": "",
        "lerobot/utils/__init__.py": "",
        "lerobot/utils/import_utils.py": HOST_DISCOVERY,
        "lerobot/scripts/lerobot_train.py": HOST_TRAIN,
        "sitecustomize.py": STAND_IN_COMMAND,
    }
    return write(root / "host", package | distribution("lerobot", version) | files)


def warnings_in(result: subprocess.CompletedProcess) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith(WARNING)]
