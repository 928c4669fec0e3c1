"""What a worker runs, and what is refused before."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ps.errors import InvalidJob
from elastic_ps.worker.entrypoint import load

CALLED: list[tuple[Any, ...]] = []


def main(epochs: int, lr: float = 0.1, *, name: str = "x") -> None:
    CALLED.append((epochs, lr, name))


def anything(**arguments: Any) -> None:
    CALLED.append(tuple(arguments.items()))


NOT_A_FUNCTION = 3


def test_the_arguments_are_passed_by_name() -> None:
    CALLED.clear()
    load(f"{__name__}:main", {"epochs": 3, "name": "y"})()
    load(f"{__name__}:anything", {"a": 1})()
    assert CALLED == [(3, 0.1, "y"), (("a", 1),)]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "main",
            {"epochs": 1, "learning_rate": 1},
            "unexpected keyword argument 'learning_rate'. Given:",
        ),
        ("main", {}, "missing a required argument: 'epochs'. Given: none"),
        ("NOT_A_FUNCTION", {}, "must be a function; it is of type int"),
        ("missing", {}, "has no 'missing'"),
    ],
)
def test_what_cannot_be_called_is_refused(name: str, arguments: dict[str, Any], said: str) -> None:
    CALLED.clear()
    with pytest.raises(InvalidJob, match=said):
        load(f"{__name__}:{name}", arguments)
    assert CALLED == []
