"""Tells the parameter server that a worker's process has ended, so that it need not wait for the lease."""

from __future__ import annotations

import contextlib
import logging
from datetime import timedelta
from pathlib import Path

from elastic_ps.errors import ElasticPSError

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=5)


def tell_parameter_server(
    job: str, addresses: tuple[str, ...], worker: int, instance: str, tls: Path | None = None
) -> None:
    """Tell shard 0 of `job`. Blocks for at most `TIMEOUT`. If that fails, the worker's lease expires.

    Args:
        tls: directory of the launcher's certificate; None without TLS.
    """
    from elastic_ps.transport import calls, ways
    from elastic_ps.transport import messages_pb2 as pb
    from elastic_ps.transport.credentials import Credentials

    text = "the parameter server could not be told that worker %d has ended: %s"
    try:
        credentials = Credentials(tls) if tls is not None else None
        with contextlib.closing(ways.connect(addresses[0], credentials=credentials)) as connection:
            request = pb.GoneRequest(job=job, worker=worker, instance=instance)
            calls.ask(connection, calls.GONE, request, timeout=TIMEOUT)
    except ElasticPSError as error:
        logger.debug(text, worker, error)
    except Exception as error:  # nobody sees the result, and each such worker costs a lease
        logger.exception(text, worker, error)
