"""How large buckets are to be, from what the network of the job's first worker is like.

A bucket is what is pushed, stepped and pulled at a time. The next values of the first buckets leave while the
last gradients arrive, so with small buckets a step begins and ends earlier. Small buckets also leave less in
the queues of the network, where everything else has to wait behind them. But each bucket costs the parameter
server time for a push and a pull of each worker, however small it is.

So a bucket is as small as it can be while that time is a small share of the time that its bytes take in the
network. It does not depend on the model, nor on how many workers share a link: both times grow alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LARGEST = 4 * 1024 * 1024
"""Bytes of a bucket that is chosen, at most: in a network that is so fast larger ones save nothing."""

SMALLEST = 64 * 1024
"""Bytes of a bucket that is chosen, at least. Its size is a multiple of this."""

BUCKET_SECONDS = 0.4e-3
"""The parameter server's processor time for a worker's push and pull of a bucket; `benchmarks.buckets`."""

SHARE = 0.08
"""Of the time that a bucket's bytes take in the network."""

WAITING = 2
"""Buckets that a worker pushes to a shard while another one waits for its answer; see `worker.sending`."""


class Link(NamedTuple):
    """What a worker's network to shard 0 is like.

    Attributes:
        rate: bytes per second.
        seconds: that a call without a body takes.
    """

    rate: float
    seconds: float


def bucket_bytes(link: Link) -> tuple[int, str]:
    """The size of buckets, in bytes, and why. `link`: as the first worker has measured it."""
    least = link.rate * BUCKET_SECONDS / SHARE
    filling = link.rate * link.seconds / WAITING  # else the network is idle until an answer comes
    size = min(LARGEST, max(least, filling))
    size = max(1, math.ceil(size / SMALLEST)) * SMALLEST
    return size, f"{link.rate / 1e6:.1f} MB/s, {link.seconds * 1e3:.1f} ms for a call without a body"
