"""The operator's life: kopf starts it, watches for it and ends it.

kopf lists and watches TrainingJobs and what belongs to them. Of what it tells, the store keeps what a pass
reads, and a change of that puts the job's name into the queue of passes. What kopf cannot do is beside it:
see `listings` and `session`. docs/reports/2026-11-operator.md says what its watches cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import kopf

from elastic_operator.api import Api, ApiError
from elastic_operator.controller import Controller
from elastic_operator.listings import PAGE, Listings, selector_of
from elastic_operator.poller import Poller
from elastic_operator.queue import Key, Queue
from elastic_operator.session import Delays, session
from elastic_operator.settings import Settings
from elastic_operator.store import Resource, Store, group_of
from elastic_ps.errors import ConnectionLost

logger = logging.getLogger(__name__)

_BURST = timedelta(milliseconds=300)
"""Pods change in bursts; one pass is made for all of it."""

_BEGIN = 1.0
"""Seconds: if a watch begins anew, others are likely to do so, too, and one listing is made for all."""

_AGAIN = 10.0
"""Seconds at most until everything is listed again, if that has failed."""

PASSES = 200
"""Passes at a time that wait for their job's server; those that act are as many as the settings say."""


class Passes:
    """Makes passes: look, ask the job's server without blocking a thread, then decide and act in one."""

    def __init__(self, controller: Controller, settings: Settings) -> None:
        self._controller = controller
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="pass")
        self.queue = Queue(self.make, concurrency=PASSES)
        self.poller = Poller(self.queue.add, interval=settings.options.poll, timeout=settings.status_timeout)

    async def make(self, key: Key) -> timedelta | None:
        """One pass; when to look again."""
        snapshot, server = self._controller.look(key)
        self.poller.follow(key, server)
        if snapshot is None:
            return None
        word = None
        if server is not None:
            word = await self.poller.word(key, server, since=snapshot.changed)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._controller.run_pass, key, snapshot, word)

    def close(self) -> None:
        """Blocks until the passes that have begun are over."""
        self._threads.shutdown()


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf compares an object with the one before only for handlers that are told of differences."""

    def build(self, **_: Any) -> Any:
        return None

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def build_settings(given: Settings, listings: Listings) -> kopf.OperatorSettings:
    """kopf's settings, as we need them."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = 30
    settings.networking.request_timeout = given.request_timeout.total_seconds()
    settings.networking.error_backoffs = Delays()
    settings.watching.chunk_size = PAGE
    settings.watching.reconnect_backoff = 1.0
    for resource in listings.monitors:
        if selector := selector_of(resource):
            settings.watching.label_selectors[group_of(resource), resource] = selector
    # A task for an object that has changed keeps the whole of it for so long.
    settings.queueing.idle_timeout = 0.1
    settings.persistence.diffbase_storage = _NoDiffs()
    return settings


def build_registry(
    controller: Controller, passes: Passes, store: Store, listings: Listings, settings: Settings, api: Api
) -> kopf.OperatorRegistry:
    """What kopf is to do: when it starts, when an object has changed, and when it ends."""
    registry = kopf.OperatorRegistry()
    background: list[asyncio.Task[None]] = []

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return session(api, listings)

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        loop, queue = asyncio.get_running_loop(), passes.queue

        def changed(key: Key, resource: Resource) -> None:
            loop.call_soon_threadsafe(queue.add, key, _BURST if resource == "pods" else timedelta(0))

        store.changed = changed
        for key in store.jobs():
            queue.add(key)
        background.append(asyncio.create_task(queue.run(), name="queue"))
        background.append(asyncio.create_task(passes.poller.run(), name="poller"))
        background.append(asyncio.create_task(_list(controller, listings, settings), name="listings"))

    def watch(resource: Resource) -> None:
        @kopf.on.event(group_of(resource), resource, id=resource, registry=registry)
        async def notify(event: kopf.RawEvent, **_: Any) -> None:
            listings.notify(resource, event)

    for resource in listings.monitors:
        watch(resource)

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        passes.close()

    return registry


async def _list(controller: Controller, listings: Listings, settings: Settings) -> None:
    """List everything now and then: what a watch has missed is found, and so is a watch that is dead."""
    wait = interval = settings.resync.total_seconds()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await listings.due.wait()
                await asyncio.sleep(_BEGIN)
        listings.due.clear()
        try:
            await asyncio.to_thread(controller.list_all)
            wait = interval
        except (ApiError, ConnectionLost) as error:
            wait = min(interval, _AGAIN)
            logger.warning("cannot list all objects: %s", error)
