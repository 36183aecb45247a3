"""Every host policy under sharding: updates, inference, precision, recomputation, and the checkpoint on its way back.

One world of two ranks a case does all of it; the tests read what it reports.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lerobot_parallel.checkpoint.convert import convert
from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.config.topology import Degrees
from tests.policies.builds.common import Case, make
from tests.policies.builds.world_models import lingbot_va
from tests.policies.cases import CASES, HSDP
from tests.policies.matrix import record
from tests.policies.runs import reference, resumed_run, sharded_run
from tests.support.world import WorldError, run_world

FSDP2, HSDP_2X2 = Degrees(1, 2), Degrees(2, 2)
# Ranks of a mesh of four add gradients in another order than the reference does.
FOUR_RANKS = 5e-6
# Batches are not split for inference, so only kernels that see other memory layouts may round differently.
INFERENCE = 1e-5
BF16 = 0.01

RUNNING = ("running_mean", "running_var", "num_batches_tracked")

cases = pytest.mark.parametrize("name", list(CASES))


@pytest.fixture(scope="module")
def references(warmed: None) -> Callable[[str, int], dict[str, Any]]:
    @functools.cache
    def find(name: str, ranks: int) -> dict[str, Any]:
        return run_world(reference, 1, CASES[name], ranks)[0]

    return find


@pytest.fixture(scope="module")
def sharded(references: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    @functools.cache
    def find(name: str) -> tuple[list[dict[str, Any]], Path]:
        references(name, 2)  # in one process: it writes the model folders
        folder = tmp_path_factory.mktemp(name) / "000002"
        Checkpoint(folder).pretrained.mkdir(parents=True)
        return run_world(functools.partial(sharded_run, CASES[name], FSDP2, checkpoint=folder), 2), folder

    return find


def assert_updates(case: Case, result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """`tolerance` 0 is bit-equal. Statistics of batch norms are left out: one process updates them once a rank."""
    assert result["state"].keys() == expected["state"].keys()
    for name, tensor in expected["state"].items():
        if case.batch_norm and name.rpartition(".")[2] in RUNNING:
            continue
        if tolerance == 0.0:
            assert torch.equal(result["state"][name], tensor), name
        else:
            torch.testing.assert_close(
                result["state"][name], tensor, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )


@cases
def test_two_updates_equal_the_accumulating_reference(sharded: Callable, references: Callable, name: str) -> None:
    case, expected = CASES[name], references(name, 2)
    results, _ = sharded(name)
    for rank, result in enumerate(results):
        assert_updates(case, result, expected, case.tolerance)
        assert result["losses"] == pytest.approx(
            expected["losses"][rank::2], rel=1e-5 if case.precision == "no" else 2e-3
        )
    record(case, "FSDP2")
    if case.bf16_only:
        record(case, "bf16", note=case.bf16_only)


@cases
def test_units_and_shards_are_those_of_the_plan(sharded: Callable, name: str) -> None:
    case, (results, _) = CASES[name], sharded(name)
    for result in results:
        assert len(result["units"]) == case.units
        if case.precision == "no":
            # Every unit and the root is a group of its own. Under bf16, norms that compute in fp32 are too.
            assert result["fsdp"] == case.units + 1
        assert result["dtensors"] == case.dtensors
        assert result["ties"] == case.ties


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.infer])
def test_inference_is_the_unsharded_policys_on_all_ranks(sharded: Callable, references: Callable, name: str) -> None:
    expected = references(name, 2)
    for result in sharded(name)[0]:
        for when in ("started",) if CASES[name].batch_norm else ("started", "ended"):
            for method, action in expected[when].items():
                torch.testing.assert_close(result[when][method], action, rtol=0, atol=INFERENCE)
        for method, action in result["ended"].items():
            assert torch.equal(action, sharded(name)[0][0]["ended"][method])


@cases
def test_recomputed_units_change_no_bit(world: Callable, sharded: Callable, references: Callable, name: str) -> None:
    """Against the same reference, which recomputes nothing."""
    results = world(functools.partial(sharded_run, CASES[name], FSDP2, recompute=True), 2)
    plain, _ = sharded(name)
    for result, before in zip(results, plain, strict=True):
        for key, tensor in before["state"].items():
            assert torch.equal(result["state"][key], tensor), key
        assert result["losses"] == before["losses"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.bf16_only])
def test_bf16_loss_is_that_of_fp32(world: Callable, references: Callable, name: str) -> None:
    case, expected = CASES[name], references(name, 2)
    in_bf16 = replace(case, build=case.bf16_build or case.build)
    for rank, result in enumerate(world(functools.partial(sharded_run, in_bf16, FSDP2, precision="bf16"), 2)):
        assert result["losses"][0] == pytest.approx(expected["losses"][rank], rel=BF16)
        assert all(torch.isfinite(action).all() for action in result["ended"].values())
    record(case, "bf16")


def test_lingbot_va_has_no_fp32_loss_to_compare_with(world: Callable) -> None:
    """Its host casts what it trains on to bf16, also where its config says fp32."""
    in_fp32 = replace(CASES["lingbot_va"], build=functools.partial(lingbot_va, dtype="float32"), bf16_only="")
    with pytest.raises(WorldError, match="must have the same dtype, but got BFloat16 and Float"):
        world(reference, 1, in_fp32, 1)


@cases
def test_converted_shards_load_into_the_host(
    world: Callable, sharded: Callable, references: Callable, name: str
) -> None:
    case, expected = CASES[name], references(name, 2)["state"]
    results, folder = sharded(name)
    convert(folder, verify=True)
    ((state, ties),) = world(_reload, 1, case, Checkpoint(folder).pretrained)
    assert state.keys() == expected.keys()
    assert ties == case.ties
    for key, tensor in results[0]["state"].items():
        # A policy that starts in bf16 is loaded into bf16.
        assert torch.equal(state[key], tensor.to(state[key].dtype)), key


def _reload(case: Case, pretrained: Path) -> tuple[dict[str, torch.Tensor], int]:
    from safetensors.torch import load_file

    from lerobot_parallel.checkpoint.state import tied_names

    policy = make(case, seed=9)
    if case.reload:
        policy = type(policy).from_pretrained(pretrained, config=policy.config)
    else:
        policy.load_state_dict(load_file(pretrained / "model.safetensors"), strict=True)
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}, len(tied_names(policy))


@cases
def test_a_resumed_run_makes_the_same_third_update(world: Callable, sharded: Callable, name: str) -> None:
    case, (results, folder) = CASES[name], sharded(name)
    for ours, uninterrupted in zip(world(resumed_run, 2, case, FSDP2, folder), results, strict=True):
        assert ours.keys() == uninterrupted["third"].keys()
        for key, tensor in uninterrupted["third"].items():
            assert torch.equal(ours[key], tensor), key
    record(case, "resume")


@pytest.mark.parametrize("name", HSDP)
def test_two_replicas_of_two_shards_make_the_same_updates(world: Callable, references: Callable, name: str) -> None:
    case, expected = CASES[name], references(name, 4)
    for rank, result in enumerate(world(functools.partial(sharded_run, case, HSDP_2X2), 4)):
        assert_updates(case, result, expected, max(FOUR_RANKS, case.tolerance))
        assert result["losses"] == pytest.approx(expected["losses"][rank::4], rel=1e-4)
        assert result["fsdp"] == case.units + 1
        for method, action in expected["ended"].items():
            torch.testing.assert_close(result["ended"][method], action, rtol=0, atol=10 * INFERENCE)
    record(case, "HSDP")
