"""`--accelerator.*`: what cannot be trained is refused before anything is touched."""

import pytest

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    check_runtime,
)


def check(runtime: AcceleratorConfig, *, sharded: bool = True, device: str = "cpu") -> str:
    """The refusal's text, empty for none."""
    try:
        check_runtime(runtime, sharded=sharded, device=device)
    except ConfigError as refusal:
        assert "\n" not in str(refusal)
        return str(refusal)
    return ""


def test_the_defaults_are_fine():
    assert check(AcceleratorConfig()) == ""


# YAML 1.1 reads each of these as false; a JSON or Python caller may also hand over the boolean.
@pytest.mark.parametrize("value", ["False", False])
def test_a_bare_no_that_became_a_boolean_means_no(value: object):
    assert AcceleratorConfig(mixed_precision=value).mixed_precision == "no"


@pytest.mark.parametrize(
    ("precision", "sharded", "device", "problem"),
    [
        ("no", True, "cpu", ""),
        ("bf16", True, "cpu", ""),
        ("bf16", False, "cuda", ""),
        ("fp16", False, "cuda", ""),
        ("fp16", True, "cuda", "loss scaling"),
        ("fp16", True, "cpu", "loss scaling"),
        ("fp16", False, "cpu", "needs a GPU"),
        ("fp8", False, "cuda", "unknown precision"),
        ("BF16", False, "cuda", "unknown precision"),
        ("True", False, "cuda", "unknown precision"),
    ],
)
def test_precisions(precision: str, sharded: bool, device: str, problem: str):
    text = check(AcceleratorConfig(mixed_precision=precision), sharded=sharded, device=device)
    if problem:
        assert text.startswith(f"--accelerator.mixed_precision={precision}: ")
        assert problem in text
    else:
        assert text == ""


@pytest.mark.parametrize("steps", [0, -1])
def test_a_window_has_at_least_one_micro_batch(steps: int):
    text = check(AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(steps)))
    assert text.startswith(f"--accelerator.gradient_accumulation.steps={steps}: ")


@pytest.mark.parametrize(
    ("fsdp", "flag", "mentions"),
    [
        (FSDPConfig(wrap_modules=["A"], min_num_params=3), "wrap_modules=['A']", "min_num_params=3"),
        (FSDPConfig(wrap_modules=[]), "wrap_modules=[]", "names no class"),
        (FSDPConfig(min_num_params=0), "min_num_params=0", "use 1 or more"),
        (FSDPConfig(ignored_modules="("), "ignored_modules=(", "not a regular expression"),
    ],
)
def test_units_of_the_users_own(fsdp: FSDPConfig, flag: str, mentions: str):
    text = check(AcceleratorConfig(fsdp=fsdp))
    assert text.startswith(f"--accelerator.fsdp.{flag}: ")
    assert mentions in text


def test_an_unknown_checkpointing_mode_is_refused_with_the_known_ones():
    text = check(AcceleratorConfig(activation_checkpointing=ActivationCheckpointingConfig("half")))
    assert text.startswith("--accelerator.activation_checkpointing.mode=half: ")
    assert "none, full" in text
