"""The parts of a parameter server process: node, the job on shard 0, transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from elastic_ps.api.mutable import MutableFields
from elastic_ps.api.status import ServerStatus
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.owner import running, used_by
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec.optimizers import Optimizers
from elastic_ps.codec.plan import Plan
from elastic_ps.contract.env import ProcessEnvironment
from elastic_ps.core import scales
from elastic_ps.embedding.served import TableCalls
from elastic_ps.errors import InvalidJob, NoCheckpoint
from elastic_ps.evaluation.decisions import Evaluation
from elastic_ps.evaluation.queue import EvaluationQueue
from elastic_ps.process.retrying import Patience
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.server.calls.members import MemberCalls
from elastic_ps.server.calls.node import Node
from elastic_ps.server.calls.service import Callers, EvaluatorCalls, Service
from elastic_ps.server.calls.shard_service import ShardService
from elastic_ps.server.calls.shard_zero import ShardZero
from elastic_ps.server.calls.steps import StepCalls
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.job.commit import CommitCoordinator
from elastic_ps.server.job.guarded import Guarded
from elastic_ps.server.job.reconfiguration import DesiredConfiguration
from elastic_ps.server.job.record import require_usable
from elastic_ps.server.job.standby import Follower
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import LOOK_TIMEOUT, RemoteShard, ShardControl
from elastic_ps.tensors.store import TensorStore
from elastic_ps.transport.base import Connection, Server
from elastic_ps.transport.calls import At


class ParameterServer:
    """A shard of a job, or its standby, serving on a transport until it is closed.

    Args:
        server: the transport to serve on. `close` closes it.
        connect: connects shard 0 with another shard, by its index.
        connect_standby: connects a shard with its standby, and shard 0 with all; None if there are none.
        patience: waits, on shard 0, for a checkpoint directory that cannot be used at the moment.

    Raises:
        InvalidJob: a codec or an optimizer of the job cannot be imported.
        NoCheckpoint: a checkpoint is required and there is none.
        CheckpointError: the checkpoint directory cannot be used, now or later.
        AskedToEnd: see `Patience`.
    """

    def __init__(
        self,
        environment: ProcessEnvironment,
        server: Server,
        connect: Callable[[int], Connection],
        connect_standby: Callable[[int], Connection] | None = None,
        *,
        patience: Patience | None = None,
        limits: ServerLimits = USUAL,
    ) -> None:
        self._environment, self._limits = environment, limits
        spec, index = environment.spec, environment.index
        Plan(spec.compression)  # a codec that cannot be imported ends the process at once
        optimizers = Optimizers(spec.parameter_server.optimizers)
        self._shards = shards = spec.parameter_server.replicas
        process = f"{environment.role}-{index}"
        self._trace = Trace(environment.trace, process)
        self._history = History(environment.history, process)
        self._server, self._patience = server, patience or Patience()
        self._remotes: list[RemoteShard] = []
        self._store = store = Store(environment.checkpoints) if environment.checkpoints else None
        self._leads, follower = environment.role == "ps", None
        if self._leads and connect_standby is not None and store is not None:
            connection, at_once = connect_standby(index), timedelta(0)
            standby = RemoteShard(environment.job, connection, start=at_once, timeout=LOOK_TIMEOUT)
            follower = Follower(standby, limits)
        self.node = Node(
            index,
            shards,
            store=store,
            optimizers=optimizers,
            draft_bytes=spec.parameter_server.draft_bytes,
            trace=self._trace,
            history=self._history,
            follower=follower,
            limits=limits,
        )
        self._tensors = TensorStore(
            index,
            shards,
            bucket_bytes=spec.parameter_server.slice_bytes,
            most_bytes=spec.parameter_server.tensor_bytes,
            clock=time.monotonic,
            limits=limits.tensors,
        )
        self.shard_zero: ShardZero | None = None
        self.term = 1
        try:
            if index == 0 and self._leads:
                self._take_the_lead(connect, connect_standby)
            parts = environment.job, self.node, self.shard_zero, self._tensors
            server.serve(service_of(*parts, standby=not self._leads))
        except BaseException:
            self.close(keep=False)
            raise

    def _take_the_lead(
        self, connect: Callable[[int], Connection], connect_standby: Callable[[int], Connection] | None
    ) -> None:
        """On shard 0: begin a term, find the checkpoint, and begin or continue the job."""
        environment = self._environment
        scales.check(environment.spec.consistency.staleness_scale)
        if self._store is not None:
            self._enter(self._store)
        checkpoints, found = self._checkpointer()
        remotes = [RemoteShard(environment.job, connect(shard)) for shard in range(1, self._shards)]
        controls: list[ShardControl] = [self.node, *remotes]
        standbys = []
        if connect_standby is not None:
            standbys = [RemoteShard(environment.job, connect_standby(shard)) for shard in range(self._shards)]
        self._remotes = [*remotes, *standbys]
        mutable = MutableFields.of(environment.spec, run=environment.run)
        said = mutable.consistency.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        self._history.record("start", term=self.term, consistency=said)
        job = Guarded(environment.spec, self.term, mutable=mutable, limits=self._limits)
        commit = CommitCoordinator(
            job,
            controls,
            standbys=standbys,
            checkpoints=checkpoints,
            history=self._history,
            crowded=environment.crowded,
        )
        file = environment.tuning
        desired = DesiredConfiguration(file, environment.run) if file is not None else None
        shard_zero = ShardZero(environment.job, commit, desired=desired)
        shard_zero.start(found, self._patience)
        self.shard_zero = shard_zero

    def _enter(self, store: Store) -> None:
        """Claim the checkpoint directory, and begin a term in it. A refusal changes nothing."""
        environment, wait = self._environment, self._patience.until_done
        resume, known = environment.resume, environment.durable
        if known is not None:  # before anything is written: the directory may be the mount point of a volume
            wait(lambda: store.require_version(known))
        versions = wait(store.versions)
        if resume == "no" and versions:
            if (owner := wait(partial(running, store.directory))) is not None:
                raise used_by(owner, store.directory)
            raise InvalidJob(
                f"{store.directory} holds checkpoints of an earlier run, up to version {versions[-1]}. "
                "Continue from them with --resume, or name an empty directory"
            )
        adopt = resume == "require" or not versions
        wait(lambda: store.claim(environment.job, environment.run, adopt=adopt, wait=resume == "auto"))
        # The files of an interrupted write may fill the disk.
        self.term = wait(store.next_term, between=store.discard_partial)

    def _checkpointer(self) -> tuple[Checkpointer, Manifest | None]:
        """The checkpointer, and the checkpoint to continue from."""
        environment, store = self._environment, self._store
        evaluator, evaluations = environment.spec.evaluator, None
        if store is not None:
            store.discard_partial()
        if store is not None and evaluator is not None:
            evaluations = self._patience.until_done(partial(EvaluationQueue, store, evaluator, self.term))
        checkpoints = Checkpointer(
            store,
            job=environment.job,
            term=self.term,
            shards=self._shards,
            times=MutableFields.of(environment.spec).checkpoint,
            now=time.monotonic(),
            check=partial(require_usable, spec=environment.spec),
            evaluation_queue=evaluations,
            known=environment.durable,
            limits=self._limits,
        )
        try:
            found = None
            if store is not None and environment.resume != "no":
                try:
                    found = self._patience.until_done(checkpoints.newest)
                except NoCheckpoint:
                    if environment.resume == "require":
                        raise
            if found is None and evaluations is not None:  # drop the results of an earlier run
                self._patience.until_done(partial(evaluations.go_back, 0))
            if found is not None and found.term >= self.term:  # it was copied from another directory
                self._patience.until_done(partial(checkpoints.begin_term, above=found.term))
                self.term = checkpoints.term
            return checkpoints, found
        except BaseException:
            checkpoints.close()
            raise

    def status(self) -> ServerStatus:
        """The answer to GET /status. Only shard 0 knows members and progress."""
        if self.shard_zero is not None:
            status = self.shard_zero.status()
        else:
            status = bare_status(self._environment, term=self.term, ready=self.node.configured)
        ready = status.ready or self._tensors.used
        more = {"ready": ready, "tensor_bytes": self._tensors.nbytes}
        if self.node.configured:
            more["value_bytes"], more["state_bytes"] = self.node.shard.model_bytes
        return status.model_copy(update=more)

    @property
    def fenced(self) -> bool:
        """Whether another process has replaced this one, so that it has to end."""
        return self.shard_zero is not None and self.shard_zero.checkpoints.fenced

    def loss(self) -> list[tuple[int, float]]:
        """The loss curve; empty on other shards than 0."""
        return self.shard_zero.loss() if self.shard_zero is not None else []

    def evaluations(self) -> list[Evaluation]:
        """The results of the job's evaluator; empty on other shards than 0."""
        queue = self.shard_zero.evaluation_queue if self.shard_zero is not None else None
        return queue.results() if queue is not None else []

    def close(self, *, keep: bool = True) -> None:
        """Stop serving and end all threads. With `keep`, first write a last checkpoint. Blocks."""
        if self.shard_zero is not None:
            self.shard_zero.close(keep=keep)
        elif keep and self._leads and self.node.configured:
            self.node.await_release(self._limits.release, quiet=self._limits.quiet)
        self.node.retire()
        self._server.close(timedelta(seconds=1))
        for remote in self._remotes:
            remote.close()
        self.node.close()
        if self._store is not None:
            self._store.close()
        self._history.close()
        self._trace.close()


def service_of(
    job: str, node: Node, shard_zero: ShardZero | None, *beside: object, standby: bool = False
) -> Service:
    """The service of a shard, of a standby or, on shard 0, of the job.

    Args:
        beside: objects with the handlers of other calls.
    """
    callers = Callers(job, node, shard_zero.job if shard_zero is not None else None)
    steps = StepCalls(shard_zero) if shard_zero is not None else None
    parts = [ShardService(callers, node, steps), steps, *beside, TableCalls(lambda: node.shard.tables)]
    if shard_zero is not None:
        parts.append(MemberCalls(callers, shard_zero))
        if shard_zero.evaluation_queue is not None:
            parts.append(EvaluatorCalls(shard_zero))
    return Service(
        callers, parts, At.STANDBY if standby else At.SHARD_ZERO if shard_zero is not None else At.OTHER
    )


def bare_status(
    environment: ProcessEnvironment, *, term: int = 0, ready: bool = False, problem: str = ""
) -> ServerStatus:
    """The answer to GET /status of a process that does not lead the job, or cannot serve yet."""
    shards = environment.spec.parameter_server.replicas
    return ServerStatus(
        job=environment.job, shard=environment.index, shards=shards, term=term, ready=ready, problem=problem
    )
