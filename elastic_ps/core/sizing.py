"""Chooses the bucket size by the network of the job's first worker.

A bucket is pushed, stepped and pulled as a unit. New values of the first buckets leave while the last
gradients arrive, so with small buckets a step begins and ends earlier. Small buckets also leave shorter
queues in the network. But each bucket costs the parameter server time for a push and a pull of each worker,
however small it is.

So a bucket is as small as possible while that time is a small fraction of the time that its encoded bytes
take in the network. The size depends neither on the model nor on the number of workers that share a link:
both times grow alike.

On a host where workers use every core, small buckets do not finish a step earlier, since nothing can run
beside backward. There they are large.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LARGEST = 4 * 1024 * 1024
"""The largest chosen bucket, in bytes: on a fast network larger ones save nothing."""

CROWDED = 64 * 1024 * 1024
"""The bucket size in shared memory if nothing can run beside backward; see `benchmarks.datapath`."""

SMALLEST = 64 * 1024
"""The smallest chosen bucket, in bytes. Its size is a multiple of this."""

BUCKET_SECONDS = 0.4e-3
"""The parameter server's CPU time for a worker's push and pull of a bucket; see `benchmarks.buckets`."""

SHARE = 0.08
"""That time, as a fraction of the time of a bucket's bytes in the network."""

WAITING = 2
"""The number of buckets that a worker pushes to a shard at a time; see `worker.strategies.push_pull`."""

TURN = 10.0
"""The seconds that a worker has for measuring before another one may. At 256 kB/s it needs two."""


class Link(NamedTuple):
    """The measured network between a worker and shard 0.

    Attributes:
        rate: bytes per second.
        seconds: the time of a call without a body.
    """

    rate: float
    seconds: float


NEAR = Link(1e12, 0.0)
"""Replaces a measurement if bodies are in shared memory."""


def bucket_bytes(link: Link, *, sent: float = 1.0, crowded: bool = False) -> tuple[int, str]:
    """The bucket size, in bytes of the model, and the reason.

    Args:
        link: the first worker's measurement.
        sent: the fraction of a bucket's bytes that is sent, above 0.
        crowded: whether the workers are on this host, and use every core.
    """
    if crowded and link == NEAR:
        return CROWDED, "the workers take every core of this host, so nothing goes on beside backward"
    rate = link.rate / sent
    least = rate * BUCKET_SECONDS / SHARE
    filling = rate * link.seconds / WAITING  # otherwise the network is idle until an answer comes
    size = min(LARGEST, max(least, filling))
    size = max(1, math.ceil(size / SMALLEST)) * SMALLEST
    why = f"the network has {link.rate / 1e6:.1f} MB/s, an empty call takes {link.seconds * 1e3:.1f} ms"
    return size, f"{why}, and {sent:.0%} of the bytes are sent"


class Turn:
    """Lets workers measure in turn: several at a time would each measure a share of shard 0's link."""

    def __init__(self) -> None:
        self._worker: int | None = None
        self._until = -math.inf

    def is_anothers(self, worker: int, now: float) -> bool:
        """Whether another worker is measuring. `now` is in seconds."""
        return self._worker not in (None, worker) and now < self._until

    def take(self, worker: int, now: float) -> None:
        """Note that the worker begins to measure."""
        self._worker, self._until = worker, now + TURN

    def end(self, worker: int) -> None:
        """Note that the worker has measured."""
        if self._worker == worker:
            self._worker = None
