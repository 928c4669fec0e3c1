"""The limits of a parameter server: how long it waits, and how much it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from elastic_ps.core.partition import SMALLEST_BUCKET_BYTES
from elastic_ps.tensors.limits import USUAL as TENSORS
from elastic_ps.tensors.limits import TensorLimits

SLOWEST = 8 << 20
"""Bytes a second: the lowest rate that limits assume between servers, and of a disk. Training may wait."""


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a parameter server, the same for every job. Tests pass shorter ones."""

    answer: timedelta = timedelta(seconds=5)
    """A blocked call to shard 0 answers after this time that nothing has happened. The caller repeats it."""

    shard_answer: timedelta = timedelta(seconds=10)
    """The same for a blocked push or pull, on each shard."""

    tick: timedelta = timedelta(milliseconds=250)
    """The time between two looks at leases and checkpoints, and of a blocked call at the state."""

    settled: timedelta = timedelta(seconds=5)
    """How long a call waits for the commit of a round, before the worker has to call again."""

    patience: timedelta = timedelta(seconds=60)
    """How long calls to a silent shard are repeated, and a closing server waits for its last checkpoint."""

    given_up: timedelta = timedelta(minutes=10)
    """A checkpoint is given up if a shard takes longer than this, plus the time for its bytes."""

    written: timedelta = timedelta(milliseconds=500)
    """How long steps wait for the writing of a checkpoint's part, before they copy the rest."""

    release: timedelta = timedelta(seconds=25)
    """How long a shard that is asked to end waits until shard 0 has its part of the last checkpoint."""

    quiet: timedelta = timedelta(seconds=15)
    """Shard 0 has ended if it sends nothing for this long, which is sixty times as long as usual."""

    keep_again: timedelta = timedelta(seconds=1)
    """The time between two attempts to write a checkpoint that must be written."""

    small_pull: int = 64 * 1024
    """The last bucket of a pull is copied if it has at most so many bytes: then no other answer follows."""

    smallest_bucket: int = SMALLEST_BUCKET_BYTES
    """Bytes of a bucket, at least, if the model is large enough."""

    probe: timedelta = timedelta(milliseconds=500)
    """The time between two attempts to reach a standby."""

    slice: timedelta = timedelta(seconds=1)
    """How long a round is delayed, at most, to send buckets to a standby that is catching up."""

    tensors: TensorLimits = TENSORS
    """The limits of the tensors that scripts keep."""

    window: int = 200
    """The number of steps that `core.objective` measures for a decision. Two of them may be more stale than
    the 99th percentile."""


USUAL = ServerLimits()
