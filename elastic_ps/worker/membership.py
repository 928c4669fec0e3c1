"""A worker's way into the job with its model, back into it where it had to join again, and out of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.mutable import MutableFields, read_mutable
from elastic_ps.codec.encoder import Encoder
from elastic_ps.codec.optimizers import second_momentum
from elastic_ps.codec.plan import Plan
from elastic_ps.codec.state import ImportedState
from elastic_ps.core.partition import TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.core.working import Event, Working
from elastic_ps.errors import (
    ConnectionLost,
    ElasticPSError,
    InvalidJob,
    InvalidModel,
    ModelMismatch,
    RefusalCode,
    Refused,
)
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import layout_from_message
from elastic_ps.worker.all_reduce import AllReduce
from elastic_ps.worker.client import Client, expelled
from elastic_ps.worker.flat import Flat
from elastic_ps.worker.group import Store
from elastic_ps.worker.local_group import GroupFollower, GroupLeader
from elastic_ps.worker.local_world import DRAIN, LocalWorld
from elastic_ps.worker.model import Described
from elastic_ps.worker.push_pull import PushPull
from elastic_ps.worker.replica import Replica
from elastic_ps.worker.schedule import Interval, Schedule
from elastic_ps.worker.strategy import Strategy
from elastic_ps.worker.values import Values

logger = logging.getLogger(__name__)


class Membership:
    """This worker as a member of the job, over all its incarnations. For the training thread, except `drain`.

    Args:
        trace, history: where this process records what it does.
        on_hung: called, on another thread, with the reason, if this worker is declared hung.
        on_joined: called when this worker has become a member.
        world: the processes of this worker; process 0 alone is heard of.
        host: this host's address, as other workers reach it.

    Attributes:
        working: what this worker is doing.
        spec: how to train the job, as of the last time that this worker has joined.
        strategy, schedule: of the model; `strategy` is None before `enter`, which sets both.
    """

    def __init__(
        self,
        spec: TrainingJobSpec,
        client: Client,
        *,
        trace: Trace,
        history: History,
        on_hung: Callable[[str], None] | None = None,
        on_joined: Callable[[], None] = lambda: None,
        world: LocalWorld | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.spec, self.working = spec, Working()
        self.strategy: Strategy | None = None
        self.schedule: Schedule
        self._client, self._world, self._host = client, world or LocalWorld(), host
        self._trace, self._history = trace, history
        self._on_hung, self._on_joined = on_hung, on_joined
        self._heart: Heart | None = None
        self._described: Described
        self._layout: pb.Layout | None = None  # of the memory that the model has; None before `enter`
        self._store: Store | None = None  # where the other workers find this one, if they speak to each other
        self._codecs = Plan(spec.compression)

    def enter(
        self,
        described: Described,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        imported: ImportedState | None,
        *,
        weights: Callable[[], Sequence[float]],
        make_step: Callable[[], object],
    ) -> Flat:
        """Join the job with this model; returns the memory that it has from now on. Blocks.

        Args:
            imported: the state with which the optimizer begins, if this worker brings the model.
            weights: for each process, its share of the samples of the step that begins.
            make_step: has the script's own optimizer make a step on this worker.

        Raises:
            InvalidModel, ModelMismatch: the model or optimizer cannot be trained in this job.
            ConnectionLost: no parameter server answers; or see `_adopt`.
        """
        local = self.spec.consistency.mode == "local"
        at_once = not (self.spec.consistency.overlap or self.spec.consistency.fragments)
        if not (self.spec.all_reduce or (local and at_once)):
            described.require_apart(model)
        if self.spec.all_reduce:
            self._store = Store(self._host)
            self._client.address = self._store.address
        self.schedule = Schedule(optimizer, own=local)
        if imported is not None:
            self.schedule.has_state()
        joined = self.join(described, self.schedule.current())
        self._adopt(joined)
        self.check(self.schedule.current())
        self._layout = joined.layout
        flat = Flat(
            layout_from_message(joined.layout),
            described.tensors,
            stepped_here=local or self.spec.all_reduce,
            world=self._world,
            registered=described.registered,
        )
        self.strategy = strategy = self._make_strategy(flat, optimizer, weights, make_step)
        strategy.steps_here = local or self.spec.all_reduce
        joined = self._initialise(strategy, joined, flat, imported)
        if not joined.initialise:
            self.schedule.joined(Settings.from_json(strategy.told.settings))
        self.note_join(joined.version)
        self.working.note(Event.ENTER)
        return flat

    def join(self, described: Described, settings: Settings) -> pb.JoinReply:
        """Become a member with this model. Blocks while another worker initialises it.

        Raises:
            ModelMismatch, InvalidModel: the parameter server cannot train this model in this job; or the
                processes of this worker do not have the same one.
        """
        self._described = described

        def join(models: list[tuple[Sequence[TensorSpec], str]]) -> pb.JoinReply:
            _check_same(models)
            return self._client.join(described.specs, described.optimizer, settings)

        mine: tuple[Sequence[TensorSpec], str] = described.specs, described.optimizer
        joined = self._world.gather("session.optimizer(...)", mine, join)
        self.working.note(Event.JOIN)
        if self._world.leads and self._heart is None:
            self._heart = Heart(self._client, timedelta(milliseconds=joined.lease_ms) / 3, self._on_hung)
            self._on_joined()
        return joined

    def add_scheduler(self, scheduler: LRScheduler, interval: Interval | None) -> None:
        """Let the job step a scheduler. Raises InvalidModel: it has made a second momentum."""
        self.schedule.add(scheduler, interval)
        self.check(self.schedule.current())

    def check(self, settings: Settings) -> None:
        """Raise InvalidModel where what is sent cannot have momentum, or `settings` make a second one."""
        sent = self._codecs.momentum
        if sent and self.spec.consistency.mode == "local":
            raise InvalidModel(
                f"the job's codec has momentum {sent}, which is made of gradients, but in consistency.mode "
                "local workers send what they have trained. Use another codec, and give the script's "
                "optimizer a momentum"
            )
        if problem := second_momentum(settings.groups, sent):
            raise InvalidModel(problem)

    def _make_strategy(
        self,
        flat: Flat,
        optimizer: torch.optim.Optimizer,
        weights: Callable[[], Sequence[float]],
        make_step: Callable[[], object],
    ) -> Strategy:
        same = self.spec.consistency.mode == "local"
        if not self._world.leads:
            return GroupFollower(self._world, flat, same=same)
        traffic, trace = self._client.traffic, self._trace
        values = Values(flat, self._codecs, traffic=traffic, trace=trace)
        if self._store is not None:
            return AllReduce(
                self._client,
                flat,
                Replica(self._client, flat, optimizer, values),
                optimizer,
                make_step,
                store=self._store,
                trace=trace,
                history=self._history,
            )
        encoder = Encoder(
            flat.layout,
            self._codecs,
            worker=self._client.worker,
            seed=self.spec.data.seed,
            traffic=traffic,
            trace=trace,
        )
        make: Callable[..., PushPull] = PushPull
        if not self._world.alone:
            make = partial(GroupLeader, self._world, weights, same=same)
        return make(
            self._client,
            flat,
            self.spec.consistency,
            encoder,
            values,
            ahead=self.spec.parameter_server.send_ahead,
            trace=trace,
            history=self._history,
        )

    def _initialise(
        self, strategy: Strategy, joined: pb.JoinReply, flat: Flat, imported: ImportedState | None
    ) -> pb.JoinReply:
        """Give the job this model's values, or get the job's. Blocks.

        If the parameter server is lost meanwhile, this worker joins again: as at first, as long as the model
        has its own values.
        """
        own = True
        while True:
            try:
                if joined.initialise:
                    self._world.decide("session.optimizer(...)", lambda: self._bring(flat, imported))
                    flat.publish()
                if not joined.initialise or self._codecs.encodes_values:
                    own = False
                    strategy.fetch(joined.version, contributor=False)  # the same values as others get
                return joined
            except Refused as refusal:
                if not expelled(refusal):
                    raise
                logger.warning("joining again: %s", refusal)
            strategy.reset()
            joined = self._join_anew(trained=not own)
            self._adopt(joined)

    def _adopt(self, joined: pb.JoinReply) -> None:
        """Make versions as this term of the job does; it may be another way than that of the term before.

        Raises:
            InvalidJob: a codec of the user's own cannot be imported here, or is another than the job's.
            ConnectionLost: the model is cut up in another way than before. It is nobody's mistake, and a
                process in this one's place joins as a newcomer.
        """
        if self._layout not in (None, joined.layout):
            raise ConnectionLost(
                "the parameter server was lost before it had kept the model, and has cut it into other "
                "buckets now: parameterServer.bucketBytes names no size, and another worker has measured its "
                "network. This worker has to be started again"
            )
        if not joined.tuning:
            return
        mutable = read_mutable(joined.tuning, source="the parameter server")
        news = mutable.news(MutableFields.of(self.spec))
        if news:
            self.spec = mutable.applied_to(self.spec)
            self._codecs = Plan(self.spec.compression)
            for what, (now, _) in news.items():
                logger.info("%s is %s now", what, now)
        self._require_same_codecs(joined)
        said = self.spec.compression.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        self._history.record("coding", term=joined.term, compression=said)
        if self.strategy is not None:
            self.strategy.adopt(self.spec.consistency, self._codecs if "compression" in news else None)

    def _require_same_codecs(self, joined: pb.JoinReply) -> None:
        ours, theirs = self._codecs.names, list(joined.codecs)
        if theirs and ours != theirs:
            raise InvalidJob(
                f"worker {self._client.worker} has the codecs {', '.join(ours)}; this job has "
                f"{', '.join(theirs)}. All processes of a job need the same code: start this worker from the "
                "image, or the files, that the parameter server was started from"
            )

    def _bring(self, flat: Flat, imported: ImportedState | None) -> None:
        for bucket in flat.layout.buckets:
            self._client.initialise(bucket.index, bucket.shard, flat.value_bytes(bucket))
            for piece in imported.pieces(bucket, flat.tensors) if imported is not None else ():
                self._client.initialise_state(bucket.index, bucket.shard, *piece)
        self._client.initialised()

    def join_again(self) -> int:
        """Become a member again; returns the version that is to be fetched. Blocks."""
        assert self.strategy is not None, "enter was called"
        joined = self._join_anew(trained=True)
        self.strategy.reset()
        self._adopt(joined)
        return joined.version

    def _join_anew(self, *, trained: bool) -> pb.JoinReply:
        """Begin another incarnation. `trained`: the model is not as it was at first any more."""
        described, settings = self._described, self.schedule.current()
        return self._world.decide(
            "the place where it joins again",
            lambda: self._client.join(described.specs, described.optimizer, settings, again=trained),
        )

    def note_join(self, version: int, *, again: bool = False) -> None:
        """Write down that an incarnation has begun, with the values of this version."""
        term = {"term": self._client.term} if again else {}
        self._history.record("join", incarnation=self._client.incarnation, version=version, **term)

    # --- leaving

    @property
    def draining(self) -> bool:
        """Whether this worker was asked to leave; all of its processes have the same answer."""
        return bool(self._world.agreed(DRAIN))

    @property
    def asked_to_leave(self) -> bool:
        """Whether this process was asked to leave; others of the worker may not know yet."""
        return self._world.proposed(DRAIN)

    def drain(self) -> None:
        """Leave at the next opportunity. May be called from a signal handler."""
        self._client.expect_to_leave()
        self._world.propose(DRAIN, "asked to leave")

    def leave(self, *, in_step: bool) -> None:
        """Say goodbye and close the connections; what this worker holds goes to others.

        Args:
            in_step: a step has begun, which is void by that.
        """
        if self._heart is not None:
            self._heart.close()
            try:
                self._client.leave(in_step=in_step)
            except ElasticPSError as error:
                logger.info("the parameter server could not be told that this worker leaves: %s", error)
        self._client.close()
        self._world.close()


def _check_same(models: Sequence[tuple[Sequence[TensorSpec], str]]) -> None:
    """Raise ModelMismatch if the processes of a worker do not have the same model and optimizer."""
    first, optimizer = models[0]
    for rank, (specs, name) in enumerate(models):
        for ours, other in zip_longest(first, specs):
            if ours != other:
                raise ModelMismatch(
                    f"the model of process {rank} of this worker is not that of process 0: it has "
                    f"{other or 'nothing'} in place of {ours or 'nothing'}. Every process must build the "
                    "same model and optimizer"
                )
        if name != optimizer:
            raise ModelMismatch(f"process {rank} of this worker has {name}, process 0 has {optimizer}")


class Heart:
    """A thread that says that this worker is alive, until closed.

    Args:
        client: of a member.
        interval: between two heartbeats.
        on_hung: called on the thread, with the reason, when the parameter server has declared this worker
            hung; nobody else can notice, since the script's own thread makes no calls then.
    """

    def __init__(self, client: Client, interval: timedelta, on_hung: Callable[[str], None] | None) -> None:
        self._client = client
        self._interval = interval
        self._on_hung = on_hung
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval.total_seconds()):
            try:
                self._client.heartbeat()
            except ElasticPSError as error:
                logger.debug("heartbeat: %s", error)  # whatever the script does next is told so too
                hung = isinstance(error, Refused) and error.code is RefusalCode.HUNG
                if hung and self._on_hung is not None:
                    self._on_hung(str(error))
            except Exception:
                logger.exception("a heartbeat failed")  # the next one may not

    def close(self) -> None:
        """End the thread; waits for a heartbeat under way."""
        self._stop.set()
        self._thread.join(timeout=5)
