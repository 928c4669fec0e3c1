"""How long a parameter server waits, and how much it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from elastic_ps.core.partition import SMALLEST_BUCKET_BYTES
from elastic_ps.tensors.limits import USUAL as TENSORS
from elastic_ps.tensors.limits import TensorLimits


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a parameter server. They are the same for every job; tests need not wait for so long."""

    answer: timedelta = timedelta(seconds=5)
    """After this time a blocked call to shard 0 answers that nothing has happened; the caller asks again."""

    shard_answer: timedelta = timedelta(seconds=10)
    """Likewise for a blocked push or pull, on each shard."""

    tick: timedelta = timedelta(milliseconds=250)
    """How often leases and checkpoints are looked after, and a blocked call looks again."""

    settled: timedelta = timedelta(seconds=5)
    """For how long a call waits for a round to be committed, before the worker has to call again."""

    patience: timedelta = timedelta(seconds=60)
    """How long a silent shard is asked for its part, and a closing server waits for its last checkpoint."""

    given_up: timedelta = timedelta(minutes=10)
    """A checkpoint is given up if a shard has not written its part after this time."""

    keep_again: timedelta = timedelta(seconds=1)
    """After a checkpoint that must be written has failed, the time until the next attempt."""

    small_pull: int = 64 * 1024
    """Bytes of a pulled bucket that are copied, if it is the last one: nothing has to be said after it."""

    smallest_bucket: int = SMALLEST_BUCKET_BYTES
    """A model is cut into buckets that are not smaller, if it can be."""

    probe: timedelta = timedelta(milliseconds=500)
    """Between two tries to reach a standby."""

    slice: timedelta = timedelta(seconds=1)
    """For how long a round is held up, at about the most, to send buckets to a standby that catches up."""

    tensors: TensorLimits = TENSORS
    """Of those that scripts keep."""

    window: int = 200
    """Steps that are measured for a decision of `core.objective`: two of them may be more stale than the 99th
    percentile."""


USUAL = ServerLimits()
