"""Whose plan counts: the user's flags, then the policy's own, then other packages', then the built-in ones."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError
from torch import nn

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import FSDPConfig
from lerobot_parallel.plans.builtin import BUILTIN_PLANS
from lerobot_parallel.plans.plan import (
    INFERENCE_METHODS,
    ResolvedPlan,
    WrapPlan,
    resolve_by_class,
    resolve_by_size,
    resolve_plan,
)

ENTRY_POINT_GROUP = "lerobot_parallel.plans"


def find_plan(policy_type: str, policy_class: type) -> tuple[WrapPlan, str] | None:
    """The plan of a policy and who gave it, or None; needs the class only, builds nothing.

    Raises:
        ConfigError: another package registered something that is no plan.
    """
    names = getattr(policy_class, "_fsdp_wrap_modules", None)
    if names:
        methods = getattr(policy_class, "_fsdp_forward_methods", None) or INFERENCE_METHODS
        return WrapPlan(units=tuple(names), forward_methods=tuple(methods)), f"{policy_class.__name__} itself"
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == policy_type:
            return _load_plan(entry), f"package {entry.dist.name if entry.dist else entry.value}"
    if policy_type in BUILTIN_PLANS:
        return BUILTIN_PLANS[policy_type], "built in"
    return None


def check_plan_exists(policy_type: str, policy_class: type, fsdp: FSDPConfig) -> None:
    """Refuse to shard a policy of which nobody says what its units are.

    Raises:
        ConfigError: no plan from user, policy, packages or this project.
    """
    if find_plan(policy_type, policy_class) is not None or fsdp.wrap_modules or fsdp.min_num_params:
        return
    raise ConfigError(
        "--policy.type",
        policy_type,
        "has no plan that says what to shard",
        "name its layer classes with --accelerator.fsdp.wrap_modules='[\"ClassName\"]', use "
        "--accelerator.fsdp.min_num_params=1000000, set _fsdp_wrap_modules on the class, or register a plan "
        f"in the entry-point group {ENTRY_POINT_GROUP}",
    )


def resolve(policy: nn.Module, policy_type: str, fsdp: FSDPConfig) -> ResolvedPlan:
    """The units of a built policy, by the first source that has a plan.

    Raises:
        ConfigError: no plan, or a name of the user's that matches no module.
    """
    check_plan_exists(policy_type, type(policy), fsdp)
    plan, source = find_plan(policy_type, type(policy)) or (WrapPlan(), "")
    if fsdp.wrap_modules:
        return resolve_by_class(fsdp.wrap_modules, plan, policy)
    if fsdp.min_num_params:
        return resolve_by_size(fsdp.min_num_params, plan, policy)
    return resolve_plan(plan, policy, source=source)


def _load_plan(entry: EntryPoint) -> WrapPlan:
    try:
        value: Any = entry.load()
        value = value() if callable(value) and not isinstance(value, WrapPlan) else value
        return value if isinstance(value, WrapPlan) else WrapPlan.model_validate(value)
    except ValidationError as error:
        problem = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'plan'}: {e['msg']}" for e in error.errors())
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    package = entry.dist.name if entry.dist else "unknown package"
    raise ConfigError(
        f"entry point {ENTRY_POINT_GROUP}.{entry.name}", entry.value, f"package {package} gives no valid plan ({problem})",
        "mend or uninstall that package",
    )
