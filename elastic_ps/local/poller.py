"""Asks the parameter servers for their status in a thread, so that nothing waits for them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from elastic_ps.api.status import ServerStatus

INTERVAL = timedelta(milliseconds=200)
TIMEOUT = timedelta(seconds=2)


@dataclass(frozen=True)
class Polled:
    """The newest answers.

    Attributes:
        ready: the shards that have answered since they were started.
        status: shard 0's last answer.
        asked_at: when that answer was requested (monotonic seconds).
    """

    ready: frozenset[int] = frozenset()
    status: ServerStatus | None = None
    asked_at: float | None = None


class Poller:
    """Polls the parameter servers in a thread until closed. `polled` raises the thread's error."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._polled = Polled()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-poller", daemon=True)
        self._thread.start()

    def polled(self) -> Polled:
        """The newest answers. Raises RuntimeError if the thread has failed."""
        with self._lock:
            if self._error is not None:
                name, error = self._thread.name, self._error
                raise RuntimeError(
                    f"the thread {name} has failed: {type(error).__name__}: {error}"
                ) from error
            return self._polled

    def restarted(self, shard: int) -> None:
        """Forget that the shard has answered, since a new process replaces it."""
        with self._lock:
            self._polled = replace(self._polled, ready=self._polled.ready - {shard})

    def ask(self) -> Polled:
        """Ask shard 0 now, in the caller's thread; returns earlier answers if it does not answer."""
        asked_at = time.monotonic()
        status = fetch_status(self._addresses[0], waiting=True)
        if status is not None:
            with self._lock:
                if not status.begun:
                    self._polled = replace(self._polled, status=_waiting(self._polled.status, status))
                elif self._polled.asked_at is None or self._polled.asked_at <= asked_at:
                    self._polled = replace(self._polled, status=status, asked_at=asked_at)
        return self.polled()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._poll()
        except Exception as error:  # noqa: BLE001 (raised in the thread that asks)
            with self._lock:
                self._error = error

    def _poll(self) -> None:
        while not self._closing.wait(INTERVAL.total_seconds()):
            for shard, address in enumerate(self._addresses):
                if shard not in self.polled().ready and fetch(address, "/healthz") is not None:
                    with self._lock:
                        self._polled = replace(self._polled, ready=self._polled.ready | {shard})
            if 0 in self.polled().ready:
                self.ask()


def _waiting(before: ServerStatus | None, now: ServerStatus) -> ServerStatus:
    """The status of a shard 0 that cannot serve yet. It does not know how far training is."""
    return now if before is None else before.model_copy(update={"problem": now.problem})


def fetch_status(address: str, *, waiting: bool = False) -> ServerStatus | None:
    """A parameter server's status; None if it does not answer.

    Args:
        waiting: also accept the answer of a server that still waits for its storage.
    """
    body = fetch(address, "/status")
    try:
        status = None if body is None else ServerStatus.model_validate_json(body)
    except ValueError:
        return None
    return status if status is not None and (waiting or status.begun) else None


def fetch_loss(address: str) -> list[tuple[int, float]]:
    """The finite losses by version that a parameter server has recorded; empty if it does not answer."""
    body = fetch(address, "/loss")
    try:
        return [(int(version), float(loss)) for version, loss in json.loads(body or b"[]")]
    except (ValueError, TypeError):
        return []


def fetch_evaluations(address: str) -> list[tuple[int, dict[str, float]]]:
    """The results of a job's evaluator, by version; empty if the parameter server does not answer."""
    body = fetch(address, "/evaluations")
    try:
        return [
            (int(each["version"]), {str(name): float(value) for name, value in each["metrics"].items()})
            for each in json.loads(body or b"[]")
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def fetch(address: str, path: str) -> bytes | None:
    """The body of a successful answer within `TIMEOUT`, or None."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT.total_seconds())
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if answer.status == 200 else None
