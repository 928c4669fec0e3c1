"""Which part of the model an exchange of local steps is about, where workers exchange one part after another.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", divide the model into *fragments*,
and exchange each of them as often as the whole model would be exchanged without them, in turn. So as many
bytes are sent in all, but a fraction of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ps.core.partition import Bucket, Layout, Rule
from elastic_ps.errors import InvalidModel


def fragments(layout: Layout, count: int) -> tuple[frozenset[int], ...]:
    """Divide the buckets of gradients into `count` fragments of about the same number of bytes.

    A tensor is in one fragment as a whole. Layers that follow each other are in different fragments, as far
    as possible. Tensors that were frozen when the job began are divided by themselves, since they cost
    nothing. Deterministic.

    Returns the indexes of each fragment's buckets.

    Raises:
        InvalidModel: there are not so many parts of which each has tensors of its own.
    """
    trained = list(_whole_tensors(layout, frozen=False))
    rest = list(_whole_tensors(layout, frozen=True))
    parts = trained or rest
    if len(parts) < count:
        raise InvalidModel(
            f"consistency.fragments is {count}, but the model can be divided into {len(parts)} at most, "
            "because a tensor is exchanged as a whole, and small ones together. Set fragments to "
            f"{len(parts)} or less"
        )
    found: list[set[int]] = [set() for _ in range(count)]
    for parts in (trained, rest):
        load = [0] * count
        for part in parts:
            lightest = min(range(count), key=lambda f: (load[f], f))
            load[lightest] += sum(bucket.nbytes for bucket in part)
            found[lightest] |= {bucket.index for bucket in part}
    return tuple(map(frozenset, found))


def _whole_tensors(layout: Layout, *, frozen: bool) -> Iterator[list[Bucket]]:
    """The buckets of gradients, in order, gathered so that no tensor is in two of the lists.

    The pieces of a tensor are in buckets that follow each other.
    """
    part: list[Bucket] = []
    for bucket in layout.buckets:
        if bucket.rule is not Rule.GRADIENT or layout.tensors[bucket.pieces[0].tensor].frozen != frozen:
            continue
        if part and part[-1].pieces[-1].tensor != bucket.pieces[0].tensor:
            yield part
            part = []
        part.append(bucket)
    if part:
        yield part


def turn(version: int, count: int, *, scattered: bool = False) -> int:
    """The fragment that the exchanges for the round on `version` are about, of `count`.

    Each of `count` versions that begin with a multiple of it has another one.

    Args:
        scattered: in another order each time: a worker that takes part in each third round, say, would
            otherwise exchange the same fragments always. It is the generalised Thue-Morse sequence, the sum
            of the digits of `version` to the base `count`, which has no period.
    """
    if not scattered or count == 1:
        return version % count
    digits = 0
    while version:
        version, digit = divmod(version, count)
        digits += digit
    return digits % count


def steps_before(exchange: int, steps: int, count: int) -> int:
    """How many local steps a worker makes before its exchange with this number, from 0, since the one before.

    `count` exchanges that follow each other have `steps` in all.
    """
    return (exchange + 1) * steps // count - exchange * steps // count
