"""What scripts keep with the job: what can be kept, and that nothing is changed without a word."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from elastic_ps.core import script_state
from elastic_ps.errors import UsageError


@pytest.mark.parametrize(
    "value",
    [0.9, 3, True, None, "a text", -math.inf, (1, (2.5, "b")), {"a": {"b": (1,)}}, 2**80, ""],
    ids=repr,
)
def test_what_json_can_have_comes_back(value: Any) -> None:
    assert script_state.from_text(script_state.to_text({"key": value})) == {"key": value}


def test_what_was_read_is_not_changed_within_but_may_be_written_again() -> None:
    read = script_state.from_text(script_state.to_text({"scores": [0.5], "at": {"epoch": 1}}))
    with pytest.raises(AttributeError):
        read["scores"].append(0.7)
    with pytest.raises(TypeError):
        read["at"]["epoch"] = 2
    assert script_state.from_text(script_state.to_text(read)) == read


def in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"best": torch.tensor(0.5)}, r"session\.state\['best'\] is of type Tensor; .* \.item\(\)"),
        ({"a": [{"b": {1, 2}}]}, r"session\.state\['a'\]\[0\]\['b'\] is of type set"),
        ({"a": {1: 0.5}}, r"a key of session\.state\['a'\] is 1; expected a string"),
        ({0: 0.5}, r"a key of session\.state is 0"),
        ({"a": 1, "rows": "x" * script_state.LIMIT}, r"the limit is 65536.* largest item is 'rows'"),
        ({"a": in_itself()}, "contains itself"),
    ],
)
def test_what_cannot_be_kept_is_named(state: dict[Any, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        script_state.to_text(state)


@pytest.mark.parametrize(
    "text", ["[]", "1", "{", "", "[" * 50_000, '{"a": ' * 9_000, '{"a": "' + "x" * script_state.LIMIT + '"}']
)
def test_a_text_that_is_no_state_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"state|line"):
        script_state.from_text(text)
