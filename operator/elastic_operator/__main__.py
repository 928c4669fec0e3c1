"""`python -m elastic_operator`: runs the operator until SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from typing import Any

import kopf

from elastic_operator import handlers, settings
from elastic_operator.api import Api
from elastic_operator.authority import Authority
from elastic_operator.cluster import Cluster
from elastic_operator.controller import Controller
from elastic_operator.leader import Leadership
from elastic_operator.listings import Listings
from elastic_operator.metrics import HealthServer, Metrics
from elastic_operator.queue import Queue
from elastic_operator.settings import Settings
from elastic_operator.store import Store
from elastic_ps.errors import UserError

logger = logging.getLogger("elastic_operator")

_TURN_LIMIT = 60.0

EXIT_LOST = 3
"""Exit status of an operator that has lost its lease."""


def main() -> int:
    """Run the operator. Returns 0 when asked to end, 2 if it cannot start as configured."""
    given = settings.parse()
    logging.basicConfig(
        level=given.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("kopf", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        _serve(given)
    except UserError as error:
        print(f"elastic-operator: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(given: Settings) -> None:
    """Reconcile jobs until asked to end. Raises UserError if it cannot start as configured."""
    metrics = Metrics()
    api = Api(given, metrics)
    store = Store()
    listings = Listings(api, store, given)
    secret = given.tls_secret
    authority = None if secret is None else Authority(api, secret, given=given.tls_secret_given)
    controller = Controller(Cluster(api, store, authority), store, listings, given, metrics)
    passes = handlers.Passes(controller, given)
    queue = passes.queue
    metrics.queue.set_function(lambda: len(queue))
    leadership = _leadership(api, given)
    health = HealthServer(
        given.health,
        metrics,
        healthy=lambda: _unhealthy(controller, queue, given),
        ready=lambda: _unready(controller, leadership),
    )
    where = ", ".join(given.namespaces) or "all namespaces"
    logger.info("serving TrainingJobs in %s; probes and metrics on port %d", where, health.port)
    # By default kopf asks for the user's name, which a container's user may lack.
    identity: Any = "elastic-ps-operator"
    try:
        if leadership is not None:
            # Nothing has started yet. In a container's first process, SIGTERM has no default action.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            leadership.acquire()
            leadership.hold(_lost)
        controller.wait_until_served()
        queue.last_turn = time.monotonic()
        kopf.run(
            registry=handlers.build_registry(controller, passes, store, listings, given, api),
            settings=handlers.build_settings(given, listings),
            identity=identity,
            standalone=True,
            clusterwide=not given.namespaces,
            namespaces=given.namespaces,
        )
        if leadership is not None:
            leadership.release()
    finally:
        health.close()  # mutant: equal


def _leadership(api: Api, given: Settings) -> Leadership | None:
    if given.lease is None:
        return None
    me = given.identity or socket.gethostname()
    return Leadership(api, *given.lease, me, duration=given.lease_duration)


def _lost() -> None:
    """Another operator may be active now: end at once. The restarted process waits for the lease."""
    os._exit(EXIT_LOST)


def _unready(controller: Controller, leadership: Leadership | None) -> str | None:
    """Why this process is not ready; None if it is. One that waits for the lease is ready."""
    waits = leadership is not None and not leadership.held
    return None if controller.served or waits else "the API server does not serve TrainingJobs yet"


def _unhealthy(controller: Controller, queue: Queue, given: Settings) -> str | None:
    """Why this process needs a restart; None if it does not."""
    limit = given.watch_limit.total_seconds()
    for resource, age in controller.watch_ages().items():
        if age > limit:
            return f"the watch of {resource} has missed a change for {age:.0f} s"
    if controller.definition_gone:
        return "the API server no longer knows TrainingJobs"
    if controller.served and time.monotonic() - queue.last_turn > _TURN_LIMIT:
        return "the event loop is blocked"
    return None


if __name__ == "__main__":
    sys.exit(main())
