"""Whose plan counts: the user's flags, then the policy's own, then other packages', then the built-in ones."""

import importlib.metadata
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from torch import nn
from wrapt import when_imported

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import FSDPConfig
from lerobot_parallel.plans.builtin import BUILTIN_PLANS, CLASS_NAMES, Plan
from lerobot_parallel.plans.plan import (
    INFERENCE_METHODS,
    ResolvedPlan,
    WrapPlan,
    resolve_by_class,
    resolve_by_size,
    resolve_plan,
)

ENTRY_POINT_GROUP = "lerobot_parallel.plans"
BUILT_IN = "built in"
_UNITS, _METHODS = "_fsdp_wrap_modules", "_fsdp_forward_methods"


def find_plan(policy_type: str, policy_class: type) -> tuple[Plan, str] | None:
    """The plan of a policy and who gave it, or None; needs the class only, builds nothing.

    Raises:
        ConfigError: the class, or another package, declares something that is no plan; or two packages do.
    """
    if getattr(policy_class, _UNITS, None):
        return _declared_plan(policy_class), f"{policy_class.__name__} itself"
    entries = [entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name == policy_type]
    if len(entries) > 1:
        raise ConfigError(
            f"entry point {ENTRY_POINT_GROUP}.{policy_type}",
            ", ".join(entry.value for entry in entries),
            f"packages {' and '.join(map(_package, entries))} both give a plan",
            "uninstall one of them",
        )
    if entries:
        return _load_plan(entries[0]), f"package {_package(entries[0])}"
    if policy_type in BUILTIN_PLANS:
        return BUILTIN_PLANS[policy_type], BUILT_IN
    return None


def check_plan_exists(
    policy_type: str, policy_class: type, fsdp: FSDPConfig, *, sharded: bool = True, precision: str = ""
) -> None:
    """Refuse to shard a policy that cannot be, or to act on the units of one of which nobody says what they are.

    Raises:
        ConfigError: no plan from user, policy, packages or this project, or one that says why there is none.
    """
    plan, _ = find_plan(policy_type, policy_class) or (None, "")
    if sharded and isinstance(plan, WrapPlan) and plan.unshardable:
        raise ConfigError(
            "--parallelism.dp_shard",
            "above 1",
            f"{policy_type} is not sharded: {plan.unshardable}",
            "use --parallelism.dp_shard=1",
        )
    if sharded and isinstance(plan, WrapPlan) and plan.needs_bf16 and precision == "no":
        reason = f"sharded weights of {policy_type} are fp32, and {plan.needs_bf16}"
        raise ConfigError("--accelerator.mixed_precision", precision, reason, "use bf16")
    if fsdp.wrap_modules or fsdp.min_num_params or plan is not None:
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
        ConfigError: no plan, a name of the user's that matches no module, or a foreign plan of which none does.
    """
    # Adapters wrap the policy; its modules, with the adapters in them, are what a plan names.
    policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    check_plan_exists(policy_type, type(policy), fsdp, sharded=False)
    found, source = find_plan(policy_type, type(policy)) or (WrapPlan(), "")
    plan = found if isinstance(found, WrapPlan) else found(policy)
    if fsdp.wrap_modules:
        return resolve_by_class(fsdp.wrap_modules, plan, policy)
    if fsdp.min_num_params:
        return resolve_by_size(fsdp.min_num_params, plan, policy)
    resolved = resolve_plan(plan, policy, source=source)
    if source != BUILT_IN and not resolved.units and not resolved.dissolved:
        names = [*plan.units, *plan.modules, *(pattern for group in plan.groups for pattern in group)]
        owner = _owner(type(policy)) if source.endswith(" itself") else source
        raise ConfigError(
            f"plan of {source}",
            ", ".join(names) or "no names",
            f"matches no module of {type(policy).__name__}",
            f"mend {owner}, or use --accelerator.fsdp.wrap_modules",
        )
    return resolved


def known_plans() -> list[dict[str, Any]]:
    """Every plan that needs no class to be found: other packages' and built in. Nothing is imported for it but them.

    A package whose plan is none is listed with what is wrong.
    """
    rows = {}
    for policy_type, plan in BUILTIN_PLANS.items():
        rows[policy_type] = _row(policy_type, BUILT_IN, plan)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            rows[entry.name] = _row(entry.name, f"package {_package(entry)}", _load_plan(entry))
        except ConfigError as error:
            rows[entry.name] = {
                "policy": entry.name,
                "source": f"package {_package(entry)}",
                "units": [],
                "note": str(error),
            }
    return [rows[policy_type] for policy_type in sorted(rows)]


def _row(policy_type: str, source: str, plan: Plan) -> dict[str, Any]:
    if not isinstance(plan, WrapPlan):
        return {"policy": policy_type, "source": source, "units": [], "note": "its units follow from the built policy"}
    groups = [f"leaves of {group[0].partition('.{i}')[0]}" for group in plan.groups]
    note = (plan.unshardable and f"not sharded: {plan.unshardable}") or (
        plan.pointless and f"pointless: {plan.pointless}"
    )
    return {"policy": policy_type, "source": source, "units": [*plan.units, *groups, *plan.modules], "note": note}


def announce_to_host() -> None:
    """On a host with an engine of its own: tell it the units of its policies that declare none.

    Only what class names can say, and only once a policy's module is imported by somebody else.
    """
    for policy_type in CLASS_NAMES:
        when_imported(f"lerobot.policies.{policy_type}.modeling_{policy_type}")(_declare)


def _declare(module: ModuleType) -> None:
    for cls in vars(module).values():
        policy_type = getattr(cls, "name", None)
        if not isinstance(cls, type) or cls.__module__ != module.__name__ or policy_type not in CLASS_NAMES:
            continue
        if not getattr(cls, _UNITS, None):
            setattr(cls, _UNITS, list(CLASS_NAMES[policy_type]))


def _declared_plan(policy_class: type) -> WrapPlan:
    names, methods = getattr(policy_class, _UNITS), getattr(policy_class, _METHODS, None) or INFERENCE_METHODS
    try:
        if isinstance(names, str) or isinstance(methods, str):
            raise TypeError("a list of names is expected, not one string")
        return WrapPlan(units=tuple(names), forward_methods=tuple(methods))
    except (ValidationError, TypeError) as error:
        raise ConfigError(
            f"{policy_class.__name__}.{_UNITS}",
            names,
            f"{_owner(policy_class)} declares no valid plan ({_problem(error)})",
            "mend or uninstall that package",
        ) from None


def _load_plan(entry: EntryPoint) -> WrapPlan:
    try:
        value: Any = entry.load()
        value = value() if callable(value) and not isinstance(value, WrapPlan) else value
        return value if isinstance(value, WrapPlan) else WrapPlan.model_validate(value)
    except Exception as error:
        raise ConfigError(
            f"entry point {ENTRY_POINT_GROUP}.{entry.name}",
            entry.value,
            f"package {_package(entry)} gives no valid plan ({_problem(error)})",
            "mend or uninstall that package",
        ) from None


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'plan'}: {e['msg']}" for e in error.errors())


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "unknown package"


def _owner(policy_class: type) -> str:
    """The distribution that a class comes from, by its top-level package."""
    top = policy_class.__module__.partition(".")[0]
    owners = importlib.metadata.packages_distributions().get(top, [top])
    return f"package {owners[0]}"
