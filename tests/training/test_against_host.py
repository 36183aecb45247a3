"""The host's own loop is the reference: one process gives its bytes, its log lines and its files."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.training.fakes import Calls, fake_wandb
from tests.training.runs import (
    QUIET,
    act_args,
    assert_close,
    files,
    last_checkpoint,
    log_lines,
    payload,
    plan_for_toy,
    toy_args,
    train,
    weights_file,
)

pytestmark = pytest.mark.usefixtures("warmed")

STATE = [
    "training_state/optimizer_state.safetensors",
    "training_state/optimizer_param_groups.json",
    "training_state/rng_state.safetensors",
]
# fp32 sums in another order, over a few updates.
ROUNDING = 5e-6


def assert_same_checkpoint(ours: Path, host: Path) -> None:
    assert payload(weights_file(ours)) == payload(weights_file(host))
    for name in STATE:
        assert (last_checkpoint(ours) / name).read_bytes() == (last_checkpoint(host) / name).read_bytes(), name


@pytest.mark.parametrize("log_freq", [1, 3])
def test_one_process_gives_the_hosts_bytes_lines_and_files(small_dataset: Path, tmp_path: Path, log_freq: int):
    """Over an epoch's end (10 steps of 3 in 30 frames), with noise, and with steps after the last log line."""
    args = act_args(small_dataset, "--steps=13", "--save_freq=6", f"--log_freq={log_freq}")
    (host,) = train(args, "host", tmp_path / "host")
    (ours,) = train(args, "single", tmp_path / "ours")
    assert log_lines(ours) == log_lines(host)
    assert len(log_lines(ours)) == 13 // log_freq
    assert {"loss", "grdn", "lr", "l1_loss", "kld_loss", "smpl", "ep", "epch"} <= log_lines(ours)[0].keys()
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "host")
    expected, got = (files(tmp_path / side / "out") for side in ("host", "ours"))
    assert expected <= got
    assert {Path(name).name for name in got - expected} == {"rng_state_rank_00000.safetensors", "manifest.json"}


def test_one_process_leaves_the_last_batch_of_an_epoch_as_short_as_the_host(small_dataset: Path, tmp_path: Path):
    """30 frames in batches of 4: two are left over, in two epochs."""
    args = act_args(small_dataset, "--steps=18", "--save_freq=18", "--batch_size=4")
    train(args, "host", tmp_path / "host")
    train(args, "single", tmp_path / "ours")
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "host")


def test_progress_bar_is_the_hosts(small_dataset: Path, tmp_path: Path):
    bars = {}
    for engine in ("host", "single"):
        (result,) = train(act_args(small_dataset, "--log_freq=0"), engine, tmp_path / engine)
        bars[engine] = [re.sub(r"\[.*|[█▏▎▍▌▋▊▉ ]", "", bar) for bar in re.findall(r"Training:[^\r\n]*", result.stderr)]
    assert bars["single"][-1] == bars["host"][-1] == "Training:100%||4/4"
    quiet = train(act_args(small_dataset), "ddp2", tmp_path / "ddp2")[1]
    assert "Training:" not in quiet.stderr


def test_ddp_without_noise_gives_the_hosts_ddp(small_dataset: Path, tmp_path: Path):
    args = act_args(small_dataset, *QUIET, "--steps=7")
    host = train(args, "host_ddp2", tmp_path / "host")
    ours = train(args, "ddp2", tmp_path / "ours")
    assert log_lines(ours[0]) == log_lines(host[0])
    assert log_lines(ours[1]) == []
    assert_close(weights_file(tmp_path / "ours"), weights_file(tmp_path / "host"), 0)


def test_wandb_gets_what_the_host_gives_it_from_rank_0_alone(small_dataset: Path, tmp_path: Path):
    args = act_args(
        small_dataset, *QUIET, "--wandb.enable=true", "--log_freq=2", "--dataset.eval_split=0.3", "--eval_steps=4"
    )

    def fake() -> Any:
        calls = fake_wandb()
        return lambda: calls

    host = train(args, "host", tmp_path / "host", fake)[0].value
    ours = train(args, "single", tmp_path / "ours", fake)[0].value
    assert [call[:2] for call in ours] == [call[:2] for call in host]
    assert _told(ours) == _told(host)
    assert {step for name, step, _ in ours if name == "log"} == {2, 4}
    main, other = train(args, "ddp2", tmp_path / "ddp2", fake)
    assert other.value == []
    assert [call[:2] for call in main.value] == [call[:2] for call in host]


def _told(calls: Calls) -> list[Any]:
    """Everything but times."""
    measured = {"train/update_s", "train/dataloading_s", "train/samples_per_s"}
    told = []
    for name, step, data in calls:
        if name == "log":
            assert measured <= data.keys() or "eval/eval_loss" in data
            data = {key: value for key, value in data.items() if key not in measured}
        told.append((name, step, data))
    return told


@pytest.fixture(scope="module")
def progress(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task progress of every frame, as RA-BC reads it: some of it backwards, some missing."""
    draw = np.random.default_rng(0)
    index = np.arange(30)
    values = np.where(index % 7 == 3, np.nan, np.cumsum(draw.normal(0.02, 0.05, size=30)))
    file = tmp_path_factory.mktemp("progress") / "progress.parquet"
    pd.DataFrame({"index": index, "episode_index": index // 10, "progress_sparse": values}).to_parquet(file)
    return file


@pytest.mark.parametrize("kind", ["uniform", "rabc"])
def test_sample_weighting_is_the_hosts(small_dataset: Path, progress: Path, tmp_path: Path, kind: str):
    import tests.training.toy_weighted  # noqa: F401

    flags = [f"--sample_weighting.type={kind}", f"--sample_weighting.progress_path={progress}"]
    args = toy_args(small_dataset, *flags, "--wandb.enable=true", kind="toy_weighted")

    def setup() -> Any:
        calls = fake_wandb()
        plan_for_toy("toy_weighted")
        return lambda: calls

    host = train(args, "host", tmp_path / "host", setup)[0].value
    ours = train(args, "single", tmp_path / "ours", setup)[0].value
    assert _told(ours) == _told(host)
    logged = ours[1][2]
    assert "train/sample_weight_mean_weight" in logged and logged["train/sample_weighting/type"] == kind
    if kind == "rabc":
        assert 0 < logged["train/sample_weight_mean_weight"] < 1
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "host")
    train(args, "host_ddp2", tmp_path / "host_ddp2", setup)
    for engine, atol in {"ddp2": 0, "fsdp2": ROUNDING}.items():
        train(args, engine, tmp_path / engine, setup)
        assert_close(weights_file(tmp_path / engine), weights_file(tmp_path / "host_ddp2"), atol)


def test_bf16_is_the_hosts_autocast(small_dataset: Path, tmp_path: Path):
    bf16 = "--accelerator.mixed_precision=bf16"
    args = act_args(small_dataset, "--steps=5")
    train([*args, "--policy.use_amp=true"], "host", tmp_path / "host")
    train([*args, bf16], "single", tmp_path / "ours")
    train(args, "single", tmp_path / "fp32")
    assert_same_checkpoint(tmp_path / "ours", tmp_path / "host")
    assert weights_file(tmp_path / "fp32").read_bytes() != weights_file(tmp_path / "ours").read_bytes()
    train([*args, *QUIET, "--policy.use_amp=true"], "host_ddp2", tmp_path / "host_ddp2")
    train([*args, *QUIET, bf16], "ddp2", tmp_path / "ddp2")
    assert_close(weights_file(tmp_path / "ddp2"), weights_file(tmp_path / "host_ddp2"), 0)


def test_use_amp_alone_changes_nothing_and_warns(small_dataset: Path, tmp_path: Path):
    (ours,) = train(act_args(small_dataset, "--policy.use_amp=true"), "single", tmp_path / "amp")
    assert "policy.use_amp is not used here" in ours.stderr
    (plain,) = train(act_args(small_dataset), "single", tmp_path / "plain")
    assert "use_amp is not used" not in plain.stderr
    assert weights_file(tmp_path / "amp").read_bytes() == weights_file(tmp_path / "plain").read_bytes()
