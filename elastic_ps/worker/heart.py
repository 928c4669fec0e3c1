"""Keeping a worker's lease alive while its script computes, and learning that the others gave it up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

from elastic_ps.errors import ElasticPSError, RefusalCode, Refused
from elastic_ps.worker.client import Client

logger = logging.getLogger(__name__)


class Heart:
    """A thread that says that this worker is alive, until closed.

    Args:
        client: of a member.
        interval: between two heartbeats.
        on_hung: called on the thread, with the reason, when the parameter server has declared this worker
            hung; nobody else can notice, since the script's own thread makes no calls then.
    """

    def __init__(self, client: Client, interval: timedelta, on_hung: Callable[[str], None] | None) -> None:
        self._client = client
        self._interval = interval
        self._on_hung = on_hung
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval.total_seconds()):
            try:
                self._client.heartbeat()
            except ElasticPSError as error:
                logger.debug("heartbeat: %s", error)  # whatever the script does next is told so too
                hung = isinstance(error, Refused) and error.code is RefusalCode.HUNG
                if hung and self._on_hung is not None:
                    self._on_hung(str(error))
            except Exception:
                logger.exception("a heartbeat failed")  # the next one may not

    def close(self) -> None:
        """End the thread; waits for a heartbeat under way."""
        self._stop.set()
        self._thread.join(timeout=5)
