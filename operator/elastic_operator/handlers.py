"""The handlers by which kopf starts the operator, tells it of changes and ends it.

kopf lists and watches TrainingJobs and their objects. The store keeps the parts of an object that a pass
reads; if these change, the job's name goes into the queue of passes. `listings` and `session` add what kopf
lacks. docs/reports/2026-11-operator.md has the cost of its watches.
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
"""The delay of a pass after a pod has changed: pods change in bursts, and one pass serves a burst."""

_BEGIN = 1.0
"""Seconds between the restart of a watch and the listing: other watches are likely to restart, too."""

_AGAIN = 10.0
"""The longest time until a failed listing is repeated, in seconds."""

PASSES = 200
"""The number of passes that may wait for their job's server at a time. The settings limit those that act."""


class Passes:
    """Makes passes. The wait for a job's server blocks no thread; the rest of a pass runs in one."""

    def __init__(self, controller: Controller, settings: Settings) -> None:
        self._controller = controller
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="pass")
        self.queue = Queue(self.make, concurrency=PASSES)
        self.poller = Poller(self.queue.add, interval=settings.options.poll, timeout=settings.status_timeout)

    async def make(self, key: Key) -> timedelta | None:
        """One pass; returns when to look again."""
        snapshot, server = self._controller.look(key)
        self.poller.follow(key, server)
        if snapshot is None:
            return None
        word, silence = None, None
        if server is not None:
            word = await self.poller.word(key, server, since=snapshot.changed)
            silence = self.poller.unanswered(key)
        loop, run_pass = asyncio.get_running_loop(), self._controller.run_pass
        return await loop.run_in_executor(self._threads, run_pass, key, snapshot, word, silence)

    def close(self) -> None:
        """Block until the passes that have begun are over."""
        self._threads.shutdown()


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps kopf from storing and comparing objects: only handlers that ask for differences need that."""

    def build(self, **_: Any) -> Any:
        return None

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def build_settings(given: Settings, listings: Listings) -> kopf.OperatorSettings:
    """The settings of kopf."""
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
    # For this long, the task of a changed object keeps the whole object.
    settings.queueing.idle_timeout = 0.1
    settings.persistence.diffbase_storage = _NoDiffs()
    return settings


def build_registry(
    controller: Controller, passes: Passes, store: Store, listings: Listings, settings: Settings, api: Api
) -> kopf.OperatorRegistry:
    """The handlers for the start, for changed objects and for the end."""
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
        background.append(asyncio.create_task(list_again(controller, listings, settings), name="listings"))

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


async def list_again(controller: Controller, listings: Listings, settings: Settings) -> None:
    """List everything periodically, until cancelled. This finds missed changes, and watches that are dead."""
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
        except Exception as error:  # no error of a listing may end the listings
            wait = min(interval, _AGAIN)
            known = isinstance(error, ApiError | ConnectionLost)
            logger.warning(
                "cannot list all objects; trying again in %g s: %s", wait, error, exc_info=not known
            )
