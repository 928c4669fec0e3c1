"""How long a worker waits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of a worker. They are the same for every job; tests need not wait for so long."""

    patience: timedelta = timedelta(minutes=15)
    """For how long a call is repeated before the parameter server counts as lost: it may wait for a node."""

    notice: timedelta = timedelta(seconds=10)
    """How often the log says that the parameter server does not answer."""

    goodbye: timedelta = timedelta(seconds=2)
    """For how long a worker tries to tell the parameter server that it leaves."""

    leaving: timedelta = timedelta(seconds=10)
    """For how long a worker that was asked to leave waits for a parameter server that does not answer."""

    fetching: timedelta = timedelta(seconds=2)
    """For how long the end of a session waits for the processes that fetch records."""

    renew: timedelta = timedelta(seconds=10)
    """How often a worker that brings a large tensor tells its home that it still does."""

    recovery: timedelta = timedelta(seconds=1)
    """That a worker gives the parameter server to notice which member of its group is gone."""


USUAL = WorkerLimits()
