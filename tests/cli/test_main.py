"""Exit codes, streams and the time that an answer takes."""

import json
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result

import lerobot_parallel
from lerobot_parallel.cli.main import main

MODULE = [sys.executable, "-m", "lerobot_parallel.cli.main"]


def run(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    pretrained = tmp_path / "run" / "checkpoints" / "000004" / "pretrained_model"
    pretrained.mkdir(parents=True)
    (pretrained / "config.json").write_text("{}")
    with pytest.warns(UserWarning):
        dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=pretrained / "pytorch_model_fsdp_0", no_dist=True)
    return pretrained.parent


HELP = [["--help"], ["--version"], *([name, "--help"] for name in ("convert", "inspect", "doctor", "demo"))]


@pytest.mark.parametrize("args", HELP)
def test_help_answers_at_once_and_imports_neither_torch_nor_the_host(args: list[str]) -> None:
    script = (
        "import sys\nfrom lerobot_parallel.cli.main import main\n"
        f"main({args!r}, standalone_mode=False)\n"
        "assert not {'torch', 'lerobot', 'numpy', 'draccus'} & set(sys.modules), sys.modules.keys()"
    )
    times = []
    for _ in range(3):
        # The processor's time: what a person waits for on a machine that does nothing else.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 0.4


def test_commands_and_version() -> None:
    assert run("--version").stdout == f"lerobot-parallel, version {lerobot_parallel.__version__}\n"
    help_text = run("--help").stdout
    assert [line.split()[0] for line in help_text.split("Commands:\n")[1].splitlines()] == [
        "convert",
        "inspect",
        "doctor",
        "demo",
        "plans",
    ]


def test_importing_the_package_imports_neither_torch_nor_the_host() -> None:
    script = "import sys, lerobot_parallel; assert not {'torch', 'lerobot', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_options_are_the_ones_decided_on() -> None:
    """Adding one is a decision."""
    commands = {name: main.get_command(click.Context(main), name) for name in main.list_commands(click.Context(main))}
    assert {name: [p.opts[0] for p in command.params] for name, command in commands.items()} == {
        "convert": [
            *("checkpoint", "--output", "--dtype", "--max-shard-size", "--delete-dcp", "--verify", "--jobs", "--to"),
            *("--push-to-hub", "--private", "--dry-run", "--json"),
        ],
        "inspect": ["checkpoint", "--tensors", "--verify", "--json"],
        "doctor": ["--dir", "--json"],
        "demo": ["--dir", "--json"],
        "plans": ["policy", "--config", "--dp-shard", "--json"],
    }


WRONG = [
    ["bogus"],
    ["--bogus"],
    ["convert"],
    ["convert", "x", "--bogus"],
    ["convert", "x", "--max-shard-size", "many"],
    ["convert", "x", "--dtype", "int4"],
    ["convert", "x", "--jobs", "0"],
    ["convert", "x", "--to", "dcp", "--dtype", "bf16"],
    ["convert", "x", "--to", "dcp", "--push-to-hub", "me/x"],
    ["convert", "x", "--private"],
    ["convert", "x", "--dry-run", "--push-to-hub", "me/x"],
]


@pytest.mark.parametrize("args", WRONG)
def test_wrong_usage_exits_with_2(args: list[str]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")


def test_convert_prints_what_it_wrote(checkpoint: Path) -> None:
    result = run("convert", checkpoint, "--verify")
    path = checkpoint / "pretrained_model" / "model.safetensors"
    assert result.exit_code == 0
    assert result.stdout.startswith(f"wrote {path}: 1 tensors, {path.stat().st_size} B, ")
    assert result.stdout.endswith("B/s, verified\n")
    assert result.stderr == ""


def test_convert_json(checkpoint: Path, tmp_path: Path) -> None:
    result = run("convert", tmp_path / "run", "--output", tmp_path / "out", "--json")
    path = tmp_path / "out" / "model.safetensors"
    printed = json.loads(result.stdout)
    assert printed.pop("seconds") > 0
    assert printed == {
        "source": str(checkpoint),
        "path": str(path),
        "files": [{"name": path.name, "bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}],
        "tensors": 1,
        "bytes": path.stat().st_size,
        "converted": True,
        "verified": False,
        "deleted_dcp": False,
        "tied": {},
        "left_out": {},
        "dry_run": False,
    }
    assert result.stderr.startswith(f"taking {checkpoint}\n")


def test_convert_deletes_the_shards_once_and_then_has_nothing_to_do(checkpoint: Path) -> None:
    assert "verified, shards deleted" in run("convert", checkpoint, "--delete-dcp").stdout
    result = run("convert", checkpoint, "--delete-dcp")
    assert result.exit_code == 0
    assert result.stdout.startswith("nothing to convert: ")
    assert not (checkpoint / "pretrained_model" / "pytorch_model_fsdp_0").exists()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("700", 700), ("2kb", 2000)])
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    from lerobot_parallel.cli.output import Size

    assert Size().convert(text, None, None) == size


def test_convert_options_reach_the_result(checkpoint: Path, tmp_path: Path) -> None:
    planned = run("convert", checkpoint, "--dry-run", "--dtype", "bf16", "--max-shard-size", "5GB", "--json")
    printed = json.loads(planned.stdout)
    assert printed["dry_run"] and not printed["converted"]
    assert not (checkpoint / "pretrained_model" / "model.safetensors").exists()
    written = run("convert", checkpoint, "--dtype", "bf16", "--output", tmp_path / "out", "--json", "--jobs", "2")
    assert json.loads(written.stdout)["bytes"] == printed["bytes"]


def test_convert_to_dcp_and_back(checkpoint: Path, tmp_path: Path) -> None:
    first = run("convert", checkpoint, "--delete-dcp")
    path = checkpoint / "pretrained_model" / "model.safetensors"
    before = path.read_bytes()
    assert first.exit_code == 0
    there = run("convert", checkpoint, "--to", "dcp", "--verify")
    assert there.stdout.startswith(f"wrote {path.with_name('pytorch_model_fsdp_0')}: 1 tensors, 12 B, ")
    assert json.loads(run("convert", checkpoint, "--json").stdout)["converted"]
    assert path.read_bytes() == before


def one_line(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_refusals_are_one_line_and_exit_with_1(checkpoint: Path, tmp_path: Path) -> None:
    shards = checkpoint / "pretrained_model" / "pytorch_model_fsdp_0"
    assert f"{tmp_path / 'nothing'}: there is no such file" in one_line(run("convert", tmp_path / "nothing"))
    assert "--output" in one_line(run("convert", checkpoint, "--output", tmp_path))
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in one_line(run("convert", checkpoint, "--output", tmp_path / "file" / "out"))
    (shards / "__0_0.distcp").write_bytes(b"")
    assert f"{shards / '__0_0.distcp'}: is truncated" in one_line(run("convert", checkpoint))
    (shards / ".metadata").write_bytes(b"cos\nsystem\n(Vtrue\ntR.")
    assert "asks for os.system" in one_line(run("convert", checkpoint))


def test_a_bug_is_not_dressed_up_as_a_refusal(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lerobot_parallel.checkpoint import convert

    def broken(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(convert, "convert", broken)
    assert isinstance(CliRunner().invoke(main, ["convert", str(checkpoint)]).exception, ValueError)


@pytest.mark.slow
def test_installed_command_converts_and_refuses(checkpoint: Path) -> None:
    done = subprocess.run([*MODULE, "convert", checkpoint, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == 1
    assert done.stderr.startswith("wrote ")
    failed = subprocess.run([*MODULE, "convert", checkpoint / "nothing"], capture_output=True, text=True)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)
