"""What a worker and the parameter server say to each other, in Python types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from elastic_ps.api.tuning import Tuning
from elastic_ps.core.ledger import Range
from elastic_ps.core.partition import Layout
from elastic_ps.core.settings import Settings
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.convert import to_message


@dataclass(frozen=True)
class Stay:
    """One stay in the job, from a join on. What a worker sends names the stay that it belongs to."""

    job: str
    worker: int
    term: int = 0
    incarnation: int = 0

    def caller(self, call: int = 0) -> pb.Caller:
        """Who is speaking. `call`: the number of the call, for those that are counted."""
        return pb.Caller(
            job=self.job, worker=self.worker, term=self.term, incarnation=self.incarnation, call=call
        )


@dataclass(frozen=True)
class Membership:
    """What the parameter server says to a worker that it has admitted.

    Attributes:
        tuning: how versions are made; None for what this worker was told when it was started.
        codecs: the names that `Plan` has for the codecs of this term; none if it does not say.
    """

    stay: Stay
    layout: Layout
    version: int
    initialise: bool
    lease: timedelta
    settings: Settings
    tuning: Tuning | None
    codecs: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step's pushes have in common.

    Attributes:
        stay: in which it is made.
        number: the worker's own count.
        base: the version that the step is computed on.
        version: the open round's that it is pushed for; the same, unless staleness is allowed.
        samples: weight in the mean.
    """

    stay: Stay
    number: int
    base: int
    version: int
    samples: int

    def pushed(self, bucket: int, attempt: int) -> dict[str, Any]:
        """What a history says when a bucket is pushed."""
        return {
            "step": self.number,
            "bucket": bucket,
            "attempt": attempt,
            "version": self.version,
            "base": self.base,
            "worker": self.stay.worker,
            "incarnation": self.stay.incarnation,
        }

    def applied(self, ending: Ending) -> dict[str, Any]:
        """What a history says when the step is in the model."""
        return {
            "step": self.number,
            "version": self.version + 1,
            "records": ending.ranges,
            "samples": self.samples,
            "worker": self.stay.worker,
            "incarnation": self.stay.incarnation,
            "term": self.stay.term,
        }


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is said of a step when all of it has been pushed.

    Attributes:
        ranges: what it was computed on.
        metrics, reductions: what the script has reported; see `core.metrics.Metrics`.
        assigns: it was values that were pushed, not gradients.
    """

    ranges: tuple[Range, ...]
    settings: str
    metrics: Mapping[str, float]
    skipped: tuple[Range, ...] = ()
    assigns: bool = False
    reductions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """What a worker asks a shard for.

    Attributes:
        version: at least that.
        buckets: their indexes, in the order in which they are wanted.
        attempt: of the round that the worker pushes for; it is told when the round starts again.
        contributor: the worker takes part in that round.
        held: the worker has the values of this version: what has not changed since need not be sent.
        ahead: hyperparameters, as JSON, with which the worker takes drafts before the version is there; "" if
            it takes none.
        drafts: for buckets of which the worker has drafts, their numbers.
    """

    version: int
    buckets: Sequence[int]
    attempt: int
    contributor: bool
    held: int | None = None
    ahead: str = ""
    drafts: Mapping[int, int] = field(default_factory=dict)

    def request(self) -> pb.PullRequest:
        """The message, which does not say who asks."""
        return to_message(pb.PullRequest, self, brief=True)


Answers = Iterator[tuple[pb.PullReply, Incoming]]
"""To a pull: (answer, body)."""
