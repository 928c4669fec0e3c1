"""Compares fingerprints of data sets, to find out whether two workers have the same records.

A fingerprint is JSON. For each part of a data set that identifies its records, it has a digest and two sums
by name. The digest covers data that can be compared exactly, such as integers and file names. The sums cover
floating-point numbers, which the same code may round differently on another processor. They are relative to
the numbers' size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MOST = 1 << 16
"""The longest fingerprint, in characters."""

TOLERANCE = 1e-4
"""The tolerance of sums. Other records, or the same ones in another order, differ by more."""


ORDER = "the order of blocks"
"""The part that says which blocks of records stay together. Without it, none do."""

SHUFFLE = "shuffle"
"""The part that says whether the order of records is random."""


class Mark(NamedTuple):
    """The digest and sums of a part of a data set, an attribute with an entry for each record."""

    digest: str
    sums: tuple[float, float] = (0.0, 0.0)


def to_text(marks: Mapping[str, Mark]) -> str:
    """A fingerprint; "" if nothing identifies the records."""
    return json.dumps(marks) if marks else ""


def differing(one: str, other: str) -> list[str]:
    """The names of the parts that two fingerprints both have, and that differ.

    Raises:
        ValueError: one of them is not a fingerprint.
    """
    if one == other or not (one and other):
        return []
    ours, theirs = _parsed(one), _parsed(other)
    lacking = [ORDER] if (ORDER in ours) != (ORDER in theirs) else []
    return lacking + [name for name, mark in ours.items() if name in theirs and not _same(mark, theirs[name])]


def other_records(names: Sequence[str]) -> str:
    """The message for parts that differ, with what to do."""
    if ORDER in names:
        return (
            "data.order, or block_sizes() of the data set, gives other blocks, so records would be at other "
            "positions. All workers need the same blocks, and so does a job that continues from a checkpoint"
        )
    if SHUFFLE in names:
        return (
            "shuffle of the DataLoader (without one: data.shuffle) has another value, so records would be at "
            "other positions. All workers need the same, and so does a job that continues from a checkpoint"
        )
    return (
        f"the entries of {', '.join(names[:5])} differ, or are in another order. All processes of a job "
        "must have the same records at the same positions. If the script draws which ones it has, as "
        "random_split, torch.randperm and shuffle do, give them a seed, as in shuffle(seed=0), or a "
        "generator with a seed, as in random_split(dataset, lengths, generator=torch.Generator()."
        "manual_seed(0)). Or call torch.manual_seed(0), random.seed(0) and numpy.random.seed(0) before, and "
        "session.seed() afterwards, so that workers draw numbers of their own again. Sort what the script "
        "reads from a set, or from a directory"
    )


def _same(one: Mark, other: Mark) -> bool:
    close = (abs(a - b) <= TOLERANCE for a, b in zip(one.sums, other.sums, strict=True))
    return one.digest == other.digest and all(close)


def _parsed(text: str) -> dict[str, Mark]:
    if len(text) > MOST:
        raise ValueError(f"a fingerprint has {len(text)} characters; at most {MOST}")
    try:
        return {
            name: Mark(str(digest), (float(first), float(second)))
            for name, (digest, (first, second)) in json.loads(text).items()
        }
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no fingerprint of a data set: {text[:100]}") from error
