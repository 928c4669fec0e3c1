"""Measures the network to a server by calls of several sizes."""

from __future__ import annotations

import os
from collections.abc import Callable

from elastic_ps.core.sizing import Link

BODIES = (256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
"""Bytes that are sent, one after the other, until a body takes `LONG`."""

LONG = 0.05
"""Seconds. A shorter call says little: a switch lets some packets pass at once."""

BODY_CALLS = 2
"""Calls with each body; the fastest counts. While a job begins, many processes start on a host, so a call
may be slow by chance, and the size of buckets follows from it for good."""

EMPTY_CALLS = 3
"""Calls without a body; the fastest counts, since the first one may open a connection."""

SHORT = 1e-6
"""Seconds that a body takes at least, whatever the clock says."""


def measure(call: Callable[[memoryview], float]) -> Link:
    """The network as it is now.

    Args:
        call: makes a call with this body, and returns how many seconds it took. Blocks.
    """
    body = memoryview(os.urandom(BODIES[-1]))  # a tunnel may compress what is alike
    empty = min(call(body[:0]) for _ in range(EMPTY_CALLS))
    for nbytes in BODIES:
        took = max(SHORT, min(call(body[:nbytes]) for _ in range(BODY_CALLS)) - empty)
        if took >= LONG:
            break
    return Link(nbytes / took, empty)
