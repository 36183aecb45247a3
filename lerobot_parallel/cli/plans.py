"""`lerobot-parallel plans`."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from lerobot_parallel.config.errors import ConfigError

if TYPE_CHECKING:
    from lerobot_parallel.plans.report import PlanReport


@click.command()
@click.argument("policy", required=False)
@click.option("--config", metavar="FILE", help="A config.json, a train_config.json, or a directory with one.")
@click.option("--dp-shard", type=click.IntRange(min=1), default=8, show_default=True, help="Ranks that share one copy.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(policy: str | None, config: str | None, dp_shard: int, as_json: bool) -> None:
    """Show which modules of a policy are sharded together.

    Without POLICY: every plan that is known here, and who gave it. With one, or with a config: units, coverage and
    sizes, from the config alone, without its weights.
    """
    if policy is None and config is None:
        rows = _known_plans()
        click.echo(json.dumps(rows, indent=1) if as_json else "\n".join(_line(row) for row in rows))
        return
    measured = _measure(policy, config, dp_shard)
    click.echo(json.dumps(dataclasses.asdict(measured), indent=1) if as_json else _paragraph(measured))


def _known_plans() -> list[dict[str, Any]]:
    from lerobot_parallel.plans.registry import known_plans

    return known_plans()


def _line(row: dict[str, Any]) -> str:
    note = row["note"] and f"; {row['note']}"
    return f"{row['policy']:<18} {row['source']:<12} {', '.join(row['units'])}{note}"


def _measure(policy: str | None, config: str | None, dp_shard: int) -> "PlanReport":
    from lerobot_parallel.config.runtime import FSDPConfig
    from lerobot_parallel.plans import registry
    from lerobot_parallel.plans.report import report
    from lerobot_parallel.plans.skeleton import build_skeleton, default_config, read_config

    made = read_config(config) if config is not None else default_config(policy)
    if policy is not None and made.type != policy:
        raise ConfigError(
            "--config", config, f"is a config of {made.type}, not of {policy}", "drop the argument or the option"
        )
    built = build_skeleton(made)
    return report(made.type, built, registry.resolve(built, made.type, FSDPConfig()), dp_shard=dp_shard)


def _paragraph(measured: "PlanReport") -> str:
    units = ", ".join(f"{count} x {name}" for name, count in measured.classes.items()) or "none"
    rows = {
        "policy": f"{measured.policy} (plan: {measured.source})",
        "parameters": f"{measured.parameters:,}, {measured.trainable:,} of them trainable",
        "units": f"{measured.units}: {units}",
        "coverage": f"{measured.coverage:.1%} of the parameters are in units",
        "largest unit": f"{measured.largest_unit:,} ({measured.largest_unit_name})",
        "root": f"{measured.root:,}",
        "per rank": f"{_gib(measured.per_rank_bytes)} of weights, gradients and AdamW state "
        f"at dp_shard={measured.dp_shard}",
        "gathered": f"{_gib(measured.gathered_bytes)} more for the root and the largest unit in bf16",
    }
    return "\n".join(f"{name:<13} {value}" for name, value in rows.items())


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
