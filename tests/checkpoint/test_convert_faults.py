"""Whatever goes wrong, the target is the old file or the new one, and the text is one line."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import safetensors.torch
import torch

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert import convert, to_dcp
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from tests.support.commands import ROOT
from tests.support.shards import all_bits, checkpoint_of, torch_read
from tests.support.world import run_world_raw

STATE = {"a": torch.arange(600.0).reshape(20, 30), "b": torch.ones(3, 3).t() * 2, "c": torch.tensor(5)}
# Whatever changes the disk; SIGKILL before it happens.
CALLS = ["pwrite", "fsync", "posix_fallocate", "replace", "rename", "unlink", "mkdir", "rmdir", "open"]


def die_at(count: int, work: Callable[[], object]) -> None:
    """Runs `work`, killed at its count-th call that changes the disk."""
    left = count

    def deadly(call: Callable) -> Callable:
        def counted(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                _kill()
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    work()


def _kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def killed_everywhere(work: Callable[[], object], check: Callable[[], None]) -> int:
    """Kills `work` at its first, second, … change until it ends by itself. Returns how often it was killed."""
    for count in range(1, 200):
        (rank,) = run_world_raw(die_at, 1, count, work, timeout=60)
        check()
        if rank.exitcode == 0:
            return count - 1
        assert rank.exitcode == -signal.SIGKILL, rank.stderr
    raise AssertionError("it never ends")


@pytest.mark.parametrize("old", [b"old", None])
def test_killed_at_any_change_the_file_is_the_old_or_the_new_one(
    tmp_path: Path, warmed: None, old: bytes | None
) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    expected = safetensors.torch.save({n: t.contiguous() for n, t in STATE.items()}, {"format": "pt"})
    if old is not None:
        checkpoint.model_file.write_bytes(old)

    def check() -> None:
        now = checkpoint.model_file.read_bytes() if checkpoint.model_file.exists() else None
        assert now in (old, expected)
        assert checkpoint.model_shards.exists()

    assert killed_everywhere(lambda: convert(checkpoint.path, verify=True, jobs=1), check) > 8
    assert checkpoint.model_file.read_bytes() == expected
    assert not [path for path in checkpoint.pretrained.iterdir() if path.name.startswith(".")]


def test_killed_at_any_change_of_a_deletion_the_weights_are_there(tmp_path: Path, warmed: None) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    expected = safetensors.torch.save({n: t.contiguous() for n, t in STATE.items()}, {"format": "pt"})

    def check() -> None:
        if not checkpoint.model_file.exists() or checkpoint.model_file.read_bytes() != expected:
            assert all_bits(torch_read(checkpoint.model_shards)["model"]) == all_bits(STATE)

    assert killed_everywhere(lambda: convert(checkpoint.path, delete_dcp=True, jobs=1), check) > 8
    assert checkpoint.model_file.read_bytes() == expected


def test_killed_at_any_change_shards_are_whole_or_not_there(tmp_path: Path, warmed: None) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    convert(checkpoint.path, delete_dcp=True)

    def check() -> None:
        if checkpoint.model_shards.exists():
            assert all_bits(torch_read(checkpoint.model_shards)["model"]) == all_bits(STATE)
            os.rename(checkpoint.model_shards, tmp_path / f"done-{len(list(tmp_path.iterdir()))}")

    assert killed_everywhere(lambda: to_dcp(checkpoint.path, jobs=1), check) > 5


def test_flipped_bit_in_a_shard_is_found_by_the_checksum_stored_with_it(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    shard = checkpoint.model_shards / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    at = bytes(data).index(STATE["a"].numpy().tobytes()) + 77
    data[at] ^= 4
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: 'model.a' is damaged"):
        convert(checkpoint.path)
    assert not checkpoint.model_file.exists()


def test_shards_saved_without_checksums_convert(tmp_path: Path) -> None:
    from torch.serialization import get_crc32_options, set_crc32_options

    before = get_crc32_options()
    set_crc32_options(False)
    try:
        checkpoint = checkpoint_of(tmp_path, STATE)
    finally:
        set_crc32_options(before)
    convert(checkpoint.path)
    assert all_bits(safetensors.torch.load_file(checkpoint.model_file)) == all_bits(STATE)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    (checkpoint.model_shards / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: is missing"):
        convert(checkpoint.path)


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    checkpoint = checkpoint_of(tmp_path, STATE)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    for work in (convert, lambda path: to_dcp(tmp_path / "out", output=tmp_path / "back")):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(OSError, match="bytes are needed, 100 are free") as full:
            work(checkpoint.path)
        assert full.value.errno == errno.ENOSPC
        assert sorted(tmp_path.rglob("*")) == before
        monkeypatch.undo()
        if work is convert:
            convert(checkpoint.path, output=tmp_path / "out")
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))


def test_output_on_another_file_system(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or os.stat(other).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no second file system here")
    target = other / f"lerobot-parallel-test-{os.getpid()}"
    try:
        convert(checkpoint_of(tmp_path, STATE).path, output=target, verify=True)
        assert all_bits(safetensors.torch.load_file(target / layout.MODEL_FILE)) == all_bits(STATE)
    finally:
        subprocess.run(["rm", "-rf", target], check=True)


def test_read_only_checkpoint_is_one_line_and_converts_elsewhere(tmp_path: Path, warmed: None) -> None:
    checkpoint = checkpoint_of(tmp_path, STATE)
    output = tmp_path / "open" / "out"
    output.parent.mkdir()
    output.parent.chmod(0o777)
    for path in [checkpoint.pretrained, *tmp_path.parents[:2], tmp_path]:
        path.chmod(0o755)

    def as_nobody() -> NoReturn:
        if os.getuid() == 0:
            os.setuid(65534)
        else:
            checkpoint.pretrained.chmod(0o555)
        with pytest.raises(PermissionError) as refused:
            convert(checkpoint.path)
        convert(checkpoint.path, output=output)
        print(refused.value)
        sys.stdout.flush()
        os._exit(0)

    (rank,) = run_world_raw(as_nobody, 1, timeout=60)
    assert rank.exitcode == 0, rank.stderr
    assert "Permission denied" in rank.stdout and str(checkpoint.pretrained) in rank.stdout
    assert all_bits(safetensors.torch.load_file(output / layout.MODEL_FILE)) == all_bits(STATE)


MEASURE = """
import sys
from lerobot_parallel.checkpoint.convert import convert, to_dcp
import torch

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

source, output = sys.argv[1:]
for number, work in enumerate([
    lambda target: convert(source, output=target, jobs=4, verify=True),
    lambda target: convert(source, output=target, jobs=4, dtype="bf16"),
    lambda target: to_dcp(output + "0", output=target, jobs=4, verify=True),
]):
    open("/proc/self/clear_refs", "w").write("5")
    before = kib("VmRSS")
    work(output + str(number))
    print((kib("VmHWM") - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """192 MiB in tensors of 48 MiB, one of them in columns; the limit holds for any size."""
    state = {f"layer.{i}": torch.full((3072, 4096), float(i)) for i in range(3)}
    checkpoint = checkpoint_of(tmp_path, state | {"wide": torch.zeros(2, 6 << 20)})
    command = [sys.executable, "-c", MEASURE, str(checkpoint.path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 3 and max(peaks) <= 64, peaks
