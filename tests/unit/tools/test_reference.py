"""The reference of a job's fields is the one that they say, and each field says how it may change."""

from __future__ import annotations

from elastic_ps.api import rules
from elastic_ps.api.job import TrainingJobSpec
from tools.reference import TARGET, page


def test_it_is_up_to_date() -> None:
    assert TARGET.read_text() == page(), "run `make manifests`"


def test_each_field_says_how_it_may_change() -> None:
    found = list(rules.fields(TrainingJobSpec))
    silent = [each.path for each in found if each.change is None and rules.part_of(each.info) is None]
    assert silent == []
    text = page()
    assert [each.path for each in found if f"| `{each.path}` |" not in text] == []
