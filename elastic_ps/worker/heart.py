"""The thread that keeps a worker's lease alive while the script computes."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

from elastic_ps.errors import ElasticPSError
from elastic_ps.worker.client import Client

logger = logging.getLogger(__name__)


class Heart:
    """Beats from its making until `close`.

    Args:
        interval: between two heartbeats; well below the lease.
    """

    def __init__(self, client: Client, interval: timedelta) -> None:
        self._client = client
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval.total_seconds()):
            try:
                self._client.heartbeat()
            except ElasticPSError as error:
                logger.debug("heartbeat: %s", error)  # whatever the script does next is told so too

    def close(self) -> None:
        """Beat no more. Blocks until the thread has ended, for 5 s at most."""
        self._stop.set()
        self._thread.join(timeout=5)
