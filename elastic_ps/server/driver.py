"""Gives the shards of a job their orders: one at a time, and before the workers can see the effect.

One condition variable guards the state of the job, and no I/O happens under it. An order says to apply a
round, to start it again, who takes part, or to go back to a checkpoint. One thread at a time gives orders,
in `_drive`: the one whose call made the order necessary, or the ticker. The shards get an order before the
workers can see its effect, so a worker never pushes for a round that a shard does not know.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.partition import Layout, TensorSpec, cut_rows, partition
from elastic_ps.core.settings import MAX_NORM, Settings
from elastic_ps.errors import (
    CheckpointError,
    InvalidModel,
    NoCheckpoint,
    RefusalCode,
    Refused,
    TransportError,
    UserError,
)
from elastic_ps.job import TrainingJobSpec
from elastic_ps.server.keeper import PATIENCE, Keeper
from elastic_ps.server.orders import Advance, Application, Configuration, Report, ShardControl, Standing
from elastic_ps.server.patience import Patience
from elastic_ps.server.remote import RemoteShard
from elastic_ps.server.rescue import held, rescue
from elastic_ps.server.state import JobState, Model
from elastic_ps.telemetry import History

logger = logging.getLogger(__name__)

TICK = timedelta(milliseconds=250)
"""How often leases and checkpoints are looked after."""

SETTLED = timedelta(seconds=5)
"""For how long a call waits for a round to be committed, before the worker has to call again."""

PAUSE = timedelta(seconds=1)
"""After a checkpoint that must be written has failed, the time until the next attempt."""

LAST = timedelta(minutes=10)
"""For how long the end of the job waits for the last version to be on disk."""

RETRY = timedelta(milliseconds=100)
"""Between two attempts to give the shards an order that cannot wait for the ticker."""

GOODBYE = timedelta(seconds=2)
"""For how long a parameter server that ends tries to tell the other shards."""


class Driver:
    """The state of a job under one lock, and the orders that the shards get.

    Args:
        job: the job's name.
        spec: how to train it.
        term: how often shard 0 has been started.
        shards: in order; the first is this process's own.
        standbys: of each shard, in order; empty without `durability: standby`.
        keeper: decides when checkpoints are written, and finishes them; None for no checkpoints.
        history: where commits are recorded.
    """

    def __init__(
        self,
        job: str,
        spec: TrainingJobSpec,
        term: int,
        shards: Sequence[ShardControl],
        *,
        standbys: Sequence[RemoteShard] = (),
        keeper: Keeper | None,
        history: History,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._job, self._spec = job, spec
        self._shards, self._standbys = shards, standbys
        self._standings = [Standing.NONE for _ in standbys]
        self._prepared: Advance | None = None  # the last order that every shard's standby can carry out
        self._keeper = keeper
        self._history = history
        self._clock = clock or time.monotonic
        self._changed = threading.Condition()
        self._state = JobState(term, self.lease, spec.consistency, spec.data)
        self._configuring = False
        self._driving = False
        self._stale = False  # the shards do not know yet who takes part in the open round
        self._spoiled = False  # a shard has lost the model: all go back to a checkpoint
        self._ordered = 0  # the version that the shards were ordered to make last, when all had voted for it
        self._keeping = False  # a thread writes a version that must be kept
        self._keep_again = 0.0  # it has failed, and is not tried again before
        self._finished_at: float | None = None
        self._closing = False
        self._over = False  # the shards are told nothing any more
        self._fan_out = ThreadPoolExecutor(max(1, len(shards) - 1), thread_name_prefix="advance")
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)

    def start(self, found: Manifest | None, patience: Patience | None = None) -> None:
        """Begin, from the checkpoint `found` if there is one, or from later rounds that the standbys hold.

        Blocks while the shards load the checkpoint, and while the storage is unavailable.
        """
        patience = patience or Patience()
        if self._keeper is not None and self._standbys and self.term > 1:
            orders = held(self._standbys[0], self.term)
            if rescue(self._keeper, self._shards, self._standbys, orders):
                found = patience.until_done(self._keeper.newest)
        if found is not None:
            patience.until_done(partial(self._restore, found, self.term))
        self._ticker.start()

    def abandon(self) -> None:
        """End the threads and do nothing else: for a coordinator that could not start."""
        self._fan_out.shutdown(cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()

    def close(self, *, keep: bool = True) -> None:
        """Stop committing and end the threads; with `keep`, first write a last checkpoint. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._ticker.join()
        if keep and self._keeper is not None and self._finish_round():
            self._keep_now()
        with self._changed:
            self._changed.wait_for(lambda: not self._driving, timeout=PATIENCE.total_seconds())
            self._over = True
        self._release()
        self.abandon()

    def _finish_round(self) -> bool:
        """Commit what is decided: some shards may have applied it. Returns whether to keep the version."""
        deadline = self._clock() + PATIENCE.total_seconds()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._driving)
                state = self._state
                if self.fenced or self._spoiled or not state.initialised or self._clock() > deadline:
                    return False
                if not state.rounds.decided:
                    return True
            if not self._commit_or_tell(closing=True):
                time.sleep(RETRY.total_seconds())

    def _release(self) -> None:
        """Tell the other shards that they may end."""
        with self._changed:
            if self._state.model is None or self.fenced or len(self._shards) == 1:
                return
            last = replace(self._current(), last=True)
        for order in [self._fan_out.submit(shard.advance, last) for shard in self._shards[1:]]:
            try:
                order.result(timeout=GOODBYE.total_seconds())
            except (Refused, TransportError, TimeoutError) as error:
                logger.info("a shard could not be told that it may end: %s", error)

    @property
    def term(self) -> int:
        """The parameter server's term. It grows when the job goes back to a checkpoint."""
        with self._changed:
            return self._state.term

    @property
    def fenced(self) -> bool:
        """Whether another parameter server has taken over: then this one must not apply or write anything."""
        return self._keeper is not None and self._keeper.fenced

    @property
    def lease(self) -> timedelta:
        """How long a member may be silent."""
        return self._spec.worker.lease_duration

    @property
    def settings(self) -> str:
        """The settings in force, as JSON."""
        with self._changed:
            return self._state.settings.to_json()

    @property
    def stopped(self) -> str:
        """See `JobState.stopped`."""
        with self._changed:
            return self._state.stopped

    @contextmanager
    def _settled(self) -> Iterator[JobState]:
        """Hold the lock while no round is being committed. Blocks for `SETTLED` at most.

        Raises:
            Refused: NOT_READY; a round is still being committed, or the job is going back to a checkpoint.
        """
        with self._changed:
            settled = self._changed.wait_for(
                lambda: self._closing or not (self._state.rounds.committing or self._spoiled),
                timeout=SETTLED.total_seconds(),
            )
            if self._closing:
                raise Refused(RefusalCode.NOT_READY, "the parameter server is stopping")
            if not settled:
                doing = "going back to a checkpoint" if self._spoiled else "committing a round"
                raise Refused(RefusalCode.NOT_READY, f"the parameter server is still {doing}; ask again")
            yield self._state

    def _told(self) -> None:
        """Note that something has changed for shards or waiting threads. The lock is held."""
        self._stale = True
        self._changed.notify_all()

    def _drop(self, worker: int, outcome: str, reason: str = "") -> None:
        """End a stay, with the lock held."""
        state, attempt = self._state, self._state.rounds.attempt
        if state.drop(worker, outcome, reason, self._clock()) is None:
            return
        logger.info(
            "worker %d %s at version %d%s", worker, outcome, state.version, f": {reason}" if reason else ""
        )
        if state.rounds.attempt != attempt:
            logger.info(
                "the round on version %d starts again, as attempt %d", state.version, state.rounds.attempt
            )
        self._told()

    def _configure(self, tensors: tuple[TensorSpec, ...], optimizer: str, settings: Settings) -> None:
        """Lay the first worker's model out over the shards."""
        model: Model | None = None
        try:
            layout = self._partition(tensors, settings)
            for shard in self._shards:
                shard.configure(Configuration(layout, optimizer, settings, self.term, None))
            model = Model(layout, optimizer)
        except UserError as error:
            raise Refused(RefusalCode.INVALID, str(error)) from error
        finally:
            with self._changed:
                self._state.model, self._configuring = model, False
                self._state.settings = Settings(settings.groups, settings.schedulers, first=settings.groups)
                self._told()

    def _partition(self, tensors: tuple[TensorSpec, ...], settings: Settings) -> Layout:
        """Raises InvalidModel if rows whose norm is limited are cut."""
        size = self._spec.parameter_server.bucket_bytes
        layout = partition(tensors, bucket_bytes=size, shards=len(self._shards))
        limited = [i for i, group in enumerate(settings.groups) if group.get(MAX_NORM) is not None]
        if cut := cut_rows(layout, limited):
            raise InvalidModel(
                f"the rows of {cut[0]} have more than parameterServer.bucketBytes={size} bytes, so they are "
                f"divided, and {MAX_NORM} cannot limit their norm; increase parameterServer.bucketBytes"
            )
        return layout

    def _drive(self) -> None:
        """Give the shards the orders that are due, unless another thread is doing it."""
        while self._commit_or_tell():
            pass

    def _commit_or_tell(self, *, closing: bool = False) -> bool:
        """Give the shards one order that is due, if there is one and no other thread is doing it.

        Args:
            closing: the caller closes the driver; from then on no other thread gives orders.

        Returns whether the order was carried out, so that there may be more to do.
        """
        with self._changed:
            if self._driving or self._closing != closing or self._state.model is None:
                return False
            spoiled = self._spoiled
            contributions = self._state.rounds.begin_commit() if self._state.ready else []
            if not (spoiled or contributions or self._stale):
                return False
            self._driving = True
            self._stale = False
            decided = time.monotonic()  # before the look at the fence
            advance = self._commit(contributions, decided) if contributions else self._current()
        try:
            return self._roll_back() if spoiled else self._tell(advance, contributions, decided)
        finally:
            with self._changed:
                self._driving = False
                self._changed.notify_all()

    def _tell(self, advance: Advance, contributions: Sequence[Contribution], decided: float) -> bool:
        """Send an order to the shards and book the result. Returns False if it has to be sent again."""
        if contributions and self._keeper is not None and self._keeper.check_fence():
            return False
        try:
            self._prepare(advance)
            if contributions and len(self._shards) > 1:
                self._ordered = advance.version
            self._tell_all(advance)
        except Exception as error:  # noqa: BLE001 (an order that failed for whatever reason is given again)
            self._failed(advance, error)
            return False
        with self._changed:
            if contributions:
                self._state.book(contributions, self._clock(), decided=decided)
                self._stale |= self._state.expected != advance.expected
            booked = self._state.last_round
            if advance.checkpoint and self._keeper is not None:
                state = self._state.to_checkpoint()
                self._keeper.begin(self._state.version, self._clock(), state, number=advance.checkpoint)
        if contributions:
            self._history.record("commit", **booked)
        return True

    def _current(self) -> Advance:
        rounds = self._state.rounds
        return Advance(rounds.version, rounds.attempt, self._state.expected, term=self._state.term)

    def _commit(self, contributions: Sequence[Contribution], decided: float) -> Advance:
        """The order to apply a round, with the lock held."""
        state, rounds = self._state, self._state.rounds
        state.settings = state.settings_after(contributions)
        application = Application(
            attempt=rounds.attempt,
            contributors=[(c.worker, c.incarnation, c.step) for c in contributions],
            samples=sum(c.samples for c in contributions),
            settings=state.settings,
        )
        version = rounds.version + 1
        due = self._keeper is not None and self._keeper.due(version, self._clock())
        number = self._keeper.number() if due and self._keeper is not None else 0
        order = Advance(version, 0, state.following, application, checkpoint=number, term=state.term)
        if not self._standbys:
            return order
        return replace(order, state=json.dumps(state.foreseen(contributions, decided=decided)))

    def _failed(self, advance: Advance, problem: Exception) -> None:
        """A shard was not reached, or refused. If it was not reached, the ticker sends the order again.

        The round starts again if a shard's sums are not those of the round and no shard can have applied it.
        A shard that refuses a round it has agreed to has lost the model: all go back to a checkpoint.
        """
        expected = isinstance(problem, TransportError | Refused)
        text = "a shard did not carry out an order for version %d: %s"
        logger.warning(text, advance.version, problem, exc_info=None if expected else problem)
        refused = problem.code if isinstance(problem, Refused) else None
        if refused is RefusalCode.STALE_TERM and self._keeper is not None:
            self._keeper.fence(problem)
        with self._changed:
            self._state.rounds.committing = False
            self._stale = True
            if refused is RefusalCode.INVALID and self._ordered != advance.version:
                self._state.restart_round()
            elif refused is not None:
                self._spoiled = True

    def _roll_back(self) -> bool:
        """Take all shards back to the newest checkpoint, in a new term, because one has lost the model."""
        try:
            if self._keeper is None:
                raise NoCheckpoint("there is no checkpoint directory")
            self._keeper.begin_term()
            if self._prepared is not None:
                rescue(self._keeper, self._shards, self._standbys, [self._prepared])
            self._restore(self._keeper.newest(), self._keeper.term)
        except NoCheckpoint as error:
            logger.error("a shard has lost the model, and the job cannot go back to a checkpoint: %s", error)
            with self._changed:
                term = self._keeper.term if self._keeper else self._state.term + 1
                self._state = JobState(term, self.lease, self._spec.consistency, self._spec.data)
        except (TransportError, Refused, CheckpointError) as error:
            if self._keeper is not None:
                self._keeper.failed(
                    f"the job has to go back to a checkpoint, and that failed so far: {error}"
                )
            return False
        with self._changed:
            self._spoiled = False
            self._told()
        return True

    def _restore(self, found: Manifest, term: int) -> None:
        """Configure all shards from a checkpoint and take its state over."""
        settings = Settings.from_json(found.state["settings"])
        layout = self._partition(found.specs, settings)
        for shard in self._shards:
            shard.configure(Configuration(layout, found.optimizer, settings, term, found.version))
        state = JobState.from_checkpoint(
            found.state,
            term=term,
            lease=self.lease,
            consistency=self._spec.consistency,
            data=self._spec.data,
            version=found.version,
            model=Model(layout, found.optimizer),
        )
        self._history.record("restore", term=term, version=found.version, round=state.last_round)
        self._prepared, self._ordered = None, 0
        with self._changed:
            self._state = state
            self._standings = [Standing.NONE for _ in self._standbys]  # of this term nothing is known yet
            self._changed.notify_all()
        logger.info("term %d continues from version %d", term, found.version)

    def _prepare(self, advance: Advance) -> None:
        """Let all shards vote on a round before any applies it. With standbys, all standbys receive it first.

        A shard that is alone votes when it applies.
        """
        if advance.apply is None:
            return
        if len(self._shards) > 1:
            self._tell_all(replace(advance, prepare=True, checkpoint=0))
        if self._standbys:
            self._prepared = advance

    def _tell_all(self, advance: Advance) -> None:
        """Send an order to all shards. This process's shard is last, because that answers workers' pulls."""
        to_others = replace(advance, state="")
        others = [self._fan_out.submit(shard.advance, to_others) for shard in self._shards[1:]]
        reports: list[Report] = [future.result() for future in others]
        reports.append(self._shards[0].advance(advance))
        for shard, report in zip([*range(1, len(self._shards)), 0], reports, strict=True):
            if self._standbys:
                self._standings[shard] = report.standby
            if self._keeper is not None:
                self._keeper.part(shard, report.written)

    def _tick(self) -> None:
        """Every `TICK`: declare silent members gone, collect checkpoint parts, repeat what failed.

        Also check the fence: workers that wait for records must not keep waiting here.
        """
        while True:
            if self._keeper is not None:
                self._keeper.check_fence()
                self._keeper.give_up_late(self._clock())
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, timeout=TICK.total_seconds()):
                    return
                if not self._state.rounds.committing:
                    self._drop_silent_and_hung()
                # Other shards are asked whether they still know the model.
                if len(self._shards) > 1 or (self._keeper is not None and self._keeper.writing):
                    self._stale = True
            self._drive()
            self._keep_what_must_be()

    def _drop_silent_and_hung(self) -> None:
        """Declare members gone whose lease has ended or that keep the others waiting. The lock is held."""
        now = self._clock()
        for worker in self._state.members.expired(now):
            self._drop(worker, "lost", f"silent for {self.lease.total_seconds():g} s")
        for worker, seconds in self._state.hung(now, self._spec.worker.progress_timeout).items():
            self._drop(worker, "hung", f"the others have waited for its step for {seconds:.1f} s")

    def _may_finish(self) -> bool:
        """Whether workers may be told that the job is finished. The lock is held.

        Not before the last version is on disk: if the parameter server was lost, no worker might be left to
        train the missing records. A full disk delays the end for `LAST` at most.
        """
        if not self._state.finished:
            return False
        if self._keeper is None or self._keeper.durable_version == self._state.version:
            return True
        if self._finished_at is None:
            self._finished_at = self._clock()
        return self._clock() - self._finished_at > LAST.total_seconds()

    def _keep_what_must_be(self) -> None:
        """Write the first version before training begins, and the last one before it ends. Blocks."""
        with self._changed:
            state = self._state
            if self._clock() < self._keep_again:
                return
            first = state.arrived and not state.initialised
            last = state.initialised and state.finished and not self._may_finish()
            if not (first or last) or self._keeping or self._closing or self._spoiled or self.fenced:
                return
            self._keeping = True
        kept = False
        try:
            kept = self._keeper is None or self._keep_now()
        finally:
            with self._changed:
                self._keeping = False
                state.initialised |= kept
                if not kept:
                    self._keep_again = self._clock() + PAUSE.total_seconds()
                self._changed.notify_all()

    @contextmanager
    def _turn(self) -> Iterator[Advance]:
        """Be the only thread that gives orders. Yields the order that describes the current state.

        Blocks until it is this thread's turn.

        Raises:
            Refused: NOT_READY; the driver is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._driving)
            if self._over:
                raise Refused(RefusalCode.NOT_READY, "the parameter server is stopping")
            self._driving = True
            current = self._current()
        try:
            yield current
        finally:
            with self._changed:
                self._driving = False
                self._changed.notify_all()

    def _keep_now(self) -> bool:
        """Write a checkpoint of the current version. Blocks; returns whether it is on disk.

        A failed call is repeated for `PATIENCE`. A checkpoint that is being written is finished first: two at
        a time would delete each other's files.
        """
        assert self._keeper is not None
        deadline = self._clock() + PATIENCE.total_seconds()
        while True:
            try:
                self._keep()
            except TransportError as error:
                if self._clock() < deadline and not self.fenced:
                    time.sleep(RETRY.total_seconds())
                    continue
                logger.warning("no checkpoint of the current version was written: %s", error)
            except (Refused, CheckpointError) as error:
                logger.warning("no checkpoint of the current version was written: %s", error)
            with self._changed:
                return self._keeper.durable_version == self._state.version

    def _keep(self) -> None:
        """See `_keep_now`. Raises TransportError, Refused, CheckpointError."""
        assert self._keeper is not None

        def ask() -> None:
            with self._turn() as current:
                self._tell_all(current)

        self._keeper.await_whole(ask)
        with self._turn() as current:
            if self._keeper.durable_version == current.version:
                return
            number = self._keeper.number()
            self._tell_all(replace(current, checkpoint=number))
            with self._changed:
                state = self._state.to_checkpoint()
            self._keeper.begin(current.version, self._clock(), state, number=number)
        self._keeper.await_whole(ask)
