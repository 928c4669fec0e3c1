"""Exit statuses of a job's processes, and the end on request.

This module imports almost nothing, so that a process can call `end_on_request` before anything else.

================ ============================================================================
exit status      meaning
================ ============================================================================
0                a worker or the evaluator finished its script, or a parameter server was asked to end
                 (SIGTERM)
INVALID (78)     the job cannot work as it is specified (`UserError`), or the script lacks a module; the
                 process is not replaced, on a cluster only before the first step
HUNG (124)       a worker that kept the others waiting for too long ended itself; counts against
                 `runPolicy.backoffLimit`
a signal N, or   killed from outside (preemption) or crashed (also: out of memory); replaced. On a cluster
128 + N          it counts unless the pod was disrupted. On one machine being killed never counts,
                 and a crash counts if the one before had the same cause and the process had done
                 nothing yet (`elastic_ps.contract.deaths`)
FENCED (250)     a parameter server ended because another one has taken over; replaced
LEFT (251)       a worker was asked to leave (SIGTERM) and left before the end; replaced, unless its
                 starter asked
LOST (252)       a worker whose parameter server was lost with all checkpoints; replaced, so that training
                 begins again
SILENT (253)     a worker whose parameter server did not answer for `WorkerLimits.patience`; replaced
any other one    the script failed, also with 255 (`sys.exit(-1)`); counts, too
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
"""The status that timeout(1) uses. It counts as a failure: a script that hangs is likely to do so again."""

FENCED = 250
"""Above the statuses of all signals. It does not count as a failure."""

LEFT = 251
"""Not 0: if somebody else asked, the starter must not take the worker for done."""

LOST = 252
"""No failure: the model that the worker needed is lost."""

SILENT = 253
"""No failure: the parameter server has not answered for too long, and nothing is lost."""


def print_stacks_on_request() -> None:
    """Let this process and its forks print the stacks of their threads on SIGUSR1, and continue."""
    if sys.stderr is not None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def ignore_requests() -> None:
    """Ignore SIGUSR1 in a process that ends, so that it neither prints stacks nor dies of the signal."""
    faulthandler.unregister(signal.SIGUSR1)
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def end_on_request(status: int) -> None:
    """Let SIGTERM end this process with `status`, until another handler is set. SIGUSR1 prints stacks.

    Call it before slow imports: SIGTERM has no default action in the first process of a container.
    """
    print_stacks_on_request()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
