"""`lerobot-parallel convert`."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lerobot_parallel.checkpoint.convert import ConvertResult


@click.command()
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Write a new directory: weights, configs, processors.")
@click.option("--delete-dcp", is_flag=True, help="Remove the model shards once the file is written and verified.")
@click.option("--verify", is_flag=True, help="Read the file back and compare each tensor with the shards.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(checkpoint: Path, output: Path | None, delete_dcp: bool, verify: bool, as_json: bool) -> None:
    """Merge the DCP shards of a checkpoint into model.safetensors.

    CKPT is a step directory, its pretrained_model directory, .../checkpoints/last, or a run's output directory. The
    file is written next to the policy's config, where LeRobot looks for it. No GPU is needed.
    """
    from lerobot_parallel.checkpoint.convert import convert

    with _progress() as progress:
        result = convert(checkpoint, output=output, delete_dcp=delete_dcp, verify=verify, progress=progress)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), default=str))
    else:
        click.echo(_sentence(result))


def _sentence(result: "ConvertResult") -> str:
    size = f"{result.tensors} tensors, {result.bytes} bytes"
    if not result.converted:
        return f"nothing to convert: {result.path} is there already ({size}), and no shards"
    done = "verified, shards deleted" if result.deleted_dcp else "verified" if result.verified else ""
    return f"wrote {result.path}: {size}, {result.seconds:.2f} seconds" + (f", {done}" if done else "")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
