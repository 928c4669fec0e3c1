"""How a process of a job ends: what its exit status says to its starter, and ending when it is asked to.

This module imports next to nothing, so that a process can call `end_on_request` before anything else.

================ ============================================================================
exit status      meaning
================ ============================================================================
0                a worker or the evaluator finished its script, or a parameter server was asked to end
                 (SIGTERM)
INVALID (78)     the job cannot work as it is specified (`UserError`), or the script lacks a module; the
                 process is not replaced, on a cluster only before the first step
1 to 127         the script failed; counts against `runPolicy.backoffLimit`
HUNG (124)       a worker that kept the others waiting for too long ended itself; counts, too
128 to 255,      killed from outside (out of memory, preemption) or crashed; replaced. On a cluster
a signal         it counts unless the pod was disrupted. On one machine being killed never counts,
                 and a crash counts if the one before had the same cause and the process had done
                 nothing yet (`elastic_ps.contract.deaths`)
FENCED (250)     a parameter server ended because another one has taken over; replaced
LEFT (251)       a worker was asked to leave (SIGTERM) and left before the end; replaced, unless
                 the process that had started it asked
LOST (252)       a worker of which the parameter server was lost, and all checkpoints with it; replaced, so
                 that training begins again
================ ============================================================================
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys

INVALID = 78
"""EX_CONFIG of sysexits.h."""

HUNG = 124
"""As of timeout(1); in the range of failures, since a script that hangs is likely to hang again."""

FENCED = 250
"""Above all signals, so that it reads as a status; in the range that counts against nothing."""

LEFT = 251
"""Not 0, because the starter may not be the one that asked, and must not take the worker for done."""

LOST = 252
"""Not in the range of failures: the worker could only go on with a model that nobody has any more."""


def print_stacks_on_request() -> None:
    """From now on this process, and its forks, print the stacks of their threads on SIGUSR1, and continue."""
    if sys.stderr is not None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def ignore_requests() -> None:
    """This process ends: SIGUSR1 asks nothing of it any more, and does not kill it on its way out either."""
    faulthandler.unregister(signal.SIGUSR1)
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def end_on_request(status: int) -> None:
    """From now on SIGTERM ends this process with `status`, until it has something to do first.

    SIGUSR1, which would end it, prints its stacks. To be called before what takes long to import: the first
    process of a container has no default action.
    """
    print_stacks_on_request()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
