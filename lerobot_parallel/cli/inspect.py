"""`lerobot-parallel inspect`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lerobot_parallel.cli.output import in_words, print_json, progress_bar

if TYPE_CHECKING:
    from lerobot_parallel.checkpoint.inspection import Inspection


@click.command()
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="List every tensor of the model.")
@click.option("--verify", is_flag=True, help="Read all shards and compare checksums; exit 1 if anything is wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(checkpoint: Path, tensors: bool, verify: bool, as_json: bool) -> None:
    """Say what is in a checkpoint: step, topology, formats, tensors, sizes, complete or not.

    CKPT is a step directory, its pretrained_model or shard directory, .../checkpoints/last, a directory with a policy
    or with DCP shards. A run's output directory gives a table of its checkpoints. Nothing in it is executed.
    """
    from lerobot_parallel.checkpoint.inspection import run_checkpoints

    steps = run_checkpoints(checkpoint)
    seen = [_inspected(path, verify) for path in steps or [checkpoint]]
    if as_json:
        print_json({"checkpoints": [_content(each, tensors) for each in seen]} if steps else _content(seen[0], tensors))
    else:
        click.echo(_table(seen) if steps else _page(seen[0], tensors))
    if verify and not all(each.complete for each in seen):
        raise click.exceptions.Exit(1)


def _inspected(path: Path, verify: bool) -> "Inspection":
    from lerobot_parallel.checkpoint.inspection import Inspection, inspect_checkpoint
    from lerobot_parallel.config.errors import ConfigError

    try:
        if not verify:
            return inspect_checkpoint(path)
        with progress_bar() as progress:
            done = 0

            def step(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                progress(done, 0)

            return inspect_checkpoint(path, verify=True, progress=step)
    except ConfigError as error:
        if not path.name.isdecimal():
            raise
        return Inspection(path, "checkpoint", problems=[str(error)])


def _content(seen: "Inspection", tensors: bool) -> dict[str, Any]:
    content = dataclasses.asdict(seen) | {"complete": seen.complete, "tensor_count": len(seen.tensors)}
    if not tensors:
        del content["tensors"]
    return content


def _page(seen: "Inspection", tensors: bool) -> str:
    rows = {
        seen.kind: str(seen.path),
        "step": seen.step,
        "topology": _topology(seen),
        "policy": seen.policy,
        "dataset": seen.dataset,
        "weights": ", ".join(f"{name} ({in_words(seen.sizes.get(name, 0))})" for name in seen.formats),
        "tensors": _tensors(seen),
        "tied": "; ".join(" = ".join(names) for names in seen.tied),
        "beside the model": ", ".join(f"{root} ({count})" for root, count in seen.left_out.items()),
        "optimizer": seen.optimizer,
        "random state": f"of {seen.rng_ranks} ranks" if seen.rng_ranks else None,
        "processors": ", ".join(seen.processors),
        "written by": ", ".join(f"{name} {version}" for name, version in seen.versions.items()),
        "missing": "\n".join(seen.missing),
        "problems": "\n".join(seen.problems),
        "state": _state(seen),
    }
    lines = [_line(name, str(value)) for name, value in rows.items() if value not in (None, "")]
    return "\n".join(lines + (_listing(seen) if tensors else []))


def _line(name: str, value: str) -> str:
    first, *others = value.splitlines()
    return "\n".join([f"{name:<16}  {first}", *(f"{'':<16}  {other}" for other in others)])


def _state(seen: "Inspection") -> str:
    word = "complete" if seen.complete else "damaged" if seen.problems else "incomplete"
    return f"{word}, every stored tensor was read" if seen.verified else word


def _topology(seen: "Inspection") -> str | None:
    if seen.topology is None:
        return None
    degrees = seen.topology.get("parallelism") or {}
    ranks = seen.topology.get("dp_world_size") or seen.topology.get("num_processes")
    parts = [f"{ranks} processes" if ranks else "", *(f"{key}={value}" for key, value in degrees.items() if value != 1)]
    parts += [f"{key}={seen.topology[key]}" for key in ("batch_size", "grad_accum_steps") if key in seen.topology]
    return ", ".join(filter(None, parts))


def _tensors(seen: "Inspection") -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in seen.dtypes.items())
    return f"{len(seen.tensors)} ({dtypes}), {seen.parameters:,} numbers" if seen.tensors else ""


def _listing(seen: "Inspection") -> list[str]:
    width = max((len(tensor.name) for tensor in seen.tensors), default=0)
    shapes = [str(list(tensor.shape)) for tensor in seen.tensors]
    return [
        f"  {tensor.name:<{width}}  {tensor.dtype:<10}  {shape:<20}  {in_words(tensor.bytes):>8}  in {tensor.chunks}"
        for tensor, shape in zip(seen.tensors, shapes, strict=True)
    ]


def _table(seen: list["Inspection"]) -> str:
    head = ("step", "state", "weights", "optimizer", "size", "topology")
    rows = [head] + [
        (
            each.path.name,
            _state(each).partition(",")[0],
            "+".join(each.formats) or "-",
            each.optimizer or "-",
            in_words(sum(each.sizes.values())),
            _topology(each) or "-",
        )
        for each in seen
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines + [f"{each.path.name}: {text}" for each in seen for text in each.missing + each.problems])
