"""`lerobot-parallel doctor`: what it finds here, and what it says where something is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lerobot_parallel import diagnosis, hooks
from lerobot_parallel.cli.main import main


def doctor(*args: object) -> Result:
    result = CliRunner().invoke(main, ["doctor", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def backends_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_tried", lambda *_: "works")


@pytest.mark.slow
def test_gloo_starts_between_two_processes_and_a_failure_is_quoted() -> None:
    assert diagnosis._tried("gloo", 2) == "works"
    assert "nonsense" in diagnosis._tried("nonsense", 1)


def test_facts_of_this_machine(backends_work: None, tmp_path: Path) -> None:
    result = doctor("--json", "--dir", tmp_path)
    seen = json.loads(result.stdout)
    assert seen["facts"]["backends"] == {"gloo": "works"}
    assert seen["facts"]["packages"]["lerobot"]["supported"] == "<0.7,>=0.6.0"
    assert seen["facts"]["hook"] == hooks.status()
    assert seen["facts"]["limits"]["disk"]["path"] == str(tmp_path)
    assert result.exit_code == (0 if seen["healthy"] else 1)


def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    version = diagnosis._version
    monkeypatch.setattr(diagnosis, "_version", lambda name: "2.9.0" if name == "torch" else version(name))


def no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    version = diagnosis._version
    monkeypatch.setattr(diagnosis, "_version", lambda name: None if name == "lerobot" else version(name))


def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(diagnosis, "_devices", broken)


PROBLEMS: dict[str, tuple[Callable, str, str]] = {
    "old torch": (old_torch, "torch: is 2.9.0, and >=2.10 is needed", "pip install 'torch>=2.10'"),
    "no host": (no_host, "lerobot: is not installed", "pip install 'lerobot"),
    "hook off": (
        lambda m: m.setenv("LEROBOT_PARALLEL", "0"),
        "hook: is not active: LEROBOT_PARALLEL=0",
        "see the reason",
    ),
    "silent gloo": (
        lambda m: m.setattr(diagnosis, "_tried", lambda *_: "no answer within 90 seconds"),
        "gloo: does not start between processes: no answer",
        "GLOO_SOCKET_IFNAME=lo",
    ),
    "configured behind our back": (
        lambda m: m.setenv("ACCELERATE_USE_FSDP", "true"),
        "environment: ACCELERATE_USE_FSDP=true",
        "unset it",
    ),
    "torch that does not import": (no_devices, "devices: cannot be examined: ImportError: libcudart", "reinstall"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problems_come_first_with_their_way_out(
    backends_work: None, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    change, problem, way_out = PROBLEMS[case]
    change(monkeypatch)
    result = doctor()
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert lines[0].startswith(f"problem: {problem}")
    assert lines[1].startswith("  way out: ") and way_out in lines[1]


def test_small_limits_are_warnings(backends_work: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_LEAST_DISK", 1 << 62)
    monkeypatch.setattr(diagnosis, "_LEAST_FILES", 1 << 62)
    monkeypatch.setattr(diagnosis, "_LEAST_SHM", 1 << 62)
    result = doctor()
    warnings = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    assert [line.split(": ")[1] for line in warnings] == ["shared memory", "open files", "disk"]
    assert result.exit_code == 0
