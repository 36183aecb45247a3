"""The README's support matrix is the one that the test run recorded."""

from pathlib import Path

import pytest

from lerobot_parallel.plans.builtin import BUILTIN_PLANS
from tests.policies import matrix
from tests.policies.cases import CASES


def test_the_readme_shows_the_recorded_matrix() -> None:
    readme = matrix.ROOT / "README.md"
    shown = matrix.in_readme(readme.read_text()) if readme.exists() else None
    if shown is None:
        pytest.skip("no README with the markers")
    assert shown == matrix.table(), "run: python -m tests.policies.matrix"


def test_every_trainable_type_that_can_be_sharded_has_a_case_and_a_row() -> None:
    trainable = {name for name, plan in BUILTIN_PLANS.items() if not getattr(plan, "unshardable", "")}
    assert {case.policy for case in CASES.values()} == trainable == set(matrix.read())


def test_nothing_is_recorded_of_cases_that_are_gone() -> None:
    recorded = {name for entry in matrix.read().values() for names in entry["passed"].values() for name in names}
    assert recorded <= CASES.keys()


def test_the_table_is_put_between_the_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# A\n\n{matrix.BEGIN}\nold\n{matrix.END}\n\n## B\n")
    matrix.write(readme)
    assert readme.read_text() == f"# A\n\n{matrix.BEGIN}\n{matrix.table()}\n{matrix.END}\n\n## B\n"
    matrix.write(readme)
    assert matrix.in_readme(readme.read_text()) == matrix.table()
