"""Telling the parameter server that a worker's process has ended, so that it need not wait for the lease."""

from __future__ import annotations

import logging
from datetime import timedelta

from elastic_ps.errors import ElasticPSError

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=5)


def tell_parameter_server(job: str, addresses: tuple[str, ...], worker: int, instance: str) -> None:
    """Tell shard 0 of `job`. Blocks for `TIMEOUT` at most; if it cannot be told, the worker's lease ends."""
    from elastic_ps.transport import messages_pb2 as pb
    from elastic_ps.transport import ways
    from elastic_ps.transport.base import unary

    connection = ways.connect(addresses[0])
    try:
        request = pb.GoneRequest(job=job, worker=worker, instance=instance)
        unary(connection, "Gone", request.SerializeToString(), timeout=TIMEOUT)
    except ElasticPSError as error:
        logger.debug("the parameter server could not be told that worker %d has ended: %s", worker, error)
    finally:
        connection.close()
