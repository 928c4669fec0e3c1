"""Between the protobuf messages and the types of `core`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic_ps.codec.base import Packed, Part
from elastic_ps.core.ledger import Range
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.errors import Malformed
from elastic_ps.transport import messages_pb2 as pb


def tensors_to_message(tensors: Iterable[TensorSpec]) -> list[pb.Tensor]:
    return [
        pb.Tensor(
            name=t.name,
            shape=t.shape,
            dtype=t.dtype,
            rule=int(t.rule),
            group=t.group,
            aliases=t.aliases,
            frozen=t.frozen,
        )
        for t in tensors
    ]


def tensors_from_message(messages: Iterable[pb.Tensor]) -> tuple[TensorSpec, ...]:
    """Raises Malformed for a dtype or rule that does not exist."""
    return tuple(
        TensorSpec(
            m.name, tuple(m.shape), _dtype(m.dtype), _rule(m.rule), m.group, tuple(m.aliases), m.frozen
        )
        for m in messages
    )


def layout_to_message(layout: Layout) -> pb.Layout:
    buckets = [
        pb.Bucket(
            shard=b.shard,
            dtype=b.dtype,
            rule=int(b.rule),
            pieces=[pb.Piece(tensor=p.tensor, start=p.start, length=p.length) for p in b.pieces],
        )
        for b in layout.buckets
    ]
    return pb.Layout(tensors=tensors_to_message(layout.tensors), buckets=buckets, shards=layout.shards)


def layout_from_message(message: pb.Layout) -> Layout:
    """Raises Malformed for a dtype or rule that does not exist."""
    buckets = [
        Bucket(
            index,
            m.shard,
            _dtype(m.dtype),
            _rule(m.rule),
            tuple(Piece(p.tensor, p.start, p.length) for p in m.pieces),
        )
        for index, m in enumerate(message.buckets)
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


def run_to_message(codec: str, packed: Packed) -> pb.Run:
    """How a run is encoded, without its bytes. `codec`: its name."""
    parts = [pb.Part(name=p.name, dtype=p.dtype, elements=p.elements) for p in packed.parts]
    return pb.Run(codec=codec, parts=parts, values=packed.values)


def parts_from_message(messages: Iterable[pb.Part]) -> list[Part]:
    return [Part(m.name, m.dtype, m.elements) for m in messages]
