"""docs/coming-from/index.md is honest: what works names its test, and the rest is said to be missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from" / "index.md").read_text()
HEAD = "| here | tested by |"
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
UNTESTED = ("not yet", "a `Dockerfile` of your own")
"""What the second column of a row begins with that names no test."""


@pytest.mark.parametrize("row", [row for row in ROWS if not row.endswith(HEAD)])
def test_a_row_names_its_test_or_says_that_it_is_not_there(row: str) -> None:
    _, theirs, ours, proof, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
    assert theirs
    if not proof:
        assert ours.startswith(UNTESTED), "what works is tested"
        return
    path, name = proof.strip("`").split("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_there_is_a_table_for_each() -> None:
    assert sum(row.endswith(HEAD) for row in ROWS) == 4
