"""The reference says what the code says: its pages are up to date, and no field or reason is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from elastic_ps.api import rules
from elastic_ps.api.job import TrainingJobSpec
from tools.reasons import CONDITIONS, EVENTS
from tools.reference import api_page, commands_page, job_page, pages

ROOT = Path(__file__).parents[3]
OF_KUBERNETES = {"Forbidden", "NamespaceTerminating", "Refused"}
"""Reasons that the operator takes from the API server's answer, or makes of it."""
IN_EVENTS_ONLY = {
    "Deleted",
    "Recovered",
    "RolledBack",
    "ConsistencyChanged",
    "CompressionChanged",
    "Evaluated",
    "EvaluationMissed",
}


def reasons_in_code() -> set[str]:
    """Each reason that a Problem, a Finding or a Note is made with, as far as it stands in the code."""
    files = [*(ROOT / "operator/elastic_operator").glob("*.py"), ROOT / "elastic_ps/core/divergence.py"]
    trees = [ast.parse(file.read_text()) for file in files]
    constants = {
        target.id: node.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def words(node: ast.expr) -> set[str]:
        if isinstance(node, ast.Name) and node.id in constants:
            return words(constants[node.id])
        if isinstance(node, ast.IfExp):
            return words(node.body) | words(node.orelse)
        if isinstance(node, ast.Subscript):
            return words(node.value)
        if isinstance(node, ast.Dict):
            return {word for value in node.values for word in words(value)}
        return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()

    place = {"Problem": 0, "Finding": 0, "Note": 2}
    return {
        word
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in place
        for word in words(node.args[place[node.func.id]])
    }


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_each_page_is_up_to_date(path: Path) -> None:
    assert path.read_text() == pages()[path], "run `make manifests`"


def test_each_field_says_how_it_may_change() -> None:
    found = list(rules.fields(TrainingJobSpec))
    silent = [each.path for each in found if each.change is None and rules.part_of(each.info) is None]
    assert silent == []
    text = job_page()
    assert [each.path for each in found if f"| `{each.path}` |" not in text] == []


def test_each_reason_is_explained_and_exists() -> None:
    explained = {name for row in CONDITIONS for name in row.names}
    of_conditions = reasons_in_code() - IN_EVENTS_ONLY
    ends = {"Succeeded", "Failed"}  # the reason with which Running ends is the phase
    assert explained == of_conditions | OF_KUBERNETES | ends
    assert {name for row in EVENTS for name in row.names} >= IN_EVENTS_ONLY


def test_an_option_without_help_is_not_listed() -> None:
    assert "==SUPPRESS==" not in commands_page()


def test_what_pages_import_is_public() -> None:
    """Each name that a page by hand imports from a package of ours is in the Python API."""
    shown = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", api_page(), re.MULTILINE))
    pages_by_hand = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference"]
    imported = {
        f"{package}.{name}"
        for path in pages_by_hand
        for package, names in re.findall(
            r"^from (elastic_ps[\w.]*) import (.+)$", path.read_text(), re.MULTILINE
        )
        for name in names.split(", ")
    }
    assert imported
    modules = {name.rpartition(".")[0] for name in shown}
    assert imported - shown - modules == set()
