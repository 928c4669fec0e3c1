"""Marks in the annotations of a job's fields: what a field goes with, and how it may change.

Python's validation, the API server's rules (in CEL), the fields of `elastic-ps set` and the reference page
are made from these marks. A `Rule`, written in both languages, expresses what marks cannot.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Change:
    """How a field, and the fields below it, may change while the job runs.

    Attributes:
        how: in words.
        why: why the field cannot change.
    """

    how: str
    why: str = ""


NEVER = Change("no")
"""Whether the API server refuses a change."""
IGNORED = Change("no effect")
SET = Change("`elastic-ps set`, `kubectl patch`")
SCALE = Change("`elastic-ps scale`, `kubectl scale`")
PATCH = Change("`kubectl patch`")
NEW_PODS = Change("`kubectl patch`, for pods made afterwards")
NOT_LOCALLY = Change("not in mode local")


@dataclass(frozen=True)
class Rule:
    """A condition that a part of a job has to meet.

    Attributes:
        cel: the rule for the API server; `self` is the part, `oldSelf` the part before a change.
        message: the API server's message if the rule is broken.
        holds: the rule in Python. Rules only for clusters always hold.
        says: the message in Python, with the values of the part and what to do.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] = lambda _: True
    says: Callable[[Any], str] = lambda _: ""

    def rule(self, model: type[BaseModel], field: str, path: str) -> Rule:
        """The rule of a field of `model`. Messages name the model by its `path` in the job."""
        del model, field, path
        return self


class Operand:
    """A field's name in rules. `path` has Python names, with dots for a field further below."""

    def __init__(self, model: type[BaseModel], path: str) -> None:
        self.names = path.split(".")
        *parents, field = self.names
        for parent in parents:
            model = part_of(model.model_fields[parent]) or model
        self.default = model.model_fields[field].default
        self.of: Callable[[Any], Any] = operator.attrgetter(path)
        self.name = ".".join(map(to_camel, self.names))
        self.cel = f"self.{self.name}"
        self.absent = f"{self.cel} == {self.default}"
        """CEL: the field is left out, or has its default."""
        if self.default is None or self.default is False:
            self.absent = f"!has({self.cel})" if self.default is None else f"!{self.cel}"

    def given(self, part: Any) -> bool:
        return bool(self.of(part) != self.default)

    def say(self, part: Any) -> str:
        """The name and the value of a field, for messages, as in YAML."""
        written: Any = part.model_dump(mode="json")
        for name in self.names:
            written = written[name]
        if isinstance(written, bool):
            return f"{self.name}: {json.dumps(written)}"
        return f"{self.name} {written:g}" if isinstance(written, float) else f"{self.name} {written}"


@dataclass(frozen=True)
class OnlyWith:
    """The field may be given only if another one has one of these values.

    Attributes:
        other: the other field, of the same part. Its default is one of these values.
        where: why the field has no meaning with other values.
        needed: the message if the field is missing, for a field that must be given with these values.
    """

    other: str
    values: tuple[str, ...]
    where: str = ""
    needed: str = ""

    def rule(self, model: type[BaseModel], field: str, path: str) -> Rule:
        own, other, values = Operand(model, field), Operand(model, self.other), " or ".join(self.values)
        fits = f"{other.cel} in {list(self.values)}" if self.values[1:] else f"{other.cel} == '{values}'"
        fits = f"{other.absent} || {fits}" if other.default is None else fits

        def has(part: Any) -> bool:
            return other.of(part) in (None, *self.values)

        def says(part: Any) -> str:
            if has(part):
                return f"{other.say(part)} needs {own.name}: {self.needed}"
            instead = f"leave it out, or set {other.name}: {values}"
            if own.default is not None:
                return f"{own.name} works only with {other.name} {values}; {instead}"
            where = f", where {self.where}" if self.where else ""
            return f"{own.say(part)} has no meaning with {other.say(part)}{where}; {instead}"

        if self.needed:
            message = f"{path}{own.name} must be set with {other.name} {values}, and only then"
            return Rule(f"({fits}) == has({own.cel})", message, lambda p: has(p) == own.given(p), says)
        message = f"{path}{own.name} works only with {other.name} {values}"
        return Rule(f"{fits} || {own.absent}", message, lambda p: has(p) or not own.given(p), says)


@dataclass(frozen=True)
class NotWith:
    """The field, or one `value` of it, cannot be combined with another field of the same part."""

    other: str
    because: str
    value: str = ""

    def rule(self, model: type[BaseModel], field: str, path: str) -> Rule:
        own, other = Operand(model, field), Operand(model, self.other)
        name = f"{own.name} {self.value}".rstrip()
        fine = f"{own.absent} || " + (f"{own.cel} != '{self.value}' || " if self.value else "")

        def holds(part: Any) -> bool:
            meant = own.of(part) == self.value if self.value else own.given(part)
            return not (meant and other.given(part))

        def says(part: Any) -> str:
            both = f"{own.say(part)} cannot be combined with {other.say(part)}"
            return f"{both}, because {self.because}; leave one of the two out"

        message = f"{path}{name} and {other.name} cannot be combined: {self.because}"
        return Rule(fine + other.absent, message, holds, says)


@dataclass(frozen=True)
class AtMost:
    """The field, or one below it, must be at most as large as another field of the part.

    Attributes:
        bound: the other field; with dots if it is further below.
        of: the field below this one that is compared.
        because: what would go wrong.
        do: the advice; `{given}` and `{bound}` stand for the values.
    """

    bound: str
    of: str = ""
    because: str = ""
    do: str = ""
    sign: ClassVar = "<="
    beyond: ClassVar = "above"
    within: ClassVar[Callable[[Any, Any], bool]] = operator.le

    def rule(self, model: type[BaseModel], field: str, path: str) -> Rule:
        own = Operand(model, f"{field}.{self.of}" if self.of else field)
        bound = Operand(model, self.bound)
        fine = "".join(f"{each.absent} || " for each in (own, bound) if each.default is None)

        def holds(part: Any) -> bool:
            given, most = own.of(part), bound.of(part)
            return given is None or most is None or type(self).within(given, most)

        def says(part: Any) -> str:
            do = self.do.format(given=own.of(part), bound=bound.of(part))
            return f"{own.say(part)} is {self.beyond} {bound.say(part)}{self.because}{do}"

        message = f"{path}{own.name} is {self.beyond} {path}{bound.name}{self.because}"
        return Rule(f"{fine}{own.cel} {self.sign} {bound.cel}", message, holds, says)


class AtLeast(AtMost):
    """Like `AtMost`, but at least as large."""

    sign, beyond, within = ">=", "below", operator.ge


Marks = Rule | OnlyWith | NotWith | AtMost


class Field(NamedTuple):
    """A field of a job.

    Attributes:
        path: its path in YAML, from the beginning of the walk.
        own: its own mark of how it may change; None if it has none.
        change: its own mark, or that of the part which contains it.
    """

    path: str
    info: FieldInfo
    own: Change | None
    change: Change | None


def fields_of(model: type[BaseModel], path: str = "", change: Change | None = None) -> Iterator[Field]:
    """The fields of the part of a job at `path`, which itself may change as `change` says."""
    for name, info in model.model_fields.items():
        own = next((mark for mark in info.metadata if isinstance(mark, Change)), None)
        yield Field(f"{path}{info.alias or name}", info, own, own or change)


def fields(model: type[BaseModel], path: str = "", change: Change | None = None) -> Iterator[Field]:
    """All fields below `model`, each before those below it."""
    for field in fields_of(model, path, change):
        yield field
        if (part := part_of(field.info)) is not None:
            yield from fields(part, f"{field.path}.", field.change)


def names_of(model: type[BaseModel], change: Change) -> tuple[str, ...]:
    """The YAML names of a part's fields that have this mark themselves."""
    return tuple(field.path for field in fields_of(model) if field.own and field.own.how == change.how)


def part_of(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a field's value; None if the value has no fields."""
    kinds = (info.annotation, *get_args(info.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def rules_of_field(model: type[BaseModel], name: str, path: str = "") -> Iterator[Rule]:
    """The marks of a field that are rules."""
    for mark in model.model_fields[name].metadata:
        if isinstance(mark, Marks):
            yield mark.rule(model, name, path)


@functools.cache
def rules_of(model: type[BaseModel], path: str = "") -> tuple[Rule, ...]:
    """The rules of a part of a job. `path` names the part in messages."""
    return tuple(rule for name in model.model_fields for rule in rules_of_field(model, name, path))


def check(part: BaseModel) -> None:
    """Raise ValueError, with what is wrong and what to do, if the part breaks a rule."""
    for rule in rules_of(type(part)):
        if not rule.holds(part):
            raise ValueError(rule.says(part))
