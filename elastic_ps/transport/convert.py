"""Converts between protobuf messages and types with fields of the same names, such as those of `core`.

`OWN` lists types that are texts or numbers in messages. A tuple is a message with its fields in that order.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from elastic_ps.api.mutable import MutableFields, read_mutable
from elastic_ps.core.ledger import Range
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Layout, Rule, TensorSpec, divided
from elastic_ps.core.settings import Settings, read_settings
from elastic_ps.core.stages import StandbyState
from elastic_ps.errors import InvalidJob, Malformed
from elastic_ps.transport import messages_pb2 as pb

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def to_message(kind: type[M], value: Any, **given: Any) -> M:
    """A message with the fields of `value`, by name; the others come from `given`."""
    shared = _shared(kind.DESCRIPTOR, value.__class__)
    return kind(
        **{name: each.send(value) for name, each in shared.items() if name not in given},
        **given,
    )


def from_message(kind: Callable[..., T], message: Message, **given: Any) -> T:
    """A `kind`, a dataclass or named tuple, from a message's fields by name; the others come from `given`.

    Raises:
        Malformed: a text or a number is not what the type of the field allows, or a field without which there
            is no `kind` is absent.
    """
    shared = _shared(message.DESCRIPTOR, kind)
    return kind(**{name: each.take(message) for name, each in shared.items() if name not in given}, **given)


def fields(message: Message, *names: str) -> dict[str, Any]:
    """The values of these fields of a message, by name; None for an absent optional field."""
    may_be_absent = _optional(message.DESCRIPTOR)
    return {
        name: getattr(message, name) if name not in may_be_absent or message.HasField(name) else None
        for name in names
    }


@cache
def _optional(message: Any) -> Set[str]:
    """The names of the fields that may be absent, for a message's descriptor."""
    return {field.name for field in message.fields if field.has_presence}


class _Converter(NamedTuple):
    """Converts a value for a message, and back."""

    send: Callable[[Any], Any]
    take: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


@cache
def _shared(message: Any, kind: Any) -> Mapping[str, _Converter]:
    """The fields that both have, by name. Here `send` and `take` get the whole value or message.

    Args:
        message: the message's descriptor.
    """
    hints = get_type_hints(kind)
    return {field.name: _field(field, hints[field.name]) for field in message.fields if field.name in hints}


def _field(field: Any, hint: Any) -> _Converter:
    name, kind, may_be_absent = field.name, _without_none(hint), field.has_presence
    send, take = _value(field, kind)
    found = attrgetter(name)
    may_be_none = kind is not hint

    def to_field(value: Any) -> Any:
        value = found(value)
        return None if value is None else send(value)

    def from_field(message: Any) -> Any:
        if may_be_absent and not message.HasField(name):
            if not may_be_none:
                raise Malformed(f"{message.DESCRIPTOR.name} has no {name}")
            return None
        value = found(message)
        return None if may_be_none and not may_be_absent and not value else take(value)

    as_it_is = take is _same and not may_be_none and not may_be_absent
    return _Converter(found if send is _same else to_field, found if as_it_is else from_field)


def _without_none(hint: Any) -> Any:
    """`X` of a hint `X | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    return hint


def _value(field: Any, kind: Any) -> _Converter:
    """The converter of a field that is there, from and to `kind`."""
    if kind in OWN:
        return OWN[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if field.message_type is None:
        if origin is frozenset:
            return _Converter(sorted, frozenset)
        return _Converter(_same, tuple if origin is tuple else _same)
    if field.message_type.GetOptions().map_entry:
        return _Converter(dict, dict)
    if field.has_presence:
        return _message(field, kind)
    one = _message(field, inner[0])
    return _Converter(
        lambda values: [one.send(each) for each in values], lambda found: tuple(map(one.take, found))
    )


def _message(field: Any, kind: Any) -> _Converter:
    made, names = GetMessageClass(field.message_type), [each.name for each in field.message_type.fields]
    if get_origin(kind) is tuple:
        return _Converter(
            lambda value: made(**dict(zip(names, value, strict=True))),
            lambda message: tuple(getattr(message, name) for name in names),
        )
    return _Converter(partial(to_message, made), partial(from_message, kind))


def tensors_to_message(tensors: Iterable[TensorSpec]) -> list[pb.Tensor]:
    return [to_message(pb.Tensor, each) for each in tensors]


def tensors_from_message(messages: Iterable[pb.Tensor]) -> tuple[TensorSpec, ...]:
    """Raises Malformed for a dtype or rule that does not exist."""
    return tuple(
        from_message(TensorSpec, each, dtype=each.dtype if each.rule == Rule.EXTERNAL else _dtype(each.dtype))
        for each in messages
    )


def layout_to_message(layout: Layout) -> pb.Layout:
    return to_message(pb.Layout, layout, tensors=tensors_to_message(layout.every))


def layout_from_message(message: pb.Layout) -> Layout:
    """Raises Malformed for a dtype or rule that does not exist."""
    buckets = [
        from_message(Bucket, each, index=index, dtype=_dtype(each.dtype))
        for index, each in enumerate(message.buckets)
    ]
    tensors, base = divided(tensors_from_message(message.tensors))
    return Layout(tensors, tuple(buckets), message.shards, base)


def ranges_to_message(ranges: Iterable[Range]) -> list[pb.Range]:
    return [pb.Range(epoch=r.epoch, start=r.start, stop=r.stop) for r in ranges]


def ranges_from_message(messages: Sequence[pb.Range]) -> tuple[Range, ...]:
    return tuple(Range(m.epoch, m.start, m.stop) for m in messages)


def settings_from_message(text: str) -> Settings:
    """Raises Malformed if `text` is not what `Settings.to_json` writes."""
    try:
        return read_settings(text)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Malformed(f"not the settings of an optimizer: {error}") from error


def _mutable(text: str) -> MutableFields:
    try:
        return read_mutable(text, source="tuning")
    except InvalidJob as error:
        raise Malformed(str(error)) from error


def _dtype(name: str) -> str:
    if name not in ITEM_SIZE:
        raise Malformed(f"unknown dtype {name!r}; known: {', '.join(ITEM_SIZE)}")
    return name


def _rule(number: int) -> Rule:
    try:
        return Rule(number)
    except ValueError as error:
        raise Malformed(f"unknown rule {number}") from error


_STANDBYS: tuple[StandbyState | None, ...] = (None, *StandbyState)
"""Indexed by their numbers in messages."""


def _standby(number: int) -> StandbyState | None:
    if number >= len(_STANDBYS):
        raise Malformed(f"{number} is not a state of a standby")
    return _STANDBYS[number]


OWN: Mapping[Any, _Converter] = {
    Layout: _Converter(layout_to_message, layout_from_message),
    MutableFields: _Converter(MutableFields.to_json, _mutable),
    Rule: _Converter(_same, _rule),
    Settings: _Converter(Settings.to_json, settings_from_message),
    StandbyState: _Converter(_STANDBYS.index, _standby),
    timedelta: _Converter(
        lambda time: round(time.total_seconds() * 1e6), lambda count: timedelta(microseconds=count)
    ),
}
"""Conversions of types without a message of their own, or that need a check. Times are in microseconds."""
