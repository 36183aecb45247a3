"""One small test for each private or fragile thing that this project relies on in torch, accelerate and the host.

When one of these fails after an upgrade, the code named in its docstring has lost its ground.
"""

import copy
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draccus
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.support.toy import ToyNastyPolicy, make_toy

pytestmark = pytest.mark.usefixtures("warmed")


# The way in: hooks.py


def test_torch_calls_the_entry_points_of_its_group_at_the_end_of_its_import(monkeypatch: pytest.MonkeyPatch):
    """hooks.install"""
    called: list[str] = []
    entry = SimpleNamespace(name="ours", load=lambda: lambda: called.append("install"))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "torch.backends" else [])
    torch._import_device_backends()
    assert called == ["install"]
    end = Path(torch.__file__).read_text().rstrip().splitlines()
    assert end[-1].strip() == "_import_device_backends()"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in inspect.getsource(torch._is_device_backend_autoload_enabled)


def test_the_hosts_main_discovers_plugins_and_then_calls_train_by_name():
    """hooks.activate replaces the name `train` between the two calls."""
    from lerobot.scripts import lerobot_train
    from lerobot.utils import import_utils

    called = lerobot_train.main.__code__.co_names
    assert called.index("register_third_party_plugins") < called.index("train")
    assert inspect.unwrap(lerobot_train.register_third_party_plugins).__module__ == import_utils.__name__
    assert list(inspect.signature(lerobot_train.train).parameters) == ["cfg", "accelerator"]


def test_the_host_reads_the_config_path_from_the_command_line():
    """hooks.engine_requested, training.command"""
    from lerobot.configs.parser import parse_arg

    assert parse_arg("config_path", ["--config_path=a"]) == parse_arg("config_path", ["--config_path", "a"]) == "a"
    assert parse_arg("config_path", ["--steps=3"]) is None


# Configs


@dataclass
class Choice:
    precision: str = "bf16"


def test_draccus_reads_a_bare_no_as_a_boolean():
    """config.runtime.AcceleratorConfig.__post_init__"""
    assert str(draccus.parse(Choice, args=["--precision=no"]).precision) == "False"
    assert draccus.parse(Choice, args=["--precision=none"]).precision == "none"


def test_the_host_says_error_before_a_value_that_it_cannot_read(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """training.command._parse_once makes a refusal of it."""
    from lerobot.configs import parser

    def identity(cfg: Any) -> Any:
        return cfg

    identity.__annotations__["cfg"] = dataclass(type("Numbers", (), {"__annotations__": {"steps": int}, "steps": 1}))
    monkeypatch.setattr(sys, "argv", ["x", "--steps=many"])
    with pytest.raises(SystemExit) as stopped:
        parser.wrap()(identity)()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.startswith("error: `steps`: ")


def test_the_host_reads_a_config_through_from_pretrained_of_the_class():
    """config.train.ParallelTrainPipelineConfig.from_pretrained sees later hosts' files first."""
    from lerobot.configs import parser

    assert "argtype.from_pretrained(config_path_cli, cli_args=cli_args)" in inspect.getsource(parser.wrap)


# Building without weights: engine.weights, training.policy


def test_modules_register_parameters_through_one_method_and_keep_them_in_one_dict(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    register = nn.Module.register_parameter
    monkeypatch.setattr(
        nn.Module, "register_parameter", lambda self, name, param: (seen.append(name), register(self, name, param))[1]
    )
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.zeros(1))
    assert seen == ["weight", "bias", "extra"]
    assert list(model._parameters) == seen
    model._parameters["extra"] = nn.Parameter(torch.ones(1))
    assert model.extra.item() == 1


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu"), lambda m: m.to_empty(device="cpu")],
)
def test_every_move_and_conversion_goes_through_apply(monkeypatch: pytest.MonkeyPatch, convert: Callable):
    calls: list[nn.Module] = []
    apply = nn.Module._apply
    monkeypatch.setattr(
        nn.Module, "_apply", lambda self, *args, **kwargs: (calls.append(self), apply(self, *args, **kwargs))[1]
    )
    model = nn.Sequential(nn.Linear(2, 2))
    convert(model)
    assert calls[:2] == [model, model[0]]


def test_torch_leaves_a_tensor_as_it_is_when_one_on_meta_is_added_to_it():
    """engine.weights._MetaWins makes an error of it."""
    tensor = torch.zeros(2)
    tensor.add_(torch.ones(2, device="meta"))
    assert torch.equal(tensor, torch.zeros(2))


def test_the_host_loads_weights_through_one_class_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """training.policy._no_weight_files"""
    from lerobot.policies import PreTrainedPolicy

    assert isinstance(PreTrainedPolicy.__dict__["_load_as_safetensor"], classmethod)
    make_toy(seed=1).save_pretrained(tmp_path)
    seen: list[tuple] = []
    monkeypatch.setattr(
        PreTrainedPolicy, "_load_as_safetensor", classmethod(lambda cls, model, *args: (seen.append(args), model)[1])
    )
    assert isinstance(ToyNastyPolicy.from_pretrained(tmp_path), ToyNastyPolicy)
    assert len(seen) == 1


def test_the_host_saves_a_policy_through_a_method_that_an_instance_can_replace(tmp_path: Path):
    """checkpoint.sharded_policy.make_savable"""
    policy = make_toy()
    calls: list[tuple] = []
    policy._save_pretrained = lambda directory, state_dict=None: calls.append((directory, state_dict))
    policy.save_pretrained(tmp_path)
    policy.save_pretrained(tmp_path, state_dict={})
    assert calls == [(tmp_path, None), (tmp_path, {})]


# Sharding


class Pair(nn.Module):
    """Two layers whose leaves are called from outside, and an odd first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def pair() -> Pair:
    torch.manual_seed(0)
    return Pair()


def _shard_and_step() -> dict[str, Any]:
    plain = pair()
    model = copy.deepcopy(plain)
    fully_shard([model.one, model.two])
    fully_shard(model)
    register_fsdp_forward_method(model, "infer")
    batch = torch.arange(16.0).reshape(4, 4).chunk(2)[dist.get_rank()]
    inferred = model.infer(batch).detach()
    model(batch).square().mean().backward()
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    held = list({id(group): group for group in groups if group is not None}.values())
    return {
        "grads": {name: p.grad.full_tensor() for name, p in model.named_parameters()},
        "inferred": inferred,
        "own_method": "infer" in vars(model),
        "groups": [len(group.fsdp_params) for group in held],
        "fields": [
            all(hasattr(p, "unsharded_accumulated_grad") for p in group.fsdp_params)
            and hasattr(group, "_partial_reduce_output")
            for group in held
        ],
    }


def test_a_list_of_modules_is_one_communication_group_and_gradients_are_averaged(world: Callable):
    """engine.sharding; torch 2.7 summed over gloo. The private fields are what the parity tests measure memory by."""
    plain, whole = pair(), torch.arange(16.0).reshape(4, 4)
    expected = plain(whole)
    expected.square().mean().backward()
    for rank, seen in enumerate(world(_shard_and_step, 2, init=True)):
        assert seen["groups"] == [4]
        assert seen["fields"] == [True]
        assert seen["own_method"], "a registered method is an attribute of the instance"
        torch.testing.assert_close(seen["inferred"], expected.detach().chunk(2)[rank])
        for name, param in plain.named_parameters():
            torch.testing.assert_close(seen["grads"][name], param.grad)


def _all_reduce_flags() -> list[list[bool]]:
    model = pair()
    fully_shard(model.one)
    fully_shard(model)
    flags = []
    for value in (False, True):
        model.set_requires_all_reduce(value)
        groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
        flags.append([group.all_reduce_grads for group in groups if group is not None])
    return flags


def test_the_all_reduce_of_all_units_is_switched_at_the_root(world: Callable):
    """engine.gradients.AccumulationWindow"""
    assert world(_all_reduce_flags, 1, init=True) == [[[False, False], [True, True]]]


def _rows() -> list[tuple[Any, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = init_device_mesh("cpu", (3,))
    seen = []
    for rows in (1, 2, 3, 4, 7):
        tensor = distribute_tensor(torch.arange(rows * 2.0).reshape(rows, 2), mesh, [Shard(0)])
        seen.append((compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements), tensor.to_local()))
    return seen


def test_the_private_offsets_of_a_shard_are_where_its_values_come_from(world: Callable):
    """checkpoint.state.local_rows"""
    for seen in world(_rows, 3, init=True):
        for rows, ((shape, offset), local) in zip((1, 2, 3, 4, 7), seen, strict=True):
            full = torch.arange(rows * 2.0).reshape(rows, 2)
            assert torch.equal(full[min(offset[0], rows) :][: shape[0]], local)


def test_batch_norm_has_one_private_base():
    """engine.sharding._NORMS"""
    base = nn.modules.batchnorm._BatchNorm
    assert all(issubclass(kind, base) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm))


def test_private_list_functions_take_mixed_dtypes_and_empty_shards():
    """engine.gradients.clip_grad_norm"""
    norms = torch._foreach_norm([torch.zeros(0, 3), torch.full((4,), 2.0).bfloat16()], 2, dtype=torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(0.0, torch.float32), (4.0, torch.float32)]
    tensors = [torch.ones(2), torch.ones(0)]
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert torch.equal(tensors[0], torch.full((2,), 0.5))


def _optimizer_steps() -> list[float]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = pair()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return [float(fields["step"]) for fields in state.values()]


def test_torchs_optimizer_state_of_a_fresh_optimizer_has_stepped(world: Callable):
    """checkpoint.state.optimizer_state reads the optimizer itself for this reason."""
    (steps,) = world(_optimizer_steps, 1, init=True)
    assert set(steps) == {1.0}


def test_an_optimizers_hooks_run_around_its_step():
    """engine.optimizer.step_on_local_parts"""
    param = nn.Parameter(torch.ones(1))
    optimizer, order = torch.optim.SGD([param], lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: order.append(param.item()))
    optimizer.register_step_post_hook(lambda *_: order.append(param.item()))
    param.grad = torch.ones(1)
    optimizer.step()
    assert order == [1.0, 0.0]


# Checkpoints


def test_errors_of_torchs_checkpoints_are_no_exceptions():
    """engine.ranks.raised_together, checkpoint.save"""
    from torch.distributed.checkpoint.api import CheckpointException

    assert not issubclass(CheckpointException, Exception)


def test_nested_entries_are_set_by_path():
    """checkpoint.safe_read"""
    from torch.distributed.checkpoint._nested_dict import set_element

    tree: dict[str, Any] = {"a": {"b": [0]}}
    set_element(tree, ("a", "b", 0), 5)
    set_element(tree, ("a", "c"), 7)
    assert tree == {"a": {"b": [5], "c": 7}}


def test_the_hosts_random_state_is_a_dict_of_tensors():
    """checkpoint.rng"""
    from lerobot.utils.random_utils import deserialize_rng_state, serialize_rng_state

    state = serialize_rng_state()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    first = torch.rand(3)
    deserialize_rng_state(state)
    assert torch.equal(torch.rand(3), first)


# accelerate


def _accelerate() -> dict[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import GradientAccumulationPlugin

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    )
    model = nn.Linear(1, 1)
    seen = {"first": accelerator.sync_gradients, "updates": []}
    for _ in range(6):
        with accelerator.accumulate(model):
            seen["updates"].append(accelerator.sync_gradients)
    accelerator.state._reset_state(reset_partial_state=True)
    sharding = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    seen["kind"] = sharding.distributed_type.value
    return seen


def test_accelerate_counts_windows_by_itself_across_epochs(world: Callable):
    """engine.gradients.AccumulationWindow"""
    (seen,) = world(_accelerate, 1, launcher=False)
    assert seen["updates"] == [False, False, True, False, False, True]


def test_accelerate_does_not_shard_on_a_cpu(world: Callable):
    """engine.accelerator keeps accelerate's own sharding out."""
    (seen,) = world(_accelerate, 1, launcher=False)
    assert seen["kind"] == "NO"


def _scaled_loss() -> list[float]:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    )
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    return [model.weight.grad.full_tensor().item(), float(isinstance(model.weight, DTensor))]


def test_accelerate_divides_the_loss_by_the_window_and_leaves_a_sharded_module_alone(world: Callable):
    """training.loop.train_step"""
    assert world(_scaled_loss, 1) == [[0.25, 1.0]]


def test_a_loader_asks_a_sampler_once_for_each_epoch():
    """training.data.DataOrder moves on to the next epoch whenever it is iterated."""
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader, Sampler

    class Counting(Sampler[int]):
        asked = 0

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            Counting.asked += 1
            return iter(range(4))

    loader = prepare_data_loader(
        DataLoader(list(range(4)), batch_size=2, sampler=Counting()),
        num_processes=2,
        process_index=1,
        put_on_device=False,
    )
    assert [batch.tolist() for _ in range(3) for batch in loader] == [[2, 3]] * 3
    assert Counting.asked == 3
