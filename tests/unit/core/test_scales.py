"""A function of the user's own says what the learning rate of a stale step is multiplied by."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from elastic_ps.api.consistency import Consistency
from elastic_ps.core import scales
from elastic_ps.errors import InvalidJob

MODULE = """
asked = []

def root(staleness):
    asked.append(staleness)
    return (1 + staleness) ** -0.5

def whole(staleness):
    return 1

def late(staleness):
    return 1 / (5 - staleness)

def negative(staleness):
    return 3 - staleness

def infinite(staleness):
    return float("inf")

def huge(staleness):
    return 10**400

def leaves(staleness):
    raise SystemExit(3)

def text(staleness):
    return "half"

def true(staleness):
    return True

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scales_of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_is_asked_before_anything_happens_and_not_again() -> None:
    scales.check("scales_of_a_user:root")
    import scales_of_a_user  # type: ignore[import-not-found]

    asked = list(scales_of_a_user.asked)
    assert scales.divisor("scales_of_a_user:root", 3) == pytest.approx(2)
    assert scales.divisor("scales_of_a_user:root", 10**9) == pytest.approx(math.sqrt(scales.TRIED + 1))
    assert scales_of_a_user.asked == asked == list(range(scales.TRIED + 1))


def test_built_in_ones() -> None:
    assert [scales.divisor(scale, 3) for scale in ("none", "inverse", "damped")] == [1, 4, 4]
    assert [scales.divisors(scale, 3) for scale in ("inverse", "damped")] == [(4, 4), (4, 2)]
    assert scales.divisor("inverse", 10**9) == 10**9 + 1
    for scale in (None, "none", "inverse", "damped"):
        scales.check(scale)
    assert scales.divisor("scales_of_a_user:whole", 7) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module_here:f", "cannot be imported: ModuleNotFoundError: No module named 'no_such"),
        (
            "scales_of_a_user:nothing",
            "cannot be imported: AttributeError: .*the parameter server, which calls",
        ),
        ("scales_of_a_user:number", "is of type int; expected a function"),
        ("scales_of_a_user:late", r"late\(5\) raises ZeroDivisionError: .* multiplied by"),
        ("scales_of_a_user:negative", r"negative\(3\) returns 0; expected a positive finite number"),
        ("scales_of_a_user:infinite", r"infinite\(0\) returns inf; expected a positive finite number"),
        ("scales_of_a_user:huge", r"huge\(0\) returns 10{400}; expected a positive finite number"),
        ("scales_of_a_user:leaves", r"leaves\(0\) raises SystemExit: 3. It takes the staleness"),
        ("scales_of_a_user:text", r"text\(0\) returns 'half'; expected a positive"),
        ("scales_of_a_user:true", r"true\(0\) returns True; expected a positive"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_sentence(name: str, why: str) -> None:
    Consistency(mode="async", staleness_scale=name)
    with pytest.raises(InvalidJob, match=why):
        scales.check(name)
