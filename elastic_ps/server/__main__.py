"""`python -m elastic_ps.server`: one shard or its standby, as the environment says, until SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING

from elastic_ps.contract import exits

if TYPE_CHECKING:
    from elastic_ps.server.process import ParameterServer

logger = logging.getLogger("elastic_ps.server")


LOOK = 0.1
"""Seconds between two looks whether another process has replaced this one."""


def main() -> int:
    """Serve until SIGTERM or SIGINT, or until another one has taken over.

    HTTP is served until the process ends: each probe without an answer becomes a Warning event.

    Returns the exit status, see `elastic_ps.contract.exits`.
    """
    exits.end_on_request(0)
    from elastic_ps.contract import env
    from elastic_ps.errors import AskedToEnd, CheckpointError, Fenced, UserError
    from elastic_ps.process import lifecycle

    with lifecycle.importing():
        from elastic_ps.process import compiler
        from elastic_ps.process.retrying import Patience
        from elastic_ps.server.job.status import StatusServer
        from elastic_ps.server.process import ParameterServer, bare_status
        from elastic_ps.transport import credentials, ways

    stop = lifecycle.Alarm()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is meant for the process that started this one
    try:
        environment = env.read()
        lifecycle.begin(environment)
        lifecycle.take_descriptors()
        lifecycle.end_if_a_thread_fails()
        compiler.defer()
        own = credentials.of_process(environment)
        transport = ways.listen(environment.bind, credentials=own)
        patience = Patience(stop.is_set)
        # It begins before anything that may have to wait, so that the status shows the wait.
        http = StatusServer(
            environment.http, lambda: bare_status(environment, problem=patience.problem), list
        )
        server = ParameterServer(
            environment,
            transport,
            lambda shard: ways.connect(environment.addresses[shard], credentials=own),
            (lambda shard: ways.connect(environment.standbys[shard], credentials=own))
            if environment.standbys
            else None,
            patience=patience,
        )
        http.show(server.status, server.loss, server.evaluations)
    except Fenced as error:
        logger.info("%s", error)
        return exits.FENCED
    except AskedToEnd as error:
        logger.info("%s", error)
        return 0
    except (UserError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.INVALID
    what = "standby of shard" if environment.role == "standby" else "shard"
    where, everywhere = transport.address, "0.0.0.0"
    if everywhere in environment.bind:  # as in a pod; the address is for its own host
        where = where.replace("127.0.0.1", everywhere)
    logger.info("%s %d of job %s serves on %s", what, environment.index, environment.job, where)
    while not (stop.wait(LOOK) or server.fenced):
        pass
    fenced = server.fenced
    logger.info("another parameter server has taken over" if fenced else "asked to stop")
    _leave_last_words(server)  # also before, since closing may take longer than the grace period
    server.close()
    _leave_last_words(server)
    lifecycle.end_soon()  # mutant: equal
    return exits.FENCED if fenced else 0


def _leave_last_words(server: ParameterServer) -> None:
    """Write the progress of training for the starter: after the end nobody can ask for it."""
    from elastic_ps.process import lifecycle

    if server.shard_zero is not None and not server.fenced:
        lifecycle.leave_reason(server.status().last_words())


if __name__ == "__main__":
    status = main()
    from elastic_ps.process import lifecycle

    lifecycle.end_now(status)
