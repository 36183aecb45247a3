"""The hook, from the dispatcher alone up to whole commands.

Most command tests run a stand-in for the host, a few lines in a folder on PYTHONPATH, under the real torch and the
real launchers: it imports fast and can be of any version. The last tests run the host itself.
"""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import types
from pathlib import Path

import pytest

from lerobot_parallel import hooks

REPO = Path(__file__).parents[1]
PEER = REPO.parent / "shared" / "peer"
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


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEROBOT_PARALLEL", "TORCH_DEVICE_BACKEND_AUTOLOAD", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    hooks._warn.cache_clear()


# A run asks for the engine ...


@pytest.mark.parametrize(
    "argument",
    [
        "--parallelism.dp_shard=2",
        "--parallelism.context_parallel.ring_degree",
        "--parallelism",
        "--accelerator.fsdp.cpu_offload=true",
        "--accelerator=accelerator.yaml",
        "--checkpoint.keep_last=3",
        "--checkpoint",
        "--checkpoint_format=dcp",
        "--checkpoint_format",
    ],
)
def test_each_of_our_flags_asks(argument: str) -> None:
    assert hooks.engine_requested(["--steps=3", argument, "2"])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--policy.type=act", "--steps", "3"],
        ["--save_checkpoint=true", "--save_checkpoint_to_hub=true"],
        ["--checkpoint_formats=dcp", "--checkpoints.x=1", "--parallelisms=1", "--accelerators.x=1"],
        ["parallelism.dp_shard=2", "checkpoint_format=dcp"],
        ["--job_name=--parallelism.dp_shard=2"],
        ["--config_path"],
        ["--config_path="],
        ["--config_path", "--resume=true"],
    ],
)
def test_other_arguments_do_not_ask(argv: list[str]) -> None:
    assert not hooks.engine_requested(argv)


CONFIGS = [
    ("train_config.json", '{"steps": 3, "KEY": {}}'),
    ("run.yaml", "steps: 3\nKEY: {}\n"),
    ("run.yml", "KEY:\n  x: 1\n"),
    ("run.toml", "steps = 3\n[KEY]\n"),
    ("run", '{"KEY": null}'),
]


@pytest.mark.parametrize("key", ["parallelism", "accelerator", "checkpoint", "checkpoint_format"])
@pytest.mark.parametrize(("name", "text"), CONFIGS)
def test_each_of_our_keys_in_the_config_file_asks(tmp_path: Path, name: str, text: str, key: str) -> None:
    file = write(tmp_path, {name: text.replace("KEY", key)}) / name
    assert hooks.engine_requested([f"--config_path={file}"])
    assert hooks.engine_requested(["--resume=true", "--config_path", str(file)])


@pytest.mark.parametrize(("name", "text"), CONFIGS)
def test_a_config_file_without_our_keys_does_not_ask(tmp_path: Path, name: str, text: str) -> None:
    file = write(tmp_path, {name: text.replace("KEY", "policy")}) / name
    assert not hooks.engine_requested([f"--config_path={file}"])


def test_only_top_level_keys_ask(tmp_path: Path) -> None:
    write(tmp_path, {"train_config.json": json.dumps({"policy": {"parallelism": {}, "checkpoint_format": "dcp"}})})
    assert not hooks.engine_requested([f"--config_path={tmp_path}"])


def test_the_config_in_a_directory_is_read(tmp_path: Path) -> None:
    assert not hooks.engine_requested([f"--config_path={tmp_path}"])
    write(tmp_path, {"train_config.json": '{"parallelism": {}}'})
    assert hooks.engine_requested([f"--config_path={tmp_path}"])
    assert hooks.engine_requested(["--config_path", f"{tmp_path}/"])


@pytest.mark.parametrize("text", ["{", "[]", "", "3", "\0"])
def test_an_unreadable_config_file_does_not_ask(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, {"train_config.json": text}) / "train_config.json"
    assert not hooks.engine_requested([f"--config_path={file}"])


def http_error() -> Exception:
    import httpx
    from huggingface_hub.errors import RemoteEntryNotFoundError

    request = httpx.Request("GET", "https://hub")
    return RemoteEntryNotFoundError("no such file", response=httpx.Response(404, request=request))


def test_the_config_of_a_hub_repo_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, {"train_config.json": '{"accelerator": {}}'}) / "train_config.json"
    asked = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args: asked.append(args) or str(file))
    assert hooks.engine_requested(["--config_path=someone/run"])
    assert asked == [("someone/run", "train_config.json")]


def test_the_latest_checkpoint_of_an_interrupted_hub_run_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = "checkpoints/000200/pretrained_model/train_config.json"
    write(tmp_path, {latest: '{"parallelism": {}}'})

    def download(repo_id: str, name: str) -> str:
        if name == "train_config.json":
            raise http_error()
        return str(tmp_path / name)

    files = ["checkpoints/000040/x", latest, "README.md"]
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("lerobot.utils.hub.HfApi.list_repo_files", lambda self, **kwargs: files)
    assert hooks.engine_requested(["--config_path=someone/run"])
    files.remove(latest), files.remove("checkpoints/000040/x")
    assert not hooks.engine_requested(["--config_path=someone/run"])


@pytest.mark.parametrize("error", [OSError("offline"), ValueError("not a repo id")])
def test_an_unreachable_hub_does_not_ask(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    assert not hooks.engine_requested(["--config_path=someone/run"])


# ... and is dispatched


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch):
    """Calls the dispatcher with a command line, or as a function; returns who trained."""
    command = types.ModuleType("lerobot_parallel.training.command")
    command.train = lambda: "we"
    monkeypatch.setitem(sys.modules, command.__name__, command)

    def call(*argv: str, args: tuple = ()) -> object:
        monkeypatch.setattr(sys, "argv", ["lerobot-train", *argv])
        return hooks._dispatcher(lambda *args: ("host", *args))(*args)

    return call


def test_a_run_that_does_not_ask_is_the_hosts(dispatch) -> None:
    assert dispatch("--steps=3") == ("host",)


def test_a_run_that_asks_is_ours(dispatch) -> None:
    assert dispatch("--steps=3", "--parallelism.dp_shard=2") == "we"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_ours(dispatch, flag: str) -> None:
    assert dispatch("--policy.type=act", flag) == "we"


def test_a_call_from_python_is_the_hosts(dispatch) -> None:
    assert dispatch("--parallelism.dp_shard=2", args=("cfg",)) == ("host", "cfg")


def test_a_run_that_asks_stops_where_our_command_cannot_be_imported(dispatch, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot_parallel.training.command", None)
    with pytest.raises(SystemExit, match="asks for the parallel engine, which cannot be imported") as stopped:
        dispatch("--checkpoint_format=dcp")
    assert "\n" not in stopped.value.code


def test_help_is_the_hosts_where_our_command_cannot_be_imported(dispatch, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "lerobot_parallel.training.command", None)
    assert dispatch("--help") == ("host",)
    assert len(caplog.records) == 1


# The module of the host


@pytest.fixture
def host_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("lerobot.scripts.lerobot_train")
    module.train = lambda: "host"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_activating_twice_wraps_once(host_module: types.ModuleType) -> None:
    original = host_module.train
    hooks.activate()
    hooks.activate()
    assert host_module.train.__wrapped__ is original


def test_the_module_under_python_m_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name="lerobot.scripts.lerobot_train")
    main.train = original = lambda: "host"
    monkeypatch.setitem(sys.modules, "__main__", main)
    hooks.activate()
    assert main.train.__wrapped__ is original


def test_switched_off_nothing_is_replaced(host_module: types.ModuleType, monkeypatch) -> None:
    original = host_module.train
    monkeypatch.setenv("LEROBOT_PARALLEL", "0")
    hooks.activate()
    assert host_module.train is original


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.5.9", False), ("0.6.0", True), ("0.6.1", True), ("0.6.2.dev0+abc", True), ("0.7.0.dev0", False), ("1.0", False)],
)
def test_only_supported_versions_are_taken_over(host_module, monkeypatch, caplog, version, supported) -> None:
    original = host_module.train
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    hooks.activate()
    hooks.activate()
    assert (host_module.train is not original) == supported
    assert [version in record.getMessage() for record in caplog.records] == [True] * (not supported)


def test_one_process_of_a_node_warns(host_module, monkeypatch, caplog) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    hooks.activate()
    assert not caplog.records


def test_a_host_with_its_own_engine_keeps_training_and_hears_of_our_plans(host_module, monkeypatch, caplog) -> None:
    original, announced = host_module.train, []
    registry = types.ModuleType("lerobot_parallel.plans.registry")
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(hooks, "_host_has_engine", lambda: True)
    hooks.activate()
    registry.announce_to_host = lambda: announced.append(True)
    hooks.activate()
    assert host_module.train is original
    assert announced == [True]
    assert not caplog.records


def test_an_exception_in_the_hook_is_one_warning(host_module, monkeypatch, caplog) -> None:
    original = host_module.train
    monkeypatch.setattr(hooks, "_host_has_engine", lambda: 1 / 0)
    hooks.activate()
    hooks.activate()
    assert host_module.train is original
    assert ["division by zero" in record.getMessage() for record in caplog.records] == [True]


def test_the_hook_and_the_package_support_the_same_hosts() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert f"lerobot[training]{hooks.SUPPORTED_HOSTS}" in project["dependencies"]
    declared = {group: entries["lerobot_parallel"] for group, entries in project["entry-points"].items()}
    assert declared == {group: f"lerobot_parallel.hooks:{name}" for group, name in hooks._ENTRY_POINTS.items()}


# status


def test_status_says_active_here() -> None:
    assert hooks.status()["active"] is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.setenv("LEROBOT_PARALLEL", "0"), "LEROBOT_PARALLEL=0"),
        (lambda m: m.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"), "TORCH_DEVICE_BACKEND_AUTOLOAD"),
        (lambda m: m.setattr(importlib.metadata, "entry_points", lambda group: ()), "torch.backends"),
        (lambda m: m.setattr(importlib.metadata, "version", lambda name: "0.7.1"), "0.7.1"),
        (lambda m: m.setattr(hooks, "_host_has_engine", lambda: True), "engine of its own"),
    ],
)
def test_status_says_why_not(monkeypatch: pytest.MonkeyPatch, change, reason: str) -> None:
    change(monkeypatch)
    status = hooks.status()
    assert status["active"] is False
    assert reason in status["reason"]


def test_neither_installing_nor_status_imports_torch_or_the_host(tmp_path: Path) -> None:
    code = (
        "import sys; from lerobot_parallel import hooks; hooks.install()\n"
        "assert not {'torch', 'lerobot'} & set(sys.modules)\n"
        "print(hooks.status()['active'], 'torch' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], tmp_path).stdout == "True False\n"


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
