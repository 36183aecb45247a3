"""What a run says of itself before its first step."""

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.training.runs import plan_for_toy, toy_args, train, watch_steps, weights_file

pytestmark = pytest.mark.usefixtures("warmed")

ROWS = ("engine", "ranks", "devices", "effective batch", "parameters", "precision", "checkpoints")
EXPECTED = {
    "single": (
        "one process",
        "1 = dp_replicate 1 x dp_shard 1",
        "1 x cpu, backend none",
        "6 = 3 x 1 ranks x 2 micro-batches",
    ),
    "ddp2": ("DDP", "2 = dp_replicate 2 x dp_shard 1", "2 x cpu, backend gloo", "12 = 3 x 2 ranks x 2 micro-batches"),
    "fsdp2": (
        "FSDP2",
        "2 = dp_replicate 1 x dp_shard 2",
        "2 x cpu, backend gloo",
        "12 = 3 x 2 ranks x 2 micro-batches",
    ),
    "hsdp2x2": (
        "HSDP",
        "4 = dp_replicate 2 x dp_shard 2",
        "4 x cpu, backend gloo",
        "24 = 3 x 4 ranks x 2 micro-batches",
    ),
}


def _local_parameters() -> Any:
    plan_for_toy()
    return watch_steps(
        lambda run, batch: sum(
            p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in run.module.parameters()
        )
    )


@pytest.mark.parametrize("engine", EXPECTED)
def test_topology_table_has_every_row(small_dataset: Path, tmp_path: Path, engine: str):
    flags = ["--steps=2", "--accelerator.gradient_accumulation.steps=2"]
    if "sdp2" in engine:
        flags += ["--checkpoint_format=safetensors_dcp", "--accelerator.mixed_precision=bf16"]
    ranks = train(toy_args(small_dataset, *flags), engine, tmp_path, _local_parameters)
    rows = _table(ranks[0].stderr)
    assert tuple(rows) == ROWS
    assert tuple(rows[name] for name in ROWS[:4]) == EXPECTED[engine]
    here, in_root = _numbers(rows["parameters"])
    assert here == ranks[0].value[0]
    total = sum(
        t.numel() for name, t in load_file(weights_file(tmp_path)).items() if name not in ("scale", "update_count")
    )
    if "sdp2" in engine:
        assert total / 2 <= here < 0.6 * total
        assert 0 < in_root < total / 2
        assert rows["precision"] == "parameters float32, autocast bf16, gradients reduced in float32"
        assert rows["checkpoints"] == "safetensors_dcp"
        assert f"of {total:,} parameters" in ranks[0].stderr
    else:
        assert here == in_root == total
        assert rows["precision"] == "parameters float32, no autocast"
        assert rows["checkpoints"] == "safetensors"
    assert all("effective batch" not in rank.stderr for rank in ranks[1:])


def _table(text: str) -> dict[str, str]:
    found = [re.search(rf"^  {name} +(.*)$", text, re.MULTILINE) for name in ROWS]
    ordered = sorted((match for match in found if match), key=lambda match: match.start())
    return {match[0].split("  ")[1].strip(): match[1] for match in ordered}


def _numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", text)]


def test_other_ranks_say_nothing(small_dataset: Path, tmp_path: Path):
    main, other = train(toy_args(small_dataset), "ddp2", tmp_path)
    assert "Output dir: out" in main.stderr and "frames: 30, episodes: 3" in main.stderr
    assert "INFO" not in other.stderr and "WARNING" not in other.stderr
