"""A parameter server process put together: node, coordinator on shard 0, transport, HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from elastic_ps.checkpoint.store import Manifest, Store
from elastic_ps.env import ProcessEnvironment
from elastic_ps.errors import NoCheckpoint
from elastic_ps.job import ServerStatus
from elastic_ps.server.coordinator import Coordinator
from elastic_ps.server.keeper import Keeper
from elastic_ps.server.node import Node, ShardControl
from elastic_ps.server.remote import RemoteShard
from elastic_ps.server.service import Service
from elastic_ps.telemetry import History, Trace
from elastic_ps.transport.base import Connection, Server

logger = logging.getLogger(__name__)


class ParameterServer:
    """One shard of a job, serving on a transport until it is closed. Several fit into one process.

    Args:
        environment: which shard of which job, and where its checkpoints are.
        server: the transport to serve on; closed by `close`.
        connect: how shard 0 reaches another shard, by its index.

    Raises:
        NoCheckpoint: a checkpoint is required and there is none.
        CheckpointError: the checkpoint directory cannot be used.
    """

    def __init__(
        self, environment: ProcessEnvironment, server: Server, connect: Callable[[int], Connection]
    ) -> None:
        spec, index = environment.spec, environment.index
        shards = spec.parameter_server.replicas
        process = f"ps-{index}"
        self._trace = Trace(environment.trace, process)
        self._history = History(environment.history, process)
        self._server = server
        self._remotes: list[RemoteShard] = []
        store = Store(environment.checkpoints) if environment.checkpoints else None
        self.node = Node(
            index, shards, store=store, deterministic=spec.consistency.deterministic, trace=self._trace
        )
        self._index, self._job, self._shards = index, environment.job, shards
        self.coordinator: Coordinator | None = None
        self.epoch = 1
        try:
            if index == 0:
                self._coordinate(environment, store, connect)
            server.serve(Service(environment.job, self.node, self.coordinator))
        except BaseException:
            self.close(keep=False)
            raise

    def _coordinate(
        self, environment: ProcessEnvironment, store: Store | None, connect: Callable[[int], Connection]
    ) -> None:
        """Shard 0: count this start, find the checkpoint, look after the members."""
        self.epoch = store.next_epoch() if store else 1
        keeper, found = self._keeper(environment, store) if store else (None, None)
        self._remotes = [RemoteShard(environment.job, connect(shard)) for shard in range(1, self._shards)]
        controls: list[ShardControl] = [self.node, *self._remotes]
        self._history.record("start", epoch=self.epoch)
        coordinator = Coordinator(
            environment.job, environment.spec, self.epoch, controls, keeper=keeper, history=self._history
        )
        try:
            coordinator.start(found)
        except BaseException:
            coordinator.abandon()
            raise
        self.coordinator = coordinator

    def _keeper(self, environment: ProcessEnvironment, store: Store) -> tuple[Keeper, Manifest | None]:
        """The keeper of the checkpoints, and the one to go on from."""
        store.discard_partial()
        checkpoint = environment.spec.parameter_server.checkpoint
        keeper = Keeper(
            store,
            job=environment.job,
            epoch=self.epoch,
            shards=self._shards,
            interval=checkpoint.interval,
            keep=checkpoint.keep,
            now=time.monotonic(),
        )
        found = None
        if environment.resume != "no":
            try:
                found = keeper.newest()
            except NoCheckpoint:
                if environment.resume == "require":
                    keeper.close()
                    raise
        return keeper, found

    def status(self) -> ServerStatus:
        """What GET /status says; only shard 0 knows of members and progress."""
        if self.coordinator is not None:
            return self.coordinator.status()
        return ServerStatus(
            job=self._job,
            shard=self._index,
            shards=self._shards,
            epoch=self.epoch,
            ready=self.node.configured,
        )

    @property
    def fenced(self) -> bool:
        """Whether another process has taken this one's place, so that it has to end."""
        return self.coordinator is not None and self.coordinator.fenced

    def loss(self) -> list[tuple[int, float]]:
        """The loss curve; empty on other shards than 0."""
        return self.coordinator.loss() if self.coordinator is not None else []

    def close(self, *, keep: bool = True) -> None:
        """Stop serving and end all threads; with `keep`, write a last checkpoint before. Blocks."""
        if self.coordinator is not None:
            self.coordinator.close(keep=keep)
        self.node.retire()
        self._server.close(timedelta(seconds=1))
        for remote in self._remotes:
            remote.close()
        self.node.close()
        self._history.close()
        self._trace.close()
