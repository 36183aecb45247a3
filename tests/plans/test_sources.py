"""Whose plan counts, and what is said of a wrong one."""

import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import FSDPConfig
from lerobot_parallel.plans import registry
from lerobot_parallel.plans.builtin import BUILTIN_PLANS, CLASS_NAMES
from lerobot_parallel.plans.plan import WrapPlan

NONE = FSDPConfig()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Builds and installs a package of somebody else's, with `code` in it and a plan for `policy`."""

    def build(code: str, policy: str = "foreign", name: str = "foreign_plans") -> None:
        source, site = tmp_path / name, tmp_path / "site"
        source.mkdir()
        (source / f"{name}.py").write_text(textwrap.dedent(code))
        (source / "pyproject.toml").write_text(
            f'[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[project]\nname = "{name.replace("_", "-")}"\nversion = "1.0"\n'
            f'[project.entry-points."lerobot_parallel.plans"]\n{policy} = "{name}:plan"\n'
            f'[tool.setuptools]\npy-modules = ["{name}"]\n'
        )
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return build


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_installed_package_gives_a_plan_and_beats_the_built_in_one(install) -> None:
    install("plan = {'units': ['Layer'], 'forward_methods': ['act']}", policy="act")
    plan, source = registry.find_plan("act", Plain)
    assert plan == WrapPlan(units=("Layer",), forward_methods=("act",))
    assert source == "package foreign-plans"
    resolved = registry.resolve(Plain(), "act", NONE)
    assert [unit.name for unit in resolved.units] == ["layers.0", "layers.1"]


def test_a_package_may_give_a_function(install) -> None:
    install(
        """
        from lerobot_parallel.plans.plan import WrapPlan

        def plan():
            return WrapPlan(units=("Layer",))
        """
    )
    assert registry.find_plan("foreign", Plain)[0].units == ("Layer",)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("plan = {'units': ['Layer'], 'moduls': ['x']}", "moduls: Extra inputs are not permitted"),
        ("plan = {'units': 3}", "units: Input should be a valid tuple"),
        ("plan = 7", "plan: Input should be a valid dictionary or instance of WrapPlan"),
        ("raise OSError('disk')", "OSError: disk"),
        ("def plan():\n    raise KeyError('x')", "KeyError: 'x'"),
    ],
)
def test_a_wrong_plan_is_one_line_that_names_the_package(install, code: str, problem: str) -> None:
    install(code)
    with pytest.raises(ConfigError) as error:
        registry.find_plan("foreign", Plain)
    assert "package foreign-plans gives no valid plan" in one_line(error) and problem in str(error.value)


def test_a_plan_of_names_that_match_nothing_names_the_package(install) -> None:
    install("plan = {'units': ['Laier'], 'modules': ['head']}")
    with pytest.raises(ConfigError) as error:
        registry.resolve(Plain(), "foreign", NONE)
    for part in ("package foreign-plans", "Laier", "head", "matches no module of Plain"):
        assert part in one_line(error)


def test_two_packages_for_one_policy_are_refused_by_name(install) -> None:
    install("plan = {'units': ['Layer']}")
    install("plan = {'units': ['Linear']}", name="other_plans")
    with pytest.raises(ConfigError) as error:
        registry.find_plan("foreign", Plain)
    assert "foreign-plans" in one_line(error) and "other-plans" in str(error.value)


def test_a_class_declares_its_own_units_and_methods(install) -> None:
    install("plan = {'units': ['Linear']}")
    cls = type("Declaring", (Plain,), {"_fsdp_wrap_modules": ["Layer"], "_fsdp_forward_methods": ["rank_actions"]})
    plan, source = registry.find_plan("foreign", cls)
    assert plan == WrapPlan(units=("Layer",), forward_methods=("rank_actions",))
    assert source == "Declaring itself"


@pytest.mark.parametrize("units", ["Layer", [3], 5])
def test_a_class_that_declares_nonsense_names_its_package(units: object) -> None:
    cls = type("Declaring", (Plain,), {"_fsdp_wrap_modules": units, "__module__": "pydantic.main"})
    with pytest.raises(ConfigError) as error:
        registry.find_plan("foreign", cls)
    assert "Declaring._fsdp_wrap_modules" in one_line(error) and "package pydantic declares no valid plan" in str(
        error.value
    )


def test_no_plan_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError) as error:
        registry.check_plan_exists("foreign", Plain, NONE)
    for way in ("wrap_modules", "min_num_params", "_fsdp_wrap_modules", "lerobot_parallel.plans"):
        assert way in one_line(error)


@pytest.mark.parametrize("name", ["gaussian_actor", "robometer", "topreward"])
def test_what_cannot_be_sharded_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.check_plan_exists(name, Plain, FSDPConfig(wrap_modules=["Layer"]))
    assert BUILTIN_PLANS[name].unshardable in one_line(error)
    registry.check_plan_exists(name, Plain, NONE, sharded=False)


def test_a_policy_that_knows_bf16_only_is_refused_without() -> None:
    with pytest.raises(ConfigError) as error:
        registry.check_plan_exists("lingbot_va", Plain, NONE, precision="no")
    assert "--accelerator.mixed_precision=no" in one_line(error) and "use bf16" in str(error.value)
    registry.check_plan_exists("lingbot_va", Plain, NONE, precision="bf16")


@pytest.mark.parametrize("name", ["tdmpc", "reward_classifier"])
def test_a_plan_says_where_sharding_is_pointless(name: str) -> None:
    assert registry.resolve(Plain(), name, NONE).pointless == BUILTIN_PLANS[name].pointless != ""


def test_every_type_of_the_host_has_a_plan() -> None:
    import lerobot.policies  # noqa: F401
    import lerobot.rewards  # noqa: F401
    from lerobot.configs import PreTrainedConfig
    from lerobot.configs.rewards import RewardModelConfig

    host = {n for n, c in PreTrainedConfig.get_known_choices().items() if c.__module__.startswith("lerobot.policies.")}
    rewards = {
        n for n, c in RewardModelConfig.get_known_choices().items() if c.__module__.startswith("lerobot.rewards.")
    }
    assert host | rewards == BUILTIN_PLANS.keys()


def test_known_plans_list_other_packages_and_what_is_wrong_with_them(install) -> None:
    install("plan = {'units': ['Layer']}")
    install("plan = 7", policy="broken", name="broken_plans")
    rows = {row["policy"]: row for row in registry.known_plans()}
    assert rows["foreign"]["source"] == "package foreign-plans" and rows["foreign"]["units"] == ["Layer"]
    assert "gives no valid plan" in rows["broken"]["note"]
    assert rows["gaussian_actor"]["note"].startswith("not sharded")
    assert rows.keys() == BUILTIN_PLANS.keys() | {"foreign", "broken"}


@pytest.fixture
def host_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A policy module of a host that has an engine: its base class declares no units."""
    module = ModuleType("lerobot.policies.pi0.modeling_pi0")
    base = type(
        "PreTrainedPolicy", (nn.Module,), {"_fsdp_wrap_modules": None, "__module__": "lerobot.policies.pretrained"}
    )
    module.PreTrainedPolicy = base
    module.PI0Policy = type("PI0Policy", (base,), {"name": "pi0", "__module__": module.__name__})
    module.PI0Own = type("PI0Own", (base,), {"name": "pi0", "_fsdp_wrap_modules": ["X"], "__module__": module.__name__})
    module.Helper = type("Helper", (), {"__module__": module.__name__})
    return module


def test_a_host_with_an_engine_is_told_the_units_that_class_names_can_say(host_module: ModuleType) -> None:
    registry._declare(host_module)
    assert host_module.PI0Policy._fsdp_wrap_modules == list(CLASS_NAMES["pi0"])
    assert host_module.PI0Own._fsdp_wrap_modules == ["X"]
    assert host_module.PreTrainedPolicy._fsdp_wrap_modules is None
    assert not hasattr(host_module.Helper, "_fsdp_wrap_modules")


def test_announcing_imports_no_policy_and_acts_when_one_is_imported() -> None:
    code = """
import sys
from lerobot_parallel.plans.registry import announce_to_host
from lerobot_parallel.plans.builtin import CLASS_NAMES
before = {name for name in sys.modules if name.endswith("modeling_act")}
announce_to_host()
assert {name for name in sys.modules if name.endswith("modeling_act")} == before == set()
from lerobot.policies.act.modeling_act import ACTPolicy
assert ACTPolicy._fsdp_wrap_modules == list(CLASS_NAMES["act"]), ACTPolicy._fsdp_wrap_modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
