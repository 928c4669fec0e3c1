"""A worker of several processes (`worker.processes`): starts them, and ends them together.

This process does nothing else: it neither imports torch nor runs the script. The first of the others that
dies ends all, and the worker's exit status is that one's. What asks the worker to leave, or to say where it
is, reaches every process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe

from elastic_ps.contract import env, exits
from elastic_ps.contract.deaths import describe_exit
from elastic_ps.process import lifecycle

SAYS = 0.5
"""Seconds that the others have to write down where they are, when one has found that the worker hangs."""


def run(environment: env.ProcessEnvironment) -> int:
    """Run a worker's processes to their end; returns its exit status, see `contract.exits`. Blocks."""
    lifecycle.begin(environment)
    lifeline, held = os.pipe()  # the kernel closes it when this process ends, however it ends
    children = _start(environment, lifeline)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: _signal(children, number))
    try:
        return _await(children)
    finally:
        _signal(children, signal.SIGKILL)
        os.close(held)
        lifecycle.end_soon()


def _start(environment: env.ProcessEnvironment, lifeline: int) -> list[subprocess.Popen[bytes]]:
    size = environment.spec.worker.processes
    pairs = [[Pipe() for _ in ("questions", "gradients")] for _ in range(size - 1)]
    to_others = [(questions[0].fileno(), gradients[0].fileno()) for questions, gradients in pairs]
    to_first = [(questions[1].fileno(), gradients[1].fileno()) for questions, gradients in pairs]
    children = []
    for rank in range(size):
        links = to_others if rank == 0 else [to_first[rank - 1]]
        contract = replace(environment, local_rank=rank, links=tuple(links), lifeline=lifeline)
        variables = {
            **os.environ,
            **_threads(size),
            **contract.to_variables(),
            env.LOCAL_RANK: str(rank),
            env.LOCAL_WORLD_SIZE: str(size),
        }
        descriptors = [lifeline, *(number for pair in links for number in pair)]
        argv = [sys.executable, "-m", "elastic_ps.worker"]
        children.append(subprocess.Popen(argv, env=variables, pass_fds=descriptors))
    for each in (connection for pair in pairs for ends in pair for connection in ends):
        each.close()
    return children


def _threads(processes: int) -> dict[str, str]:
    """The threads that the worker was given, shared out."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() else lifecycle.usable_cores()
    return dict.fromkeys(env.THREAD_VARIABLES, str(max(1, threads // processes)))


def _await(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or one has died; returns what the worker ends with."""
    alive = {child.pid: rank for rank, child in enumerate(children)}
    left = False
    while alive:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_pid not in alive:
            # An orphan, where this is the first process of a container.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid if ended else -1, os.WNOHANG)
            continue
        rank = alive.pop(ended.si_pid)
        status = children[rank].wait()
        left |= status == exits.LEFT
        if status not in (0, exits.LEFT):
            return _end(children, rank, status)
    return exits.LEFT if left else 0


def _end(children: Sequence[subprocess.Popen[bytes]], rank: int, status: int) -> int:
    text = f"process {rank} of this worker (pid {children[rank].pid}) {describe_exit(status)}"
    print(f"{text}; the others are ended with it", file=sys.stderr, flush=True)
    if status < 0:
        lifecycle.leave_reason(text)
    if status == exits.HUNG:
        _signal(children, signal.SIGUSR1)
        time.sleep(SAYS)
    return status if status > 0 else 128 - status


def _signal(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)
