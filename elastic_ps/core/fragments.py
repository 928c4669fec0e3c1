"""Divides the model into fragments, which workers with local steps exchange in turn.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", divide the model into *fragments*,
and exchange each of them in turn, as often as the whole model would be exchanged without them. The total
traffic is the same, but only a fraction of it is sent at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ps.core.partition import Bucket, Layout, Rule
from elastic_ps.errors import InvalidModel


def fragments(layout: Layout, count: int) -> tuple[frozenset[int], ...]:
    """Divide the buckets of gradients into `count` fragments of about the same number of bytes.

    A tensor is never split. Consecutive layers are in different fragments, as far as possible. Tensors that
    were frozen when the job began are divided separately, since they cost nothing. Deterministic.

    Returns the indexes of each fragment's buckets.

    Raises:
        InvalidModel: the model has too few tensors for so many fragments.
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
    """The buckets of gradients, in order, grouped so that no tensor is in two groups.

    The pieces of a tensor are in consecutive buckets.
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
    """The fragment, of `count`, that the round on `version` exchanges.

    `count` consecutive versions, from a multiple of `count` on, exchange all fragments.

    Args:
        scattered: use another order each time. Otherwise a worker that takes part in every third round, for
            example, might always exchange the same fragments. The order is the generalised Thue-Morse
            sequence, the sum of the digits of `version` in base `count`, which has no period.
    """
    if not scattered or count == 1:
        return version % count
    digits = 0
    while version:
        version, digit = divmod(version, count)
        digits += digit
    return digits % count


def steps_before(exchange: int, steps: int, count: int) -> int:
    """The number of local steps between a worker's previous exchange and this one, numbered from 0.

    `count` consecutive exchanges have `steps` local steps in all.
    """
    return (exchange + 1) * steps // count - exchange * steps // count
