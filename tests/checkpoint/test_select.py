"""Which checkpoint a resume takes: the one it names, or the newest good one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lerobot_parallel.checkpoint import commit, layout
from lerobot_parallel.checkpoint.select import newest_good, resolve
from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.source import config_file
from tests.support.checkpoints import save_toy, toy_run
from tests.support.datasets import copy_peer
from tests.support.world import run_world


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")

    def save() -> None:
        run = toy_run(folder)
        for step in (1, 2, 3):
            save_toy(run, step)

    run_world(save, 1)
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run", symlinks=True))


def _step(run: Path, step: int) -> layout.Checkpoint:
    return layout.Checkpoint(run / f"checkpoints/00000{step}")


def _flip(checkpoint: layout.Checkpoint) -> None:
    data = bytearray(checkpoint.model_file.read_bytes())
    data[-1] ^= 1
    checkpoint.model_file.write_bytes(data)


DAMAGE: dict[str, Callable[[layout.Checkpoint], None]] = {
    "a flipped bit": _flip,
    "a truncated file": lambda c: c.optimizer_file.write_bytes(c.optimizer_file.read_bytes()[:-9]),
    "a missing file": lambda c: c.rank_rng_file(0).unlink(),
    "a missing part": lambda c: shutil.rmtree(c.training_state),
    "an empty directory": lambda c: (shutil.rmtree(c.path), c.path.mkdir()),
    "no directory": lambda c: shutil.rmtree(c.path),
}
CHOICES = [
    "checkpoints/last",
    "checkpoints",
    ".",
    "checkpoints/last/pretrained_model/train_config.json",
    "checkpoints/last/pretrained_model",
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_checkpoint_is_passed_over_and_said_so(run: Path, damage: str, choice: str):
    DAMAGE[damage](_step(run, 3))
    said: list[str] = []
    found = resolve(run / choice, checksums=True, say=said.append)
    assert found.path == _step(run, 2).path
    assert "is damaged or incomplete" in said[0] and "000003" in said[0]
    assert "falling back to" in said[1] and "000002" in said[1]


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "no directory"])
def test_a_damaged_checkpoint_that_is_named_is_refused(run: Path, damage: str):
    DAMAGE[damage](_step(run, 3))
    for name in ("checkpoints/000003", "checkpoints/000003/pretrained_model/train_config.json"):
        with pytest.raises(ConfigError, match="is damaged or incomplete") as refused:
            resolve(run / name, checksums=True, say=pytest.fail)
        assert "\n" not in str(refused.value) and "--config_path" in str(refused.value)


LACKING: dict[str, Callable[[layout.Checkpoint], None]] = {
    "a processor": lambda c: (c.pretrained / "policy_postprocessor.json").unlink(),
    "the statistics of a processor": lambda c: _state_file(c).unlink(),
    "the groups of the optimizer": lambda c: c.optimizer_groups.unlink(),
    "what says the steps of a processor": lambda c: (c.pretrained / "policy_preprocessor.json").write_text(
        '{"steps": 3}'
    ),
}


def _state_file(checkpoint: layout.Checkpoint) -> Path:
    return next(checkpoint.pretrained.glob("policy_preprocessor_step_*.safetensors"))


@pytest.mark.parametrize("lacking", LACKING)
def test_a_file_that_resuming_reads_late_is_missed_without_a_manifest_too(tmp_path: Path, lacking: str):
    folder = copy_peer(tmp_path) / "host1"
    shutil.copytree(folder / "000004", folder / "checkpoints/000004")
    shutil.copytree(folder / "000004", folder / "checkpoints/000008")
    newest = layout.Checkpoint(folder / "checkpoints/000008")
    (folder / "checkpoints/last").symlink_to("000008")
    LACKING[lacking](newest)
    said: list[str] = []
    found = resolve(folder / "checkpoints/last", checksums=True, say=said.append)
    assert found.path.name == "000004"
    assert "000008 is damaged or incomplete" in said[0] and "falling back to" in said[1]
    with pytest.raises(ConfigError, match="is damaged or incomplete"):
        resolve(newest.path, checksums=True, say=pytest.fail)


def test_good_ones_are_taken_without_a_word(run: Path):
    assert resolve(_step(run, 1).train_config, checksums=True, say=pytest.fail).path == _step(run, 1).path
    for choice in CHOICES:
        assert resolve(run / choice, checksums=True, say=pytest.fail).path == _step(run, 3).path
    # A run that went back to an older one goes on from there.
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000002")
    assert resolve(run / "checkpoints", checksums=True, say=pytest.fail).path == _step(run, 2).path


def test_without_checksums_sizes_are_still_compared(run: Path):
    _flip(_step(run, 3))
    assert resolve(run, checksums=False, say=pytest.fail).path == _step(run, 3).path
    DAMAGE["a truncated file"](_step(run, 3))
    assert resolve(run, checksums=False, say=lambda text: None).path == _step(run, 2).path


def test_nothing_good_is_refused(run: Path):
    for step in (1, 2, 3):
        _flip(_step(run, step))
    assert newest_good(run / "checkpoints", checksums=True, say=lambda text: None) is None
    with pytest.raises(ConfigError, match="there is no good checkpoint"):
        resolve(run, checksums=True, say=lambda text: None)


def test_extra_files_are_in_nobodys_way(run: Path):
    (_step(run, 3).pretrained / "README.md").write_text("notes")
    assert resolve(run, checksums=True, say=pytest.fail).path == _step(run, 3).path


def test_checkpoints_of_other_software_are_looked_at_without_a_manifest(tmp_path: Path):
    peer = copy_peer(tmp_path)
    for writer in ("fsdp2", "host1"):
        path = peer / writer / "000004"
        assert resolve(path, checksums=True, say=pytest.fail).path == path
    shard = next((peer / "fsdp2/000004/training_state/optimizer_0").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    model = peer / "host1/000004/pretrained_model/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    for writer, name in (("fsdp2", shard.name), ("host1", model.name)):
        with pytest.raises(ConfigError, match=name):
            resolve(peer / writer / "000004", checksums=True, say=pytest.fail)


def test_a_pointer_file_serves_where_links_do_not(run: Path, monkeypatch: pytest.MonkeyPatch):
    def no_links(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.symlink", no_links)
    last = run / "checkpoints/last"
    commit._point_last_at(_step(run, 2).path)
    assert last.is_file() and not last.is_symlink() and last.read_text() == "000002"
    for choice in CHOICES:
        assert resolve(run / choice, checksums=True, say=pytest.fail).path == _step(run, 2).path
        assert config_file(str(run / choice)).resolve() == _step(run, 2).train_config
        if choice != "checkpoints/last/pretrained_model/train_config.json":
            assert layout.locate(run / choice).path == _step(run, 2).path
    monkeypatch.undo()
    commit._point_last_at(_step(run, 1).path)
    assert last.is_symlink() and layout.locate(run).path == _step(run, 1).path


def test_a_last_that_was_copied_as_a_directory_is_moved_away(run: Path):
    last = run / "checkpoints/last"
    last.unlink()
    shutil.copytree(_step(run, 1).path, last)
    commit._point_last_at(_step(run, 2).path)
    assert last.is_symlink() and last.resolve() == _step(run, 2).path


def test_a_replaced_checkpoint_comes_back_if_its_successor_never_came(run: Path):
    """Where the two cannot be swapped in one step, and the process died between its two steps."""
    aside = layout.replaced_path(_step(run, 3).path)
    _step(run, 3).path.rename(aside)
    assert resolve(run, checksums=True, say=pytest.fail).path == _step(run, 3).path
    assert not aside.exists()


def test_without_an_atomic_swap_a_published_checkpoint_is_moved_aside(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commit, "_exchange", lambda first, second: False)
    staging = layout.staging_path(_step(run, 3).path, "abc")
    shutil.copytree(_step(run, 1).path, staging)
    commit.publish(staging, _step(run, 3).path)
    assert _step(run, 3).step_file.read_bytes() == _step(run, 1).step_file.read_bytes()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000001", "000002", "000003", "last"]


def _retain(checkpoints: Path, keep: int) -> None:
    commit.remove(commit.retain(checkpoints, keep))


class TestRetention:
    def test_the_newest_complete_ones_stay(self, run: Path):
        _retain(run / "checkpoints", 2)
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000002", "000003", "last"]

    def test_what_last_names_stays(self, run: Path):
        commit._point_last_at(_step(run, 1).path)
        _retain(run / "checkpoints", 1)
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000001", "000003", "last"]

    def test_an_incomplete_newer_one_does_not_count(self, run: Path):
        _step(run, 3).step_file.unlink()
        _retain(run / "checkpoints", 1)
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000002", "000003", "last"]

    def test_a_failure_is_a_warning(self, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
        def refuse(*args: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("shutil.rmtree", refuse)
        _retain(run / "checkpoints", 1)
        assert "could not remove the old checkpoint" in caplog.text and "Permission denied" in caplog.text
