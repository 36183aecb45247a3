"""`lerobot-parallel convert`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lerobot_parallel.cli.output import Size, in_words, print_json, progress_bar

if TYPE_CHECKING:
    from lerobot_parallel.checkpoint.convert import ConvertResult, ShardResult


@click.command()
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Write a new directory: weights, configs, processors.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Cast floating tensors; others keep theirs.")
@click.option("--max-shard-size", type=Size(), help="Several files and an index; LeRobot 0.6 loads one only.")
@click.option("--delete-dcp", is_flag=True, help="Remove the model shards once the file is written and verified.")
@click.option("--verify", is_flag=True, help="Read back what was written and compare it.")
@click.option("--jobs", type=click.IntRange(min=1), help="Ranges copied at a time (default: CPUs, at most 4).")
@click.option("--to", type=click.Choice(["safetensors", "dcp"]), default="safetensors", help="dcp goes the other way.")
@click.option("--push-to-hub", "repo", metavar="REPO", help="Upload the result as a model repository.")
@click.option("--private", is_flag=True, help="With --push-to-hub: create the repository private.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and how large it is; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(
    checkpoint: Path, to: str, repo: str | None, private: bool, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Merge the DCP shards of a checkpoint into model.safetensors.

    CKPT is a step directory, its pretrained_model or shard directory, .../checkpoints/last, or a run's output
    directory; or a directory of DCP shards of other software, with --output. The file is written next to the policy's
    config, where LeRobot looks for it. No GPU is needed.

    With --to dcp: write DCP shards from model.safetensors.
    """
    _check_usage(to, repo, private, dry_run, options)
    work = _to_dcp if to == "dcp" else _to_safetensors
    result = work(checkpoint, dry_run=dry_run, options=options)
    content = dataclasses.asdict(result) | {"dry_run": dry_run}
    if repo is not None:
        content["url"] = _push(result.path.parent, repo, private, quiet=as_json)
    if as_json:
        print_json(content)


def _check_usage(to: str, repo: str | None, private: bool, dry_run: bool, options: dict[str, Any]) -> None:
    if to == "dcp" and repo is not None:
        raise click.UsageError("--push-to-hub uploads weights files, and --to dcp writes none")
    for name in ("dtype", "max_shard_size", "delete_dcp"):
        if to == "dcp" and options[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} belongs to the way from shards to a weights file")
    if private and repo is None:
        raise click.UsageError("--private belongs to --push-to-hub")
    if dry_run and repo is not None:
        raise click.UsageError("--dry-run uploads nothing: drop --push-to-hub")


def _to_safetensors(checkpoint: Path, *, dry_run: bool, options: dict[str, Any]) -> "ConvertResult":
    from lerobot_parallel.checkpoint.convert import convert

    with progress_bar() as progress:
        result = convert(checkpoint, dry_run=dry_run, progress=progress, **options)
    _tell(checkpoint, result.source)
    for root, count in (result.left_out or {}).items():
        click.echo(f"left out: {count} values under {root!r}, beside the model", err=True)
    for name, kept in (result.tied or {}).items():
        click.echo(f"tied: {name} is {kept}, written once", err=True)
    click.echo(_sentence(result, dry_run), err=_is_json())
    return result


def _to_dcp(checkpoint: Path, *, dry_run: bool, options: dict[str, Any]) -> "ShardResult":
    from lerobot_parallel.checkpoint.convert import to_dcp

    kept = {name: options[name] for name in ("output", "verify", "jobs")}
    with progress_bar() as progress:
        result = to_dcp(checkpoint, dry_run=dry_run, progress=progress, **kept)
    _tell(checkpoint, result.source)
    verb = "would write" if dry_run else "wrote"
    text = f"{verb} {result.path}: {result.tensors} tensors, {in_words(result.bytes)}"
    click.echo(text + _speed(result) + (", verified" if result.verified else ""), err=_is_json())
    return result


def _is_json() -> bool:
    return click.get_current_context().params["as_json"]


def _tell(given: Path, taken: Path) -> None:
    """Which checkpoint was taken, where the user did not name it."""
    if given.absolute() != taken:
        click.echo(f"taking {taken}", err=True)


def _sentence(result: "ConvertResult", dry_run: bool) -> str:
    size = f"{result.tensors} tensors, {in_words(result.bytes)}"
    if not result.converted and not dry_run:
        return f"nothing to convert: {result.path} is there already ({size}), and no shards"
    lines = [f"{'would write' if dry_run else 'wrote'} {result.path}: {size}{_speed(result)}{_afterwards(result)}"]
    if len(result.files) > 1:
        lines += [f"  {file.name}  {in_words(file.bytes)}" for file in result.files]
    return "\n".join(lines)


def _speed(result: "ConvertResult | ShardResult") -> str:
    if not result.seconds:
        return ""
    return f", {result.seconds:.2f} seconds, {in_words(result.bytes / result.seconds)}/s"


def _afterwards(result: "ConvertResult") -> str:
    return (", verified" if result.verified else "") + (", shards deleted" if result.deleted_dcp else "")


def _push(folder: Path, repo: str, private: bool, *, quiet: bool) -> str:
    from lerobot_parallel.training.publish import publish_directory

    url = publish_directory(folder, repo, private=private or None)
    click.echo(f"Model pushed to {url}", err=quiet)
    return url
