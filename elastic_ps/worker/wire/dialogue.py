"""The common parts of a worker's calls: the caller, the step, and the limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.convert import ranges_from_message


@dataclass(frozen=True)
class MemberId:
    """One incarnation of a worker. Each of its calls names it."""

    job: str
    worker: int
    term: int = 0
    incarnation: int = 0

    def caller(self, call: int = 0) -> pb.Caller:
        """Make a message of it. `call`: the number of the call, if it has one."""
        return pb.Caller(
            job=self.job, worker=self.worker, term=self.term, incarnation=self.incarnation, call=call
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """The common parts of a step's pushes.

    Attributes:
        member_id: who makes it.
        number: the worker's own count.
        base: the version that the step is computed on.
        version: the open round's that it is pushed for; the same, unless staleness is allowed.
        samples: how many records it counts as.
        weight: what the script said that it weighs in the mean; None: nothing, so it weighs as `samples`.
            It may be 0 in one of several processes of a worker.
    """

    member_id: MemberId
    number: int
    base: int
    version: int
    samples: int
    weight: float | None = None

    @property
    def weighs(self) -> float:
        """Its weight in the mean."""
        return self.weight or float(self.samples)

    def pushed(self, bucket: int, attempt: int) -> dict[str, Any]:
        """The entry of a history when a bucket is pushed."""
        return {
            "step": self.number,
            "bucket": bucket,
            "attempt": attempt,
            "version": self.version,
            "base": self.base,
            "worker": self.member_id.worker,
            "incarnation": self.member_id.incarnation,
        }

    def applied(self, ending: pb.FinishRequest) -> dict[str, Any]:
        """The entry of a history when the step is in the model."""
        return {
            "step": self.number,
            "version": self.version + 1,
            "records": ranges_from_message(ending.ranges),
            "samples": self.samples,
            "worker": self.member_id.worker,
            "incarnation": self.member_id.incarnation,
            "term": self.member_id.term,
        }


Answers = Iterator[tuple[pb.PullReply, Incoming]]
"""The answers to a pull: (answer, body)."""


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of a worker, the same for every job. Tests use shorter ones."""

    patience: timedelta = timedelta(minutes=15)
    """How long a call is repeated: the pod of a parameter server may wait for a node."""

    notice: timedelta = timedelta(seconds=10)
    """How often the log says that the parameter server does not answer."""

    goodbye: timedelta = timedelta(seconds=2)
    """How long a worker tries to tell the parameter server that it leaves."""

    leaving: timedelta = timedelta(seconds=10)
    """How long a worker that was asked to leave waits for a parameter server that does not answer."""

    fetching: timedelta = timedelta(seconds=2)
    """How long the end of a session waits for the processes that fetch records."""

    renew: timedelta = timedelta(seconds=10)
    """How often a worker that brings a large tensor tells its owner that it still does."""

    recovery: timedelta = timedelta(seconds=1)
    """How long the parameter server has to notice which member of a broken group is gone."""


USUAL = WorkerLimits()
