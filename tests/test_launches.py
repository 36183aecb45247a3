"""The hook in whole commands, by every launcher: on a stand-in for the host, then on the host itself."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from lerobot_parallel import hooks
from tests.support.hosts import (
    ACCELERATE,
    BROKEN_COMMAND,
    CONSOLE_SCRIPT,
    HOST_TRAIN,
    MODULE,
    STAND_IN_COMMAND,
    TORCHRUN,
    distribution,
    run,
    stand_in_host,
    warnings_in,
    write,
)

REPO = Path(__file__).parents[1]
PEER = REPO.parent / "shared" / "peer"


# Whole commands on the stand-in host

LAUNCHES = {
    "console script": [sys.executable, CONSOLE_SCRIPT],
    "python -m": [sys.executable, *MODULE],
    "torchrun -m": [*TORCHRUN, *MODULE],
    "torchrun script": [*TORCHRUN, CONSOLE_SCRIPT],
    "accelerate launch -m": [*ACCELERATE, *MODULE],
    "accelerate launch script": [*ACCELERATE, CONSOLE_SCRIPT],
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_launch_reaches_our_command(tmp_path: Path, launch: str) -> None:
    result = run([*LAUNCHES[launch], "--parallelism.dp_shard=2"], tmp_path, path=stand_in_host(tmp_path))
    processes = 2 if "torchrun" in launch else 1
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")) == [""] + ["host discovers"] * processes + ["we train"] * processes
    assert warnings_in(result) == []


def test_a_command_that_does_not_ask_is_the_hosts(tmp_path: Path) -> None:
    result = run([sys.executable, *MODULE, "--steps=3"], tmp_path, path=stand_in_host(tmp_path))
    assert result.stdout == "host discovers\nhost trains\n"
    assert warnings_in(result) == []


ASKING = [sys.executable, CONSOLE_SCRIPT, "--parallelism.dp_shard=2"]
HOST_RUNS = "host discovers\nhost trains\n"


def test_switched_off_the_command_is_the_hosts(tmp_path: Path) -> None:
    result = run(ASKING, tmp_path, path=stand_in_host(tmp_path), LEROBOT_PARALLEL="0")
    assert (result.stdout, warnings_in(result)) == (HOST_RUNS, [])


def test_an_unsupported_host_is_one_warning_and_its_command_works(tmp_path: Path) -> None:
    result = run([sys.executable, *MODULE], tmp_path, path=stand_in_host(tmp_path, "0.7.0"))
    assert result.stdout == HOST_RUNS
    assert len(warnings_in(result)) == 1
    assert "lerobot 0.7.0 is not supported" in warnings_in(result)[0]


def test_an_unsupported_host_is_not_mentioned_by_its_other_commands(tmp_path: Path) -> None:
    other = {"lerobot/scripts/lerobot_record.py": HOST_TRAIN}
    host = stand_in_host(tmp_path, "0.7.0", **other)
    result = run([sys.executable, "-m", "lerobot.scripts.lerobot_record"], tmp_path, path=host)
    assert (result.stdout, warnings_in(result)) == (HOST_RUNS, [])


@pytest.mark.parametrize("version", ["0.6.1", "0.9.0"])
def test_a_host_with_its_own_engine_runs_its_own_command(tmp_path: Path, version: str) -> None:
    host = stand_in_host(tmp_path, version, **{"lerobot/distributed/__init__.py": ""})
    result = run(ASKING, tmp_path, path=host)
    assert (result.stdout, warnings_in(result)) == (HOST_RUNS, [])


def test_a_host_without_the_discovery_function_is_one_warning(tmp_path: Path) -> None:
    without = {"lerobot/utils/import_utils.py": ""}
    code = "import torch, lerobot.utils.import_utils\nprint('host works')"
    result = run([sys.executable, "-c", code], tmp_path, path=stand_in_host(tmp_path, **without))
    assert result.stdout == "host works\n"
    assert ["register_third_party_plugins" in line for line in warnings_in(result)] == [True]


def test_a_broken_plugin_is_one_warning_that_names_its_distribution(tmp_path: Path) -> None:
    entry_points = "[lerobot.plugins]\nmissing = no_such_module:start\n"
    host = stand_in_host(tmp_path, **distribution("broken-arm", "1.0", entry_points))
    result = run(ASKING, tmp_path, path=host)
    assert result.stdout == "host discovers\nwe train\n"
    assert ["broken-arm" in line and "no_such_module" in line for line in warnings_in(result)] == [True]


def test_without_wrapt_torch_is_imported_with_one_warning(tmp_path: Path) -> None:
    path = write(tmp_path, {"sitecustomize.py": "import sys\nsys.modules['wrapt'] = None\n"})
    result = run([sys.executable, "-c", "import torch; print('torch works')"], tmp_path, path=path)
    assert result.stdout == "torch works\n"
    assert ["wrapt" in line for line in warnings_in(result)] == [True]


def test_a_command_that_asks_stops_on_one_line_where_the_engine_is_broken(tmp_path: Path) -> None:
    host = stand_in_host(tmp_path, **{"sitecustomize.py": BROKEN_COMMAND})
    result = run(ASKING, tmp_path, path=host)
    assert (result.returncode, result.stdout) == (1, "host discovers\n")
    assert len(result.stderr.splitlines()) == 1


# Whole commands on the real host

RUN = (
    "--dataset.repo_id=local/reach --dataset.root=reach --policy.type=act --policy.device=cpu "
    "--policy.push_to_hub=false --policy.dim_model=32 --policy.dim_feedforward=64 --policy.n_heads=4 "
    "--policy.chunk_size=8 --policy.n_action_steps=8 --policy.latent_dim=8 --batch_size=4 --steps=2 --save_freq=2 "
    "--log_freq=1 --num_workers=0 --wandb.enable=false --seed=7 --output_dir=out"
).split()


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="the peer data is not in this checkout")
def test_a_run_that_does_not_ask_writes_the_hosts_bytes(tmp_path: Path) -> None:
    written = {}
    for hook in ("1", "0"):
        place = tmp_path / hook
        shutil.copytree(PEER / "reach", place / "reach")
        result = run([sys.executable, *MODULE, *RUN], place, LEROBOT_PARALLEL=hook)
        assert result.returncode == 0, result.stderr
        saved = place / "out/checkpoints/000002/pretrained_model"
        written[hook] = {file.name: file.read_bytes() for file in saved.iterdir()}
    assert "model.safetensors" in written["0"]
    assert written["1"] == written["0"]
    assert hooks._KEYS.isdisjoint(json.loads(written["1"]["train_config.json"]))


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["console script", "python -m", "torchrun -m"])
def test_the_real_host_reaches_our_command(tmp_path: Path, launch: str) -> None:
    path = write(tmp_path / "path", {"sitecustomize.py": STAND_IN_COMMAND})
    result = run([*LAUNCHES[launch], "--checkpoint_format=dcp"], tmp_path, path=path, timeout=180)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n").count("we train") == (2 if "torchrun" in launch else 1)


@pytest.mark.slow
def test_help_lists_our_flags(tmp_path: Path) -> None:
    result = run([sys.executable, CONSOLE_SCRIPT, "--help"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "--parallelism.dp_shard" in result.stdout
    assert "--steps" in result.stdout


# Packaging


@pytest.mark.slow
def test_a_normal_install_carries_the_hook(tmp_path: Path) -> None:
    """The wheel alone, in a folder that stands for site-packages: what an editable install has here anyway."""
    source = tmp_path / "source"
    shutil.copytree(REPO / "lerobot_parallel", source / "lerobot_parallel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (REPO / name).exists():
            shutil.copy(REPO / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    target = tmp_path / "site"
    wheel = run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], tmp_path)
    assert wheel.returncode == 0, wheel.stderr
    found = list(tmp_path.glob("*.whl"))
    installed = run([*pip, "install", "--no-deps", "--target", target, *found], tmp_path)
    assert installed.returncode == 0, installed.stderr
    (metadata,) = target.glob("lerobot_parallel-*.dist-info")
    assert "lerobot_parallel.hooks:install" in (metadata / "entry_points.txt").read_text()
    where = "import importlib.metadata as m; print(m.distribution('lerobot-parallel').locate_file(''))\n"
    write(target, {"sitecustomize.py": where + "import lerobot_parallel.hooks as h; print(h.__file__)\n"})
    write(target, {"lerobot_parallel/training/command.py": "def train():\n    print('we train')\n"})
    result = run([*LAUNCHES["python -m"], "--checkpoint_format=dcp"], tmp_path, path=target)
    expected = [str(target), str(target / "lerobot_parallel/hooks.py"), "we train"]
    assert result.stdout.splitlines() == expected, result.stderr
