"""The operator's life: kopf starts, serves and stops it, and everything else is ours.

kopf watches nothing: it would keep the whole of each object, and a task for each that changes. The watches
are ours, and keep what a pass reads. docs/operator.md says what that brought with a thousand jobs.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import kopf

from elastic_operator.api import Api, ApiError
from elastic_operator.controller import Controller
from elastic_operator.poller import Poller
from elastic_operator.queue import Key, Queue
from elastic_operator.reflector import Reflectors
from elastic_operator.settings import Settings
from elastic_operator.store import Resource, Store
from elastic_ps.errors import ConnectionLost

logger = logging.getLogger(__name__)

_BURST = timedelta(milliseconds=300)
"""Pods change in bursts; one pass is made for all of it."""

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


def build_settings() -> kopf.OperatorSettings:
    """kopf's settings, as we need them."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = 30
    return settings


def build_registry(
    controller: Controller,
    passes: Passes,
    store: Store,
    reflectors: Reflectors,
    settings: Settings,
    api: Api,
) -> kopf.OperatorRegistry:
    """What kopf is to do when it starts and when it ends."""
    registry = kopf.OperatorRegistry()
    background: list[asyncio.Task[None]] = []

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        inside = settings.kubeconfig is None
        return kopf.login_with_service_account(**kwargs) if inside else _connection(api)

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        loop, queue = asyncio.get_running_loop(), passes.queue

        def changed(key: Key, resource: Resource) -> None:
            loop.call_soon_threadsafe(queue.add, key, _BURST if resource == "pods" else timedelta(0))

        store.changed = changed
        for key in store.jobs():
            queue.add(key)
        reflectors.start()
        background.append(asyncio.create_task(queue.run(), name="queue"))
        background.append(asyncio.create_task(passes.poller.run(), name="poller"))
        background.append(asyncio.create_task(_resync(controller, settings), name="resync"))

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        reflectors.stop()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        passes.close()

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


async def _resync(controller: Controller, settings: Settings) -> None:
    """List everything now and then: what a watch has missed is found, and so is a watch that is dead."""
    while True:
        await asyncio.sleep(settings.resync.total_seconds())
        try:
            await asyncio.to_thread(controller.list_all)
        except (ApiError, ConnectionLost) as error:
            logger.warning("cannot list all objects: %s", error)
