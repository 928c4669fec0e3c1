"""How large buckets are to be, from what the network of the job's first worker is like.

A bucket is what is pushed, stepped and pulled at a time. The next values of the first buckets leave while the
last gradients arrive, so with small buckets a step begins and ends earlier. Small buckets also leave less in
the queues of the network, where everything else has to wait behind them. But each bucket costs the parameter
server time for a push and a pull of each worker, however small it is.

So a bucket is as small as it can be while that time is a small share of the time that its bytes take in the
network, as few as the codecs leave of them. It does not depend on the model, nor on how many workers share a
link: both times grow alike.

Within a host whose every core is taken by a worker, a step is not ready any sooner with small buckets, since
nothing can go on beside backward. There they are large.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LARGEST = 4 * 1024 * 1024
"""Bytes of a bucket that is chosen, at most: in a network that is so fast larger ones save nothing."""

CROWDED = 64 * 1024 * 1024
"""Bytes of a bucket in shared memory where nothing can be done beside backward; see `benchmarks.datapath`."""

SMALLEST = 64 * 1024
"""Bytes of a bucket that is chosen, at least. Its size is a multiple of this."""

BUCKET_SECONDS = 0.4e-3
"""The parameter server's processor time for a worker's push and pull of a bucket; `benchmarks.buckets`."""

SHARE = 0.08
"""Of the time that a bucket's bytes take in the network."""

WAITING = 2
"""Buckets that a worker pushes to a shard while another one waits for its answer; see `worker.push_pull`."""

TURN = 10.0
"""Seconds that a worker has for measuring, before another one may. With 256 kB/s it needs two."""


class Link(NamedTuple):
    """What a worker's network to shard 0 is like.

    Attributes:
        rate: bytes per second.
        seconds: that a call without a body takes.
    """

    rate: float
    seconds: float


NEAR = Link(1e12, 0.0)
"""In place of a measurement where bodies lie in shared memory."""


def bucket_bytes(link: Link, *, sent: float = 1.0, crowded: bool = False) -> tuple[int, str]:
    """The size of buckets, in bytes of the model, and why.

    Args:
        link: as the first worker has measured it.
        sent: the share of a bucket's bytes that is sent, above 0.
        crowded: the workers are on this host, and take every core.
    """
    if crowded and link == NEAR:
        return CROWDED, "the workers take every core of this host, so nothing goes on beside backward"
    rate = link.rate / sent
    least = rate * BUCKET_SECONDS / SHARE
    filling = rate * link.seconds / WAITING  # else the network is idle until an answer comes
    size = min(LARGEST, max(least, filling))
    size = max(1, math.ceil(size / SMALLEST)) * SMALLEST
    why = f"{link.rate / 1e6:.1f} MB/s, {link.seconds * 1e3:.1f} ms for a call without a body"
    return size, f"{why}, {sent:.0%} of the bytes are sent"


class Turn:
    """Whose turn it is to measure: several at a time would find what a share of shard 0's link is like."""

    def __init__(self) -> None:
        self._worker: int | None = None
        self._until = -math.inf

    def is_anothers(self, worker: int, now: float) -> bool:
        """Whether another worker is measuring. `now` is in seconds."""
        return self._worker not in (None, worker) and now < self._until

    def take(self, worker: int, now: float) -> None:
        """The worker begins to measure."""
        self._worker, self._until = worker, now + TURN

    def end(self, worker: int) -> None:
        """The worker has measured."""
        if self._worker == worker:
            self._worker = None
