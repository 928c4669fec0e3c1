"""The drafts that a worker has: the next values of buckets, received before their round was decided.

A draft is kept beside the model. When the version is there, the shard says whether the draft stands: then it
becomes the bucket's values, and nothing has to be sent any more. Otherwise it is void. Where a draft changes
few elements of the values that the worker has, only these are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from elastic_ps.codec import dtype_of
from elastic_ps.codec.changes import FewChanges
from elastic_ps.core.partition import Bucket

VOID_STEPS = 3
"""After so many steps in a row whose drafts did not stand, none are taken any more."""


class Ahead:
    """A worker's drafts. Several threads may use it, each for other buckets.

    The memory for a bucket's draft is allocated with the first one.
    """

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}
        self._changes: dict[int, FewChanges] = {}  # of drafts that are not in their memory
        self._numbers: dict[int, int] = {}
        self._void: set[int] = set()  # versions since the last one whose drafts stood

    @property
    def pays(self) -> bool:
        """Whether drafts tend to stand. They do not if a script sets hyperparameters after backward."""
        return len(self._void) < VOID_STEPS

    def numbers(self, buckets: Iterable[int]) -> dict[int, int]:
        """The numbers of the drafts that are there of these buckets."""
        return {bucket: self._numbers[bucket] for bucket in buckets if bucket in self._numbers}

    def forget(self, buckets: Iterable[int] | None = None) -> None:
        """The drafts of these buckets are void; None: of all."""
        for bucket in list(self._numbers) if buckets is None else buckets:
            self._numbers.pop(bucket, None)

    def memory(self, bucket: Bucket) -> torch.Tensor:
        """Where a draft of the bucket is received: flat, of its dtype."""
        if bucket.index not in self._memory:
            self._memory[bucket.index] = torch.empty(bucket.elements, dtype=dtype_of(bucket.dtype))
        return self._memory[bucket.index]

    def keep(self, bucket: int, changes: FewChanges | None) -> None:
        """The bucket's draft is what the values become with these changes; None: what is in its memory."""
        self._changes.pop(bucket, None)
        if changes is not None:
            self._changes[bucket] = changes

    def note(self, bucket: int, number: int) -> None:
        """The draft of this number is there. If it was sent without values, they are those of the model."""
        self._numbers[bucket] = number

    def take(self, bucket: Bucket, values: torch.Tensor) -> None:
        """The draft stands: it becomes `values`, which are those that it was received for. Once."""
        changes = self._changes.pop(bucket.index, None)
        if changes is not None:
            changes.make(values)
        else:
            values.copy_(self._memory[bucket.index])
        self._void.clear()

    def superseded(self, bucket: int, version: int) -> None:
        """The bucket has come with other values than those of a draft, if there was one."""
        if self._numbers.pop(bucket, None) is not None:
            self._void.add(version)
