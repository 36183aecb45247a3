"""What commands share: a progress bar, sizes in words and as typed, one JSON object."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class Size(click.ParamType):
    """A number of bytes as in `5GB` or `500MiB`; decimal and binary units as in transformers."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", str(value).strip().upper())
        if match is None or match[2] not in _UNITS or not float(match[1]):
            self.fail(f"{value!r} is no size: give one as 5GB, 500MB or 1GiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


def in_words(nbytes: float) -> str:
    """3 significant digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def print_json(result: object) -> None:
    """One object on one line, on stdout; a path is a string."""
    content = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result
    click.echo(json.dumps(content, default=str))


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal, that takes the bytes done so far and the bytes there are."""
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
