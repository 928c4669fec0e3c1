"""`python -m elastic_ps.server`: one shard, as told by the environment, until SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading

from elastic_ps import env
from elastic_ps.errors import CheckpointError, UserError
from elastic_ps.process import log_to_stderr, watch_lifeline
from elastic_ps.server.process import ParameterServer
from elastic_ps.server.status import StatusServer
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status, see `elastic_ps.env`."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        environment = env.read()
        watch_lifeline(environment.lifeline)
        log_to_stderr(f"ps-{environment.index}")
        transport = GrpcServer(environment.bind)
        server = ParameterServer(
            environment, transport, lambda shard: GrpcConnection(environment.addresses[shard])
        )
        http = StatusServer(environment.http, server.status, server.loss)
    except (UserError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return env.EXIT_INVALID
    logger.info("shard %d of job %s serves on %s", environment.index, environment.job, transport.address)
    stop.wait()
    logger.info("asked to stop")
    server.close()
    http.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
