"""The hook inside one process: which runs are ours, what is replaced, what its status says."""

import importlib.metadata
import json
import sys
import tomllib
import types
from pathlib import Path

import pytest

from lerobot_parallel import hooks
from tests.support.hosts import (
    run,
    write,
)

REPO = Path(__file__).parents[1]
PEER = REPO.parent / "shared" / "peer"


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
    [
        ("0.5.9", False),
        ("0.6.0", True),
        ("0.6.1", True),
        ("0.6.2.dev0+abc", True),
        ("0.7.0.dev0", False),
        ("1.0", False),
    ],
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
