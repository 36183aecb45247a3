"""The one place that configures accelerate, and what could do so behind it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.commands import launch
from accelerate.utils import launch as launching

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import AcceleratorConfig, DDPConfig, GradientAccumulationConfig
from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.engine import accelerator as engine_accelerator
from lerobot_parallel.engine.accelerator import build_accelerator, check_environment, release_process_group

GUARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "FSDP_VERSION": "2",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_SOMETHING_NEW": "1",
}
INERT = {
    "ACCELERATE_USE_FSDP": "false",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "False",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_USE_DEEPSPEED": "0",
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_DYNAMO_MODE": "default",
    "NOT_FSDP_VERSION": "2",
}

pytestmark = pytest.mark.usefixtures("warmed")


@pytest.mark.parametrize("name", GUARDED)
def test_a_variable_that_would_configure_the_run_is_an_error_that_names_it(name: str):
    with pytest.raises(ConfigError) as refused:
        check_environment({**INERT, name: GUARDED[name]})
    text = str(refused.value)
    assert text.startswith(f"{name}={GUARDED[name]}: ")
    assert "LEROBOT_ALLOW_ACCELERATE_ENV=1" in text


def test_variables_that_configure_nothing_are_left_alone():
    check_environment(INERT)
    check_environment({})


def test_the_guard_can_be_switched_off_by_one_value_only():
    check_environment({**GUARDED, "LEROBOT_ALLOW_ACCELERATE_ENV": "1"})
    for value in ("0", "", "true"):
        with pytest.raises(ConfigError):
            check_environment({**GUARDED, "LEROBOT_ALLOW_ACCELERATE_ENV": value})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, str]]]:
    """The environments that `accelerate launch FLAGS script` gives to its processes, for one and for several."""
    monkeypatch.setattr(launch, "default_config_file", "/no/such/config.yaml")

    def environments(*flags: str) -> list[dict[str, str]]:
        made = []
        for prepare in (
            lambda args: launching.prepare_simple_launcher_cmd_env(args)[1],
            launching.prepare_multi_gpu_env,
        ):
            args = launch.launch_command_parser().parse_args([*flags, "--num_processes=2", "script.py"])
            args, *_ = launch._validate_launch_command(args)
            args.main_process_port = 0
            made.append(prepare(args))
        return made

    return environments


def test_accelerate_launch_without_a_config_file_configures_nothing(launched: Callable):
    for environ in launched():
        assert "ACCELERATE_MIXED_PRECISION" in environ
        check_environment(environ)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--mixed_precision=bf16"], {"ACCELERATE_MIXED_PRECISION"}),
        (["--dynamo_backend=inductor"], {"ACCELERATE_DYNAMO_BACKEND"}),
        (["--use_fsdp", "--fsdp_version=2"], {"ACCELERATE_USE_FSDP"}),
    ],
)
def test_what_accelerate_launch_is_told_is_refused(launched: Callable, flags: list[str], names: set[str]):
    refused = set()
    for environ in launched(*flags):
        try:
            check_environment(environ)
        except ConfigError as refusal:
            refused.add(refusal.flag)
    assert refused == names


def _describe(runtime: AcceleratorConfig, degrees: Degrees) -> dict[str, Any]:
    accelerator = build_accelerator(runtime, degrees, device_type="cpu")
    model, optimizer = torch.nn.Linear(2, 2), None
    prepared = accelerator.prepare(model) if not degrees.sharded else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    return {
        "kind": accelerator.distributed_type.value,
        "processes": (accelerator.num_processes, accelerator.device.type),
        "fsdp": getattr(accelerator.state, "fsdp_plugin", None) is not None,
        "precision": accelerator.mixed_precision,
        "accumulation": accelerator.gradient_accumulation_steps,
        "across_epochs": not accelerator.gradient_state.sync_with_dataloader,
        "scheduler_left_alone": not accelerator.gradient_state.adjust_scheduler
        and not accelerator.step_scheduler_with_optimizer,
        "ddp": {
            name: getattr(prepared, name, None)
            for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        },
        "groups": torch.distributed.is_initialized() and torch.distributed.get_world_size(),
        "optimizer": type(accelerator.prepare(optimizer)).__name__,
    }


@pytest.mark.parametrize("degrees", [Degrees(1, 1), Degrees(2, 1), Degrees(1, 2)], ids=lambda d: d.engine)
def test_accelerate_is_built_from_our_dataclasses(world: Callable, degrees: Degrees):
    runtime = AcceleratorConfig(
        mixed_precision="bf16",
        gradient_accumulation=GradientAccumulationConfig(3),
        ddp=DDPConfig(find_unused_parameters=False, gradient_as_bucket_view=True, static_graph=True),
    )
    for seen in world(_describe, degrees.world_size, runtime, degrees, launcher=degrees.world_size > 1):
        assert seen["kind"] == ("NO" if degrees.world_size == 1 else "MULTI_CPU")
        assert seen["processes"] == (degrees.world_size, "cpu")
        assert seen["groups"] == (degrees.world_size if degrees.world_size > 1 else False)
        assert not seen["fsdp"], "accelerate must not know that parameters are sharded"
        assert (seen["precision"], seen["accumulation"]) == ("bf16", 3)
        assert seen["across_epochs"]
        assert seen["scheduler_left_alone"]
        expected = {"find_unused_parameters": False, "gradient_as_bucket_view": True, "static_graph": True}
        assert seen["ddp"] == (expected if degrees.engine == "ddp" else dict.fromkeys(expected))


def _owners_of_the_group() -> list[Any]:
    """Whether the kept group outlives torch's registry and a DDP module, and whether it can be let go."""
    accelerator = build_accelerator(AcceleratorConfig(), Degrees(2, 1), device_type="cpu")
    module = accelerator.prepare(torch.nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    del module
    kept = [group.size() for group in engine_accelerator._KEPT]
    release_process_group()
    return [kept, engine_accelerator._KEPT]


def test_the_process_group_is_the_last_to_go(world: Callable):
    """DDP's reducer frees a group with the GIL in its hand: a rank that never ends, once in some hundred runs."""
    assert world(_owners_of_the_group, 2) == [[[2], []]] * 2
