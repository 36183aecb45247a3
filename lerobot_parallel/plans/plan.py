"""The words in which a policy says what to shard, and how they are resolved on a built policy."""

import difflib
import fnmatch
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict
from torch import nn

from lerobot_parallel.config.errors import ConfigError

INFERENCE_METHODS = ("select_action", "predict_action_chunk")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class WrapPlan(BaseModel):
    """Which modules of a policy are gathered together (the units), and how the policy is entered.

    Patterns are shell-style globs on module FQNs; `{i}` stands for a layer index and `{last}` for the largest
    one of its stack. Everything that no unit takes stays in the root unit, which is gathered for the whole step.

    Attributes:
        units: class names, matched by `type(module).__name__` on every instance; a name that this build of
            the policy does not contain is skipped.
        groups: leaves of one layer that form one unit, for stacks whose layers are never called themselves.
            Each group is a list of patterns with one `{i}`; it makes one unit for every index present.
        modules: single modules that are units of their own (large embeddings, heads that are never called).
        keep_gathered: units, by name, that stay gathered between forward and backward, such as the last
            layer of a stack whose output the loss does not use: its pre-backward hook never fires.
        keep_in_root: modules whose weights are read without calling them; units on or around them dissolve.
        uncalled: leaves whose weights the unit around them reads instead of calling them: gathered with the unit, also
            where they would compute in another dtype than the rest of it.
        forward_methods: methods besides `forward` that gather the root before they run.
        gathered_methods: those of them whose number of unit calls depends on a rank's own data, such as a
            decoding that stops at an end token. They gather every unit before they run and none while they
            do, so that ranks may stop at different steps; the model must fit a device meanwhile.
        pointless: why sharding gains nothing here; said in a warning.
        unshardable: why a run cannot be sharded, or trained at all; said in a refusal.
        needs_bf16: why it trains under bf16 only, though sharding keeps fp32 masters; said in a refusal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    units: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    modules: tuple[str, ...] = ()
    keep_gathered: tuple[str, ...] = ()
    keep_in_root: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    forward_methods: tuple[str, ...] = INFERENCE_METHODS
    gathered_methods: tuple[str, ...] = ()
    pointless: str = ""
    unshardable: str = ""
    needs_bf16: str = ""


@dataclass(frozen=True)
class Unit:
    """Modules that are gathered together. `name` is the FQN of the module, or the common prefix of a group."""

    name: str
    modules: tuple[nn.Module, ...]
    keep_gathered: bool = False

    def parameters(self) -> Iterator[nn.Parameter]:
        for module in self.modules:
            yield from module.parameters()


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan on one built policy.

    Attributes:
        source: who gave the plan, for the log.
        units: innermost first, the order in which `fully_shard` wants them.
        forward_methods: those of the plan that the policy has.
        gathered_methods: those of them that gather every unit before they run.
        uncalled: modules that are never called.
        pointless: why sharding gains nothing, for a warning.
        dissolved: names of units that went back to the root, with the reason.
    """

    source: str
    units: tuple[Unit, ...]
    forward_methods: tuple[str, ...]
    gathered_methods: tuple[str, ...] = ()
    uncalled: tuple[nn.Module, ...] = ()
    pointless: str = ""
    dissolved: dict[str, str] = field(default_factory=dict)


def resolve_plan(plan: WrapPlan, policy: nn.Module, *, source: str) -> ResolvedPlan:
    """Find the plan's units in `policy`. Pure: the policy is not changed, parameters may be on meta."""
    named = dict(policy.named_modules())
    units = _class_units(plan, named) + _group_units(plan, named) + _module_units(plan, named)
    return _finish(units, plan, policy, source)


def resolve_by_class(names: Iterable[str], plan: WrapPlan, policy: nn.Module) -> ResolvedPlan:
    """Units by the user's own class names, instead of the policy's plan.

    Raises:
        ConfigError: a name that matches no module, with the close ones.
    """
    named = dict(policy.named_modules())
    present = sorted({type(m).__name__ for name, m in named.items() if name and not isinstance(m, _CONTAINERS)})
    for name in names:
        if name not in present:
            close = difflib.get_close_matches(name, present, n=3, cutoff=0.5) or present[:8]
            raise ConfigError(
                "--accelerator.fsdp.wrap_modules",
                name,
                f"no module of {type(policy).__name__} that can be a unit is of this class",
                f"close names: {', '.join(close)}",
            )
    own = plan.model_copy(update={"units": tuple(names), "groups": (), "modules": (), "keep_gathered": ()})
    return _finish(_class_units(own, named), own, policy, "--accelerator.fsdp.wrap_modules")


def resolve_by_size(min_num_params: int, plan: WrapPlan, policy: nn.Module) -> ResolvedPlan:
    """Units by size: innermost modules whose parameters, less those of units inside them, reach the minimum."""
    units: list[Unit] = []
    taken: set[int] = set()
    for name, module in reversed(list(policy.named_modules())):
        left = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if name and not isinstance(module, _CONTAINERS) and sum(left.values()) >= min_num_params:
            units.append(Unit(name, (module,)))
            taken.update(left)
    own = plan.model_copy(update={"units": (), "groups": (), "modules": (), "keep_gathered": ()})
    return _finish(units, own, policy, "--accelerator.fsdp.min_num_params")


def _class_units(plan: WrapPlan, named: dict[str, nn.Module]) -> list[Unit]:
    return [Unit(name, (module,)) for name, module in named.items() if name and type(module).__name__ in plan.units]


def _module_units(plan: WrapPlan, named: dict[str, nn.Module]) -> list[Unit]:
    matching = [n for n in named if n and any(fnmatch.fnmatchcase(n, pattern) for pattern in plan.modules)]
    return [Unit(name, (named[name],)) for name in matching]


def _group_units(plan: WrapPlan, named: dict[str, nn.Module]) -> list[Unit]:
    units = []
    for patterns in plan.groups:
        by_index: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for pattern in patterns:
            regex = re.compile(fnmatch.translate(pattern).replace(r"\{i\}", r"(\d+)"))
            for name in named:
                if match := regex.fullmatch(name):
                    by_index[match.groups()].append(name)
        prefixes = [_common_prefix(names) for names in by_index.values()]
        for prefix, names in zip(prefixes, by_index.values(), strict=True):
            # Leaves of two stacks share no more than the model that holds both, for every layer alike.
            name = prefix if prefixes.count(prefix) == 1 else names[0]
            units.append(Unit(name, tuple(named[name] for name in names)))
    return units


def _common_prefix(names: list[str]) -> str:
    parts = [name.split(".") for name in names]
    shared = []
    for pieces in zip(*parts, strict=False):
        if len(set(pieces)) > 1:
            break
        shared.append(pieces[0])
    return ".".join(shared) or names[0]


def _finish(units: list[Unit], plan: WrapPlan, policy: nn.Module, source: str) -> ResolvedPlan:
    units = _distinct(unit for unit in units if any(True for _ in unit.parameters()))
    units, dissolved = _dissolve(units, plan, policy)
    kept = _matching(plan.keep_gathered, [unit.name for unit in units])
    units = [Unit(u.name, u.modules, keep_gathered=u.name in kept) for u in units]
    depths = {id(module): name.count(".") for name, module in policy.named_modules()}
    units.sort(key=lambda unit: min(depths[id(module)] for module in unit.modules), reverse=True)
    methods = tuple(m for m in plan.forward_methods if callable(getattr(policy, m, None)))
    for name, reason in dissolved.items():
        logging.warning("unit %s stays in the root: %s", name, reason)
    gathered = tuple(m for m in plan.gathered_methods if m in methods)
    named = dict(policy.named_modules())
    uncalled = tuple(named[name] for name in sorted(_matching(plan.uncalled, list(named))))
    return ResolvedPlan(source, tuple(units), methods, gathered, uncalled, plan.pointless, dissolved)


def _distinct(units: Iterable[Unit]) -> list[Unit]:
    """Drop a unit that shares a module with an earlier one: a module is gathered with one unit only."""
    seen: set[int] = set()
    distinct = []
    for unit in units:
        ids = {id(module) for module in unit.modules}
        if not ids & seen:
            distinct.append(unit)
            seen |= ids
    return distinct


def _dissolve(units: list[Unit], plan: WrapPlan, policy: nn.Module) -> tuple[list[Unit], dict[str, str]]:
    dissolved: dict[str, str] = {}
    read_directly = _subtree_parameters(policy, plan.keep_in_root)
    shared = shared_parameters(policy)
    for unit in units:
        inside = {id(module) for module in unit.modules}
        if any(id(p) in read_directly for p in unit.parameters()):
            dissolved[unit.name] = "the plan keeps some of its weights in the root"
        elif any(_straddles(places, inside) for places in shared):
            dissolved[unit.name] = "it owns one side of a tied weight whose other owner is elsewhere"
    return [unit for unit in units if unit.name not in dissolved], dissolved


def _straddles(places: list[frozenset[int]], inside: set[int]) -> bool:
    within = [bool(modules & inside) for modules in places]
    return any(within) and not all(within)


def _subtree_parameters(policy: nn.Module, patterns: Iterable[str]) -> set[int]:
    names = _matching(patterns, [name for name, _ in policy.named_modules() if name])
    return {id(p) for name in names for p in policy.get_submodule(name).parameters()}


def shared_parameters(policy: nn.Module) -> list[list[frozenset[int]]]:
    """For every parameter that stands in several places, tied or in a module used twice: the ids of the modules
    around it, its owner among them, for each place."""
    places: dict[int, list[frozenset[int]]] = defaultdict(list)

    def visit(module: nn.Module, around: frozenset[int]) -> None:
        around = around | {id(module)}
        # Not `parameters(recurse=False)`, which sarm overrides without that argument.
        for parameter in module._parameters.values():
            if parameter is not None:
                places[id(parameter)].append(around)
        for child in module.children():
            visit(child, around)

    visit(policy, frozenset())
    return [around for around in places.values() if len(around) > 1]


def _matching(patterns: Iterable[str], names: list[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        regex = re.compile(fnmatch.translate(pattern).replace(r"\{last\}", r"(\d+)"))
        stacks: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for match in filter(None, map(regex.fullmatch, names)):
            before, index = (match[0][: match.start(1)], int(match[1])) if match.groups() else ("", 0)
            stacks[before].append((index, match[0]))
        for stack in stacks.values():
            last = max(index for index, _ in stack)
            found.update(name for index, name in stack if index == last)
    return found
