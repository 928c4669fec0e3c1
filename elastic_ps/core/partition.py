"""Divides a model's tensors into buckets, and the buckets among the shards.

A bucket is the unit of push, aggregation, optimizer step and pull. Parameters fill buckets in reverse order
of registration, which is about the order in which backward finishes their gradients: the first bucket is
complete while earlier layers are still being differentiated (Li et al., "PyTorch Distributed", VLDB 2020, use
the same order for all-reduce).
"""

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from elastic_ps.errors import InvalidModel

SMALLEST_BUCKET_BYTES = 256 * 1024
"""Smaller buckets cost more in calls than their earlier start saves."""

BUCKETS_WANTED = 8
"""The smallest number of buckets of a model, as far as `SMALLEST_BUCKET_BYTES` allows."""

OVERLAPPING_BYTES = 4 * 1024 * 1024
"""With a larger bucket size `BUCKETS_WANTED` is ignored: few buckets are wanted."""

TABLE_BYTES = 128 * 1024 * 1024
"""A table is cut into buckets of at most about this size. A step sends only few of its rows, so small buckets
would cost calls and save nothing."""

ITEM_SIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
"""The bytes of an element, by the name of its dtype in torch."""


class Rule(enum.IntEnum):
    """How workers' contributions to a bucket become its next value. The numbers are part of the protocol."""

    GRADIENT = 0
    """The sample-weighted mean is a gradient; the optimizer makes a step with it."""
    MEAN = 1
    """Floating-point buffers (BatchNorm's running statistics): the value is the sample-weighted mean."""
    MAXIMUM = 2
    """Other buffers (counters): the value is the elementwise maximum."""
    CONSTANT = 3
    """Not trained (frozen, or not given to the optimizer): the first worker's value, for everybody."""
    BROADCAST = 4
    """Values that scripts change and that have no mean: that of the contributor with the lowest index."""
    SUM = 5
    """Values of which each worker changes a part, such as the rows of its batch. Contributions are changes,
    and all of them are added to the value."""
    EXTERNAL = 6
    """Each worker's own, and the same for all: the parameter server has only its description."""


def uncompiled(name: str) -> str:
    """A tensor's name in the original model, without the wrappers of `torch.compile`."""
    return name.replace("_orig_mod.", "")


def within(given: Sequence[str], names: Sequence[str], what: str) -> set[str]:
    """The names of tensors that are given by name or by module.

    Raises:
        InvalidModel: no tensor or module has a given name.
    """
    if isinstance(given, str):
        raise InvalidModel(f"{what} is the string {given!r}; expected a list of names, as in [{given!r}]")
    if not (isinstance(given, Collection) and all(isinstance(name, str) for name in given)):
        raise InvalidModel(f"{what} is {given!r}; expected a list of names of modules or tensors")
    found: set[str] = set()
    for prefix in map(uncompiled, given):
        inside = {name for name in names if name == prefix or name.startswith(f"{prefix}.")}
        if not inside:
            raise InvalidModel(
                f"{what} names {prefix!r}, but the model has no such module, parameter or persistent buffer; "
                f"it has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            )
        found |= inside
    return found


TABLE = "table"
DESCRIPTIONS = ("json", TABLE)
"""In place of a dtype: the content is a JSON object that describes adapters, or a table that grows."""


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer of the model.

    Attributes:
        name: its name in `state_dict`, without the additions of `torch.compile`.
        shape: the size of each dimension, in elements.
        dtype: a key of `ITEM_SIZE`.
        rule: how its next value is made.
        group: index of the optimizer's parameter group; -1 where `rule` is not GRADIENT.
        aliases: its other names in `state_dict`, where several modules share it.
        frozen: given to the optimizer, but not trained when the first worker joined. It may be later.
        sparse: it is a table: its gradients are sparse (`nn.Embedding(..., sparse=True)`), so that it has
            buckets of its own, and only the rows that a step has touched are sent.
        content: where `rule` is EXTERNAL, what has to be the same for all workers: a digest of the values.
            The dtype may then be any of torch. Or it is a description, of a dtype in `DESCRIPTIONS`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: Rule
    group: int = -1
    aliases: tuple[str, ...] = field(default=(), compare=False)
    frozen: bool = field(default=False, compare=False)
    sparse: bool = field(default=False, compare=False)
    content: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """The elements of a row: those that one index of the first dimension selects."""
        return math.prod(self.shape[1:])

    def __str__(self) -> str:
        return self.name if self.dtype in DESCRIPTIONS else f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Piece:
    """`length` elements from `start` on of the flattened tensor with index `tensor`."""

    tensor: int
    start: int
    length: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive pieces of one dtype, one rule and one shard, which are sent together."""

    index: int
    shard: int
    dtype: str
    rule: Rule
    pieces: tuple[Piece, ...]

    @cached_property
    def elements(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_SIZE[self.dtype]

    @property
    def is_half(self) -> bool:
        """Whether the elements have half precision."""
        return self.dtype in ("float16", "bfloat16")

    def absent(self, present: Sequence[bool]) -> list[slice]:
        """The slices of the bucket whose pieces have no gradient.

        Args:
            present: whether each piece has a gradient; empty if all have.
        """
        absent, place = [], 0
        for piece, there in zip(self.pieces, present, strict=False):
            if not there:
                absent.append(slice(place, place + piece.length))
            place += piece.length
        return absent


@dataclass(frozen=True)
class Layout:
    """The buckets of a model, in the order in which they are pushed.

    `base`: what is in no bucket, because each worker has it (`Rule.EXTERNAL`).
    """

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    shards: int
    base: tuple[TensorSpec, ...] = ()

    @property
    def every(self) -> tuple[TensorSpec, ...]:
        """All tensors of the model."""
        return self.tensors + self.base

    def of_shard(self, shard: int) -> list[Bucket]:
        """The buckets that `shard` owns, in order of push."""
        return [bucket for bucket in self.buckets if bucket.shard == shard]

    def width(self, bucket: Bucket) -> int:
        """The elements of a row, if the bucket is of a table; else 0."""
        tensor = self.tensors[bucket.pieces[0].tensor]
        return tensor.row if tensor.sparse else 0

    @cached_property
    def pushed(self) -> list[Bucket]:
        """The buckets that a worker pushes in each step."""
        return [bucket for bucket in self.buckets if bucket.rule is not Rule.CONSTANT]

    @cached_property
    def pull_order(self) -> list[Bucket]:
        """All buckets, first layers first: the order in which the next forward needs them."""
        gradients = [bucket for bucket in self.buckets if bucket.rule is Rule.GRADIENT]
        others = [bucket for bucket in self.buckets if bucket.rule is not Rule.GRADIENT]
        return gradients[::-1] + others


def partition(
    tensors: Sequence[TensorSpec],
    *,
    bucket_bytes: int,
    shards: int,
    parts: int = 1,
    smallest: int = SMALLEST_BUCKET_BYTES,
    whole: Collection[int] = (),
) -> Layout:
    """Cut `tensors`, given in order of registration, into buckets for `shards` shards.

    Buckets hold whole tensors of up to about `bucket_bytes` bytes. A small model has smaller buckets, so that
    each shard and each of `parts` fragments gets some, and transfers can overlap. A larger tensor is cut,
    between rows if a row has at most `bucket_bytes`. Each bucket goes to the shard with the fewest bytes so
    far, so shards differ by less than a bucket. Frozen tensors have buckets of their own, which cost nothing
    while they are frozen. Each table has buckets of its own, cut between rows: one for each shard if it is
    large enough for that. Deterministic. Tensors with the rule EXTERNAL become the layout's `base`.

    Args:
        whole: the parameter groups whose tensors are never cut. A bucket may be as large as one of them.
    """
    tensors, base = divided(tensors)
    load = [0] * shards
    buckets: list[Bucket] = []
    for rule, frozen, sparse in itertools.product(Rule, (False, True), (False, True)):
        kind = (rule, frozen, sparse)
        numbered = [
            (i, t) for i, t in enumerate(tensors) if (t.rule, t.frozen, t.sparse) == kind and t.elements
        ]
        # Each rule by itself: a few trained parameters must not cut a large frozen model into tiny buckets.
        total = sum(t.elements * ITEM_SIZE[t.dtype] for _, t in numbered)
        wanted = max(smallest, math.ceil(total / BUCKETS_WANTED))
        most = min(bucket_bytes, wanted) if bucket_bytes <= OVERLAPPING_BYTES else bucket_bytes
        target = min(most, math.ceil(total / max(shards, parts)))
        filled = _cut_tables(reversed(numbered), shards, min(smallest, bucket_bytes)) if sparse else None
        for dtype, pieces in filled or _fill(reversed(numbered), target, bucket_bytes, whole):
            nbytes = sum(piece.length for piece in pieces) * ITEM_SIZE[dtype]
            shard = min(range(shards), key=lambda s: (load[s], s))
            load[shard] += nbytes
            buckets.append(Bucket(len(buckets), shard, dtype, rule, tuple(pieces)))
    return Layout(tensors, tuple(buckets), shards, base)


def divided(tensors: Iterable[TensorSpec]) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The tensors that the job keeps, and those that each worker has."""
    every = [*tensors]
    kept = tuple(each for each in every if each.rule is not Rule.EXTERNAL)
    return kept, tuple(each for each in every if each.rule is Rule.EXTERNAL)


def _cut_tables(
    tables: Iterable[tuple[int, TensorSpec]], shards: int, smallest: int
) -> Iterable[tuple[str, list[Piece]]]:
    """Cut tables between rows, into one piece for each shard, or fewer of `smallest` bytes."""
    for index, table in tables:
        rows, nbytes = table.shape[0], table.elements * ITEM_SIZE[table.dtype]
        parts = max(min(shards, math.ceil(nbytes / smallest)), math.ceil(nbytes / TABLE_BYTES))
        bounds = [rows * part // parts * table.row for part in range(parts + 1)]
        for start, stop in itertools.pairwise(bounds):
            if start < stop:
                yield table.dtype, [Piece(index, start, stop - start)]


def _fill(
    tensors: Iterable[tuple[int, TensorSpec]], target: int, largest: int, whole: Collection[int]
) -> Iterable[tuple[str, list[Piece]]]:
    """Gather consecutive tensors of a dtype up to `target` bytes, and cut larger ones.

    Rows of up to `largest` bytes stay whole, and so do tensors of the groups `whole`.
    """
    current: list[Piece] = []
    current_dtype, used = "", 0
    for index, tensor in tensors:
        item = ITEM_SIZE[tensor.dtype]
        size = tensor.elements * item
        if current and (tensor.dtype != current_dtype or used + size > target):
            yield current_dtype, current
            current, used = [], 0
        current_dtype = tensor.dtype
        unit = tensor.row if tensor.row * item <= largest else 1
        if tensor.group in whole:
            unit = tensor.elements
        units = tensor.elements // unit
        parts = math.ceil(units / max(1, target // (unit * item)))
        bounds = [units * part // parts * unit for part in range(parts + 1)]
        for start, stop in itertools.pairwise(bounds[:-1]):
            yield current_dtype, [Piece(index, start, stop - start)]
        current.append(Piece(index, bounds[-2], bounds[-1] - bounds[-2]))
        used += (bounds[-1] - bounds[-2]) * item
    if current:
        yield current_dtype, current


def cut_rows(layout: Layout, groups: Collection[int]) -> list[TensorSpec]:
    """The tensors of these parameter groups with a row that is divided among buckets."""
    tensors = layout.tensors
    cut = {
        piece.tensor
        for bucket in layout.buckets
        for piece in bucket.pieces
        if tensors[piece.tensor].group in groups
        and (piece.start % tensors[piece.tensor].row or piece.length % tensors[piece.tensor].row)
    }
    return [tensors[index] for index in sorted(cut)]


_HINT = (
    ". With base='external' all workers need the same frozen values, bit for bit, and the same adapters: "
    "load them from the same files, in the same dtype"
)


def _apart(ours: str, theirs: str) -> tuple[str, str]:
    """The parts in which two JSON objects differ, as JSON; both texts if one is something else."""
    try:
        mine, other = json.loads(ours), json.loads(theirs)
        keys = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ours, theirs
    return json.dumps({key: mine.get(key) for key in keys}), json.dumps({key: other.get(key) for key in keys})


def difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str:
    """Say how a worker's tensors (`ours`) differ from the parameter server's; "" if they do not."""
    mine, other, hint = {t.name: t for t in ours}, {t.name: t for t in theirs}, ""
    lines = [f"{t}: only in this worker's model" for name, t in mine.items() if name not in other]
    lines += [
        f"{t}: only in the model on the parameter server" for name, t in other.items() if name not in mine
    ]
    for name in mine.keys() & other.keys():
        if mine[name] != other[name]:
            a, b = mine[name], other[name]
            if a.rule is b.rule is Rule.EXTERNAL and str(a) == str(b):
                here, there = (
                    _apart(a.content, b.content) if a.dtype in DESCRIPTIONS else (a.content, b.content)
                )
                lines.append(f"{name}: this worker has {here}, the other workers have {there}")
                hint = hint if a.dtype == TABLE else _HINT
                continue
            same = str(a) == str(b)
            here, there = (
                f"{t} ({t.rule.name.lower()}, group {t.group})" if same else f"{t}" for t in (a, b)
            )
            lines.append(f"{name}: this worker has {here}, the parameter server has {there}")
    if not lines and list(mine) != list(other):
        lines.append("the tensors are the same, but their order differs")
    return "; ".join(sorted(lines)[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "") + hint
