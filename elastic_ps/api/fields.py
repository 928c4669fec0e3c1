"""The types of a TrainingJob's fields: names, durations, pod templates."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

from elastic_ps.api import rules

MOST_SECONDS = 2**31 - 1
"""The longest duration in a job: 68 years. Much longer ones would exceed the range of Python's dates."""

_DURATION = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(value: object) -> timedelta:
    """Read a duration as Kubernetes writes it: `30s`, `1m30s`, `500ms`. A longer one is `MOST_SECONDS`.

    Raises:
        ValueError: `value` is not such a string (nor already a timedelta).
    """
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str) or not re.match(_DURATION, value):
        raise ValueError(f"{value!r} is not a duration; write it like 30s, 1m30s or 500ms")
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", value)
    seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    return timedelta(seconds=min(seconds, MOST_SECONDS))


def format_duration(value: timedelta) -> str:
    """Write a duration so that `parse_duration` reads it back."""
    milliseconds = round(value.total_seconds() * 1000)
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


Duration: TypeAlias = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration),
    WithJsonSchema({"type": "string", "pattern": _DURATION}),
]
AUTO: Final = "auto"


def parse_duration_or_auto(value: object) -> timedelta | Literal["auto"]:
    """Read a duration, or the word auto.

    Raises:
        ValueError: `value` is neither.
    """
    if value == AUTO:
        return AUTO
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


DurationOrAuto: TypeAlias = Annotated[
    timedelta | Literal["auto"],
    BeforeValidator(parse_duration_or_auto),
    PlainSerializer(lambda value: value if value == AUTO else format_duration(value)),
    WithJsonSchema({"type": "string", "pattern": f"^auto$|{_DURATION}"}),
]
PodTemplate: TypeAlias = dict[str, JsonValue]


def check_named(name: str, known: Sequence[str], *, what: str, own: str) -> str:
    """Return `name` if it is one of the `known` names, or names an object of the user as `module:name`.

    Args:
        what: what it names, such as "codec".
        own: the form of a user's own name, such as "module:Class".

    Raises:
        ValueError: it is neither.
    """
    if name in known or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return name
    nearest = difflib.get_close_matches(name, known, 1)
    hint = f"; {nearest[0]} is the nearest" if nearest else ""
    raise ValueError(f"there is no {what} {name!r}; expected one of {', '.join(known)}, or {own}{hint}")


class CamelModel(BaseModel):
    """A model with camel-case fields in YAML and JSON. It refuses unknown fields and broken rules.

    A null means what leaving the field out means, as for the API server.
    """

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, alias_generator=to_camel, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: object) -> object:
        if not isinstance(given, dict) or None not in given.values():
            return given
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values())}
        return {name: value for name, value in given.items() if value is not None or name not in known}

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        rules.check(self)
        return self
