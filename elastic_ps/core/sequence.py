"""Recognises duplicate and outdated pushes on a shard.

The table has an entry for each bucket and contributor of the open round. It is emptied when a round opens or
starts again, so it does not grow with time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic_ps.errors import RefusalCode, Refused


class PushKey(NamedTuple):
    """Identifies a push. See `docs/design/protocol.md`."""

    term: int
    worker: int
    incarnation: int
    step: int
    bucket: int
    version: int
    attempt: int


@dataclass
class PushLog:
    """The pushes of the open round.

    Attributes:
        term: the term of this shard.
        version, attempt: those of the open round.
        asked: in deterministic mode, the (worker, bucket) of each push that came before its turn.
        expected: the incarnation of each worker that takes part; 0, which none has, for a worker that has not
            come yet. Others are refused: their values would spoil the sums. In deterministic mode the order
            of the workers is the order of additions.
        several: whether a worker may push several steps for one round.
        added: for each bucket, the (worker, incarnation, step) whose values are in its sum.
        weights: for each bucket with pushes in its sum, their weights.
        adding: the buckets to which a push is being added, so that their sums are incomplete.
    """

    term: int
    version: int = 0
    attempt: int = 0
    expected: Mapping[int, int] = field(default_factory=dict)
    several: bool = False
    added: dict[int, set[tuple[int, int, int]]] = field(default_factory=dict)
    weights: dict[int, list[float]] = field(default_factory=dict)
    asked: set[tuple[int, int]] = field(default_factory=set)
    adding: set[int] = field(default_factory=set)

    def decide(self, key: PushKey) -> bool:
        """Whether to add the push. Returns False if it was added already.

        Raises:
            Refused: STALE_TERM, STALE_INCARNATION, WRONG_VERSION or STALE_ATTEMPT, in words.
        """
        self.require_open(key)
        if self.expected.get(key.worker) != key.incarnation:
            raise Refused(
                RefusalCode.STALE_INCARNATION,
                f"worker {key.worker} with incarnation {key.incarnation} does not take part in the open "
                "round: it was declared gone, or has no records",
            )
        added = self.added.get(key.bucket, set())
        if (key.worker, key.incarnation, key.step) in added:
            return False
        for worker, incarnation, step in () if self.several else added:
            if worker == key.worker:
                raise Refused(
                    RefusalCode.STALE_INCARNATION,
                    f"this round has step {step} of worker {worker} with incarnation {incarnation} already",
                )
        return True

    def require_open(self, key: PushKey) -> None:
        """Raise Refused (STALE_TERM, STALE_ATTEMPT, WRONG_VERSION) unless the push is for the open round."""
        if key.term != self.term:
            raise Refused(RefusalCode.STALE_TERM, f"the push is of term {key.term}, not {self.term}")
        if key.version < self.version or (key.version == self.version and key.attempt < self.attempt):
            raise Refused(
                RefusalCode.STALE_ATTEMPT,
                f"the push is for version {key.version}, attempt {key.attempt}, but "
                f"the open round is on version {self.version}, attempt {self.attempt}",
            )
        if (key.version, key.attempt) != (self.version, self.attempt):
            raise Refused(
                RefusalCode.WRONG_VERSION,
                f"the push is for version {key.version}, attempt {key.attempt}, which this shard has not "
                f"reached (version {self.version}, attempt {self.attempt})",
            )

    def check_initialiser(self, worker: int, incarnation: int) -> None:
        """Raise Refused unless this worker sends the model's first values.

        Raises:
            Refused: STALE_INCARNATION; NOT_READY: it is not known yet which worker sends them.
        """
        if self.version or self.added:
            raise Refused(RefusalCode.STALE_INCARNATION, "the model is being trained already")
        if not self.expected:
            raise Refused(
                RefusalCode.NOT_READY, "it is not known yet which worker brings the model; send it again"
            )
        if self.expected.get(worker) != incarnation:
            raise Refused(
                RefusalCode.STALE_INCARNATION,
                f"worker {worker} with incarnation {incarnation} is not the one that brings the model",
            )

    def check_version(self, version: int) -> None:
        """Raise Refused (WRONG_VERSION) unless this is the version of the open round."""
        if version != self.version:
            raise Refused(
                RefusalCode.WRONG_VERSION,
                f"values of version {version} were sent; the open round is on {self.version}",
            )

    def begin(self, key: PushKey) -> None:
        """Note that the push is being added to its bucket's sum. No other one may be meanwhile."""
        self.adding.add(key.bucket)

    def add(self, key: PushKey, *, weight: float = 0.0) -> None:
        """Note that the push, of the open round and with this weight, is in its bucket's sum."""
        self.adding.discard(key.bucket)
        if weight:
            self.weights.setdefault(key.bucket, []).append(weight)
        self.added.setdefault(key.bucket, set()).add((key.worker, key.incarnation, key.step))

    def weight(self, bucket: int) -> float:
        """The total weight of the pushes in a bucket's sum, rounded once: the order makes no difference."""
        return math.fsum(self.weights.get(bucket, ()))

    def turn(self, worker: int, bucket: int) -> bool:
        """Whether all expected workers with a lower index are in the sum of `bucket`."""
        have = {entry[0] for entry in self.added.get(bucket, ())}
        return all(other in have for other in self.expected if other < worker)

    def takes_turn(self, worker: int, bucket: int) -> bool:
        """Whether it is the turn of a push of `worker`. If not, note that it waits."""
        if self.turn(worker, bucket):
            return True
        self.asked.add((worker, bucket))
        return False

    @property
    def queued(self) -> frozenset[int]:
        """The workers whose pushes still wait for their turn."""
        return frozenset(worker for worker, bucket in self.asked if not self.turn(worker, bucket))

    def has_all(self, bucket: int) -> bool:
        """Whether the sum of `bucket` has exactly the contributions of the expected workers."""
        have = {entry[:2] for entry in self.added.get(bucket, ())}
        return bool(have) and have == set(self.expected.items()) and bucket not in self.adding

    def complete(self, buckets: Collection[int], contributors: Collection[tuple[int, int, int]]) -> bool:
        """Whether the sums of all `buckets` have exactly these contributions."""
        wanted = set(contributors)
        return all(self.added.get(b, set()) == wanted and b not in self.adding for b in buckets)

    def open(self, *, version: int, attempt: int, expected: Mapping[int, int]) -> None:
        """Set the open round. If the round or attempt is another one, the sums are void."""
        if (version, attempt) != (self.version, self.attempt):
            self.added.clear()
            self.weights.clear()
            self.asked.clear()
            self.adding.clear()
        self.version, self.attempt, self.expected = version, attempt, expected
