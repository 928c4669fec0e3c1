"""kopf: it watches, we only note which job to look at. Nothing is kept in the objects.

Only raw event handlers are registered. kopf's others would add finalizers or annotations to the jobs, and
run again after every patch of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import kopf

from elastic_operator import names
from elastic_operator.api import Api, ApiError
from elastic_operator.controller import Controller
from elastic_operator.queue import Queue
from elastic_operator.settings import Settings
from elastic_ps.errors import ConnectionLost
from elastic_ps.job import GROUP, VERSION

logger = logging.getLogger(__name__)

_BURST = timedelta(milliseconds=300)
"""Pods change in bursts; one pass is made for all of it."""


class Backoffs:
    """Delays between attempts to reach the API server. They never run out: a watch must not give up."""

    def __iter__(self) -> Iterator[float]:
        yield from (1, 1, 2, 3, 5, 8, 13)  # mutant: equal
        while True:
            yield 20


def build_settings() -> kopf.OperatorSettings:
    """kopf's settings, as we need them."""
    settings = kopf.OperatorSettings()
    settings.networking.error_backoffs = Backoffs()
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.label_selectors["v1", "pods"] = names.JOB_LABEL
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.queueing.error_delays = Backoffs()
    settings.process.ultimate_exiting_timeout = 30
    return settings


def build_registry(
    controller: Controller, queue: Queue, settings: Settings, api: Api
) -> kopf.OperatorRegistry:
    """The handlers. They block nothing and write nothing."""
    registry = kopf.OperatorRegistry()
    generations: dict[str, tuple[int | None, bool, str | None]] = {}
    background: list[asyncio.Task[None]] = []

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        inside = settings.kubeconfig is None
        return kopf.login_with_service_account(**kwargs) if inside else _connection(api)

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        background.append(asyncio.create_task(queue.run(), name="queue"))
        background.append(asyncio.create_task(_resync(controller, queue, settings), name="resync"))

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)

    @kopf.on.event(GROUP, VERSION, names.PLURAL, registry=registry)
    async def job_changed(event: Any, **_: Any) -> None:
        metadata, gone = event["object"]["metadata"], event["type"] == "DELETED"
        controller.jobs_watch.delivered(event["object"], gone=gone)
        if gone:
            generations.pop(metadata["uid"], None)
            return
        # Our own writes of the status do not change these.
        restart = (metadata.get("annotations") or {}).get(names.RESTART_ANNOTATION)
        seen = (metadata.get("generation"), "deletionTimestamp" in metadata, restart)
        if event["type"] is None or generations.get(metadata["uid"]) != seen:
            generations[metadata["uid"]] = seen
            queue.add((metadata["namespace"], metadata["name"]))

    @kopf.on.event("", "v1", "pods", labels={names.JOB_LABEL: kopf.PRESENT}, registry=registry)
    async def pod_changed(event: Any, **_: Any) -> None:
        metadata = event["object"]["metadata"]
        controller.pods_watch.delivered(event["object"], gone=event["type"] == "DELETED")
        queue.add((metadata["namespace"], metadata["labels"][names.JOB_LABEL]), _BURST)

    return registry


def _connection(api: Api) -> kopf.ConnectionInfo:
    """kopf's words for how our own client reaches the API server."""
    access = api.access()
    return kopf.ConnectionInfo(
        server=access.server,
        ca_path=access.authority,
        insecure=access.insecure,
        token=access.token,
        certificate_path=access.certificate,
        private_key_path=access.key,
    )


async def _resync(controller: Controller, queue: Queue, settings: Settings) -> None:
    """List everything now and then: what a watch has missed is found, and so is a watch that is dead."""
    while True:
        await asyncio.sleep(settings.resync.total_seconds())
        try:
            keys = await asyncio.to_thread(controller.list_all)
        except (ApiError, ConnectionLost) as error:
            logger.warning("cannot list all objects: %s", error)
            continue
        for key in keys:
            queue.add(key)
