"""What a training script talks to: who am I, my optimizer, my records.

A session belongs to the thread that made it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, get_args

import torch

from elastic_ps import env
from elastic_ps.core.ledger import Range
from elastic_ps.core.partition import Bucket
from elastic_ps.core.settings import Settings
from elastic_ps.errors import ElasticPSError, RefusalCode, Refused, UsageError
from elastic_ps.job import TrainingJobSpec
from elastic_ps.telemetry import History, Trace
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection
from elastic_ps.worker.batches import Batches
from elastic_ps.worker.client import Client, Ending, Granted, Membership, Step, expelled
from elastic_ps.worker.exchange import Exchange
from elastic_ps.worker.heart import Heart
from elastic_ps.worker.loader import ElasticLoader
from elastic_ps.worker.model import Described, Flat
from elastic_ps.worker.optimizer import ElasticOptimizer, Interval
from elastic_ps.worker.phases import Phases

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=torch.optim.lr_scheduler.LRScheduler)


class Drained(SystemExit):
    """This worker was asked to leave and has done so; the process ends with `env.EXIT_LEFT`."""

    def __init__(self) -> None:
        super().__init__(env.EXIT_LEFT)


class Session:
    """One worker's stay in a job.

    Args:
        job, spec: the job's name and how it is to be trained.
        worker: this worker's index.
        connections: one for each shard, in order. The session closes them.
        trace, history: where this process writes about itself.
        on_hung: called, on another thread, with the reason, if this worker is declared hung.
        instance: names this process for all time; a random text if it is not given.
    """

    def __init__(
        self,
        job: str,
        spec: TrainingJobSpec,
        worker: int,
        connections: Sequence[Connection],
        *,
        trace: Trace | None = None,
        history: History | None = None,
        on_hung: Callable[[str], None] | None = None,
        instance: str = "",
    ) -> None:
        self.spec = spec
        self.worker = worker
        self._client = Client(job, worker, connections, instance=instance)
        self._trace = trace or Trace(None, "")
        self._history = history or History(None, "")
        self._phases = Phases(self._trace)
        self._owner = os.getpid()
        self._exchange: Exchange | None = None
        self._optimizer: ElasticOptimizer | None = None
        self._wrapped: torch.optim.Optimizer
        self._on_hung = on_hung
        self._heart: Heart | None = None
        self._batches = Batches()
        self._stopping = False
        self._ended_early: ElasticLoader | None = None
        self._steps = 0
        self._settings = Settings(groups=())
        self._adopted = (self._settings, False)
        self._dropped = False  # the last step was not made; the script does not know
        self._keeps_schedule = False  # a late step does not end an epoch: the script's own schedule is right
        self._behind: int | None = None  # since that step: are schedulers stepped after every step?
        self._generation = 0
        self._computing = False
        self._chief = False
        self._draining = False
        self._closed = False

    # --- what a script uses

    @property
    def version(self) -> int:
        """The version of the model that this worker has: how many optimizer steps were taken."""
        return self._exchange.version if self._exchange else 0

    @property
    def started(self) -> bool:
        """Whether this worker is a member of the job."""
        return self._heart is not None

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one to evaluate and save, when the loader has come to its end.

        True on exactly one worker, and only after all records are in the model. Blocks until they are when
        the loader ended before, because the script had batches to make a last step with.
        """
        loader, self._ended_early = self._ended_early, None
        if loader is not None and not self._closed and not self._batches:
            loader._await_end()
        return self._chief

    def optimizer(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, overlap: bool = True
    ) -> ElasticOptimizer:
        """Join the job with this model; returns the optimizer to use. Blocks.

        The model's values become those of the job. The first worker of a job brings them.

        Args:
            optimizer: a fresh one, of a class of torch.optim on `core.settings.ALLOWED`.
            model: on the device where it shall be trained.
            overlap: send gradients while backward runs. False sends them in `step`, for scripts that
                change gradients in between (clip_grad_norm_, GradScaler) or run backward several times.

        Raises:
            InvalidModel, ModelMismatch: the model or optimizer cannot be trained in this job.
            UsageError: called twice.
            ConnectionLost: no parameter server answers.
        """
        if self._optimizer is not None:
            raise UsageError("session.optimizer was called before; a job trains one model and optimizer")
        described, self._wrapped = Described(model, optimizer), optimizer
        member = self._client.join(described.specs, described.optimizer, Described.settings(optimizer))
        self._settings = member.settings
        flat = Flat(member.layout, described.tensors)
        exchange = Exchange(
            self._client, flat, self.spec.consistency, trace=self._trace, history=self._history
        )
        self._exchange = exchange
        self._heart = Heart(self._client, member.lease / 3, self._on_hung)
        member = self._enter(member, described, flat)
        self._signature = (described.specs, described.optimizer)
        self._optimizer = ElasticOptimizer(optimizer, flat, self, overlap=overlap)
        if not member.initialise:
            self._optimizer.adopt(member.settings)
        self._phases.watch(model)
        self._history.record("join", incarnation=self._client.incarnation, version=member.version)
        return self._optimizer

    def _enter(self, member: Membership, described: Described, flat: Flat) -> Membership:
        """Give the job this model's values, or get the job's. Blocks.

        If the parameter server is lost meanwhile, this worker joins again: as at first, as long as the model
        has its own values.
        """
        assert self._exchange is not None
        own = True
        while True:
            try:
                if member.initialise:
                    for bucket in member.layout.buckets:
                        self._client.initialise(bucket.index, bucket.shard, flat.value_bytes(bucket))
                    self._client.initialised()
                else:
                    own = False
                    self._exchange.fetch(member.version, contributor=False)
                return member
            except Refused as refusal:
                if not expelled(refusal):
                    raise
                logger.warning("joining again: %s", refusal)
            self._exchange.reset()
            settings = Described.settings(self._wrapped)
            member = self._client.join(described.specs, described.optimizer, settings, again=not own)

    def loader(
        self, source: Any, batch_size: int | None = None, *, epochs: int = 1, **options: Any
    ) -> ElasticLoader:
        """An iterable over this worker's share of the records.

        Args:
            source: a map-style data set, or a `torch.utils.data.DataLoader` over one, whose batch size and
                other options are then used (not its sampler: the order is the job's `data.shuffle`).
            batch_size: records in a batch of one worker.
            epochs: how often each record is trained, by all workers together.
            options: as of DataLoader: num_workers, collate_fn, pin_memory, ...

        Raises:
            InvalidModel: a data set without length.
            UsageError: arguments that do not fit.
        """
        return ElasticLoader(self, source, batch_size=batch_size, epochs=epochs, options=options)

    def scheduler(self, scheduler: S, *, interval: Interval | None = None) -> S:
        """Keep a learning-rate scheduler's state on the parameter server; returns it.

        A worker that joins later, or after a resume, then goes on where the schedule stands. Without this
        call a scheduler works too, but a newcomer's starts from the beginning, which matters once it is the
        longest-serving worker, whose learning rate is the one that counts.

        Args:
            interval: how often the script steps it: after every `step` or every `epoch`. Who joins, or is
                late (`consistency.backupWorkers`), then knows where the schedule stands. Without it that is
                found out from what is seen of the script, which may be a step off near an epoch's first step.
        """
        if self._optimizer is None or self._exchange is None:
            raise UsageError("call session.optimizer(...) before session.scheduler(...)")
        if interval not in (None, *get_args(Interval)):
            raise UsageError(f"interval is {interval!r}; expected 'step' or 'epoch'")
        self._optimizer.add_scheduler(scheduler, interval)
        if self._exchange.settings:
            settings = Settings.from_json(self._exchange.settings)
            self._optimizer.adopt(settings, catch_up=settings.stepped)
            self._watch_script(self._exchange.version, known=settings.stepped)
        return scheduler

    def _watch_script(self, version: int, *, known: bool) -> None:
        """Settings of the first step do not tell whether schedulers are stepped after every step."""
        assert self._optimizer is not None
        unknown = version == 1 and not known and self._optimizer.guesses
        self._behind = self._steps if unknown else None

    def report(self, **metrics: Any) -> None:
        """Tell the job about values, as in `loss=loss` or `test_accuracy=0.97`: one number each.

        Between a batch and its `optimizer.step()` they go with the step, and the loss becomes part of the
        loss curve (weighted by samples); at other times they are sent at once.
        """
        if self._batches:
            self._batches.report(metrics)
        else:
            self._client.report({key: float(value) for key, value in metrics.items()})

    def close(self) -> None:
        """Leave the job and free everything. What this worker holds goes to others. Idempotent."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if self._heart is not None:
            self._heart.close()
            try:
                if self._exchange is not None and self._exchange.under_way is None:
                    self._client.leave()
                else:
                    self._client.gone()
            except ElasticPSError as error:
                logger.info("could not say goodbye: %s", error)
        self._client.close()
        if self._exchange is not None:
            self._exchange.close()
        self._history.record("left", version=self.version)
        self._trace.close()
        self._history.close()

    def drain(self) -> None:
        """Leave at the next opportunity: after the step under way. May be called from a signal handler."""
        self._draining = True

    # --- for the optimizer

    def _begin_step(self) -> None:
        assert self._exchange is not None
        if not self._batches and self._batches.given_back:
            raise UsageError(
                "this step's batch was given back when the loop over the loader was left before backward(). "
                "Compute on a batch before leaving the loop; instead of next(iter(loader)), keep the iterator"
            )
        if not self._batches:
            raise UsageError(
                "this step's batch did not come from session.loader(...), so its records cannot be counted. "
                "Iterate over session.loader(dataset or DataLoader, ...)"
            )
        if self._dropped and self._optimizer is not None:
            self._dropped = False
            self._adopt(*self._adopted)
        if self._behind is not None and self._steps > self._behind and self._optimizer is not None:
            self._behind = None
            if self._optimizer.stepped:
                self._optimizer.step_schedulers(otherwise=True)
        self._phases.backward()
        base = self._exchange.version
        step = Step(
            stay=self._client.stay, number=self._steps, base=base, version=base, samples=self._batches.samples
        )
        self._exchange.begin(step)

    def _exchange_ready(self, bucket: Bucket, present: Sequence[bool]) -> None:
        assert self._exchange is not None
        self._phases.gradient()
        self._exchange.ready(bucket, present)

    def _before_step(self) -> None:
        self._phases.backward_ended()

    def _finish_step(self, settings: str) -> None:
        assert self._exchange is not None
        assert self._optimizer is not None
        step = self._exchange.under_way
        assert step is not None
        if step.samples != self._batches.samples:
            raise UsageError("a batch was loaded between backward() and optimizer.step(); call step() first")
        batches = self._batches
        ending = Ending(ranges=batches.ranges, settings=settings, metrics=batches.metrics())
        try:
            with self._phases.waiting(step.number):
                self._exchange.finish(ending)
        except Refused as refusal:
            stepped = self._optimizer.stepped
            if refusal.code is RefusalCode.LATE:
                self._drop_step()
                self._exchange.reset()
                if self._exchange.settings:
                    self._settings = Settings.from_json(self._exchange.settings)
                self._keeps_schedule = self._optimizer.per_epoch
            elif expelled(refusal):
                self._join_again(refusal)
            else:
                raise
            if not self._keeps_schedule:
                self._dropped = True
                self._adopt(self._settings, stepped)
        else:
            self._steps += 1
            self._batches.forget()
            if self._exchange.settings and self._exchange.settings != settings:
                self._behind = None
                self._optimizer.adopt(Settings.from_json(self._exchange.settings))
        if self._stopping:
            self._stop_computing()

    def _adopt(self, settings: Settings, stepped: bool) -> None:
        """Take over the settings of the last step, one scheduler step later if `stepped`.

        After a step that was dropped the script goes on as if it had been made, and may step its schedulers;
        so they are set once more before the next step.
        """
        assert self._optimizer is not None
        self._optimizer.adopt(settings, catch_up=stepped)
        self._adopted, self._behind = (settings, stepped), None

    def _drop_step(self) -> None:
        """The step under way and all records in hand go to others."""
        self._generation += 1
        self._steps += 1
        self._batches.forget()

    def _join_again(self, reason: Refused) -> None:
        """The parameter server does not know this worker (any more): go on as a new member.

        The step under way and all records in hand are dropped; whoever is handed them computes them again.
        """
        assert self._optimizer is not None
        assert self._exchange is not None
        logger.warning("joining again: %s", reason)
        while True:
            self._drop_step()
            member = self._client.join(*self._signature, self._optimizer.settings(), again=True)
            self._exchange.reset()
            try:
                self._exchange.fetch(member.version, contributor=False)
            except Refused as refusal:
                if not expelled(refusal):
                    raise
                continue
            break
        self._settings = member.settings
        self._history.record(
            "join", incarnation=self._client.incarnation, version=member.version, term=self._client.term
        )
        logger.info("joined again at version %d", member.version)

    def _optimizer_state(self) -> Iterator[tuple[pb.OptimizerStateReply, bytes]]:
        for shard in range(self._client.shards):
            for reply, body in self._client.optimizer_state(shard):
                if not reply.done:
                    yield reply, body

    # --- for the loader

    def _take(self, records: int, epochs: int, batch: int, *, wait: bool) -> tuple[Range, ...]:
        """Get records; with `wait`, () means that all of them are in the model."""
        if self._exchange is None or self._optimizer is None:
            raise UsageError("call session.optimizer(...) before iterating over session.loader(...)")
        while True:
            self._between_batches()
            try:
                abandoned = self._exchange.under_way is not None
                granted = self._client.take(
                    records=records, epochs=epochs, batch=batch, wait=wait, abandoned=abandoned
                )
                if granted.pending:
                    continue
                self._accept(granted, wait=wait)
                return granted.ranges
            except Refused as refusal:
                if not expelled(refusal):
                    raise
                stepped = self._optimizer.stepped
                self._join_again(refusal)
                self._adopt(self._settings, stepped)
                if not wait:
                    return ()

    def _accept(self, granted: Granted, *, wait: bool) -> None:
        """Get the version to compute on."""
        assert self._exchange is not None
        assert self._optimizer is not None
        if granted.ranges and wait:
            self._computing, self._stopping = True, False
            if granted.version != self._exchange.version:
                self._exchange.fetch(granted.version, contributor=True)
                if self._keeps_schedule:
                    self._keeps_schedule = False
                    return
                settings = Settings.from_json(self._exchange.settings)
                # Nothing comes before the first step; there, what this worker's own script does must do.
                known = settings.stepped or (granted.version <= 2 and self._optimizer.stepped)
                self._adopt(settings, known)
                self._watch_script(granted.version, known=known)
        elif granted.finished and wait:
            self._computing = False
            self._chief = granted.chief
            if granted.version != self._exchange.version:
                self._exchange.fetch(granted.version, contributor=False)

    @property
    def generation(self) -> int:
        """Changes when this worker had to join again, so that all records in hand were dropped."""
        return self._generation

    def _begin_batch(self, ranges: list[Range]) -> None:
        self._batches.add(ranges)
        self._phases.forward()

    def _between_batches(self) -> None:
        """Where a worker that was asked to leave does so."""
        if self._draining and (self._exchange is None or self._exchange.under_way is None):
            self.close()
            raise Drained

    def _stop_computing(self) -> None:
        """Give back what was not computed on, after the step of what was; no round waits for this worker."""
        self._stopping = bool(self._batches)
        if self._computing and not self._closed and not self._stopping:
            self._computing = False
            try:
                self._client.release(
                    abandoned=self._exchange is not None and self._exchange.under_way is not None
                )
            except Refused as refusal:
                if not expelled(refusal):
                    raise
