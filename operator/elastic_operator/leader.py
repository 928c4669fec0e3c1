"""Leader election: of several operators, the one that holds a Lease works, and the others wait.

As in client-go's leader election, no clocks are compared: an operator takes a lease that its holder has given
up, or that it has seen unchanged for the lease's duration by its own clock. Two operators that overlap for a
moment do no harm: names of objects are deterministic, and a status that has changed is not written over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from elastic_operator.api import Api, ApiError
from elastic_operator.settings import Settings
from elastic_ps.errors import ConnectionLost

logger = logging.getLogger(__name__)

DURATION = Settings.lease_duration
"""The default time after which a lease that is not renewed may be taken."""

RENEW = 1 / 5
"""The interval between two looks at a lease or two renewals, as a fraction of its duration."""

GIVE_UP = 2 / 3
"""A holder that has not renewed its lease for this fraction of the duration stops."""


@dataclass(frozen=True)
class Record:
    """A lease that was read. `mark` changes with every change of the lease."""

    holder: str
    mark: str
    transitions: int


def read(manifest: Mapping[str, Any]) -> Record:
    """A Lease of the API as a `Record`."""
    spec = manifest.get("spec") or {}
    return Record(
        holder=str(spec.get("holderIdentity") or ""),
        mark=str(manifest["metadata"]["resourceVersion"]),
        transitions=int(spec.get("leaseTransitions") or 0),
    )


def may_take(record: Record | None, me: str, unchanged: timedelta, duration: timedelta = DURATION) -> bool:
    """Whether the operator `me` may take or renew a lease that has not changed for this long. Pure."""
    return record is None or record.holder in ("", me) or unchanged >= duration


class Leadership:
    """The lease `name` in `namespace`, held or wanted by the operator `me`. For one thread at a time."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        me: str,
        *,
        duration: timedelta = DURATION,
        renew: float = RENEW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._namespace, self._name, self._me = api, namespace, name, me
        self._clock, self._duration, self._pause = clock, duration, renew * duration.total_seconds()
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen: Record | None = None
        self._since = clock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Block until this operator holds the lease."""
        logger.info("waiting for the lease %s/%s as %s", self._namespace, self._name, self._me)
        while not self.attempt():
            sleep(self._pause)
        logger.info("holding the lease %s/%s", self._namespace, self._name)

    def attempt(self) -> bool:
        """Take or renew the lease if that is possible; returns whether this operator holds it."""
        try:
            record = self._read()
            if record != self._seen:
                self._seen, self._since = record, self._clock()
            unchanged = timedelta(seconds=self._clock() - self._since)
            if not may_take(record, self._me, unchanged, self._duration):
                return False
            self._write(record, self._me)
        except (ApiError, ConnectionLost) as error:
            logger.warning("cannot read or renew the lease %s/%s: %s", self._namespace, self._name, error)
            return False
        return True

    @property
    def held(self) -> bool:
        """Whether this operator has got the lease."""
        return self._thread is not None

    def hold(self, lost: Callable[[], None]) -> None:
        """Renew the lease in a thread until `release`. The thread calls `lost` if renewing fails for long."""
        self._thread = threading.Thread(target=self._renew, args=(lost,), name="lease", daemon=True)
        self._thread.start()

    def _renew(self, lost: Callable[[], None]) -> None:
        renewed, duration = self._clock(), self._duration.total_seconds()
        while not self._ended.wait(self._pause):
            if self._renewed():
                renewed = self._clock()
            elif self._clock() - renewed > GIVE_UP * duration:
                logger.error(
                    "lost the lease %s/%s: it could not be renewed in time", self._namespace, self._name
                )
                lost()
                return

    def _renewed(self) -> bool:
        """See `attempt`. The thread survives any error: otherwise two operators would end up working."""
        try:
            return self.attempt()
        except Exception:
            logger.exception("cannot renew the lease %s/%s", self._namespace, self._name)
            return False

    def release(self) -> None:
        """Stop renewing, and give up the lease so that nobody waits for its end. Blocks for a request."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        try:
            record = self._read()
            if record is not None and record.holder == self._me:
                self._write(record, "")
        except (ApiError, ConnectionLost) as error:
            logger.warning("cannot give up the lease %s/%s: %s", self._namespace, self._name, error)

    def _read(self) -> Record | None:
        try:
            return read(self._api.request("get", "leases", f"{self._path}/{self._name}"))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def _write(self, record: Record | None, holder: str) -> None:
        """Write the holder. Raises ApiError 409 if another operator was faster."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._duration.total_seconds())),
            "renewTime": now,
        }
        if record is None or (holder and record.holder != holder):
            spec |= {"acquireTime": now, "leaseTransitions": 0 if record is None else record.transitions + 1}
        if record is None:
            metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": spec,
            }
            self._api.request("create", "leases", self._path, body=body)
        else:
            body = {"metadata": {"resourceVersion": record.mark}, "spec": spec}
            self._api.request("patch", "leases", f"{self._path}/{self._name}", body=body)
