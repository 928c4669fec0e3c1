"""Shard 0's second part: it knows the members and the records, and commits the rounds.

The decisions are `core`'s; here they meet the clock, the threads and the other shards. State is guarded by
one condition variable, and no I/O happens under it. Whatever the shards have to be told (apply a round,
start it again, who takes part) is told by `_drive`, by one thread at a time: the one whose call made it
necessary, or the ticker. Shards are told before the workers can notice, so that a worker never pushes for
a round that a shard does not know.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from elastic_ps.checkpoint.store import Manifest
from elastic_ps.core.consistency import Contribution, SyncRounds
from elastic_ps.core.ledger import Ledger, LedgerError, Range
from elastic_ps.core.membership import Membership, Stay
from elastic_ps.core.partition import Layout, Rule, TensorSpec, difference, partition
from elastic_ps.core.progress import Curve, Rate
from elastic_ps.core.settings import Settings
from elastic_ps.errors import CheckpointError, RefusalCode, Refused, TransportError, UserError
from elastic_ps.job import Member, Progress, ServerStatus, TrainingJobSpec
from elastic_ps.server.keeper import Keeper
from elastic_ps.server.node import Advance, Configuration, ShardControl, Written
from elastic_ps.server.shard import Application
from elastic_ps.telemetry import History

logger = logging.getLogger(__name__)

WAIT = timedelta(seconds=5)
"""After this time a blocked call answers that nothing has happened, and the caller asks again."""

TICK = timedelta(milliseconds=250)
"""How often leases and checkpoints are looked after."""


@dataclass(frozen=True)
class Model:
    """The model that is being trained: its tensors' layout and the class of its optimizer."""

    layout: Layout
    optimizer: str


@dataclass(frozen=True)
class Joined:
    """The answer to a worker that has become a member."""

    stay: Stay
    version: int
    layout: Layout
    initialise: bool
    settings: Settings


@dataclass(frozen=True)
class Taken:
    """The answer to a worker that asks for records; `pending`: nothing has happened, ask again."""

    ranges: Sequence[Range] = ()
    version: int = 0
    finished: bool = False
    chief: bool = False
    pending: bool = False


class Coordinator:
    """Members, records and rounds of a job. All methods may be called from any thread and may block.

    Args:
        job: the job's name.
        spec: how it is to be trained.
        epoch: how often shard 0 has been started.
        shards: in order; the first is this process's own.
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
        keeper: Keeper | None,
        history: History,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job, self.epoch = job, epoch
        self._spec = spec
        self._shards = shards
        self._keeper = keeper
        self._history = history
        self._clock = clock
        self._changed = threading.Condition()
        self._members = Membership(lease=spec.worker.lease_duration)
        self._rounds = SyncRounds()
        self._ledger: Ledger | None = None
        self._model: Model | None = None
        self._settings = Settings(groups=())
        self._initialised = False
        self._initialiser: int | None = None
        self._configuring = False
        self._driving = False
        self._stale = False  # the shards do not know yet who takes part in the open round
        self._closing = False
        self._chief: int | None = None
        self._metrics: dict[str, float] = {}
        self._loss = Curve()
        self._rate = Rate()
        self._fan_out = ThreadPoolExecutor(max(1, len(shards) - 1), thread_name_prefix="advance")
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)

    def start(self) -> None:
        """Begin to look after leases and checkpoints; go on from the checkpoint that the keeper found."""
        if self._keeper is not None and self._keeper.found is not None:
            self._resume(self._keeper.found)
        self._ticker.start()

    def abandon(self) -> None:
        """End the threads, and nothing else: for a coordinator that could not start."""
        self._fan_out.shutdown(cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()

    def close(self) -> None:
        """Stop committing, write a last checkpoint if there is something to keep, end the threads. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._driving, timeout=30)
            version = self._rounds.version
            due = self._keeper is not None and self._initialised and version > 0
        self._ticker.join()
        if due and self._keeper is not None and self._keeper.durable_version != version:
            try:
                self._keeper.begin(version, self._clock(), self._checkpoint_state())
                self._send(Advance(version, self._rounds.attempt, frozenset(), checkpoint=True))
                deadline = self._clock() + 30
                while self._keeper.writing and self._clock() < deadline:
                    time.sleep(0.01)
                    self._send(Advance(version, self._rounds.attempt, frozenset()))
            except (Refused, TransportError, CheckpointError) as error:
                logger.warning("the last checkpoint, of version %d, was not written: %s", version, error)
        self.abandon()

    @property
    def lease(self) -> timedelta:
        """How long a member may be silent."""
        return self._members.lease

    @property
    def settings(self) -> str:
        """The settings in force, as JSON."""
        with self._changed:
            return self._settings.to_json()

    # --- members

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Hold the lock, at a moment at which no round is being committed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._rounds.committing)
            yield

    def join(
        self,
        worker: int,
        *,
        pid: int,
        host: str,
        tensors: tuple[TensorSpec, ...],
        optimizer: str,
        settings: Settings,
    ) -> Joined | None:
        """Admit a worker; None while another one initialises the model (ask again).

        Raises:
            Refused: MODEL_MISMATCH; INVALID.
        """
        with self._settled():
            self._drop(worker, "lost")
            if not self._changed.wait_for(self._may_join, timeout=WAIT.total_seconds()):
                return None
            configure = self._model is None
            self._configuring = configure
        if configure:
            self._configure(tensors, optimizer, settings)
        with self._settled():
            assert self._model is not None
            self._require_same(tensors, optimizer)
            self._drop(worker, "lost")
            version = self._rounds.version
            stay = self._members.join(worker, pid=pid, host=host, version=version, now=self._clock())
            initialise = not self._initialised
            if initialise:
                self._initialiser = worker
            joined = Joined(stay, version, self._model.layout, initialise, self._settings)
        self._history.record("join", worker=worker, incarnation=stay.incarnation, version=version)
        logger.info("worker %d (pid %d on %s) joined at version %d", worker, pid, host, version)
        self._drive()
        return joined

    def _may_join(self) -> bool:
        return not self._configuring and (self._initialised or self._initialiser is None)

    def _configure(self, tensors: tuple[TensorSpec, ...], optimizer: str, settings: Settings) -> None:
        """Lay the first worker's model out over the shards."""
        server = self._spec.parameter_server
        model: Model | None = None
        try:
            layout = partition(tensors, bucket_bytes=server.bucket_bytes, shards=len(self._shards))
            for shard in self._shards:
                shard.configure(Configuration(layout, optimizer, settings, self.epoch, 0))
            model = Model(layout, optimizer)
        except UserError as error:
            raise Refused(RefusalCode.INVALID, str(error)) from error
        finally:
            with self._changed:
                self._model, self._settings, self._configuring = model, settings, False
                self._stale = True
                self._changed.notify_all()

    def _require_same(self, tensors: tuple[TensorSpec, ...], optimizer: str) -> None:
        assert self._model is not None
        different = difference(tensors, self._model.layout.tensors)
        if optimizer != self._model.optimizer:
            text = f"optimizer: this worker has {optimizer}, the parameter server has {self._model.optimizer}"
            different = f"{text}; {different}" if different else text
        if different:
            raise Refused(RefusalCode.MODEL_MISMATCH, different)

    def initialised(self, worker: int, incarnation: int) -> None:
        """The first worker has sent its values: the model can be trained."""
        with self._settled():
            self._members.check(worker, incarnation, self._clock())
            self._initialised, self._initialiser = True, None
            self._changed.notify_all()

    def heartbeat(self, worker: int, incarnation: int) -> None:
        """Raises Refused (STALE_INCARNATION) if the worker was declared gone."""
        with self._changed:
            self._members.check(worker, incarnation, self._clock())

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker says goodbye, between two steps; what it holds goes to others."""
        with self._settled():
            self._members.check(worker, incarnation, self._clock())
            self._give_back(incarnation)
            self._rounds.withdraw(worker)
            self._drop(worker, "left")
        self._drive()

    def gone(self, worker: int, pid: int) -> None:
        """A worker's process has ended; nothing happens if a newer one has taken its place."""
        with self._settled():
            stay = self._members.live.get(worker)
            if stay is not None and stay.pid == pid:
                self._drop(worker, "lost")
        self._drive()

    def _drop(self, worker: int, outcome: str) -> None:
        """End a stay, with the lock held."""
        stay = self._members.remove(worker, outcome=outcome, version=self._rounds.version)
        if stay is None:
            return
        logger.info("worker %d %s at version %d", worker, outcome, self._rounds.version)
        attempt = self._rounds.attempt
        for void in self._rounds.lose(worker):
            self._give_back(void.incarnation)
        finished = self._rounds.done.get(worker)
        if self._ledger is not None:
            self._ledger.give_back(stay.incarnation, keep=finished.records if finished else ())
        if self._rounds.attempt != attempt:
            logger.info("version %d starts again as attempt %d", self._rounds.version, self._rounds.attempt)
        if self._initialiser == worker:
            self._initialiser, self._model = None, None
        self._stale = True
        self._changed.notify_all()

    def _give_back(self, incarnation: int) -> None:
        if self._ledger is not None:
            self._ledger.give_back(incarnation)
        self._stale = True
        self._changed.notify_all()

    # --- records and steps

    def take(
        self, worker: int, incarnation: int, *, records: int, epochs: int, batch: int, wait: bool
    ) -> Taken:
        """Hand out records. With `wait` the worker has none, and no round waits for it until it gets some.

        Raises:
            Refused: STALE_INCARNATION; INVALID: the data set is not the one of the other workers.
        """
        with self._settled():
            self._members.check(worker, incarnation, self._clock())
            ledger = self._open_ledger(records, epochs)
            if wait and worker not in self._rounds.waiting:
                self._give_back(incarnation)
                self._rounds.withdraw(worker)
        if not wait:
            return self._take_now(ledger, incarnation, batch)
        self._drive()
        deadline = self._clock() + WAIT.total_seconds()
        while True:
            with self._settled():
                self._members.check(worker, incarnation, self._clock())
                held = ledger.held(incarnation) or ledger.take(
                    incarnation, batch=batch, workers=len(self._members.live)
                )
                if held and not self._rounds.knows(worker):  # else two that wait would wake each other
                    self._rounds.admit(worker)
                    self._stale = True
                elif ledger.finished:
                    return Taken(finished=True, version=self._rounds.version, chief=self._is_chief(worker))
            self._drive()
            with self._settled():
                if held and self._rounds.takes_part(worker) and not (self._stale or self._driving):
                    return Taken(held, self._rounds.version)
                left = deadline - self._clock()
                if left <= 0 or self._closing:
                    return Taken(pending=True)
                self._changed.wait(left)

    def _take_now(self, ledger: Ledger, incarnation: int, batch: int) -> Taken:
        with self._changed:
            ranges = ledger.take(incarnation, batch=batch, workers=len(self._members.live))
            return Taken(ranges, finished=ledger.finished)

    def _open_ledger(self, records: int, epochs: int) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(records, epochs, self._spec.data.shard_records)
        if (self._ledger.records, self._ledger.epochs) != (records, epochs):
            raise Refused(
                RefusalCode.INVALID,
                f"this worker's data set has {records} records for {epochs} epochs; the job trains "
                f"{self._ledger.records} records for {self._ledger.epochs} epochs",
            )
        return self._ledger

    def _is_chief(self, worker: int) -> bool:
        if self._chief not in self._members.live:
            self._chief = min(self._members.live)
        return self._chief == worker

    def release(self, worker: int, incarnation: int) -> None:
        """A worker, between two steps, gives back what it holds, and is not waited for; it stays a member."""
        with self._settled():
            self._members.check(worker, incarnation, self._clock())
            self._give_back(incarnation)
            self._rounds.withdraw(worker)
        self._drive()

    def finish(self, contribution: Contribution, *, version: int, attempt: int) -> bool:
        """A worker's step is complete on all shards. Returns False if that was known.

        The call that completes a round commits it and returns when the shards have applied it.

        Raises:
            Refused: see `SyncRounds.finish`; INVALID: records that the worker does not hold.
        """
        with self._settled():
            stay = self._members.check(contribution.worker, contribution.incarnation, self._clock())
            if contribution.step <= stay.last_step:
                return False
            try:
                if self._ledger is not None:
                    self._ledger.check(contribution.incarnation, contribution.records)
            except LedgerError as error:
                raise Refused(RefusalCode.INVALID, str(error)) from error
            new = self._rounds.finish(contribution, version=version, attempt=attempt)
        self._drive()
        return new

    def report(self, worker: int, incarnation: int, metrics: Mapping[str, float]) -> None:
        """Keep values that a script reports outside a step."""
        with self._changed:
            self._members.check(worker, incarnation, self._clock())
            self._metrics.update(metrics)

    # --- telling the shards

    def _drive(self) -> None:
        """Tell the shards what they have to be told, unless another thread is at it."""
        while True:
            with self._changed:
                if self._driving or self._closing or self._model is None:
                    return
                contributions = self._rounds.begin_commit() if self._rounds.ready else []
                if not contributions and not self._stale:
                    return
                self._driving = True
                advance = self._commit(contributions) if contributions else self._current()
                self._stale = False
            problem: Exception | None = None
            try:
                self._send(advance)
            except (TransportError, Refused) as error:
                problem = error
            with self._changed:
                self._driving = False
                if problem is not None:
                    self._undo(advance, problem)
                elif contributions:
                    self._committed(contributions, advance)
                self._changed.notify_all()
            if problem is not None:
                return
            if contributions:
                self._record(contributions, advance.version)

    def _current(self) -> Advance:
        return Advance(self._rounds.version, self._rounds.attempt, frozenset(self._rounds.expected))

    def _commit(self, contributions: Sequence[Contribution]) -> Advance:
        """The order to apply a round, with the lock held."""
        rounds = self._rounds
        # Who has made most steps: one that joined first may have been overtaken before its first step.
        steps = {stay.incarnation: stay.steps for stay in self._members.stays()}
        eldest = min(contributions, key=lambda c: (-steps[c.incarnation], c.incarnation))
        if eldest.settings:
            self._settings = Settings.from_json(eldest.settings)
        application = Application(
            attempt=rounds.attempt,
            contributors=[(c.worker, c.incarnation, c.step) for c in contributions],
            samples=sum(c.samples for c in contributions),
            settings=self._settings,
        )
        following = frozenset((rounds.expected - rounds.gone) | rounds.waiting)
        due = self._keeper is not None and self._keeper.due(self._clock())
        return Advance(rounds.version + 1, 0, following, application, checkpoint=due)

    def _undo(self, advance: Advance, problem: Exception) -> None:
        """A shard could not be told: the ticker tries again. A round with wrong sums starts again."""
        logger.warning("a shard did not take the round of version %d: %s", advance.version, problem)
        self._rounds.committing = False
        self._stale = True
        if isinstance(problem, Refused) and advance.apply is not None:
            for void in self._rounds.restart():
                self._give_back(void.incarnation)

    def _committed(self, contributions: Sequence[Contribution], advance: Advance) -> None:
        """Book a round that the shards have applied, with the lock held."""
        stays = {stay.incarnation: stay for stay in self._members.stays()}
        losses = [(c.metrics["loss"], c.samples) for c in contributions if "loss" in c.metrics]
        for c in contributions:
            if self._ledger is not None:
                self._ledger.apply(c.incarnation, c.records)
            stay = stays[c.incarnation]
            stay.steps, stay.last_step = stay.steps + 1, c.step
            stay.records += sum(r.records for r in c.records)
            self._metrics.update({k: v for k, v in c.metrics.items() if k != "loss"})
        self._rounds.end_commit()
        if losses:
            mean = sum(loss * samples for loss, samples in losses) / sum(samples for _, samples in losses)
            self._loss.add(self._rounds.version, mean)
        self._rate.add(self._ledger.applied if self._ledger else 0, self._clock())
        if advance.checkpoint and self._keeper is not None:
            self._keeper.begin(self._rounds.version, self._clock(), self._checkpoint_state())

    def _record(self, contributions: Sequence[Contribution], version: int) -> None:
        steps = [
            {"worker": c.worker, "incarnation": c.incarnation, "step": c.step, "records": c.records}
            | {"samples": c.samples}
            for c in contributions
        ]
        self._history.record("commit", version=version, contributions=steps)

    def _send(self, advance: Advance) -> None:
        """Tell all shards; this process's own last, because its workers' pulls are answered by that."""
        others = [self._fan_out.submit(shard.advance, advance) for shard in self._shards[1:]]
        written: list[list[Written]] = [future.result() for future in others]
        written.append(self._shards[0].advance(advance))
        if self._keeper is not None:
            for shard, parts in zip([*range(1, len(self._shards)), 0], written, strict=True):
                self._keeper.parts(shard, parts)

    def _tick(self) -> None:
        """Every `TICK`: declare silent members gone, collect checkpoint parts, try again what failed."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, timeout=TICK.total_seconds()):
                    return
                if not self._rounds.committing:
                    for worker in self._members.expired(self._clock()):
                        self._drop(worker, "lost")
                if self._keeper is not None and self._keeper.writing:
                    self._stale = True
            self._drive()

    # --- checkpoints and reports

    def _checkpoint_state(self) -> dict[str, Any]:
        """Everything of a version that is not a tensor; the lock is held."""
        assert self._model is not None
        return {
            "tensors": [asdict(t) for t in self._model.layout.tensors],
            "optimizer": self._model.optimizer,
            "settings": self._settings.to_json(),
            "ledger": self._ledger.state() if self._ledger else None,
            "last_incarnation": self._members.last_incarnation,
            "members": [asdict(stay) for stay in self._members.stays()],
            "metrics": dict(self._metrics),
            "loss": list(self._loss.points),
        }

    def _resume(self, found: Manifest) -> None:
        """Go on from a checkpoint: model, ledger, counters. Its members are gone."""
        tensors = tuple(
            TensorSpec(**{**t, "shape": tuple(t["shape"]), "rule": Rule(t["rule"])}) for t in found.tensors
        )
        server, state = self._spec.parameter_server, found.state
        layout = partition(tensors, bucket_bytes=server.bucket_bytes, shards=len(self._shards))
        settings = Settings.from_json(state["settings"])
        for shard in self._shards:
            shard.configure(Configuration(layout, found.optimizer, settings, self.epoch, found.version))
        stays = [Stay(**stay) for stay in state["members"]]
        for stay in stays:
            stay.outcome = stay.outcome or "lost"
            stay.left_version = found.version if stay.left_version is None else stay.left_version
        with self._changed:
            self._model, self._settings = Model(layout, found.optimizer), settings
            self._initialised = True
            self._members.last_incarnation = state["last_incarnation"]
            self._members.departed = stays
            self._rounds.version = found.version
            if state["ledger"] is not None:
                self._ledger = Ledger.from_state(state["ledger"], shard_records=self._spec.data.shard_records)
            self._metrics = dict(state["metrics"])
            self._loss = Curve(points=[(version, loss) for version, loss in state["loss"]])
        logger.info("going on from version %d", found.version)

    def status(self) -> ServerStatus:
        """Progress and members, at this moment."""
        with self._changed:
            now, ledger, version = self._clock(), self._ledger, self._rounds.version
            rate = self._rate.per_second(ledger.applied, now) if ledger else None
            progress = Progress(
                version=version,
                samples_per_second=rate,
                loss=self._loss.points[-1][1] if self._loss.points else None,
                metrics=dict(self._metrics),
                durable_version=self._keeper.durable_version if self._keeper else None,
            )
            if ledger is not None:
                left = ledger.expected - ledger.applied
                progress = progress.model_copy(
                    update={
                        "epoch": ledger.complete_epochs,
                        "epochs": ledger.epochs,
                        "percent": 100 * ledger.applied // max(1, ledger.expected),
                        "records_applied": ledger.applied,
                        "records_expected": ledger.expected,
                        "eta_seconds": round(left / rate) if rate else None,
                        "finished": ledger.finished,
                    }
                )
            members = [self._member(stay) for stay in self._members.stays()]
        return ServerStatus(
            job=self.job,
            shard=0,
            shards=len(self._shards),
            epoch=self.epoch,
            ready=self._initialised,
            progress=progress,
            members=members,
        )

    def _member(self, stay: Stay) -> Member:
        computing = stay.worker in self._rounds.expected or stay.worker in self._rounds.waiting
        here = "joining" if self._initialiser == stay.worker else "training" if computing else "idle"
        state = here if not stay.outcome else stay.outcome
        return Member.model_validate(
            {
                "worker": stay.worker,
                "incarnation": stay.incarnation,
                "pid": stay.pid,
                "host": stay.host,
                "state": state,
                "joined_version": stay.joined_version,
                "left_version": stay.left_version,
                "steps": stay.steps,
                "records": stay.records,
            }
        )

    def loss(self) -> list[tuple[int, float]]:
        """The loss curve: (version, sample-weighted mean of what the scripts reported)."""
        with self._changed:
            return list(self._loss.points)
