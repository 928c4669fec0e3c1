"""A worker joins the job with its model, joins again where it must, and leaves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import zip_longest

import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.api.mutable import MutableFields, read_mutable
from elastic_ps.codec.encoder import Encoder
from elastic_ps.codec.optimizers import check_tables, second_momentum
from elastic_ps.codec.plan import Plan
from elastic_ps.codec.several import Several
from elastic_ps.codec.state import ImportedState
from elastic_ps.collectives.groups import Store
from elastic_ps.core.overlap import Overlap, choose
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.core.settings import Settings
from elastic_ps.core.working import Event, State, Working
from elastic_ps.data.batches import Batches, Slices
from elastic_ps.errors import (
    ConnectionLost,
    ElasticPSError,
    InvalidJob,
    InvalidModel,
    ModelMismatch,
    RefusalCode,
    Refused,
)
from elastic_ps.process.lifecycle import give_back_freed_memory
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import layout_from_message
from elastic_ps.worker.model.description import ModelDescription
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.model.schedule import Schedule
from elastic_ps.worker.model.values import Values
from elastic_ps.worker.strategies.all_reduce import AllReduce
from elastic_ps.worker.strategies.local_group import GroupFollower, GroupLeader
from elastic_ps.worker.strategies.push_pull import PushPull
from elastic_ps.worker.strategies.replica import Replica
from elastic_ps.worker.strategies.strategy import LocalGradients, LocalTraining, Strategy
from elastic_ps.worker.wire.client import Client, expelled
from elastic_ps.worker.wire.local_world import DRAIN, LocalWorld

logger = logging.getLogger(__name__)


class Membership:
    """This worker as a member of the job, over all its incarnations. For the training thread, except `drain`.

    Args:
        on_hung, on_joined, world, host: see `Session`. Process 0 of the world alone is the member.

    Attributes:
        working: what this worker is doing.
        spec: the job's, as of the last time that this worker has joined.
        schedule, model, gradients, overlap: from `session.optimizer` on.
        local: likewise, in mode `local`.
        check_given: see `Flat.check_given`; until there are records, where the script makes the steps.
        make_step: has the script's own optimizer make a step on this worker.
        batches: the batches that the script has in hand for the next step.
        slices: divides batches among the processes.
        steps: the number of its next step, or of the one under way. Some numbers are never used.
        drops: how often all records in hand were taken from the script, as when this worker joins again.
        untold: how many of these the script is not told of.
        repeats: called when this worker has joined again: the parameter server may have forgotten some calls.
        has_been_chief: whether this worker has been the chief, of any epoch or at the end.
    """

    schedule: Schedule
    gradients: LocalGradients
    overlap: Overlap
    make_step: Callable[[], object]
    _described: ModelDescription
    _settings: Settings  # as the script began with them
    _choose_overlap: Callable[[Consistency], Overlap]

    def __init__(
        self,
        spec: TrainingJobSpec,
        client: Client,
        *,
        on_hung: Callable[[str], None] | None = None,
        on_joined: Callable[[], None] = lambda: None,
        world: LocalWorld | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.spec, self.client, self.world = spec, client, world or LocalWorld()
        self.working, self.batches = Working(), Batches()
        self.slices = Slices(self.world.rank, self.world.size)
        self.model: torch.nn.Module | None = None
        self.local: LocalTraining | None = None
        self.check_given: Callable[[], None] = lambda: None
        self.steps = self.drops = self.untold = 0
        self.repeats: list[Callable[[], None]] = []
        self.has_been_chief = False
        self._strategy: Strategy | None = None
        self._first: Flat | None = None  # the memory of the model, if it has all values of version 0
        self._host, self._on_hung, self._on_joined = host, on_hung, on_joined
        self._heartbeat: Heartbeat | None = None
        self._layout: pb.Layout | None = None  # of the memory that the model has; None before `enter`
        self._store: Store | None = None  # where the other workers find this one, if they speak to each other
        self._codecs = Plan(spec.compression)

    @property
    def strategy(self) -> Strategy:
        """The strategy for the model, from `enter` on."""
        assert self._strategy is not None, "the model has been given to session.optimizer"
        return self._strategy

    @property
    def entered(self) -> bool:
        """Whether the model has been given to the job, or has got the job's values."""
        return self._strategy is not None and self.working.state is not State.JOINING

    @property
    def version(self) -> int:
        """The version of the model that this worker has; one that is under way is not taken over yet."""
        if self.local is not None and self.local.started is not None:
            return self.local.started.version
        return self._strategy.version if self._strategy else 0

    @property
    def in_force(self) -> Settings:
        """The settings as of the last pull; before it, those that this worker has brought."""
        return Settings.from_json(said) if (said := self.strategy.info.settings) else self._settings

    def weights(self) -> list[float]:
        """Return the share of each process in the records that the next step is computed on."""
        return self.slices.weights(self.batches.sizes)

    def parts(self) -> tuple[float | None, list[float]]:
        """What the script said that this process's part of the step weighs, and `weights`."""
        return self.batches.weight, self.weights()

    # --- into the job

    def enter(
        self,
        described: ModelDescription,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        imported: ImportedState | None = None,
        *,
        overlap: bool = True,
    ) -> Flat:
        """Join the job with this model; returns the memory that it has from now on. Blocks.

        Args:
            imported: the state with which the optimizer begins, if this worker brings the model.
            overlap: the script lets gradients be sent while backward runs.

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
            self.client.address = self._store.address
        self.schedule = Schedule(optimizer, own=local, has_state=imported is not None)
        joined = self.join(described, self.schedule.current())
        self._adopt(joined)
        self.check(self.schedule.current())
        self._layout = joined.layout
        flat = Flat(
            layout_from_message(joined.layout),
            described.tensors,
            stepped_here=self.spec.steps_on_workers,
            world=self.world,
            registered=described.registered,
        )
        give_back_freed_memory()  # that of parameters, which have other memory now
        self._choose_overlap = partial(
            choose,
            self.spec.parameter_server.overlap,
            layout=flat.layout,
            script=overlap,
            named=isinstance(optimizer, Several),
            crowded=joined.crowded,
        )
        self._note_overlap()
        self._strategy = strategy = self._make_strategy(flat, optimizer)
        joined = self._initialise(strategy, joined, flat, imported)
        if imported is None and self._keeps_first(flat):
            self._first = flat
        if self.spec.steps_on_workers:
            self.check_given = flat.check_given
        if not joined.initialise:
            self.schedule.joined(self.in_force)
        self._note_join(joined.version)
        self.working.note(Event.ENTER)
        self.model = model
        return flat

    def join(self, described: ModelDescription, settings: Settings) -> pb.JoinReply:
        """Become a member with this model. Blocks while another worker initialises it.

        Raises:
            ModelMismatch, InvalidModel: the parameter server cannot train this model in this job; or the
                processes of this worker do not have the same one.
        """
        self._described, self._settings = described, settings

        def join(models: list[tuple[Sequence[TensorSpec], str]]) -> pb.JoinReply:
            _check_same(models)
            return self.client.join(described.every, described.optimizer, settings)

        mine: tuple[Sequence[TensorSpec], str] = described.every, described.optimizer
        joined = self.world.gather("session.optimizer(...)", mine, join)
        self.working.note(Event.JOIN)
        if self.world.leads and self._heartbeat is None:
            interval = timedelta(milliseconds=joined.lease_ms) / 3
            self._heartbeat = Heartbeat(self.client, interval, self._on_hung)
            self._on_joined()
        return joined

    def check(self, settings: Settings) -> None:
        """Raise InvalidModel if the codec's momentum does not fit the mode, or `settings` add another one.

        Or if an optimizer of a table would change rows that have no gradient.
        """
        sent = self._codecs.momentum
        if sent and self.spec.consistency.mode == "local":
            raise InvalidModel(
                f"the job's codec has momentum {sent}, which needs gradients, but in consistency.mode local "
                "workers send changes of the model. Use another codec, and give the script's optimizer a "
                "momentum"
            )
        if problem := second_momentum(settings.groups, sent):
            raise InvalidModel(problem)
        check_tables(self._described.tables, self._described.optimizer, settings.groups)

    def _make_strategy(self, flat: Flat, optimizer: torch.optim.Optimizer) -> Strategy:
        same = self.spec.consistency.mode == "local"
        if not self.world.leads:
            return GroupFollower(self.world, flat, same=same)
        client, trace = self.client, self.client.trace
        values = Values(flat, self._codecs, traffic=client.traffic, trace=trace)
        if self._store is not None:
            replica = Replica(client, flat, optimizer, values)
            return AllReduce(client, flat, replica, optimizer, lambda: self.make_step(), store=self._store)
        encoder = Encoder(
            flat.layout,
            self._codecs,
            worker=client.worker,
            seed=self.spec.data.seed,
            traffic=client.traffic,
            trace=trace,
        )
        make: Callable[..., PushPull] = PushPull
        if not self.world.alone:
            make = partial(GroupLeader, self.world, self.weights, same=same)
        drafts = self.spec.parameter_server.drafts
        return make(client, flat, self.spec.consistency, encoder, values, drafts=drafts)

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
                    bring = partial(self._bring, flat, imported)
                    self.world.decide("session.optimizer(...)", bring)
                    flat.publish()
                if not joined.initialise or self._codecs.encodes_values:
                    own = False
                    strategy.fetch(joined.version, contributor=False)  # the same values as others get
                return joined
            except Refused as refusal:
                if not expelled(refusal):
                    raise
                logger.warning("joining again: %s", refusal)
            joined = self._join_anew(again=not own)

    def _adopt(self, joined: pb.JoinReply) -> None:
        """Take over this incarnation, and the mutable fields of this term of the job.

        Raises:
            InvalidJob: a codec of the user's own cannot be imported here, or is another than the job's.
            ConnectionLost: the model is cut into other buckets than before. A new process in place of this
                one can join.
        """
        if self._layout not in (None, joined.layout):
            raise ConnectionLost(
                "the parameter server was lost before the first checkpoint, and has used another bucket "
                "size since its restart. This worker ends, and a new process can take its place. To avoid "
                "this, set parameterServer.bucketBytes"
            )
        mine = self.client.member_id
        self.client.member_id = replace(mine, term=joined.term, incarnation=joined.incarnation)
        mutable = read_mutable(joined.tuning, source="the parameter server")
        if news := mutable.news(MutableFields.of(self.spec)):
            self.spec = mutable.applied_to(self.spec)
            self._codecs = Plan(self.spec.compression)
            for what, (now, _) in news.items():
                logger.info("%s is %s now", what, now)
        ours, theirs = self._codecs.names, list(joined.codecs)
        if ours != theirs:
            raise InvalidJob(
                f"worker {self.client.worker} has the codecs {', '.join(ours)}; this job has "
                f"{', '.join(theirs)}. All processes of a job need the same code: start this worker from the "
                "image, or the files, that the parameter server was started from"
            )
        said = self.spec.compression.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        self.client.history.record("coding", term=joined.term, compression=said)
        if self._strategy is not None:
            self._strategy.adopt(self.spec.consistency, self._codecs if "compression" in news else None)
            self._note_overlap()

    def _note_overlap(self) -> None:
        self.overlap = self._choose_overlap(self.spec.consistency)
        self.client.traffic.overlap = "" if self.spec.all_reduce else self.overlap.name

    def _bring(self, flat: Flat, imported: ImportedState | None = None) -> None:
        for bucket in flat.layout.buckets:
            self.client.initialise(bucket, flat.value_bytes(bucket))
            for piece in imported.pieces(bucket, flat.tensors) if imported is not None else ():
                self.client.initialise_state(bucket, *piece)
        self.client.initialised(repeatable=imported is None and self._keeps_first(flat))

    def _keeps_first(self, flat: Flat) -> bool:
        """Whether the model has the values of version 0, bit for bit, until it gets those of version 1."""
        unchanged = all(bucket.rule in (Rule.GRADIENT, Rule.CONSTANT) for bucket in flat.layout.buckets)
        return unchanged and not (self.spec.steps_on_workers or self._codecs.encodes_values)

    def _join_anew(self, *, again: bool) -> pb.JoinReply:
        """Begin another incarnation. Blocks. `again`: the model no longer has its first values."""
        described, settings = self._described, self.schedule.current() if again else self._settings
        joined = self.world.decide(
            "its next join",
            lambda: self.client.join(described.every, described.optimizer, settings, again=again),
        )
        self._adopt(joined)
        return joined

    def _note_join(self, version: int, **term: int) -> None:
        """Write down that an incarnation has begun, with the values of this version."""
        self.client.history.record(
            "join", incarnation=self.client.member_id.incarnation, version=version, **term
        )

    def join_again(self, reason: Refused) -> None:
        """Continue as a new member, because the parameter server does not know this worker any more. Blocks.

        The unfinished step is dropped, and the records in hand go to others. Each of `repeats` says again
        what the parameter server may have forgotten.
        """
        logger.warning("joining again: %s", reason)
        while True:
            self.drop_all()
            first = None if self.version or self.strategy.has_newer else self._first
            joined = self._join_anew(again=first is None)
            version = joined.version
            try:
                if joined.initialise and first is not None:
                    first.check(thorough=True)
                    self.world.decide("its next join", partial(self._bring, first))
                self._first = None
                self.strategy.fetch(version, contributor=False)
                self._first = first
                for repeat in self.repeats:
                    repeat()
                break
            except Refused as refusal:
                if not expelled(refusal):
                    raise
        self.schedule.take_over(self.in_force)
        self._note_join(version, term=self.client.term)
        logger.info("joined again at version %d", version)

    @contextmanager
    def rejoining(self, *, in_step: bool = False) -> Iterator[None]:
        """Join again, and go on after the block, if a call in it is refused as this worker is not known.

        Args:
            in_step: the block ends a step, whose gradients the script may still look at.
        """
        try:
            yield
        except Refused as refusal:
            if not expelled(refusal):
                raise
            self.join_again(refusal)
            if not in_step:
                self.gradients.void()

    def drop_all(self) -> None:
        """The step under way and all records in hand go to others."""
        self.drops += 1
        self.steps += 1
        self.working.note(Event.DROP)
        self.forget(lost=True)
        self.strategy.reset()

    def forget(self, *, lost: bool = False) -> None:
        """Leave what the script has in hand to others. `lost`: the script has not asked for that."""
        self.batches.forget(lost=lost)
        if self.local is not None:
            self.local.void()

    def exchange_steps(self) -> None:
        """If this worker has made steps by itself, see `LocalTraining.exchange`."""
        if self.local is not None:
            self.local.exchange()

    # --- leaving

    @property
    def draining(self) -> bool:
        """Whether this worker was asked to leave; all of its processes have the same answer."""
        return bool(self.world.agreed(DRAIN))

    @property
    def asked_to_leave(self) -> bool:
        """Whether this process was asked to leave; others of the worker may not know yet."""
        return self.world.proposed(DRAIN)

    def drain(self) -> None:
        """Leave at the next opportunity. May be called from a signal handler."""
        self.client.expect_to_leave()
        self.world.propose(DRAIN, "asked to leave")

    def leave(self, *, in_step: bool, failed: bool) -> None:
        """Say goodbye and close the connections; see `Client.leave`."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            try:
                self.client.leave(in_step=in_step, failed=failed)
            except ElasticPSError as error:
                logger.info("the parameter server could not be told that this worker leaves: %s", error)
        self.client.close()
        self.world.close()


def _check_same(models: Sequence[tuple[Sequence[TensorSpec], str]]) -> None:
    """Raise ModelMismatch if the processes of a worker do not have the same model and optimizer."""
    first, optimizer = models[0]
    for rank, (specs, name) in enumerate(models):
        for ours, other in zip_longest(first, specs):
            if ours != other:
                values = " with other values" if str(ours) == str(other) else ""
                raise ModelMismatch(
                    f"the model of process {rank} of this worker is not that of process 0: it has "
                    f"{other or 'nothing'}{values} in place of {ours or 'nothing'}. Every process must build "
                    "the same model and optimizer"
                )
        if name != optimizer:
            raise ModelMismatch(
                f"process {rank} of this worker has the optimizer {name}, but process 0 has {optimizer}. "
                "Every process must build the same model and optimizer"
            )


class Heartbeat:
    """A thread that says that this worker is alive, until closed.

    Args:
        client: of a member.
        interval: between two heartbeats.
        on_hung: called on the thread, with the reason, when the parameter server has declared this worker
            hung; nobody else can notice, since the script's own thread makes no calls then.
    """

    def __init__(self, client: Client, interval: timedelta, on_hung: Callable[[str], None] | None) -> None:
        self.client, self._interval, self._on_hung = client, interval, on_hung
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval.total_seconds()):
            try:
                self.client.heartbeat()
            except ElasticPSError as error:
                logger.debug("heartbeat: %s", error)  # the script's next call fails, too
                hung = isinstance(error, Refused) and error.code is RefusalCode.HUNG
                if hung and self._on_hung is not None:
                    self._on_hung(str(error))
            except Exception:
                logger.exception("a heartbeat failed")  # the next one may succeed

    def close(self) -> None:
        """End the thread; waits for a heartbeat under way."""
        self._stop.set()
        self._thread.join(timeout=5)
