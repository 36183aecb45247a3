"""Runs of other software are reached: weights, losses, samples and restored state equal what it wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from tests.support.datasets import PEER_ARGS, copy_peer
from tests.support.tracing import inspected_run, traced_training

# Adam turns the rounding noise of gradients that are zero in theory (key biases) into steps: two topologies of
# the software that wrote the data differ by 2e-5 themselves.
WEIGHTS = 1e-4
LOSSES = 1e-5

DDP = ["--parallelism.dp_replicate=2"]
FSDP2 = ["--parallelism.dp_shard=2"]


@pytest.fixture
def peer(tmp_path: Path, warmed: None) -> Path:
    return copy_peer(tmp_path)


def _expected_trace(peer: Path, writer: str, rank: int) -> list[dict[str, Any]]:
    lines = (peer / writer / f"trace.rank{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _assert_traces(traces: list[list[dict[str, Any]]], peer: Path, writer: str, *, first: int = 0) -> None:
    for rank, trace in enumerate(traces):
        expected = _expected_trace(peer, writer, rank)[first:]
        assert [step["index"] for step in trace] == [step["index"] for step in expected]
        assert [s["loss"] for s in trace] == pytest.approx([s["loss"] for s in expected], abs=LOSSES)
        assert [s["grad_norm"] for s in trace] == pytest.approx([s["grad_norm"] for s in expected], rel=1e-4)


def _assert_weights(file: Path, expected: Path) -> None:
    ours, theirs = load_file(file), load_file(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=WEIGHTS, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("flags", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_two_ranks_reach_the_sharded_run_of_the_other_software(peer: Path, flags: list[str]):
    traces = traced_training([*PEER_ARGS, *flags, "--output_dir=out"], 2, peer)
    _assert_traces(traces, peer, "fsdp2")
    _assert_weights(peer / "out/checkpoints/last/pretrained_model/model.safetensors", peer / "fsdp2/step8.safetensors")


def test_one_process_reaches_the_hosts_own_run(peer: Path):
    traces = traced_training([*PEER_ARGS, "--accelerator.mixed_precision=no", "--output_dir=out"], 1, peer)
    _assert_traces(traces, peer, "host1")
    _assert_weights(peer / "out/checkpoints/last/pretrained_model/model.safetensors", peer / "host1/step8.safetensors")


def test_resume_on_two_ranks_reaches_the_other_softwares_step_8(peer: Path):
    traces = traced_training([*_resume("fsdp2"), "--checkpoint_format=safetensors_dcp"], 2, peer)
    _assert_traces(traces, peer, "fsdp2", first=4)
    _assert_weights(
        peer / "out/checkpoints/000008/pretrained_model/model.safetensors", peer / "fsdp2/step8.safetensors"
    )


def test_resume_of_the_hosts_checkpoint_in_one_process_reaches_step_8(peer: Path):
    traces = traced_training([*_resume("host1"), "--accelerator.mixed_precision=no"], 1, peer)
    _assert_traces(traces, peer, "host1", first=4)
    _assert_weights(
        peer / "out/checkpoints/000008/pretrained_model/model.safetensors", peer / "host1/step8.safetensors"
    )


TOPOLOGIES = {
    "one process": (1, ["--parallelism.dp_shard=1", "--checkpoint_format=safetensors"]),
    "ddp2": (2, ["--parallelism.dp_shard=1", "--checkpoint_format=safetensors"]),
    "fsdp2": (2, ["--parallelism.dp_shard=2"]),
    "fsdp4": (4, ["--parallelism.dp_shard=4"]),
    "hsdp2x2": (4, ["--parallelism.dp_replicate=2", "--parallelism.dp_shard=2"]),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("writer", ["fsdp2", "host1"])
def test_loaded_state_equals_the_saved_one_on_every_topology(peer: Path, writer: str, topology: str):
    nprocs, flags = TOPOLOGIES[topology]
    weights, optimizer = _saved_state(peer / writer / "000004", writer)
    for rank_weights, rank_optimizer, lr in inspected_run([*_resume(writer), *flags], nprocs, peer, _full_state):
        assert lr == 1e-3
        _assert_equal(rank_weights, weights)
        _assert_equal(rank_optimizer, optimizer)


def _resume(writer: str) -> list[str]:
    return ["--resume=true", f"--config_path={writer}/000004/pretrained_model/train_config.json", "--output_dir=out"]


def _assert_equal(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == saved.keys()
    different = [name for name, tensor in saved.items() if not torch.equal(ours[name], tensor)]
    assert not different


def _full_state(run: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Weights and Adam state in full, read by torch's own state dict and the optimizer's own fields."""
    full = lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
    weights = {name: full(tensor) for name, tensor in get_model_state_dict(run.module).items()}
    optimizer = run.saved.optimizer
    fields = {
        f"{name}.{field}": full(value)
        for name, param in run.module.named_parameters()
        for field, value in optimizer.state.get(param, {}).items()
    }
    return weights, fields, optimizer.param_groups[0]["lr"]


def _saved_state(checkpoint: Path, writer: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    if writer == "host1":
        return _host_state(checkpoint)
    weights = _read_shards(checkpoint / "pretrained_model/pytorch_model_fsdp_0", "model.")
    optimizer = _read_shards(checkpoint / "training_state/optimizer_0", "optimizer.state.")
    return weights, optimizer


def _read_shards(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """With torch's own reader, one process, no planner of ours."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    keys = [key for key in entries if key.startswith(prefix) and hasattr(entries[key], "size")]
    state = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in keys}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in state.items()}


def _host_state(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    weights = load_file(checkpoint / "pretrained_model/model.safetensors")
    state = load_file(checkpoint / "training_state/optimizer_state.safetensors")
    # The host numbers state in the order of the groups: ACT's are the backbone's (none here) and all others.
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    policy = ACTPolicy(ACTConfig.from_pretrained(checkpoint / "pretrained_model"))
    names = {id(param): name for name, param in policy.named_parameters()}
    order = [names[id(param)] for group in policy.get_optim_params() for param in group["params"]]
    named = {}
    for key, tensor in state.items():
        _, index, field = key.split("/")
        named[f"{order[int(index)]}.{field}"] = tensor
    return weights, named
