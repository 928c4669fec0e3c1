"""What a training script talks to: who am I, my optimizer, my records.

A session belongs to the thread that made it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from elastic_ps.core.settings import CLAMP
from elastic_ps.errors import UsageError
from elastic_ps.job import TrainingJobSpec
from elastic_ps.telemetry import History, Trace
from elastic_ps.transport.base import Connection
from elastic_ps.worker.client import Client
from elastic_ps.worker.engine import Engine
from elastic_ps.worker.loader import ElasticLoader
from elastic_ps.worker.member import Member
from elastic_ps.worker.model import Described
from elastic_ps.worker.optimizer import ElasticOptimizer
from elastic_ps.worker.schedule import Interval, check_interval
from elastic_ps.worker.seed import seed_everything

S = TypeVar("S", bound=torch.optim.lr_scheduler.LRScheduler)


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
        history = history or History(None, "")
        client = Client(job, worker, connections, instance=instance)
        self._member = Member(client, history=history, on_hung=on_hung)
        self._engine = Engine(spec, client, self._member, trace=trace or Trace(None, ""), history=history)
        self._owner = os.getpid()
        self._optimizer: ElasticOptimizer | None = None
        self._loaders: list[ElasticLoader] = []

    @property
    def version(self) -> int:
        """The version of the model that this worker has: how many optimizer steps were taken."""
        return self._engine.version

    @property
    def generation(self) -> int:
        """Changes when this worker had to join again, so that all records in hand were dropped."""
        return self._engine.generation

    @property
    def started(self) -> bool:
        """Whether this worker is a member of the job."""
        return self._member.joined

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one to evaluate and save, when the loader has come to its end.

        True on exactly one worker, and only after all records are in the model. Blocks until they are when
        the loader ended before, because the script had batches to make a last step with.

        In the body of `for epoch in loader.epochs()` it is true on exactly one of the workers that come to
        the end of that epoch; the others may still train records of it, except in the last epoch.
        """
        for loader in self._loaders:
            if (chief := loader.is_chief()) is not None:
                return chief
            loader.await_end()
        return self._engine.chief

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        overlap: bool = True,
        check_gradients: bool = False,
        averaged: Sequence[str] = (),
        broadcast: Sequence[str] = (),
        own: Sequence[str] = (),
        clamp: tuple[float, float] | None = None,
    ) -> ElasticOptimizer:
        """Join the job with this model; returns the optimizer to use. Blocks.

        The model's values become those of the job. The first worker of a job brings them.

        Args:
            optimizer: a fresh one, of a class of torch.optim on `core.settings.ALLOWED`.
            model: on the device where it shall be trained.
            overlap: send gradients while backward runs. False sends them in `step`, for scripts that
                change gradients in between (clip_grad_norm_, GradScaler) or run backward several times.
            check_gradients: for debugging, compare each gradient in `step` with what was sent. With `overlap`
                it finds changes through `.data`, which cannot be seen otherwise. Costs a pass over them.
            averaged: names of modules, parameters or buffers of the model that no optimizer trains and the
                script changes itself, such as a teacher that is an average of the model. They are sent with
                each step, and the job's value is the mean over the workers.
            broadcast: likewise of what cannot be averaged, such as a queue and its position: the job's value
                is that of the worker with the lowest index among those whose steps the version is made of.
            clamp: the lowest and the highest value of a trained parameter: the parameter server limits all of
                them after each step, as a Wasserstein critic's are. A parameter group may have its own, as in
                {"params": ..., "clamp": (-0.01, 0.01)}, or None. Other constraints of a group are
                "max_norm" and "keep_zeros"; see docs/scripts.md.
            own: names of those that belong to this worker: the job neither gets them nor overwrites them.

        Raises:
            InvalidModel, ModelMismatch: the model or optimizer cannot be trained in this job.
            UsageError: called twice.
            ConnectionLost: no parameter server answers.
        """
        if self._optimizer is not None:
            raise UsageError("session.optimizer was called before; a job trains one model and optimizer")
        if clamp is not None:
            for group in optimizer.param_groups:
                group.setdefault(CLAMP, clamp)
        described = Described(model, optimizer, averaged=averaged, broadcast=broadcast, own=own)
        flat = self._engine.enter(described, model, optimizer)
        self._optimizer = ElasticOptimizer(
            optimizer,
            flat,
            self._engine,
            overlap=overlap,
            check=check_gradients,
            own=described.own,
        )
        return self._optimizer

    def loader(
        self, source: Any, batch_size: int | None = None, *, epochs: int = 1, **options: Any
    ) -> ElasticLoader:
        """An iterable over this worker's share of the records.

        Args:
            source: a map-style data set, or a `torch.utils.data.DataLoader` over one, whose batch size,
                `shuffle`, `drop_last` and other options are then used. A random order is that of the job's
                `data.seed`. Without a DataLoader the job's `data.shuffle` says whether the order is random.
            batch_size: records in a batch of one worker.
            epochs: how often each record is trained, by all workers together.
            options: as of DataLoader: num_workers, collate_fn, pin_memory, drop_last, ...

        Raises:
            InvalidModel: a data set without length.
            UsageError: arguments that do not fit.
        """
        loader = ElasticLoader(self._engine, source, batch_size=batch_size, epochs=epochs, options=options)
        self._loaders.append(loader)
        return loader

    def scheduler(self, scheduler: S, *, interval: Interval | None = None) -> S:
        """Step a learning-rate scheduler by the job's progress; returns it.

        The script does not step it. So all workers have the same learning rate at each version, whenever they
        joined, also after a resume.

        Args:
            interval: what it makes a step for: each "step" (a version of the model), each "epoch" that is
                complete, or each "sample", a record whose gradient is in the model. How many versions an
                epoch has depends on the number of workers; samples do not, so with "sample" a schedule of
                `len(dataset) * epochs` steps ends with the job. Left out for ReduceLROnPlateau, which the
                script steps with its value; its state goes over to workers that join.

        Raises:
            UsageError: another interval, or there is no optimizer yet.
        """
        if self._optimizer is None:
            raise UsageError("call session.optimizer(...) before session.scheduler(...)")
        check_interval(scheduler, interval)
        self._engine.add_scheduler(scheduler, interval)
        return scheduler

    @property
    def stopped(self) -> str:
        """Why a script has ended the training with `stop`, as far as this worker knows; "" if none has."""
        return self._engine.stopped

    def stop(self, reason: str) -> None:
        """End the training early, on all workers, as a success: for example when a loss no longer improves.

        Steps that other workers have begun are still made. Then every loader comes to its end, the last
        version is on disk, every worker has its values, and `is_chief` is true on exactly one worker. Leave
        the loop with `break` after this call, or let it end. Blocks until the parameter server has answered.

        Args:
            reason: shown as the job's end; a sentence such as "the validation loss has not improved".

        Raises:
            UsageError: no reason is given, or `session.optimizer` was not called before.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"session.stop needs a reason in words, and got {reason!r}")
        self._engine.stop(reason.strip())

    def seed(self, base: int = 0) -> int:
        """Seed torch, `random` and numpy for this worker at its present version; returns the seed.

        Workers that all call `torch.manual_seed(0)` draw the same dropout masks and augmentations, of
        different records. After this call they draw different ones. Called once before the loop, it makes
        workers differ; called for each batch, a batch's random numbers follow from `base`, the worker's index
        and the version, so that they are the same when another process computes the step again.
        """
        return seed_everything(base, worker=self.worker, version=self.version)

    def report(self, **metrics: Any) -> None:
        """Tell the job about values, as in `loss=loss` or `test_accuracy=0.97`: one number each.

        Between a batch and its `optimizer.step()` they go with the step, and the loss becomes part of the
        loss curve (weighted by samples); at other times they are sent at once.
        """
        self._engine.report(metrics)

    def close(self) -> None:
        """Leave the job and free everything. What this worker holds goes to others. Idempotent."""
        if os.getpid() == self._owner:
            self._engine.close()

    def drain(self) -> None:
        """Leave at the next opportunity: after the step under way. May be called from a signal handler."""
        self._member.drain()
