"""The support matrix of the README: what the test run saw, and nothing else.

python -m pytest tests/policies          # records
python -m tests.policies.matrix          # writes the table into README.md
"""

import fcntl
import json
import os
from pathlib import Path

from tests.policies.builds.common import Case

ROOT = Path(__file__).resolve().parents[2]
RECORDS = Path(__file__).with_name("matrix.json")
COLUMNS = ("FSDP2", "HSDP", "bf16", "resume")
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"
RECORD = "RECORD_MATRIX"
"""Set to 1, a test run updates `matrix.json`; otherwise it only reads it."""


def record(case: Case, column: str, *, note: str = "") -> None:
    """A test of this case passed up to here. Where nothing is recorded, it is compared with what is there.

    Args:
        note: what a plain yes would not say.
    """
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may record at once
        _record(case, column, note)


def _record(case: Case, column: str, note: str) -> None:
    records = read()
    entry = records.setdefault(case.policy, {"stubbed": case.stubbed, "passed": {}})
    passed = entry["passed"].setdefault(column, [])
    if case.name in passed and entry.get("notes", {}).get(column, "") == note:
        return
    if os.environ.get(RECORD) != "1":
        raise AssertionError(f"{case.name} passes {column}, but the matrix does not say so: run with {RECORD}=1")
    entry["passed"][column] = sorted({*passed, case.name})
    if note:
        entry.setdefault("notes", {})[column] = note
    entry["stubbed"] = case.stubbed or entry["stubbed"]
    RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


def read() -> dict[str, dict]:
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def table() -> str:
    """Markdown, one row a policy; a column says `yes` where a test passed, and a dash where none was run."""
    rows = ["| policy | " + " | ".join(COLUMNS) + " | stubbed in the tests |", "|---" * (len(COLUMNS) + 2) + "|"]
    for policy, entry in sorted(read().items()):
        cells = [_cell(entry, column) for column in COLUMNS]
        rows.append(f"| {policy} | {' | '.join(cells)} | {entry['stubbed'] or 'nothing'} |")
    return "\n".join(rows)


def _cell(entry: dict, column: str) -> str:
    if not entry["passed"].get(column):
        return "–"
    return ", ".join(filter(None, ["yes", entry.get("notes", {}).get(column)]))


def in_readme(text: str) -> str | None:
    """The table between the markers of a README, or None without markers."""
    if BEGIN not in text or END not in text:
        return None
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def write(path: Path) -> None:
    """Put the table between the markers of `path`, at its end if it has none."""
    text = path.read_text() if path.exists() else ""
    if in_readme(text) is None:
        text = f"{text.rstrip()}\n\n## Policies\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write(ROOT / "README.md")
