"""The session of this process, as its environment wants it. A process has one at most."""

from __future__ import annotations

import atexit
import os
from functools import partial
from multiprocessing.connection import Connection

from elastic_ps.collectives.groups import host_towards, require_safe
from elastic_ps.contract import env
from elastic_ps.errors import UsageError
from elastic_ps.process.lifecycle import end_hung, tell_joined
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import USUAL
from elastic_ps.worker.wire.local_world import Drained, Links, LocalWorld

_current: Session | None = None


def connect() -> Session:
    """This process's session in the job that it was started for. Reads the environment; does not block.

    It begins with the first call. Later ones return the same session, until it is closed.

    Raises:
        UsageError: the process was not started as a worker of a job, or has trained in a closed session.
    """
    global _current
    if _current is not None and _current.open:
        return _current
    if _current is not None and _current.started:
        raise UsageError(
            "this process has closed the session that it trained in, and a job trains one model once. To "
            "train several, start a job for each, as in `elastic-ps run train.py -- --seed 1`"
        )
    environment = env.read()
    if environment.role != "worker":
        raise UsageError(
            f"only a worker may call elastic_ps.connect(), and this is the job's {environment.role}. An "
            "evaluator's script loops over elastic_ps.checkpoints()"
        )
    from elastic_ps.transport import credentials, ways

    host = "127.0.0.1"
    if environment.spec.all_reduce:
        host = host_towards(ways.parse(environment.addresses[0])[1], within=USUAL.patience)
        require_safe(host, environment.spec, secured=environment.tls is not None)
    world = _local_world(environment)
    process = f"worker-{environment.index}"
    own = credentials.of_process(environment)
    connections = [ways.connect(address, credentials=own) for address in environment.addresses]
    _current = Session(
        environment.job,
        environment.spec,
        environment.index,
        connections,
        trace=Trace(environment.trace if world.leads else None, process),
        history=History(environment.history if world.leads else None, process),
        on_hung=end_hung,
        instance=environment.instance,
        hostname=environment.hostname,
        on_joined=partial(tell_joined, environment.joined),
        world=world,
        host=host,
    )
    atexit.register(_current.close)
    return _current


def _local_world(environment: env.ProcessEnvironment) -> LocalWorld:
    links = [
        Links(Connection(questions), Connection(gradients)) for questions, gradients in environment.links
    ]
    for descriptor in (number for pair in environment.links for number in pair):
        os.set_inheritable(descriptor, False)
    size = environment.spec.worker.processes if links else 1
    return LocalWorld(environment.local_rank, links, size)


def drain() -> None:
    """Ask the session to leave; without one the process ends at once. For signal handlers."""
    if _current is None or not _current.started:
        raise Drained
    _current.drain()


def asked_to_leave() -> bool:
    """Whether this process was asked to leave."""
    return _current is not None and _current.asked_to_leave


def came_late() -> bool:
    """Whether this process had nothing to train, and nothing to save; see `Runtime.came_late`."""
    return _current is not None and _current.came_late


def finish() -> None:
    """The script has come to its end; see `Session.finish`. Blocks."""
    if _current is not None:
        _current.finish()


def close(*, failed: bool = False) -> bool:
    """Close the session, if there is one; see `Session.close`. Returns False if the script had done that."""
    was_open = _current is None or _current.open
    if _current is not None:
        _current.close(failed=failed)
    return was_open
