"""Gives the shards of a job their orders: one at a time, and before the workers can see the effect.

An order applies a round, restarts it, changes who takes part, or goes back to a checkpoint. One thread at a
time gives orders, in `drive`: the thread of the call that made the order necessary, or the ticker. The shards
get an order before the workers can see its effect, so a worker never pushes for a round that a shard does not
know.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

from elastic_ps.api.job import BUCKET_BYTES
from elastic_ps.api.tables import TableStatus, added
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.codec.optimizers import Optimizers, steps_whole_tensors
from elastic_ps.codec.plan import Plan
from elastic_ps.core import scales
from elastic_ps.core.chiefs import Chiefs
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.fragments import fragments
from elastic_ps.core.overlap import smallest_bucket
from elastic_ps.core.partition import Layout, TensorSpec, cut_rows, partition
from elastic_ps.core.settings import MAX_NORM, Application, Settings
from elastic_ps.core.sizing import LARGEST, Link, bucket_bytes
from elastic_ps.core.stages import Course, CourseEvent, OrderEvent, StageEvent, StandbyState
from elastic_ps.errors import (
    CheckpointError,
    Fenced,
    InvalidModel,
    NoCheckpoint,
    RefusalCode,
    Refused,
    TransportError,
    UserError,
)
from elastic_ps.process.retrying import RETRY, Patience, Pauses
from elastic_ps.process.telemetry import History
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.job.guarded import Guarded
from elastic_ps.server.job.record import JobRecord, foreseen, mutable_of, of_same_run, to_checkpoint
from elastic_ps.server.job.standby import Rescue
from elastic_ps.server.job.state import JobState
from elastic_ps.server.orders import Advance, Configuration, Model, RemoteShard, Report, ShardControl

logger = logging.getLogger(__name__)

LONGEST = 1.0
"""The longest time between two attempts to send an order, in seconds. The first one is `RETRY`."""

GOODBYE = timedelta(seconds=2)
"""How long a parameter server that ends tries to tell the other shards."""


class CommitCoordinator:
    """Gives the orders. Thread-safe.

    Args:
        shards: the shards in order; the first is this process's own.
        standbys: the standby of each shard, in order; empty without `durability: standby`.
        history: records the commits.
        crowded: see `core.sizing.bucket_bytes`.

    Attributes:
        standings: the state of each shard's standby, as the shards have reported it.
        queued: in deterministic mode, the workers that wait for their turn to push, as reported.
        tables: the counts of the shards' tables, as reported.
    """

    def __init__(
        self,
        job: Guarded,
        shards: Sequence[ShardControl],
        *,
        standbys: Sequence[RemoteShard] = (),
        checkpoints: Checkpointer,
        history: History,
        crowded: bool = False,
    ) -> None:
        self._overlap = job.spec.parameter_server.overlap
        self.job, self._crowded = job, crowded and len(shards) == 1 and self._overlap != "always"
        self.shards, self._standbys = shards, standbys
        self.checkpoints, self.history = checkpoints, history
        checkpoints.serve(job, self)
        self.standings: list[StandbyState | None] = [None for _ in standbys]
        self.queued: frozenset[int] = frozenset()
        self.tables: list[TableStatus] = []
        self._prepared: tuple[Advance, Model] | None = None  # the last order that all standbys can carry out
        self._ordered = 0  # the version that the shards were ordered to make last, when all had voted for it
        self._first_decided = 0, 0, 0.0  # the term and version decided last, and when at first
        self._decided_at = 0.0  # when the order under way was decided, before the look at the fence
        self._norm = 0.0  # the norm of its mean gradient, if that is clipped
        self._unmade = 0, ""  # the version whose step raised an error, and that error
        self._over = False  # no more orders are sent
        self._pauses, self._not_before = Pauses(RETRY.total_seconds(), LONGEST), 0.0  # after a failed order
        self._fan_out = ThreadPoolExecutor(max(1, len(shards) - 1), thread_name_prefix="advance")

    @property
    def asks_shards(self) -> bool:
        """Whether the ticker asks the shards for reports.

        It asks whether they know the model, have written a part of a checkpoint, or have pushes that wait.
        """
        deterministic = self.job.spec.consistency.deterministic
        return len(self.shards) > 1 or self.checkpoints.writing or deterministic

    def start(self, found: Manifest | None, patience: Patience) -> None:
        """Begin, from the checkpoint `found` if there is one, or from later rounds that the standbys hold.

        Blocks while the shards load the checkpoint, and while the storage is unavailable.

        Raises:
            Fenced: another parameter server has begun a newer term.
            AskedToEnd: the process was asked to end meanwhile.
        """
        term = self.job.term
        if self.checkpoints.writes and self._standbys and term > 1:
            rescue = Rescue(self.checkpoints, self.shards, self._standbys, patience.asked_to_end)
            # A standby that was away keeps the rounds of a term that the job has given up since.
            held = [each for each in rescue.held() if found is None or each.term >= found.term]
            if patience.until_done(partial(rescue.save, held)):
                found = patience.until_done(self.checkpoints.newest)
        if found is not None:
            patience.until_done(partial(self._restore, found, term))

    @property
    def problem(self) -> str:
        """Why the next version was not made, if its step raised an error; else "". The lock is held."""
        version, error = self._unmade
        if version <= self.job.state.version:
            return ""
        return f"the step that makes version {version} has raised an error, and is made again: {error}"

    def close(self) -> None:
        """Stop giving orders, and tell the other shards that they may end. Blocks."""
        with self.job.lock:
            self.job.changed.wait_for(
                lambda: not self.job.sending, timeout=self.job.limits.patience.total_seconds()
            )
            self._over = True
        self._release()
        self.abandon()

    def abandon(self) -> None:
        """End the threads and do nothing else."""
        self._fan_out.shutdown(wait=False, cancel_futures=True)

    def finish_round(self) -> bool:
        """Commit a decided round, which shards may have applied. Returns whether to write the version."""
        job = self.job
        deadline = job.clock() + job.limits.patience.total_seconds()
        while True:
            with job.lock:
                job.changed.wait_for(lambda: not job.sending)
                state = job.state
                late = job.clock() > deadline  # mutant: equal
                if self.checkpoints.fenced or job.rolling_back or not state.initialised or late:
                    return False
                if not state.rounds.decided:
                    return True
            if not self._give_one_order(closing=True):
                time.sleep(RETRY.total_seconds())

    def _release(self) -> None:
        with self.job.lock:
            if self.job.state.model is None or self.checkpoints.fenced or len(self.shards) == 1:
                return
            last = replace(self._current(), last=True)
        for order in [self._fan_out.submit(shard.advance, last) for shard in self.shards[1:]]:
            try:
                order.result(timeout=GOODBYE.total_seconds())
            except (Refused, TransportError, TimeoutError) as error:
                logger.info("a shard could not be told that it may end: %s", error)

    def configure(
        self,
        state: JobState,
        tensors: tuple[TensorSpec, ...],
        optimizer: str,
        settings: Settings,
        link: Link | None = None,
    ) -> None:
        """Distribute the first worker's model over the shards.

        Args:
            state: the job's state. If it is replaced meanwhile, the new one gets no model.
            link: the worker's network, to choose the bucket size if the job leaves that open.

        Raises:
            Refused: INVALID; NOT_READY: a shard obeys a newer term, so that the worker has to join that.
            TransportError: a shard does not answer.
        """
        job = self.job
        model: Model | None = None
        chosen = 0
        self._ordered = 0  # the version is 0 again
        try:
            layout, chosen = self._laid_out(tensors, optimizer, settings, link)
            self._configure(Configuration(layout, optimizer, settings, state.term, None, mutable=job.mutable))
            model = Model(layout, optimizer)
        except UserError as error:
            raise Refused(RefusalCode.INVALID, str(error)) from error
        except Refused as refusal:
            if refusal.code is RefusalCode.STALE_TERM:
                raise Refused(RefusalCode.NOT_READY, f"{refusal}; join again") from refusal
            raise
        finally:
            with job.lock:
                state.note(StageEvent.LAY_OUT if model is not None else StageEvent.FAIL)
                state.model, state.bucket_bytes = model, chosen
                state.settings = Settings(settings.groups, settings.schedulers, first=settings.groups)
                job.note_change()

    def _configure(self, told: Configuration) -> None:
        """Configure this process's shard, which finds mistakes, and then the others at once. Blocks."""
        self.shards[0].configure(told)
        with ExitStack() as others, self.job.lock:  # none is left behind at work if another one fails
            if self._over:
                raise Refused(RefusalCode.NOT_READY, "the parameter server is stopping")
            for shard in self.shards[1:]:
                others.callback(self._fan_out.submit(shard.configure, told).result)

    def _laid_out(
        self, tensors: Sequence[TensorSpec], optimizer: str, settings: Settings, link: Link | None
    ) -> tuple[Layout, int]:
        """The first layout, and the chosen bucket size; 0 for none. Raises as `_cut`."""
        if link is None or not self.job.spec.chooses_buckets:
            return self._cut(tensors, optimizer, settings, 0)
        size, why = bucket_bytes(link, sent=Plan(self.job.spec.compression).sent, crowded=self._crowded)
        layout, chosen = self._cut(tensors, optimizer, settings, size)
        if chosen:
            logger.info("buckets have %d KiB: %s", size // 1024, why)
        return layout, chosen

    def _cut(
        self, tensors: Sequence[TensorSpec], optimizer: str, settings: Settings, chosen: int
    ) -> tuple[Layout, int]:
        """The layout with buckets of the chosen size, and that size.

        The size is 0 if none was chosen, or the model cannot be cut so. Then buckets have the usual size.

        Raises:
            InvalidModel: a row whose norm is limited would be cut, or the model has too few fragments.
        """
        size = self.job.spec.parameter_server.bucket_bytes or chosen or BUCKET_BYTES
        parts = self.job.spec.consistency.fragments or 1
        shards, least = len(self.shards), smallest_bucket(self._overlap, self.job.limits.smallest_bucket)
        here = not self.job.spec.all_reduce  # else the workers, which have whole rows, limit them
        limited = [i for i, group in enumerate(settings.groups) if here and group.get(MAX_NORM) is not None]
        try:
            known = Optimizers(self.job.spec.parameter_server.optimizers)
            kinds = known.classes_of(optimizer, len(settings.groups))
            whole = [i for i, kind in enumerate(kinds) if steps_whole_tensors(kind)]
            layout = partition(
                tensors, bucket_bytes=size, shards=shards, parts=parts, smallest=least, whole=whole
            )
            fragments(layout, parts)
            if cut := cut_rows(layout, limited):
                raise InvalidModel(
                    f"the rows of {cut[0]} have more than parameterServer.bucketBytes={size} bytes, so they "
                    f"are divided, and {MAX_NORM} cannot limit their norm; increase "
                    "parameterServer.bucketBytes"
                )
        except InvalidModel as problem:
            if not chosen:
                raise
            logger.info("buckets have the default size in place of %d KiB: %s", chosen // 1024, problem)
            return self._cut(tensors, optimizer, settings, 0)
        return layout, chosen

    def _kept_size(self, found: Manifest) -> int:
        """The chosen bucket size in a checkpoint, if this job leaves the size open, too; else 0."""
        spec, chosen = self.job.spec, int(found.state["bucket_bytes"])
        if spec.parameter_server.bucket_bytes:
            return 0
        if of_same_run(found, self.job.mutable):
            return chosen  # the workers have divided their memory so
        return chosen if spec.chooses_buckets and (chosen <= LARGEST or self._crowded) else 0

    def drive(self) -> None:
        """Give the shards the orders that are due, unless another thread does it."""
        while self._give_one_order():
            pass

    def _give_one_order(self, *, closing: bool = False) -> bool:
        """Give the shards one order, if one is due and no other thread does it.

        Args:
            closing: the caller closes the coordinator. From then on no other thread gives orders.

        Returns whether the order was carried out, so another one may be due.
        """
        job = self.job
        with job.lock:
            model = job.state.model
            if job.sending or job.closing != closing or model is None:
                return False
            if not closing and time.monotonic() < self._not_before:
                return False
            if job.state.orphaned(job.clock()) and not job.state.rounds.committing:
                job.note_course(CourseEvent.ROLL_BACK)
            rolling_back, paused = job.rolling_back, job.course is Course.PAUSED
            contributions = job.state.begin_commit() if job.state.ready and not paused else []
            if not (rolling_back or contributions or job.behind):
                return False
            job.note_order(OrderEvent.SEND)
            advance = self._order_to_apply(contributions) if contributions else self._current()
        try:
            done = self._roll_back() if rolling_back else self._tell(advance, contributions, model)
            if done:
                self._pauses.reset()
            return done
        finally:
            with job.lock:
                job.note_order(OrderEvent.END)
                job.changed.notify_all()

    def _back_off(self) -> None:
        """Pause after an order that failed, so that not every call of a worker repeats it."""
        self._not_before = time.monotonic() + self._pauses.next()

    def _tell(self, advance: Advance, contributions: Sequence[Contribution], model: Model) -> bool:
        """Send an order to the shards and book the result. Returns False if it has to be sent again.

        Args:
            model: the model of the order.
        """
        job = self.job
        if contributions and not self.checkpoints.leads():
            if not self.checkpoints.fenced:  # unknown at the moment; the ticker tries again
                self._back_off()
                with job.lock:
                    job.state.rounds.fail_commit()
                    job.note_order(OrderEvent.CHANGE)
            return False
        try:
            advance = self._prepare(advance, model)
            if contributions and len(self.shards) > 1:
                self._ordered = advance.version
            self.tell_all(advance)
        except Exception as error:  # noqa: BLE001 (an order that failed for any reason is repeated)
            self._failed(advance, error, model)
            return False
        with job.lock:
            if contributions:
                job.state.book(contributions, job.clock(), decided=self._decided_at)
                if job.state.expected != advance.expected:
                    job.note_order(OrderEvent.CHANGE)
            booked = job.state.last_round
            if advance.checkpoint:
                state = to_checkpoint(job.state)
                self.checkpoints.begin(job.state.version, job.clock(), state, number=advance.checkpoint)
        if contributions:
            self.history.record("commit", **booked)
        return True

    def _current(self) -> Advance:
        state = self.job.state
        return Advance(state.version, state.rounds.attempt, state.expected, term=state.term)

    def _order_to_apply(self, contributions: Sequence[Contribution]) -> Advance:
        """The order to apply a round. The lock is held."""
        job = self.job
        state, rounds = job.state, job.state.rounds
        state.decide_settings(contributions)
        version = rounds.version + 1
        self._decided_at = time.monotonic()
        if self._first_decided[:2] != (state.term, version):  # else the same order is made again
            self._first_decided = state.term, version, self._decided_at
        application = Application(
            attempt=rounds.attempt,
            contributors=[(c.worker, c.incarnation, c.step) for c in contributions],
            weight=math.fsum(c.weight for c in contributions),
            settings=state.settings_to_step_with(contributions),
            assigns=any(c.assigns for c in contributions),
            elsewhere=state.state_holders is not None,
            divisors=state.divisors_with(contributions),
            time=self._first_decided[2],
        )
        due = self.checkpoints.due(version, job.clock())
        if state.state_holders is not None:  # it is written when a worker has sent the values
            state.state_holders.wanted = version if due else None
            return Advance(version, 0, state.following, application, term=state.term)
        number = self.checkpoints.number() if due else 0
        order = Advance(version, 0, state.following, application, checkpoint=number, term=state.term)
        if not self._standbys:
            return order
        return replace(order, state=json.dumps(foreseen(state, contributions, decided=self._decided_at)))

    def _failed(self, advance: Advance, problem: Exception, model: Model) -> None:
        """Handle a shard that was not reached, or refused. In the first case the ticker repeats the order.

        If a shard has other sums than the round needs, and no shard can have applied the round, the round is
        restarted. If a shard refuses a round that it has agreed to, it has lost the model: all shards go back
        to a checkpoint, unless the worker that was bringing this model was lost meanwhile.
        """
        job = self.job
        expected = isinstance(problem, TransportError | Refused)
        text = "a shard did not carry out an order for version %d: %s"
        logger.warning(text, advance.version, problem, exc_info=None if expected else problem)
        refused = problem.code if isinstance(problem, Refused) else None
        if not expected or type(problem) is TransportError:  # which another shard's process has answered
            self._unmade = advance.version, repr(problem)[:500]
        if refused is None:
            self._back_off()
        if refused is RefusalCode.STALE_TERM:
            self.checkpoints.fence(problem)
        with job.lock:
            rounds = job.state.rounds
            if rounds.committing:
                rounds.fail_commit()
            job.note_order(OrderEvent.CHANGE)
            if refused is RefusalCode.INVALID and self._ordered != advance.version:
                job.state.restart_round()
            elif refused is not None and job.state.model is model:
                job.note_course(CourseEvent.ROLL_BACK)

    def _roll_back(self) -> bool:
        """Set all shards back to the newest checkpoint, in a new term; see `Course.ROLLING_BACK`."""
        job = self.job
        try:
            self.checkpoints.begin_term()
            if self._prepared is not None:
                rescue = Rescue(self.checkpoints, self.shards, self._standbys, lambda: job.closing)
                order, model = self._prepared
                rescue.save([model.complete(order)])
            self._restore(self.checkpoints.newest(), self.checkpoints.term)
        except NoCheckpoint as error:
            logger.error("a shard has lost the model, and the job cannot go back to a checkpoint: %s", error)
            with job.lock:
                job.replace(job.blank(self.checkpoints.term))
        except (TransportError, Refused, CheckpointError) as error:
            self._back_off()
            self.checkpoints.failed(
                f"the job has to go back to a checkpoint, and that failed so far: {error}"
            )
            return False
        with job.lock:
            job.note_course(CourseEvent.RESTORE)
            job.note_change()
        return True

    def _restore(self, found: Manifest, term: int) -> None:
        """Configure all shards from a checkpoint and take its state over.

        The term has the mutable fields of the checkpoint, unless newer ones are known.

        Raises:
            Fenced: a shard obeys a newer term.
            InvalidJob, InvalidModel: see `mutable_of`, `scales.check`, `Plan` and `Table.shrink`.
        """
        job = self.job
        settings = Settings.from_json(found.state["settings"])
        layout, chosen = self._cut(found.every, found.optimizer, settings, self._kept_size(found))
        mutable = mutable_of(found, job.mutable)
        scales.check(mutable.consistency.staleness_scale)
        Plan(mutable.compression)  # before any shard is told
        size = sum(file.size for file in found.files)
        told = Configuration(
            layout, found.optimizer, settings, term, found.version, mutable=mutable, load_bytes=size
        )
        try:
            self._configure(told)
        except Refused as refusal:
            if refusal.code is RefusalCode.STALE_TERM:
                raise Fenced(str(refusal)) from refusal
            if refusal.code is RefusalCode.INVALID:
                raise InvalidModel(str(refusal)) from refusal
            raise
        state = JobRecord.read(found.state).continued(
            term=term,
            lease=job.spec.worker.lease_duration,
            consistency=mutable.consistency,
            data=job.spec.data,
            version=found.version,
            model=Model(layout, found.optimizer),
            change="it joins again, since the job has changed" if mutable.needs_term(job.mutable) else "",
            all_reduce=job.spec.all_reduce,
            shares=job.spec.worker.replicas if mutable.consistency.fixed_workers else 0,
        )
        state.bucket_bytes = chosen
        if not of_same_run(found, job.mutable):
            state.chiefs = Chiefs()  # earlier ones may never come
        clip = state.settings.max_grad_norm
        if clip is not None and self._standbys:  # a shard may step without the others, which have the norm
            logger.warning("max_grad_norm %g has no effect now: it needs a job without standbys", clip)
            state.settings = state.settings.unclipped()
        said = mutable.consistency.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        self.history.record(
            "restore", term=term, version=found.version, round=state.last_round, consistency=said
        )
        self._prepared, self._ordered = None, 0
        if mutable.replaces(job.mutable):
            self.checkpoints.tune(mutable.checkpoint)
        with job.lock:
            job.replace(state)
            job.tune(mutable)
            self.standings = [None for _ in self._standbys]  # nothing is known yet of this term
            self.queued, self.tables = frozenset(), []
            job.changed.notify_all()
        logger.info("term %d continues from version %d", term, found.version)

    def _prepare(self, advance: Advance, model: Model) -> Advance:
        """Let all shards vote on a round before any applies it. Standbys receive the round first.

        A single shard votes when it applies. Returns the order to apply the round. If the gradient is
        clipped, the order has the norm over all shards. A shard that has made the version has no sums any
        more, so a repeated order has the norm of the first one.
        """
        if advance.apply is None:
            return advance
        if len(self.shards) > 1:
            reports = self.tell_all(replace(advance, prepare=True, checkpoint=0))
            if advance.apply.clips is not None:
                if self._ordered != advance.version:
                    self._norm = math.hypot(*(report.norm for report in reports))
                advance = replace(advance, apply=replace(advance.apply, norm=self._norm))
        if self._standbys:
            self._prepared = advance, model
        return advance

    def tell_all(self, advance: Advance) -> list[Report]:
        """Send an order to all shards, and return their answers.

        This process's shard is the last one, because it answers workers' pulls.
        """
        to_others = replace(advance, state="")
        others = [self._fan_out.submit(shard.advance, to_others) for shard in self.shards[1:]]
        reports = [*(future.result() for future in others), self.shards[0].advance(advance)]
        for shard, report in zip([*range(1, len(self.shards)), 0], reports, strict=True):
            if self._standbys:
                self.standings[shard] = report.standby
            self.checkpoints.part(shard, report)
        self.queued = frozenset().union(*(report.queued for report in reports))
        self.tables = added(report.tables for report in reports)
        return reports

    @contextmanager
    def turn(self) -> Iterator[Advance]:
        """Be the only thread that gives orders. Yields the order that describes the current state.

        Blocks until it is this thread's turn.

        Raises:
            Refused: NOT_READY; it is closed.
        """
        job = self.job
        with job.lock:
            job.changed.wait_for(lambda: not job.sending)
            if self._over:
                raise Refused(RefusalCode.NOT_READY, "the parameter server is stopping")
            job.note_order(OrderEvent.SEND_OTHER)
            current = self._current()
        try:
            yield current
        finally:
            with job.lock:
                job.note_order(OrderEvent.END)
                job.changed.notify_all()
