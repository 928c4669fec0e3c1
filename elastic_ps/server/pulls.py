"""What a pull is answered with, and drafts: the next versions of buckets, made before their round is decided.

As soon as a bucket has the gradients of all who take part, its next values can be computed, and sent
meanwhile. But the round may still start again: nobody knows yet whether all other buckets will be complete.
So the step is made on a copy of the bucket. If the round is then made of just what the draft was made of, the
copy takes the bucket's place, and those who have the draft's values need not get them again. Otherwise the
draft is void, and the bucket is as if there had been none.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from elastic_ps.codec.changes import Delta
from elastic_ps.server.values import BucketValues


@dataclass(frozen=True)
class RestartedAs:
    """The answer to a pull when the round was started again: push everything for this attempt."""

    attempt: int


@dataclass(frozen=True)
class Pulled:
    """A bucket that has reached the version asked for.

    Attributes:
        unchanged: the caller has its values already.
        copied: `data` is a copy, which never changes.
        stands: the values are those of the draft that the caller has.
        draft: number of the draft that the bucket is; 0 for the version itself.
        delta: what the caller has to add to the values that it has, instead of `data`.
        last: all buckets are there, whatever becomes of the caller from now on.
    """

    bucket: int
    version: int
    data: memoryview
    unchanged: bool = False
    copied: bool = False
    stands: bool = False
    draft: int = 0
    delta: Delta | None = None
    last: bool = False


NO_DRAFTS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class Basis:
    """What a version of a bucket is made of.

    Attributes:
        version: that is made.
        attempt: of the round.
        contributors: (worker, incarnation, step) of all contributions.
        samples: that they weigh together.
        groups: the optimizer's hyperparameters.
    """

    version: int
    attempt: int
    contributors: frozenset[tuple[int, int, int]]
    samples: int
    groups: Sequence[Mapping[str, Any]]

    def has_sums_of(self, other: Basis) -> bool:
        """Whether the gradients are the same; the hyperparameters may be others."""
        return (self.version, self.attempt, self.contributors) == (
            other.version,
            other.attempt,
            other.contributors,
        )


@dataclass
class _Draft:
    values: BucketValues
    basis: Basis
    number: int


class Drafts:
    """The drafts of a shard's buckets. Thread-safe, if no two threads are about the same bucket.

    Args:
        make: gives new values with an optimizer for each bucket, by its index; it is called once.
    """

    def __init__(self, make: Callable[[], dict[int, BucketValues]]) -> None:
        self._make = make
        self._spare: dict[int, BucketValues] = {}
        self._made: dict[int, _Draft] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def make(self, live: BucketValues, basis: Basis) -> BucketValues:
        """The draft of a bucket, whose `draft` is its number. One that was made of these gradients is kept.

        A number is never used twice. So a worker that has a draft of an older number never takes it for this
        one, even if its memory was written over while it was sent. Blocks for the optimizer's step.
        """
        index = live.bucket.index
        there = self._made.get(index)
        if there is not None and there.basis.has_sums_of(basis):
            return there.values
        self._made.pop(index, None)
        with self._lock:
            if not self._spare:
                self._spare = self._make()
        values = self._spare[index]
        values.mirror(live)
        values.apply(basis.groups, basis.version)
        values.draft = next(self._numbers)
        self._made[index] = _Draft(values, basis, values.draft)
        return values

    def take(self, live: BucketValues, basis: Basis) -> BucketValues | None:
        """What takes the place of `live`, which may be written over then; None if no draft is of `basis`."""
        index = live.bucket.index
        draft = self._made.pop(index, None)
        if draft is None or draft.basis != basis:
            return None
        self._spare[index] = live
        return draft.values
