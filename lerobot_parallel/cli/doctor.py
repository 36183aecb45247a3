"""`lerobot-parallel doctor`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lerobot_parallel.cli.output import in_words, print_json

if TYPE_CHECKING:
    from lerobot_parallel.diagnosis import Diagnosis


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path, exists=True), help="Where checkpoints would go.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(folder: Path | None, as_json: bool) -> None:
    """Say whether parallel training can work here, problems first, each with its way out.

    Looks at the versions of the host, torch and accelerate, the hook, devices, backends (two processes are started),
    shared memory, open files and free disk. Exits with 1 if something stands in the way of a sharded run.
    """
    from lerobot_parallel.diagnosis import diagnose

    seen = diagnose(folder)
    if as_json:
        print_json(dataclasses.asdict(seen) | {"healthy": seen.healthy})
    else:
        click.echo("\n".join([*_problems(seen), *_facts(seen.facts)]))
    if not seen.healthy:
        raise click.exceptions.Exit(1)


def _problems(seen: "Diagnosis") -> list[str]:
    words = {True: "problem", False: "warning"}
    lines = [f"{words[p.fatal]}: {p.about}: {p.problem}\n  way out: {p.way_out}" for p in seen.problems]
    return lines or ["no problems"]


def _facts(facts: dict[str, dict[str, Any]]) -> list[str]:
    rows = {name: _package(value) for name, value in facts["packages"].items()}
    hook = facts["hook"]
    rows["hook"] = f"{'active' if hook.get('active') else 'not active'}: {hook.get('reason', 'unknown')}"
    if devices := facts["devices"]:
        rows["devices"] = f"{devices['cpus']} CPUs, {_gpus(devices['gpus'])}"
    rows |= facts["backends"]
    rows["torchrun"] = facts["environment"].get("torchrun") or "not on PATH"
    return [f"{name:<16}  {value}" for name, value in (rows | _limits(facts["limits"])).items()]


def _limits(limits: dict[str, Any]) -> dict[str, str]:
    rows = {}
    if "shared_memory" in limits:
        rows["shared memory"] = f"{in_words(limits['shared_memory']['free'])} free"
    if "disk" in limits:
        rows["open files"] = str(limits["open_files"]["soft"])
        rows["disk"] = f"{in_words(limits['disk']['free'])} free in {limits['disk']['path']}"
    return rows


def _package(value: Any) -> str:
    return value if isinstance(value, str) else f"{value['version']} (supported: {value['supported']})"


def _gpus(gpus: list[dict[str, Any]]) -> str:
    return ", ".join(f"{gpu['name']} {in_words(gpu['bytes'])}" for gpu in gpus) or "no GPU"
