"""Converts between protobuf messages and types with fields of the same names, such as those of `core`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

from elastic_ps.codec.base import Packed, Part
from elastic_ps.core.ledger import Range
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.errors import Malformed
from elastic_ps.transport import messages_pb2 as pb

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def to_message(kind: type[M], value: Any, **given: Any) -> M:
    """A message with the fields of `value`, by name; the others come from `given`."""
    names = _common(kind.DESCRIPTOR, value.__class__) - given.keys()
    return kind(**{name: getattr(value, name) for name in names}, **given)


def fields(message: Message, *names: str) -> dict[str, Any]:
    """The values of these fields of a message, by name; None for an absent optional field."""
    known = message.DESCRIPTOR.fields_by_name
    return {
        name: getattr(message, name) if not known[name].has_presence or message.HasField(name) else None
        for name in names
    }


def from_message(kind: Callable[..., T], message: Message, **given: Any) -> T:
    """A `kind`, a dataclass or named tuple, from a message's fields by name; the others come from `given`."""
    names = _common(message.DESCRIPTOR, kind) - given.keys()
    return kind(**fields(message, *names), **given)


@cache
def _common(message: Any, kind: Any) -> frozenset[str]:
    """The field names that both have. `message`: the message's descriptor."""
    return frozenset(kind.__annotations__).intersection(message.fields_by_name)


def tensors_to_message(tensors: Iterable[TensorSpec]) -> list[pb.Tensor]:
    return [to_message(pb.Tensor, each) for each in tensors]


def tensors_from_message(messages: Iterable[pb.Tensor]) -> tuple[TensorSpec, ...]:
    """Raises Malformed for a dtype or rule that does not exist."""
    return tuple(
        from_message(
            TensorSpec,
            each,
            shape=tuple(each.shape),
            dtype=_dtype(each.dtype),
            rule=_rule(each.rule),
            aliases=tuple(each.aliases),
        )
        for each in messages
    )


def layout_to_message(layout: Layout) -> pb.Layout:
    buckets = [
        to_message(pb.Bucket, bucket, pieces=[to_message(pb.Piece, piece) for piece in bucket.pieces])
        for bucket in layout.buckets
    ]
    return pb.Layout(tensors=tensors_to_message(layout.tensors), buckets=buckets, shards=layout.shards)


def layout_from_message(message: pb.Layout) -> Layout:
    """Raises Malformed for a dtype or rule that does not exist."""
    buckets = [
        from_message(
            Bucket,
            each,
            index=index,
            dtype=_dtype(each.dtype),
            rule=_rule(each.rule),
            pieces=tuple(from_message(Piece, piece) for piece in each.pieces),
        )
        for index, each in enumerate(message.buckets)
    ]
    return Layout(tensors_from_message(message.tensors), tuple(buckets), message.shards)


def ranges_to_message(ranges: Iterable[Range]) -> list[pb.Range]:
    return [pb.Range(epoch=r.epoch, start=r.start, stop=r.stop) for r in ranges]


def ranges_from_message(messages: Sequence[pb.Range]) -> tuple[Range, ...]:
    return tuple(Range(m.epoch, m.start, m.stop) for m in messages)


def _dtype(name: str) -> str:
    if name not in ITEM_SIZE:
        raise Malformed(f"unknown dtype {name!r}; known: {', '.join(ITEM_SIZE)}")
    return name


def _rule(number: int) -> Rule:
    try:
        return Rule(number)
    except ValueError as error:
        raise Malformed(f"unknown rule {number}") from error


def run_to_message(packed: Packed) -> pb.Run:
    return to_message(pb.Run, packed, parts=[to_message(pb.Part, part) for part in packed.parts])


def run_from_message(message: pb.Run) -> Packed:
    return from_message(Packed, message, parts=tuple(from_message(Part, part) for part in message.parts))
