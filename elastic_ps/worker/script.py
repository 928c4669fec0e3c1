"""`python -m elastic_ps.worker`: import the job's entrypoint and call it.

Of a worker with several processes (`worker.processes`), the one that was started as the worker starts them
and ends them together. It does nothing else: it neither imports torch nor runs the script. The first that
dies ends all, and the worker's exit status is that one's. What asks the worker to leave, or to say where it
is, reaches every process.

`python -m elastic_ps.worker --check SPEC` (in JSON) only imports it, to find out before anything is started
whether that works, whether it takes the job's arguments, and whether there are the codecs of
`spec.compression`, the optimizers of `spec.parameterServer`, and the function that
`consistency.stalenessScale` may name. The evaluator's entrypoint is tried likewise.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe

from elastic_ps.api.job import parse_spec
from elastic_ps.contract import env, exits
from elastic_ps.contract.deaths import describe_exit
from elastic_ps.errors import InvalidJob, RefusalCode, Refused, TransportError, UserError
from elastic_ps.process import entrypoint, lifecycle

_STATUSES = {RefusalCode.HUNG: exits.HUNG, RefusalCode.MODEL_LOST: exits.LOST}
"""What a worker ends with that was refused for such a reason."""


def status_of(error: Exception) -> int:
    """The exit status of a worker whose script has failed."""
    if isinstance(error, entrypoint.ALWAYS):
        return exits.INVALID
    return _STATUSES.get(error.code, 1) if isinstance(error, Refused) else 1


def check(text: str) -> int:
    """Print what is wrong with the entrypoints, their arguments, codecs or optimizers; returns the status."""
    try:
        with lifecycle.importing():
            from elastic_ps.codec.optimizers import Optimizers
            from elastic_ps.codec.plan import Plan
            from elastic_ps.core import scales

            spec = parse_spec(json.loads(text), source="spec")
            entrypoint.load(spec.entrypoint, spec.arguments)
            if (evaluator := spec.evaluator) is not None:
                entrypoint.load(evaluator.entrypoint, evaluator.arguments, field="spec.evaluator.arguments")
            Plan(spec.compression)
            scales.check(spec.consistency.staleness_scale)
            Optimizers(spec.parameter_server.optimizers)
    except InvalidJob as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.INVALID
    lifecycle.end_soon()
    return 0


def main() -> int:
    """Run the script; returns the exit status, see `elastic_ps.contract.exits`."""
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        return check(sys.argv[2])
    if env.in_job() and (environment := env.read()).spec.worker.processes > 1 and not environment.links:
        return run_processes(environment)
    with lifecycle.importing():
        from elastic_ps.process import compiler
        from elastic_ps.worker import checks, current
    from elastic_ps.worker.local_world import Drained

    try:
        environment = env.read()
        lifecycle.begin(environment)
        lifecycle.keep_freed_memory()
        compiler.defer()
        lifecycle.handle_sigterm(current.drain)
        try:
            entrypoint.load(environment.spec.entrypoint, environment.spec.arguments)()
        except SystemExit as ending:
            if not ending.code:  # as `sys.exit(main())` ends a script that has done its work
                current.finish()
            raise
        current.finish()
    except UserError as error:
        current.close(failed=True)  # so that the cause is said last
        return _invalid(str(error))
    except Drained:
        return exits.LEFT
    except Exception as error:  # noqa: BLE001 (the script's own failure)
        if isinstance(error, TransportError) and current.asked_to_leave():
            print(f"left in the middle of a step: {error}", file=sys.stderr)
            return exits.LEFT
        current.close(failed=True)
        if left := checks.left_over(error):
            return _invalid(left)
        text = entrypoint.describe(error)
        print(text, end="", file=sys.stderr)
        if current.came_late():
            print("the training was over before this worker made a step: that is no failure", file=sys.stderr)
            return 0
        lifecycle.leave_reason(text[-2000:])
        return status_of(error)
    finally:
        current.close()
        lifecycle.end_soon()
    return 0


def _invalid(problem: str) -> int:
    """Say what a person has to change; returns the status."""
    print(f"error: {problem}", file=sys.stderr)
    lifecycle.leave_reason(problem)
    return exits.INVALID


SAYS = 0.5
"""Seconds that the others have to write down where they are, when one has found that the worker hangs."""


def run_processes(environment: env.ProcessEnvironment) -> int:
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
