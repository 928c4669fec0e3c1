"""How the shards of a job are told what to do: one order at a time, and before the workers can notice.

One condition variable guards the state of the job, and no I/O happens under it. Whatever the shards have to
be told (apply a round, start it again, who takes part, go back to a checkpoint) is told by `_drive`, by one
thread at a time: the one whose call made it necessary, or the ticker. Shards are told before the workers can
notice, so that a worker never pushes for a round that a shard does not know.
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

from elastic_ps.checkpoint.store import Manifest
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.partition import Layout, TensorSpec, partition
from elastic_ps.core.settings import Settings
from elastic_ps.errors import CheckpointError, RefusalCode, Refused, TransportError, UserError
from elastic_ps.job import TrainingJobSpec
from elastic_ps.server.keeper import PATIENCE, Keeper
from elastic_ps.server.orders import Advance, Application, Configuration, Report, ShardControl, Standing
from elastic_ps.server.remote import RemoteShard
from elastic_ps.server.rescue import held, rescue
from elastic_ps.server.state import JobState, Model
from elastic_ps.telemetry import History

logger = logging.getLogger(__name__)

TICK = timedelta(milliseconds=250)
"""How often leases and checkpoints are looked after."""


class Driver:
    """The state of a job under one lock, and what the shards are told of it.

    Args:
        job: the job's name.
        spec: how it is to be trained.
        epoch: how often shard 0 has been started.
        shards: in order; the first is this process's own.
        standbys: of each shard, in order; none without `durability: standby`.
        keeper: decides when checkpoints are written and finishes them; None for none.
        history: where commits are recorded.
    """

    def __init__(
        self,
        job: str,
        spec: TrainingJobSpec,
        epoch: int,
        shards: Sequence[ShardControl],
        *,
        standbys: Sequence[RemoteShard] = (),
        keeper: Keeper | None,
        history: History,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._spec = job, spec
        self._shards, self._standbys = shards, standbys
        self._standings = [Standing.NONE for _ in standbys]
        self._prepared: Advance | None = None  # the last order that every shard's standby can carry out
        self._keeper = keeper
        self._history = history
        self._clock = clock
        self._changed = threading.Condition()
        self._state = JobState(epoch, self.lease, spec.consistency)
        self._configuring = False
        self._driving = False
        self._stale = False  # the shards do not know yet who takes part in the open round
        self._spoiled = False  # a shard has lost the model: all go back to a checkpoint
        self._closing = False
        self._fan_out = ThreadPoolExecutor(max(1, len(shards) - 1), thread_name_prefix="advance")
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)

    def start(self, found: Manifest | None) -> None:
        """Begin, with the checkpoint `found` if there is one, or with what a standby has beyond it."""
        if self._keeper is not None and self._standbys and self.epoch > 1:
            orders = held(self._standbys[0], self.epoch)
            if rescue(self._keeper, self._shards, self._standbys, orders):
                found = self._keeper.newest()
        if found is not None:
            self._restore(found, self.epoch)
        self._ticker.start()

    def abandon(self) -> None:
        """End the threads, and nothing else: for a coordinator that could not start."""
        self._fan_out.shutdown(cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()

    def close(self, *, keep: bool = True) -> None:
        """Stop committing and end the threads; with `keep`, write a last checkpoint before. Blocks."""
        with self._changed:
            due = keep and self._keeper is not None and self._state.initialised and not self._spoiled
            due = due and self._keeper is not None and self._keeper.durable_version != self._state.version
            due = due and not self.fenced
            self._closing = True
            self._changed.notify_all()
        self._ticker.join()
        if due:
            with self._changed:
                self._changed.wait_for(lambda: not self._driving, timeout=PATIENCE.total_seconds())
            self._keep_now()
        self.abandon()

    @property
    def epoch(self) -> int:
        """Of the parameter server; grows when the job goes back to a checkpoint."""
        with self._changed:
            return self._state.epoch

    @property
    def fenced(self) -> bool:
        """Whether another parameter server has taken over: this one may apply and write nothing any more."""
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

    @contextmanager
    def _settled(self) -> Iterator[JobState]:
        """Hold the lock, at a moment at which no round is being committed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or not (self._state.rounds.committing or self._spoiled)
            )
            if self._closing:
                raise Refused(RefusalCode.NOT_READY, "the parameter server is stopping")
            yield self._state

    def _told(self) -> None:
        """Something has changed that shards or waiting threads have to know; the lock is held."""
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
            logger.info("version %d starts again as attempt %d", state.version, state.rounds.attempt)
        self._told()

    def _configure(self, tensors: tuple[TensorSpec, ...], optimizer: str, settings: Settings) -> None:
        """Lay the first worker's model out over the shards."""
        model: Model | None = None
        try:
            layout = self._partition(tensors)
            for shard in self._shards:
                shard.configure(Configuration(layout, optimizer, settings, self.epoch, None))
            model = Model(layout, optimizer)
        except UserError as error:
            raise Refused(RefusalCode.INVALID, str(error)) from error
        finally:
            with self._changed:
                self._state.model, self._state.settings, self._configuring = model, settings, False
                self._told()

    def _partition(self, tensors: tuple[TensorSpec, ...]) -> Layout:
        server = self._spec.parameter_server
        return partition(tensors, bucket_bytes=server.bucket_bytes, shards=len(self._shards))

    def _drive(self) -> None:
        """Tell the shards what they have to be told, unless another thread is at it."""
        while True:
            with self._changed:
                if self._driving or self._closing or self._state.model is None:
                    return
                spoiled = self._spoiled
                contributions = self._state.rounds.begin_commit() if self._state.ready else []
                if not (spoiled or contributions or self._stale):
                    return
                self._driving = True
                self._stale = False
                decided = time.monotonic()  # before the look at the fence
                advance = self._commit(contributions, decided) if contributions else self._current()
            try:
                done = self._roll_back() if spoiled else self._tell(advance, contributions, decided)
            finally:
                with self._changed:
                    self._driving = False
                    self._changed.notify_all()
            if not done:
                return

    def _tell(self, advance: Advance, contributions: Sequence[Contribution], decided: float) -> bool:
        """Send an order to the shards and book what came of it. Returns False if it has to be tried again."""
        if contributions and self._keeper is not None and self._keeper.check_fence():
            return False
        try:
            self._send(advance)
        except Exception as error:  # noqa: BLE001 (an order that failed for whatever reason is given again)
            with self._changed:
                self._undo(advance, error)
            return False
        with self._changed:
            if contributions:
                self._state.book(contributions, self._clock(), decided=decided)
                self._stale |= self._state.expected != advance.expected
            booked = self._state.last_round
            if advance.checkpoint and self._keeper is not None:
                self._keeper.begin(self._state.version, self._clock(), self._state.to_checkpoint())
        if contributions:
            self._history.record("commit", **booked)
        return True

    def _current(self) -> Advance:
        rounds = self._state.rounds
        return Advance(rounds.version, rounds.attempt, self._state.expected, epoch=self._state.epoch)

    def _commit(self, contributions: Sequence[Contribution], decided: float) -> Advance:
        """The order to apply a round, with the lock held."""
        state, rounds = self._state, self._state.rounds
        if settings := state.settings_of(contributions):
            state.settings = Settings.from_json(settings)
        application = Application(
            attempt=rounds.attempt,
            contributors=[(c.worker, c.incarnation, c.step) for c in contributions],
            samples=sum(c.samples for c in contributions),
            settings=state.settings,
        )
        version, empty = rounds.version + 1, Standing.EMPTY in self._standings
        due = self._keeper is not None and self._keeper.due(version, self._clock(), wanted=empty)
        order = Advance(version, 0, state.following, application, checkpoint=due, epoch=state.epoch)
        if not self._standbys:
            return order
        return replace(order, state=json.dumps(state.foreseen(contributions, decided=decided)))

    def _undo(self, advance: Advance, problem: Exception) -> None:
        """A shard could not be told: the ticker tries again. Wrong sums: again from the workers' buckets."""
        expected = isinstance(problem, TransportError | Refused)
        text = "a shard did not take the round of version %d: %s"
        logger.warning(text, advance.version, problem, exc_info=None if expected else problem)
        self._state.rounds.committing = False
        self._stale = True
        if isinstance(problem, Refused):
            if problem.code is RefusalCode.NOT_READY:
                self._spoiled = True
            elif advance.apply is not None:
                self._state.restart_round()

    def _roll_back(self) -> bool:
        """A shard has lost the model: all shards go back to the newest checkpoint, in a new epoch."""
        try:
            if self._keeper is None:
                raise CheckpointError("there is no checkpoint directory")
            if self._prepared is not None:
                rescue(self._keeper, self._shards, self._standbys, [self._prepared])
            found = self._keeper.roll_back()
            self._restore(found, self._keeper.epoch)
        except (TransportError, Refused) as error:
            logger.warning("the checkpoint is not restored yet: %s", error)
            return False
        except CheckpointError as error:
            logger.error("a shard has lost the model, and there is nothing to go on from: %s", error)
            with self._changed:
                self._state = JobState(self._state.epoch + 1, self.lease, self._spec.consistency)
        with self._changed:
            self._spoiled = False
            self._told()
        return True

    def _restore(self, found: Manifest, epoch: int) -> None:
        """Configure all shards from a checkpoint and take its state over."""
        layout = self._partition(JobState.tensors_of(found.tensors))
        settings = Settings.from_json(found.state["settings"])
        for shard in self._shards:
            shard.configure(Configuration(layout, found.optimizer, settings, epoch, found.version))
        state = JobState.from_checkpoint(
            found.state,
            epoch=epoch,
            lease=self.lease,
            consistency=self._spec.consistency,
            version=found.version,
            model=Model(layout, found.optimizer),
            shard_records=self._spec.data.shard_records,
        )
        self._history.record("restore", epoch=epoch, version=found.version, round=state.last_round)
        self._prepared = None
        with self._changed:
            self._state = state
            self._standings = [Standing.NONE for _ in self._standbys]  # of this epoch nothing is known yet
            self._changed.notify_all()
        logger.info("epoch %d goes on from version %d", epoch, found.version)

    def _send(self, advance: Advance) -> None:
        """Tell all shards. With standbys, no shard applies a round before every standby has it."""
        if advance.apply is not None and self._standbys and len(self._shards) > 1:
            self._tell_all(replace(advance, prepare=True))
        if advance.apply is not None and self._standbys:
            self._prepared = advance
        self._tell_all(advance)

    def _tell_all(self, advance: Advance) -> None:
        """This process's own shard comes last, because its workers' pulls are answered by that."""
        to_others = replace(advance, state="")
        others = [self._fan_out.submit(shard.advance, to_others) for shard in self._shards[1:]]
        reports: list[Report] = [future.result() for future in others]
        reports.append(self._shards[0].advance(advance))
        for shard, report in zip([*range(1, len(self._shards)), 0], reports, strict=True):
            if self._standbys:
                self._standings[shard] = report.standby
            if self._keeper is not None:
                self._keeper.parts(shard, report.written)

    def _tick(self) -> None:
        """Every `TICK`: declare silent members gone, collect checkpoint parts, try again what failed.

        Also look at the fence: workers that wait for records must not go on waiting here.
        """
        while True:
            if self._keeper is not None:
                self._keeper.check_fence()
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, timeout=TICK.total_seconds()):
                    return
                if not self._state.rounds.committing:
                    self._drop_silent_and_hung()
                # Other shards are asked whether they still know the model.
                if len(self._shards) > 1 or (self._keeper is not None and self._keeper.writing):
                    self._stale = True
            self._drive()

    def _drop_silent_and_hung(self) -> None:
        """Declare gone whose lease has ended, and who keeps the others waiting; the lock is held."""
        now = self._clock()
        for worker in self._state.members.expired(now):
            self._drop(worker, "lost", f"silent for {self.lease.total_seconds():g} s")
        for worker, seconds in self._state.hung(now, self._spec.worker.progress_timeout).items():
            self._drop(worker, "hung", f"the others have waited for its step for {seconds:.1f} s")

    def _keep_now(self) -> None:
        """Write a checkpoint of the version that is there. Blocks until it is on disk or given up.

        One that is under way is finished before: two at a time would take each other's files away.
        """
        assert self._keeper is not None
        with self._changed:
            probe, state = self._current(), self._state
        try:
            self._keeper.await_whole(lambda: self._send(probe))
            if self._keeper.durable_version == probe.version:
                return
            self._send(replace(probe, checkpoint=True))
            with self._changed:
                self._keeper.begin(probe.version, self._clock(), state.to_checkpoint())
            self._keeper.await_whole(lambda: self._send(probe))
        except (Refused, TransportError, CheckpointError) as error:
            logger.warning("version %d was not kept: %s", probe.version, error)
