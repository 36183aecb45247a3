"""How much of a policy is in units at its default size, on meta, in a process of its own."""

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from lerobot_parallel.cli.main import main
from lerobot_parallel.config.runtime import FSDPConfig
from lerobot_parallel.plans import registry
from lerobot_parallel.plans.report import PlanReport, report
from tests.policies.builds.full_size import BUILDERS

# In percent, measured by other means (shared notes); ours is higher where a plan has more units.
MEASURED = {
    "act": 99.0,
    "diffusion": 95.8,
    "eo1": 90.3,
    "fastwam": 98.2,
    "groot": 76.1,
    "lingbot_va": 96.5,
    "molmoact2": 91.3,
    "pi0": 99.8,
    "pi05": 99.7,
    "pi0_fast": 84.6,
    "sarm": 95.2,
    "tdmpc": 100.0,
    "vla_jepa": 84.3,
    "vqbet": 95.8,
    "wall_x": 92.2,
}
BILLION = 1_000_000_000


def _report(name: str) -> PlanReport:
    policy = BUILDERS[name]()
    return report(name, policy, registry.resolve(policy, name, FSDPConfig()), dp_shard=8)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_units_cover_what_they_can_and_the_root_stays_small(world: Callable, name: str) -> None:
    (measured,) = world(_report, 1, name)
    print(name, measured)
    assert measured.coverage * 100 >= MEASURED[name] - 0.05
    if name in ("pi0", "pi05"):
        assert measured.coverage >= 0.93
    if measured.parameters > BILLION:
        assert measured.root <= 0.15 * measured.parameters
    # A unit is gathered whole beside the shards: none may be as large as what eight ranks save.
    assert measured.largest_unit < measured.parameters / 4 or measured.parameters < BILLION


def _command(*args: str) -> str:
    result = CliRunner().invoke(main, ["plans", *args])
    return result.stdout if result.exit_code == 0 else f"exit {result.exit_code}: {result.stderr}"


def test_the_command_measures_a_policy_from_its_defaults(world: Callable) -> None:
    (text,) = world(_command, 1, "sarm", "--dp-shard", "4", "--json")
    data = json.loads(text)
    assert (data["policy"], data["source"], data["units"]) == ("sarm", "built in", 16)
    assert data["classes"] == {"TransformerEncoderLayer": 16}
    # All trainable: fp32 master, gradient and two moments, over four ranks.
    assert data["per_rank_bytes"] == -(-data["parameters"] * 16 // 4)
    assert data["coverage"] == pytest.approx(1 - data["root"] / data["parameters"])


def _command_on(folder: str, *args: str) -> str:
    from lerobot_parallel.plans.skeleton import default_config

    config = default_config("act")
    config.dim_model = 32
    config.save_pretrained(folder)
    return _command(*args, "--config", folder)


def test_the_command_reads_a_config_and_speaks_in_lines(world: Callable, tmp_path) -> None:
    (text,) = world(_command_on, 1, str(tmp_path))
    assert "act (plan: built in)" in text and "17: 8 x ACTEncoderLayer" in text.replace("8 x BasicBlock, ", "")
    (refusal,) = world(_command_on, 1, str(tmp_path), "pi0")
    assert refusal.startswith("exit 1") and "is a config of act, not of pi0" in refusal


def test_the_command_lists_every_plan_without_building_one() -> None:
    rows = json.loads(CliRunner().invoke(main, ["plans", "--json"]).stdout)
    by_type = {row["policy"]: row for row in rows}
    assert by_type["fastwam"]["units"] == ["MoTLayer"]
    assert by_type["robometer"]["note"].startswith("not sharded")
    text = CliRunner().invoke(main, ["plans"]).stdout
    assert len(text.splitlines()) == len(rows)


@pytest.mark.parametrize(
    ("args", "words"),
    [(["nosuch"], "POLICY=nosuch"), (["--config", "/nowhere/config.json"], "--config=/nowhere/config.json")],
)
def test_the_command_refuses_on_one_line(world: Callable, args: list[str], words: str) -> None:
    (text,) = world(_command, 1, *args)
    assert text.startswith("exit 1") and words in text and text.strip().count("\n") == 0
