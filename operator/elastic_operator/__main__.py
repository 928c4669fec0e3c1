"""`python -m elastic_operator`: runs the operator until SIGTERM."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import kopf

from elastic_operator import handlers, settings
from elastic_operator.api import Api
from elastic_operator.cluster import Cluster
from elastic_operator.controller import Controller
from elastic_operator.metrics import HealthServer, Metrics
from elastic_operator.queue import Queue
from elastic_operator.settings import Settings
from elastic_ps.errors import UserError

logger = logging.getLogger("elastic_operator")

_TURN_LIMIT = 60.0


def main() -> int:
    """Return 0 when asked to end, 2 where it cannot start as configured."""
    given = settings.parse()
    logging.basicConfig(
        level=given.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("kopf", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    metrics = Metrics()
    try:
        api = Api(given, metrics)
    except UserError as error:
        print(f"elastic-operator: {error}", file=sys.stderr)
        return 2
    cluster = Cluster(api, status_timeout=given.status_timeout.total_seconds())
    controller = Controller(cluster, given, metrics)
    queue = Queue(controller.run_pass, concurrency=given.concurrency)
    metrics.queue.set_function(lambda: len(queue))
    health = HealthServer(
        given.health,
        metrics,
        healthy=lambda: _unhealthy(controller, queue, given),
        ready=lambda: None if controller.served else "the API server does not serve TrainingJobs yet",
    )
    where = ", ".join(given.namespaces) or "all namespaces"
    logger.info("serving TrainingJobs in %s; probes and metrics on port %d", where, health.port)
    # Otherwise kopf asks for the user's name, and a container's user may have none.
    identity: Any = "elastic-ps-operator"
    try:
        controller.wait_until_served()
        queue.last_turn = time.monotonic()
        kopf.run(
            registry=handlers.build_registry(controller, queue, given, api),
            settings=handlers.build_settings(),
            identity=identity,
            standalone=True,
            clusterwide=not given.namespaces,
            namespaces=given.namespaces,
        )
    finally:
        health.close()  # mutant: equal
    return 0


def _unhealthy(controller: Controller, queue: Queue, given: Settings) -> str | None:
    """What is wrong with this process, such that only a restart helps; None if nothing is."""
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
