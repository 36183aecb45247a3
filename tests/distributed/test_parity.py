"""One process, DDP, FSDP2 and HSDP make the same updates, over a policy with everything in it that goes wrong."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lerobot_parallel.config.runtime import AcceleratorConfig, FSDPConfig, GradientAccumulationConfig
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.plans.plan import WrapPlan
from tests.support.toy import TOY_PLAN, make_toy, toy_batch

PLAN = WrapPlan(**TOY_PLAN | {"keep_gathered": ["joint.prefix.{last}"]})
UNITS = 2 + 2 * 2 + 2
ENGINES = {
    "single": Degrees(1, 1),
    "ddp2": Degrees(2, 1),
    "fsdp2": Degrees(1, 2),
    "fsdp4": Degrees(1, 4),
    "hsdp2x2": Degrees(2, 2),
}
SHARDED = {name: degrees for name, degrees in ENGINES.items() if degrees.sharded}
# fp32 sums in another order; SGD, since Adam hides factors and amplifies rounding.
ROUNDING = 2e-6
LR = 0.1

pytestmark = pytest.mark.usefixtures("warmed")


def reference(
    micro_batches: list[dict], accumulation: int, *, max_norm: float = 0.0, upcast: bool = False, **toy: Any
) -> dict[str, Any]:
    """Plain torch, one process: every window's micro-batches as one batch."""
    policy = make_toy(seed=0, **toy)
    for param in policy.parameters() if upcast else ():
        param.data = param.data.float() if param.requires_grad else param.data
    optimizer = torch.optim.SGD(policy.get_optim_params(), lr=LR, weight_decay=0.01)
    norms = []
    for start in range(0, len(micro_batches), accumulation):
        window = micro_batches[start : start + accumulation]
        batch = {key: torch.cat([b[key] for b in window]) for key in window[0]}
        policy(batch)[0].backward()
        limit = max_norm or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        policy.update()
    return {"state": policy.state_dict(), "norms": norms}


def engine_run(
    degrees: Degrees,
    micro_batches: list[dict],
    accumulation: int,
    *,
    max_norm: float = 0.0,
    precision: str = "no",
    fsdp: FSDPConfig | None = None,
    plan: WrapPlan = PLAN,
    watch: Callable[[Any], Any] = lambda policy: None,
    **toy: Any,
) -> dict[str, Any]:
    """One rank's run on its part of every micro-batch; ranks build policies of different seeds."""
    from lerobot_parallel.checkpoint.state import model_state
    from lerobot_parallel.engine.accelerator import build_accelerator
    from lerobot_parallel.engine.gradients import AccumulationWindow
    from lerobot_parallel.plans.plan import resolve_plan
    from tests.support.sharding import shard_on_cpu

    runtime = AcceleratorConfig(
        mixed_precision=precision,
        gradient_accumulation=GradientAccumulationConfig(accumulation),
        fsdp=fsdp or FSDPConfig(),
    )
    accelerator = build_accelerator(runtime, degrees, device_type="cpu")
    rank, world = accelerator.process_index, accelerator.num_processes
    module = policy = make_toy(seed=rank, **toy)
    report = None
    if degrees.sharded:
        resolved = resolve_plan(plan, policy, source="test")
        report = shard_on_cpu(policy, resolved, degrees, accelerator, runtime)
    optimizer = torch.optim.SGD(policy.get_optim_params(), lr=LR, weight_decay=0.01)
    if not degrees.sharded:
        policy, optimizer = accelerator.prepare(policy, optimizer)
    window = AccumulationWindow(accelerator, policy)
    losses, norms, watched = [], [], []
    for batch in micro_batches:
        mine = {key: value.chunk(world)[rank] for key, value in batch.items()}
        with window.micro_batch():
            with accelerator.autocast():
                loss, _ = policy(mine)
            accelerator.backward(loss)
            watched.append(watch(module))
            if window.is_update:
                norms.append(window.finish(max_norm).item())
                optimizer.step()
                optimizer.zero_grad()
                module.update()
        losses.append((loss.detach().clone(), loss.dtype))
    full = lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
    return {
        "state": {name: full(tensor) for name, tensor in model_state(module).items()},
        "offset": module.offset.clone(),
        "norms": norms,
        "losses": losses,
        "watched": watched,
        "report": report,
        "tied": module.embed.weight is module.head.weight,
        "sharded": sum(isinstance(p, DTensor) for p in module.parameters()),
        "units": sum(isinstance(m, FSDPModule) for m in module.modules()),
        "norm_dtypes": module.norm_dtypes(),
    }


def engine(*args: Any, **kwargs: Any) -> Callable[[], dict[str, Any]]:
    return functools.partial(engine_run, *args, **kwargs)


def _assert_states(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = ROUNDING) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", ENGINES)
def test_one_step_equals_plain_torch_on_the_whole_batch(world: Callable, name: str):
    degrees = ENGINES[name]
    batches = [toy_batch(8, seed=1)]
    expected = reference(batches, 1)
    for result in world(engine(degrees, batches, 1), degrees.world_size):
        _assert_states(result["state"], expected["state"])
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert torch.equal(result["offset"], make_toy(seed=0).offset)
        assert result["tied"]
        if degrees.sharded:
            # The root and everything in it; only the 0-dim gain stays whole.
            assert result["report"].units == UNITS
            assert result["sharded"] == sum(p.dim() > 0 for p in make_toy().parameters())


@pytest.mark.parametrize("name", [n for n in ENGINES if n != "single"])
def test_windows_of_four_micro_batches_equal_batches_of_four_times_the_size(world: Callable, name: str):
    degrees = ENGINES[name]
    batches = [toy_batch(8, seed=i) for i in range(8)]
    expected = reference(batches, 4, max_norm=0.5)
    for result in world(engine(degrees, batches, 4, max_norm=0.5), degrees.world_size):
        _assert_states(result["state"], expected["state"])
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)


@pytest.mark.parametrize("name", SHARDED)
def test_clipping_over_sharded_and_plain_gradients_is_that_of_one_process(world: Callable, name: str):
    degrees = ENGINES[name]
    batches = [toy_batch(8, seed=i) for i in range(2)]
    expected = reference(batches, 1, max_norm=0.05)
    fsdp = FSDPConfig(ignored_modules=r"blocks\.0|env_proj")
    for result in world(engine(degrees, batches, 1, max_norm=0.05, fsdp=fsdp), degrees.world_size):
        _assert_states(result["state"], expected["state"])
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["report"].replicated > 1


def _bytes_of(policy: torch.nn.Module) -> int:
    """Bytes of parameters and of everything FSDP2 keeps of their gradients, unique storages only."""
    tensors = []
    for param in policy.parameters():
        tensors += [param, *([param.grad] if param.grad is not None else [])]
    for module in policy.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        for fsdp_param in group.fsdp_params if group else []:
            tensors += [t for t in (fsdp_param.unsharded_accumulated_grad,) if t is not None]
        if group is not None and group._partial_reduce_output is not None:
            tensors.append(group._partial_reduce_output)
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", SHARDED)
def test_no_full_gradient_is_kept_between_micro_batches(world: Callable, name: str):
    degrees = ENGINES[name]
    batches = [toy_batch(8, seed=i) for i in range(4)]
    total = sum(p.numel() for p in make_toy(dim=64).parameters()) * 4
    for result in world(engine(degrees, batches, 4, watch=_bytes_of, dim=64), degrees.world_size):
        unit = result["report"].largest_unit * 4
        # Parameters and gradients, sharded, and padding of at most one row a parameter.
        assert len(result["watched"]) == 4
        assert max(result["watched"]) <= 2 * total / degrees.dp_shard + unit


@pytest.mark.parametrize("name", ["fsdp2", "hsdp2x2"])
def test_size_based_units_and_cpu_offload_change_no_number(world: Callable, name: str):
    degrees = ENGINES[name]
    batches = [toy_batch(8, seed=i) for i in range(2)]
    expected = reference(batches, 1)
    for fsdp in (FSDPConfig(cpu_offload=True), FSDPConfig(reshard_after_forward=False)):
        for result in world(engine(degrees, batches, 1, fsdp=fsdp), degrees.world_size):
            _assert_states(result["state"], expected["state"])


def test_bf16_computes_in_bf16_and_keeps_fp32_masters_norms_and_loss(world: Callable):
    batches = [toy_batch(8, seed=i) for i in range(2)]
    expected = reference(batches, 1)
    for body in ("float32", "bfloat16"):
        for result in world(engine(ENGINES["fsdp2"], batches, 1, precision="bf16", body_dtype=body), 2):
            assert {t.dtype for t in result["state"].values() if t.is_floating_point()} - {torch.float32} <= {
                torch.bfloat16
            }
            assert result["state"]["out.weight"].dtype == torch.float32
            assert all(dtype == torch.float32 for _, dtype in result["losses"])
            # A policy that keeps norms in fp32 beside a bf16 body means it; one that is fp32 all over does not.
            assert result["norm_dtypes"] == {torch.float32 if body == "bfloat16" else torch.bfloat16}
            _assert_states(result["state"], _floats_like(expected["state"], result["state"]), atol=2e-2)


def _floats_like(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(other[name].dtype) for name, tensor in state.items()}


def test_without_mixed_precision_a_bf16_policy_trains_as_its_fp32_copy(world: Callable):
    batches = [toy_batch(8, seed=i) for i in range(2)]
    expected = reference(batches, 1, upcast=True, body_dtype="bfloat16")
    for result in world(engine(ENGINES["fsdp2"], batches, 1, body_dtype="bfloat16"), 2):
        assert result["state"]["out.weight"].dtype == torch.float32
        assert result["norm_dtypes"] == {torch.float32}
        # The frozen layer stays in bf16, whose rounding depends on the shape of the batch.
        _assert_states(result["state"], expected["state"], atol=1e-4)


def _infer(degrees: Degrees, precision: str) -> list[Any]:
    from lerobot_parallel.engine.accelerator import build_accelerator
    from lerobot_parallel.plans.plan import resolve_plan
    from tests.support.sharding import shard_on_cpu

    runtime = AcceleratorConfig(mixed_precision=precision)
    accelerator = build_accelerator(runtime, degrees, device_type="cpu")
    policy = make_toy(seed=dist.get_rank())
    plan = resolve_plan(PLAN, policy, source="test")
    shard_on_cpu(policy, plan, degrees, accelerator, runtime)
    policy.eval()
    actions = [policy.select_action(toy_batch(2)) for _ in range(3)]
    chunk = policy.predict_action_chunk(toy_batch(2))
    resharded = all(isinstance(p, DTensor) or p.dim() == 0 for p in policy.parameters())
    return [actions, chunk, resharded]


@pytest.mark.parametrize("name", SHARDED)
def test_inference_on_the_sharded_policy_equals_the_unsharded_one(world: Callable, name: str):
    degrees = ENGINES[name]
    policy = make_toy(seed=0).eval()
    expected = [policy.select_action(toy_batch(2)) for _ in range(3)]
    for actions, chunk, resharded in world(_infer, degrees.world_size, degrees, "no"):
        torch.testing.assert_close(actions, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(chunk, policy.predict_action_chunk(toy_batch(2)), rtol=0, atol=1e-6)
        assert resharded, "an inference call left gathered parameters behind"


def test_inference_under_bf16_needs_no_autocast_of_the_caller(world: Callable):
    expected = make_toy(seed=0).eval().predict_action_chunk(toy_batch(2))
    for _, chunk, _ in world(_infer, 2, ENGINES["fsdp2"], "bf16"):
        torch.testing.assert_close(chunk, expected, rtol=0, atol=5e-2)
