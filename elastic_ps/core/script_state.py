"""The state that scripts keep with the job (`Session.state`): a small JSON object. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from elastic_ps.errors import UsageError

LIMIT = 64 * 1024
"""The largest state, in bytes: it is in each checkpoint, and a standby gets it with each version."""

EMPTY = "{}"


def to_text(state: Mapping[str, Any]) -> str:
    """The state as JSON. Infinities and NaN are written as Python's json does.

    Raises:
        UsageError: JSON cannot encode it, or it is too large.
    """
    try:
        text = json.dumps(_plain(state, "session.state"))
    except RecursionError as error:
        raise UsageError("session.state is nested too deeply, or contains itself") from error
    if (size := len(text.encode())) > LIMIT:
        largest = max(state, key=lambda key: len(json.dumps(_plain(state[key], ""))))
        raise UsageError(
            f"session.state would have {size} bytes as JSON; the limit is {LIMIT}, since it is part of every "
            f"checkpoint. The largest item is {largest!r}. Keep scores and counts in it, and write large "
            "data to a file"
        )
    return text


def from_text(text: str) -> dict[str, Any]:
    """The state, as immutable data, since changes within it would be lost.

    Raises:
        ValueError: the text is not a JSON object, or is too long.
    """
    if len(text.encode()) > LIMIT:
        raise ValueError(f"the state has more than {LIMIT} bytes")
    try:
        state = json.loads(text)
    except RecursionError as error:
        raise ValueError("the state is nested too deeply") from error
    if not isinstance(state, dict):
        raise ValueError(f"the state is {text[:100]!r}; expected a JSON object")
    return {key: _frozen(value) for key, value in state.items()}


def _plain(value: object, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(
                    f"a key of {where} is {key!r}; expected a string, since JSON has no other keys"
                )
        return {key: _plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    raise UsageError(
        f"{where} is of type {type(value).__name__}; expected a JSON value: a number, a string, a boolean, "
        "None, or a list or dict of these. For a tensor or an array with one element, use .item()"
    )


def _frozen(value: object) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(each) for each in value)
    if isinstance(value, dict):
        return MappingProxyType({key: _frozen(each) for key, each in value.items()})
    return value
