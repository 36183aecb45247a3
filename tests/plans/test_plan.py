"""The words of a plan, on small modules whose units are known by hand; then on the toy policy."""

import logging

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.plans.plan import ResolvedPlan, WrapPlan, resolve_by_class, resolve_by_size, resolve_plan
from tests.support.toy import TOY_PLAN, make_toy

pytestmark = pytest.mark.usefixtures("warmed")


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)


class Namesake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)


Namesake.__name__ = "Block"


class Layer(nn.Module):
    """Leaves that are called by somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn = nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class Model(nn.Module):
    """Two stacks of different depth, a block beside them, an embedding and a head; nothing is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.left = nn.ModuleList(Layer() for _ in range(3))
        self.right = nn.ModuleList(Layer() for _ in range(12))
        self.block = Block()
        self.head = nn.Linear(4, 10, bias=False)
        self.act = nn.ReLU()

    def select_action(self) -> None: ...

    predict_action_chunk = None


LEAVES = ("norm", "attn.q", "attn.k", "mlp")
STACK = tuple(f"left.{{i}}.{leaf}" for leaf in LEAVES)


def names(plan: ResolvedPlan) -> list[str]:
    return [unit.name for unit in plan.units]


def resolve(module: nn.Module | None = None, **words: object) -> ResolvedPlan:
    return resolve_plan(WrapPlan(**words), Model() if module is None else module, source="test")


# units


def test_a_class_name_takes_every_instance_of_every_class_of_that_name():
    model = nn.ModuleDict({"a": Block(), "b": Namesake(), "c": nn.ModuleList([Block(), nn.Linear(1, 1)])})
    plan = resolve(model, units=["Block"])
    assert sorted(names(plan)) == ["a", "b", "c.0"]
    assert {type(unit.modules[0]) for unit in plan.units} == {Block, Namesake}


def test_subclasses_are_not_taken_by_their_parents_name():
    child = type("Child", (Block,), {})
    assert names(resolve(nn.ModuleDict({"a": child()}), units=["Block"])) == []


def test_names_that_this_build_lacks_are_skipped():
    plan = resolve(
        units=["Block", "BasicBlock"], groups=[["vision.{i}.mlp"]], modules=["vision.*"], keep_in_root=["vision"]
    )
    assert names(plan) == ["block"]
    assert plan.dissolved == {}


def test_the_policy_itself_is_the_root_and_no_unit():
    assert names(resolve(units=["Model", "Block"])) == ["block"]


def test_a_module_without_parameters_is_no_unit():
    assert names(resolve(units=["ReLU"])) == []


def test_inner_units_come_first():
    plan = resolve(units=["Layer", "Linear"])
    order = names(plan)
    for name in order:
        inside = [other for other in order if other.startswith(f"{name}.")]
        assert all(order.index(other) < order.index(name) for other in inside)


# groups


def test_a_group_makes_one_unit_for_every_index():
    plan = resolve(groups=[STACK])
    assert sorted(names(plan)) == ["left.0", "left.1", "left.2"]
    for unit in plan.units:
        assert len(unit.modules) == len(LEAVES)
        assert sum(p.numel() for p in unit.parameters()) == sum(p.numel() for p in Layer().parameters())


def test_group_patterns_are_globs_with_whole_numbers():
    plan = resolve(groups=[["*.{i}.attn.?"]])
    # Both stacks have layers 0 to 2: one index, one unit, whatever the glob took.
    assert {len(unit.modules) for unit in plan.units} == {2, 4}
    assert len(plan.units) == 12


def test_a_group_of_one_leaf_is_named_after_it():
    assert sorted(names(resolve(groups=[["left.{i}.mlp"]]))) == [f"left.{i}.mlp" for i in range(3)]


def test_a_group_comes_before_the_unit_around_it_and_after_those_inside_it():
    plan = resolve(units=["Layer", "Linear"], groups=[["left.{i}.norm", "left.{i}.attn", "left.{i}.mlp"]])
    order = [unit.modules[0] if len(unit.modules) == 1 else unit.name for unit in plan.units]
    groups = [i for i, unit in enumerate(plan.units) if len(unit.modules) > 1]
    assert len(groups) == 3
    layers = [i for i, module in enumerate(order) if isinstance(module, Layer)]
    linears = [i for i, module in enumerate(order) if isinstance(module, nn.Linear)]
    assert max(groups) < min(layers)
    assert max(i for i in linears if plan.units[i].name.startswith("left")) < min(groups)


# modules, keep_gathered


def test_single_modules_by_glob():
    assert sorted(names(resolve(modules=["embed", "left.[01].mlp", "he?d", "lef"]))) == [
        "embed",
        "head",
        "left.0.mlp",
        "left.1.mlp",
    ]


def test_a_module_belongs_to_one_unit_only():
    plan = resolve(units=["Embedding"], modules=["embed", "embed"], groups=[["embed"]])
    assert names(plan) == ["embed"]


def test_last_is_the_largest_index_and_no_text():
    plan = resolve(groups=[[f"right.{{i}}.{leaf}" for leaf in LEAVES]], keep_gathered=["right.{last}"])
    assert [unit.name for unit in plan.units if unit.keep_gathered] == ["right.11"]


def test_last_is_counted_in_every_stack():
    stacks = [[f"{stack}.{{i}}.{leaf}" for leaf in LEAVES] for stack in ("left", "right")]
    plan = resolve(groups=stacks, units=["Block"], keep_gathered=["*.{last}", "missing.{last}"])
    assert {unit.name for unit in plan.units if unit.keep_gathered} == {"left.2", "right.11"}


def test_units_are_kept_gathered_by_name():
    plan = resolve(groups=[STACK], units=["Block"], keep_gathered=["left.1", "bl*"])
    assert {unit.name for unit in plan.units if unit.keep_gathered} == {"left.1", "block"}


# keep_in_root, ties


@pytest.mark.parametrize("kept", ["block.inner", "block", "bl*.norm"])
def test_units_on_or_around_what_stays_in_the_root_dissolve(kept: str, caplog: pytest.LogCaptureFixture):
    plan = resolve(units=["Block", "Embedding"], keep_in_root=[kept])
    assert names(plan) == ["embed"]
    assert list(plan.dissolved) == ["block"]
    assert any("block stays in the root" in record.getMessage() for record in caplog.records)


def test_units_inside_of_one_that_dissolves_stay():
    plan = resolve(units=["Block", "Linear"], keep_in_root=["block.norm"])
    assert "block.inner" in names(plan)
    assert list(plan.dissolved) == ["block"]


def tied() -> Model:
    model = Model()
    model.head.weight = model.embed.weight
    return model


def test_both_units_of_a_tied_pair_dissolve_with_a_warning(caplog: pytest.LogCaptureFixture):
    plan = resolve(tied(), units=["Embedding", "Block"], modules=["head"])
    assert names(plan) == ["block"]
    assert set(plan.dissolved) == {"embed", "head"}
    assert all("tied" in reason for reason in plan.dissolved.values())
    assert sum(r.levelno == logging.WARNING for r in caplog.records) == 2


def test_a_unit_around_both_owners_of_a_tied_weight_stays():
    model = nn.ModuleDict({"lm": tied(), "other": Block()})
    plan = resolve(model, units=["Model", "Embedding"])
    assert names(plan) == ["lm"]
    assert set(plan.dissolved) == {"lm.embed"}


def test_a_group_of_both_owners_of_a_tied_weight_stays():
    plan = resolve(tied(), groups=[["embed", "head"]])
    assert len(plan.units) == 1
    assert sum(p.numel() for p in set(plan.units[0].parameters())) == 40
    assert plan.dissolved == {}


def test_a_module_used_twice_cannot_be_in_two_units():
    first, second = Block(), Block()
    second.inner = first.inner
    plan = resolve(nn.ModuleDict({"a": first, "b": second, "c": Block()}), units=["Block"])
    assert names(plan) == ["c"]
    assert set(plan.dissolved) == {"a", "b"}


def test_a_module_used_twice_can_be_a_unit_itself():
    first, second = Block(), Block()
    second.inner = first.inner
    plan = resolve(nn.ModuleDict({"a": first, "b": second}), units=["Linear"])
    assert names(plan) == ["a.inner"]


# forward methods


def test_only_methods_that_the_policy_has_are_registered():
    plan = resolve(forward_methods=["select_action", "predict_action_chunk", "plan"])
    assert plan.forward_methods == ("select_action",)
    assert WrapPlan().forward_methods == ("select_action", "predict_action_chunk")


# The user's own


def test_the_users_class_names_replace_the_plan_but_not_what_it_knows_of_the_policy():
    plan = WrapPlan(units=["Embedding"], keep_in_root=["block.norm"], forward_methods=["select_action"])
    resolved = resolve_by_class(["Layer", "Block"], plan, Model())
    assert sorted(names(resolved)) == sorted([f"left.{i}" for i in range(3)] + [f"right.{i}" for i in range(12)])
    assert set(resolved.dissolved) == {"block"}
    assert resolved.forward_methods == ("select_action",)
    assert resolved.source == "--accelerator.fsdp.wrap_modules"


@pytest.mark.parametrize(
    ("name", "close"),
    [("layer", "Layer"), ("Blok", "Block"), ("LinearLayer", "Linear"), ("Zzz", "Block"), ("ModuleList", "Block")],
)
def test_a_name_of_the_users_that_matches_nothing_is_refused_with_close_ones(name: str, close: str):
    with pytest.raises(ConfigError) as refused:
        resolve_by_class(["Block", name], WrapPlan(), Model())
    text = str(refused.value)
    assert text.startswith(f"--accelerator.fsdp.wrap_modules={name}: ")
    assert close in text.rpartition("close names: ")[2].split(", ")
    assert "ModuleList" not in text.rpartition(": ")[2]


def test_units_by_size_are_the_innermost_that_reach_the_minimum():
    # A layer has 8 + 40 + 76 parameters, its mlp alone 76, that one's first Linear 40, the second 36.
    model = Model()
    assert {n.rpartition(".")[2] for n in names(resolve_by_size(76, WrapPlan(), model))} == {"mlp"}
    assert {n for n in names(resolve_by_size(40, WrapPlan(), model)) if n.startswith("left.0")} == {
        "left.0.mlp.0",
        "left.0",
    }


def test_containers_are_never_units_by_size():
    by_size = resolve_by_size(1, WrapPlan(), Model())
    assert not any(isinstance(unit.modules[0], nn.ModuleList | nn.ModuleDict) for unit in by_size.units)
    assert names(resolve_by_size(100_000, WrapPlan(), Model())) == []


def test_units_by_size_leave_what_the_plan_keeps_in_the_root():
    by_size = resolve_by_size(1, WrapPlan(keep_in_root=["embed"]), Model())
    assert "embed" not in names(by_size)
    assert "embed" in by_size.dissolved


def test_size_does_not_count_what_inner_units_took():
    model = nn.Module()
    model.outer = nn.Module()
    model.outer.big = nn.Linear(10, 10)
    model.outer.small = nn.Linear(2, 2)
    assert names(resolve_by_size(100, WrapPlan(), model)) == ["outer.big"]
    assert sorted(names(resolve_by_size(6, WrapPlan(), model))) == ["outer.big", "outer.small"]


# The plan itself


def test_resolving_changes_nothing_and_works_on_meta():
    with torch.device("meta"):
        model = Model()
    before = dict(model.named_parameters())
    assert names(resolve(model, units=["Block"], groups=[STACK])) == names(resolve(units=["Block"], groups=[STACK]))
    assert all(param is before[name] and param.is_meta for name, param in model.named_parameters())


@pytest.mark.parametrize("words", [{"unit": ["Block"]}, {"units": "Block"}, {"units": [3]}, {"groups": ["left.{i}"]}])
def test_a_plan_takes_no_other_words_or_types(words: dict):
    with pytest.raises(ValidationError):
        WrapPlan(**words)


def test_the_toy_policy():
    policy = make_toy()
    plan = resolve_plan(WrapPlan(**TOY_PLAN | {"keep_gathered": ["joint.prefix.{last}"]}), policy, source="test")
    assert sorted(names(plan)) == [
        "blocks.0",
        "blocks.1",
        "joint.prefix.0",
        "joint.prefix.1",
        "joint.suffix.0",
        "joint.suffix.1",
        "state_proj",
        "unused",
    ]
    assert [unit.name for unit in plan.units if unit.keep_gathered] == ["joint.prefix.1"]
    in_units = {id(p) for unit in plan.units for p in unit.parameters()}
    left = {name for name, p in policy.named_parameters() if id(p) not in in_units}
    assert {name.partition(".")[0] for name in left} == {
        "embed",
        "env_proj",
        "frozen",
        "small",
        "gain",
        "queries",
        "out",
        "target",
    }
