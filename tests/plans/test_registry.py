"""Whose plan counts, what a bad one says, and the built-in plans on the host's real policies."""

from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_policy_config
from torch import nn

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import FSDPConfig
from lerobot_parallel.engine.weights import empty_parameters
from lerobot_parallel.plans import registry
from lerobot_parallel.plans.builtin import BUILTIN_PLANS
from lerobot_parallel.plans.plan import WrapPlan
from tests.support.toy import make_toy

pytestmark = pytest.mark.usefixtures("warmed")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 2, 1)
        self.body = nn.Linear(3, 3)
        self.head = nn.LayerNorm(3)

    def select_action(self) -> None: ...

    def plan(self) -> None: ...


class Declaring(Plain):
    _fsdp_wrap_modules = ["LayerNorm"]
    _fsdp_forward_methods = ["plan"]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs packages that register plans; each entry point loads `value` under `name`."""

    def install(**plans: Any) -> None:
        entries = []
        for name, value in plans.items():
            entry = EntryPoint(name=name, value=f"robot_pack.plans:{name}", group=registry.ENTRY_POINT_GROUP)
            object.__setattr__(entry, "dist", SimpleNamespace(name="robot-pack"))
            entries.append((entry, value))

        def load(self: EntryPoint) -> Any:
            value = next(v for e, v in entries if e is self)
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(EntryPoint, "load", load)
        monkeypatch.setattr(registry, "entry_points", lambda group: [e for e, _ in entries if e.group == group])

    return install


def units(policy: nn.Module, policy_type: str = "act", **fsdp: Any) -> tuple[str, list[str]]:
    plan = registry.resolve(policy, policy_type, FSDPConfig(**fsdp))
    return plan.source, [unit.name for unit in plan.units]


# The order


def test_the_user_comes_first_then_the_policy_then_packages_then_the_built_in(packages: Callable):
    packages(act={"units": ["Conv1d"]})
    assert units(Declaring(), wrap_modules=["Linear"]) == ("--accelerator.fsdp.wrap_modules", ["body"])
    assert units(Declaring(), min_num_params=12) == ("--accelerator.fsdp.min_num_params", ["body"])
    assert units(Declaring()) == ("Declaring itself", ["head"])
    assert units(Plain()) == ("package robot-pack", ["stem"])
    packages()
    assert units(Plain()) == ("built in", [])


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_a_policy_that_declares_nothing_is_passed_over(nothing: object):
    policy_class = type("Silent", (Plain,), {"_fsdp_wrap_modules": nothing})
    assert registry.find_plan("act", policy_class) == (BUILTIN_PLANS["act"], "built in")
    assert registry.find_plan("unknown", policy_class) is None


def test_a_declaring_policy_names_its_forward_methods_or_gets_the_usual_ones():
    plan, _ = registry.find_plan("act", Declaring)
    assert plan == WrapPlan(units=("LayerNorm",), forward_methods=("plan",))
    bare = type("Bare", (Plain,), {"_fsdp_wrap_modules": {"LayerNorm"}})
    assert registry.find_plan("act", bare)[0].forward_methods == ("select_action", "predict_action_chunk")


@pytest.mark.parametrize(
    "value",
    [
        WrapPlan(units=("Conv1d",)),
        {"units": ["Conv1d"]},
        lambda: WrapPlan(units=("Conv1d",)),
        lambda: {"units": ["Conv1d"]},
    ],
)
def test_a_package_gives_a_plan_a_dict_or_a_function(packages: Callable, value: object):
    packages(robot=value)
    assert registry.find_plan("robot", Plain) == (WrapPlan(units=("Conv1d",)), "package robot-pack")


def test_a_packages_plan_is_for_its_own_policy_only(packages: Callable):
    packages(robot={"units": ["Conv1d"]}, broken=ImportError("no such module"))
    assert registry.find_plan("other", Plain) is None
    assert registry.find_plan("robot", Plain) is not None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"unit": ["Conv1d"]}, "unit: "),
        ({"units": "Conv1d"}, "units: "),
        (["Conv1d"], "plan: "),
        (None, "plan: "),
        (ImportError("no module named flash"), "ImportError: no module named flash"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_package_with_no_valid_plan_is_named(packages: Callable, value: object, problem: str):
    packages(robot=value)
    with pytest.raises(ConfigError) as refused:
        registry.find_plan("robot", Plain)
    text = str(refused.value)
    assert "robot-pack" in text
    assert "lerobot_parallel.plans.robot=robot_pack.plans:robot" in text
    assert problem in text
    assert "\n" not in text


# Whether there is one


def test_a_policy_without_a_plan_is_refused_with_every_way_to_give_one():
    with pytest.raises(ConfigError) as refused:
        registry.check_plan_exists("toy_nasty", type(make_toy()), FSDPConfig())
    text = str(refused.value)
    assert text.startswith("--policy.type=toy_nasty: ")
    for way in ("wrap_modules", "min_num_params", "_fsdp_wrap_modules", "lerobot_parallel.plans"):
        assert way in text


@pytest.mark.parametrize("own", [{"wrap_modules": ["ToyBlock"]}, {"min_num_params": 10}])
def test_the_users_units_are_enough(own: dict):
    registry.check_plan_exists("toy_nasty", type(make_toy()), FSDPConfig(**own))
    assert units(make_toy(), "toy_nasty", **own)[1]


def test_a_broken_package_is_found_before_the_run_even_where_the_user_names_units(packages: Callable):
    packages(robot={"unit": []})
    for fsdp in (FSDPConfig(), FSDPConfig(wrap_modules=["Linear"]), FSDPConfig(min_num_params=3)):
        with pytest.raises(ConfigError, match="robot-pack"):
            registry.check_plan_exists("robot", Plain, fsdp)


# The built-in plans on real policies, smaller than the published ones


CAMERA = PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
POLICIES: dict[str, dict[str, Any]] = {
    "act": {
        "n_encoder_layers": 2, "n_vae_encoder_layers": 3, "n_decoder_layers": 1, "dim_model": 32, "n_heads": 2,
        "dim_feedforward": 64, "latent_dim": 8, "chunk_size": 8, "n_action_steps": 8,
        "pretrained_backbone_weights": None,
    },
    "diffusion": {
        "down_dims": (16, 32), "diffusion_step_embed_dim": 16, "n_groups": 4, "spatial_softmax_num_keypoints": 8,
        "horizon": 8, "n_action_steps": 4, "pretrained_backbone_weights": None,
    },
    "tdmpc": {
        "horizon": 3, "n_action_repeats": 2, "latent_dim": 10, "mlp_dim": 32, "state_encoder_hidden_dim": 16,
        "q_ensemble_size": 2, "image_encoder_hidden_dim": 8, "n_gaussian_samples": 8, "n_pi_samples": 4, "n_elites": 4,
    },
    "vqbet": {
        "n_obs_steps": 2, "n_action_pred_token": 2, "action_chunk_size": 3, "crop_shape": (56, 56), "gpt_input_dim": 32,
        "gpt_output_dim": 32, "gpt_hidden_dim": 32, "gpt_n_layer": 3, "gpt_n_head": 2, "gpt_block_size": 50,
        "vqvae_embedding_dim": 16, "vqvae_enc_hidden_dim": 16, "vqvae_n_embed": 4, "spatial_softmax_num_keypoints": 8,
        "pretrained_backbone_weights": None,
    },
}  # fmt: skip
# Counted by hand from the configs above: a ResNet-18 has 8 BasicBlocks; a U-Net of two levels 2 x 2 residual
# blocks down, 2 in the middle, 1 x 2 up; TDMPC's model has a copy of itself as its target.
UNITS = {
    "act": {"ACTEncoderLayer": 2 + 3, "ACTDecoderLayer": 1, "BasicBlock": 8},
    "diffusion": {"DiffusionConditionalResidualBlock1d": 4 + 2 + 2, "BasicBlock": 8},
    "vqbet": {"Block": 3, "BasicBlock": 8},
}


def build(policy_type: str, *, camera: bool = True) -> nn.Module:
    """The host's policy on a state and a camera; TDMPC wants its camera under the plain name."""
    image = "observation.image" if policy_type == "tdmpc" else "observation.images.top"
    config = make_policy_config(
        policy_type,
        device="cpu",
        push_to_hub=False,
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (6,)),
            **({image: CAMERA} if camera else {"observation.environment_state": PolicyFeature(FeatureType.ENV, (4,))}),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (6,))},
        **POLICIES[policy_type],
    )
    assert isinstance(config, PreTrainedConfig)
    with empty_parameters():
        return get_policy_class(policy_type)(config)


@pytest.mark.parametrize("policy_type", POLICIES)
def test_built_in_plans_find_their_units(policy_type: str):
    policy = build(policy_type)
    plan = registry.resolve(policy, policy_type, FSDPConfig())
    assert plan.source == "built in"
    assert plan.dissolved == {}
    counted = Counter(type(unit.modules[0]).__name__ for unit in plan.units)
    if policy_type in UNITS:
        assert counted == UNITS[policy_type]
    else:
        assert set(counted) == {"Sequential"}
        assert len(plan.units) > 10
    assert plan.forward_methods == ("select_action", "predict_action_chunk")
    in_units = sum(p.numel() for p in {p for unit in plan.units for p in unit.parameters()})
    assert in_units > 0.5 * sum(p.numel() for p in policy.parameters())


def test_without_a_camera_the_backbone_is_skipped():
    plan = registry.resolve(build("act", camera=False), "act", FSDPConfig())
    assert Counter(type(unit.modules[0]).__name__ for unit in plan.units) == {
        "ACTEncoderLayer": 5,
        "ACTDecoderLayer": 1,
    }
