"""The session of a training script: this worker's place in the job, its optimizer, its records.

Only the thread that made a session may use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.codec.optimizers import Optimizers
from elastic_ps.codec.several import parts_of, together
from elastic_ps.codec.state import ImportedState
from elastic_ps.core.metrics import Reduction
from elastic_ps.core.settings import CLAMP, MAX_GRAD_NORM
from elastic_ps.data.batches import checked_weight
from elastic_ps.data.seed import seed_everything
from elastic_ps.embedding.ahead import Prefetch
from elastic_ps.embedding.tables import Tables
from elastic_ps.embedding.together import tables_in_job
from elastic_ps.errors import UsageError
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.tensors.client import Tensors
from elastic_ps.transport.base import Connection
from elastic_ps.worker.loader import TOO_EARLY, ElasticLoader
from elastic_ps.worker.model.checks import Averages, check_model, check_wrapper
from elastic_ps.worker.model.description import ModelDescription
from elastic_ps.worker.model.schedule import Interval, check_interval
from elastic_ps.worker.optimizer import ElasticOptimizer
from elastic_ps.worker.runtime.local_steps import outer_optimizer
from elastic_ps.worker.runtime.runtime import Runtime
from elastic_ps.worker.runtime.state import ScriptState
from elastic_ps.worker.wire.client import Client
from elastic_ps.worker.wire.dialogue import USUAL, WorkerLimits
from elastic_ps.worker.wire.local_world import LocalWorld

S = TypeVar("S", bound=torch.optim.lr_scheduler.LRScheduler)


class Session:
    """A worker's part in a job. `elastic_ps.connect` makes it.

    Attributes:
        worker: this worker's index, counted from 0.
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
        hostname: str = "",
        on_joined: Callable[[], None] = lambda: None,
        world: LocalWorld | None = None,
        host: str = "127.0.0.1",
        limits: WorkerLimits = USUAL,
    ) -> None:
        """Serve `elastic_ps.connect` alone.

        Args:
            job, spec: the job's name and spec.
            worker: this worker's index.
            connections: one for each shard, in order. The session closes them.
            trace, history: where this process records what it does.
            on_hung: called with the reason, on another thread, if this worker is declared hung.
            instance: a name for this process that no other process ever has; random if it is not given.
            hostname: see `Client`.
            on_joined: called when this worker has become a member, or uses tensors of the server.
            world: the processes of this worker, if it has several. The session closes it.
            host: this host's address, as other workers reach it.
            limits: how long it waits.
        """
        self.processes = world = world or LocalWorld()
        self.spec, self.worker = spec, worker
        client = Client(
            job,
            worker,
            connections,
            instance=instance,
            pid=None if world.alone else os.getppid(),
            hostname=hostname,
            limits=limits,
            trace=trace,
            history=history,
        )
        self._on_joined = on_joined
        self._runtime = Runtime(spec, client, on_hung=on_hung, on_joined=on_joined, world=world, host=host)
        self._averages = Averages(lambda: self._runtime.records.over)
        self._runtime.at_close.append(self._averages.close)
        self._owner, self._client = os.getpid(), client
        self._tensors: Tensors | None = None
        self._optimizer: ElasticOptimizer | None = None
        self._loaders: list[ElasticLoader] = []
        self.at_finish: list[Callable[[], object]] = []  # called where the script has ended without an error

    @property
    def version(self) -> int:
        """The version of this worker's model. Each step of the job and each `assign` makes the next one."""
        return self._runtime.version

    @property
    def samples(self) -> int:
        """How many records of the job were trained or skipped until the current version."""
        return self._runtime.in_force.position.samples if self._runtime.entered else 0

    @property
    def world_size(self) -> int:
        """The number of workers whose steps made this worker's version. It is the same for all at a version.

        Before the first one it is the job's `worker.replicas`. A worker with several processes counts once.
        """
        return self._runtime.made.workers or self.spec.worker.replicas

    @property
    def global_batch_size(self) -> int:
        """The number of records, of all workers, that made the version that this worker has.

        The same for all workers at a version, as `world_size`. Before the first version it is what the job
        file says: `consistency.globalBatchSize`, or the loader's batch size for each worker.

        Raises:
            UsageError: before the first version, when `session.loader` has not been called.
        """
        if planned := self._runtime.made.samples or self.spec.consistency.global_batch_size:
            return planned
        if not self._loaders:
            raise UsageError(
                "session.global_batch_size is not known before the first version: call session.loader(...) "
                "first, which says how large a worker's batch is"
            )
        return self.world_size * self._loaders[-1].batch_size

    @property
    def generation(self) -> int:
        """A number that changes when this worker joins again, or pauses, and so drops the records in hand."""
        return self._runtime.drops - self._runtime.untold

    @property
    def started(self) -> bool:
        """Whether this process, not its parent, is or has been a member of the job."""
        return os.getpid() == self._owner and self._runtime.working.joined

    @property
    def is_chief(self) -> bool:
        """Whether this worker evaluates and saves. Read it after the loop; before, it raises UsageError.

        It is true on exactly one worker, and only after all records are in the model. Blocks until they are,
        if the loop ended earlier so that the script could make a last step with accumulated gradients.

        In the body of `for epoch in loader.epochs()` it is true on exactly one of the workers that come to
        the end of that epoch. Other workers may still train records of the epoch, except in the last one.

        In a worker with several processes, all must read it, and it can be true on process 0 only.
        """
        for loader in self._loaders:
            if (chief := loader.is_chief()) is not None:
                return chief and self.processes.leads
        records = self._runtime.records
        if self.open and records.loader is None and not (records.over or self.stopped):
            raise UsageError(TOO_EARLY)
        return records.chief and self.processes.leads

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        model: torch.nn.Module,
        *,
        overlap: bool = True,
        check_gradients: bool = False,
        averaged: Sequence[str] = (),
        broadcast: Sequence[str] = (),
        own: Sequence[str] = (),
        summed: Sequence[str] = (),
        clamp: tuple[float, float] | None = None,
        max_grad_norm: float | None = None,
        state: Mapping[str, Any] | None = None,
        base: Literal["external"] | None = None,
    ) -> ElasticOptimizer:
        """Join the job with this model; returns the optimizer to use. Blocks.

        The first worker's values become the job's model. The models of other workers get the job's values.

        Args:
            optimizer: a new one, of a class of torch.optim that docs/guides/scripts.md lists, or of one that
                the job names in parameterServer.optimizers. In mode `local` any torch optimizer: it runs on
                this worker, which keeps its state. Or several, by names, each with parameters of its own. The
                result is then a mapping of them, as in `optimizers["critic"].step()`, and its own `step`
                steps all of them. Each batch is for one step, which sends the gradients.
            model: on the device where it is to be trained.
            overlap: whether gradients may be sent while backward runs (`parameterServer.overlap`). With
                False they are sent in `step`, for scripts that change gradients in between (GradScaler; to
                clip, see max_grad_norm) or run backward several times.
            check_gradients: for debugging: `step` compares each gradient with what was sent. So it also finds
                changes through `.data`, which are not noticed otherwise. Costs a pass over all gradients.
                In mode `local` no gradient is sent, and this and `overlap` have no effect.
            averaged: names of modules, parameters or buffers of the model that no optimizer trains and the
                script changes itself, such as a teacher that is an average of the model. Workers send them
                with each step, and the job's value is their mean over the workers.
            broadcast: names of tensors of the same kind that cannot be averaged, such as a queue and its
                position. The job's value is that of the first worker, by index, with a step in the version.
            summed: names of tensors of the same kind of which each worker changes a part, such as the rows of
                its batch in a memory bank. The job adds the changes of all workers to its value.
            own: names of modules, parameters or buffers that are this worker's: never sent or overwritten.
            clamp: the lowest and the highest value of trained parameters, for example of a Wasserstein
                critic. They are clamped after each step. A parameter group may have limits of
                its own, as in {"params": ..., "clamp": (-0.01, 0.01)}, or None for no limits. A group may
                also have the options "max_norm" and "keep_zeros"; see docs/guides/scripts.md.
            max_grad_norm: the parameter server scales the gradient of each version, which is the mean over
                all records, down to this 2-norm, as `clip_grad_norm_` would with one process. Gradients may
                be sent while backward runs. It needs parameter servers without standbys.
            state: the `state_dict()` of such an optimizer, to begin with its state and hyperparameters,
                as for fine-tuning; for several optimizers, a mapping by their names. The limits above
                stay. It is ignored for a worker that joins later. The state moves to the parameter server.
            base: with "external", each worker loads by itself what no optimizer trains; see
                `adapters.base.Base`. It is never sent, is in no checkpoint, and must be the same for all.

        Raises:
            InvalidModel, ModelMismatch: the model or optimizer cannot be trained in this job.
            UsageError: called twice.
            ConnectionLost: no parameter server answers.
        """
        if self._optimizer is not None:
            raise UsageError(
                "session.optimizer was called twice, but a job trains one model. Put several networks, such "
                "as those of a GAN, into one torch.nn.ModuleDict, and pass their optimizers together, as in "
                "session.optimizer({'generator': ..., 'critic': ...}, both). See \"Two networks in turn\" in "
                "docs/cookbook.md. To train anew in a notebook without a job, call connect() first"
            )
        check_model(model)
        if (tables := self._tables_of(model)) is not None:
            self._runtime.prefetch_rows = tables.prefetch
        if isinstance(optimizer, Mapping):
            optimizer = together(optimizer, model)
        check_wrapper(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "session.optimizer(optimizer, model) takes a torch optimizer, or a dict of them, and "
                f"then the model; the first argument is a {type(optimizer).__name__}"
            )
        if check_gradients and not self.processes.alone:
            raise UsageError(
                "check_gradients does not work with worker.processes above 1, because only the sum over the "
                "processes is sent. Use it with processes: 1"
            )
        for group in optimizer.param_groups:
            if clamp is not None:
                group.setdefault(CLAMP, clamp)
            if max_grad_norm is not None:
                group[MAX_GRAD_NORM] = max_grad_norm
        runs_there, imported = optimizer, None
        if self.spec.consistency.mode == "local":
            for part in parts_of(optimizer):
                check_wrapper(part)
            if state is not None:
                raise UsageError(
                    "state is for an optimizer that runs on the parameter server. In mode local it runs on "
                    "the worker: call optimizer.load_state_dict(state) before session.optimizer(...)"
                )
            runs_there = outer_optimizer(
                optimizer, self.spec.consistency.outer_rule, workers=self.spec.worker.replicas
            )
        else:
            imported = None if state is None else ImportedState(optimizer, state)
        if summed and self.spec.consistency.mode == "local" and self.spec.consistency.outer_rule.elastic:
            raise UsageError(
                f"summed={[*summed]} does not work with consistency.outer easgd, where each worker keeps its "
                "own values. Use another outer rule, such as average; or name the tensors in averaged "
                "(the job has their values of the last exchange) or own (they are never exchanged)"
            )
        if any(group.get(MAX_GRAD_NORM) is not None for group in optimizer.param_groups):
            self._require_whole_gradient()
        described = ModelDescription(
            model,
            runs_there,
            averaged=averaged,
            broadcast=broadcast,
            own=own,
            summed=summed,
            optimizers=Optimizers(self.spec.parameter_server.optimizers),
            tables=not (self.spec.all_reduce or self.spec.consistency.mode == "local"),
            base=base,
        )
        flat = self._runtime.enter(described, model, runs_there, imported, overlap=overlap)
        self._runtime.phases.watch(model)
        self._averages.begin(model)
        self._optimizer = ElasticOptimizer(
            optimizer, flat, self._runtime, check=check_gradients, own=described.own, tables=tables
        )
        return self._optimizer

    def _tables_of(self, model: torch.nn.Module) -> Tables | None:
        """The tables of the model that grow. Raises InvalidModel: the job cannot train them."""
        own = self._runtime
        return tables_in_job(model, self.spec, self._client, own.rows_refused, self.processes, own.parts)

    def _require_whole_gradient(self) -> None:
        """Raise UsageError where the gradient that is to be clipped is not known as a whole."""
        if self.spec.consistency.mode == "local":
            raise UsageError(
                "max_grad_norm is for gradients that are sent, but in mode local the worker makes its steps: "
                "call torch.nn.utils.clip_grad_norm_ before optimizer.step()"
            )
        if self.spec.parameter_server.durability == "standby":
            raise UsageError(
                "max_grad_norm needs the norm over all parameter servers, which parameterServer.durability: "
                "standby does not compute. Set parameterServer.durability: checkpoint. Or clip each worker's "
                "own gradient, with session.optimizer(..., overlap=False) and torch.nn.utils.clip_grad_norm_"
            )

    def assign(self, model: torch.nn.Module) -> None:
        """Make the values that the script has given the model the job's next version. Blocks.

        Use it for changes by the script itself: to go back to the best model, reset a layer, or prune.
        Change the model in place, then call this, between `optimizer.step()` and the next `backward()`. All
        parameters and buffers become the version's; the optimizer's state stays, and no scheduler steps.
        Steps that other workers compute meanwhile are dropped; their records are trained on the new values.

        Any worker may call it, or all at the same version. If several workers assign values at once, the
        first values count, and the other workers get those.

        Args:
            model: the one that was given to `session.optimizer`.

        Raises:
            UsageError: not between two steps; another model; a frozen parameter was changed; values that are
                not finite; consistency is not `sync`, or with backupWorkers, globalBatchSize,
                maxStalenessP99 or deterministic.
        """
        if self._optimizer is None or model is not self._runtime.model:
            raise UsageError("session.assign needs the model that session.optimizer(...) was given")
        self._optimizer.assign()

    def pause(self) -> None:
        """Let the other workers train on without this one, until it loads its next batch. Blocks for a call.

        Use it before a long task within an epoch, such as an evaluation: otherwise the others wait for
        this worker's next step. Call it after `optimizer.step()`, or after `optimizer.skip()` if no step is
        made with the batch. The other records that this worker holds go to others, and its next batch is of
        the newest version. The model keeps its values until then.

        Raises:
            UsageError: in the middle of a step.
        """
        self._runtime.records.pause()

    @property
    def server(self) -> Tensors:
        """Tensors on the parameter server that scripts push to and pull from as they like; see `Tensors`.

        They need neither `session.optimizer` nor `session.loader`. A job whose scripts use no loader succeeds
        when every worker has come to the end of its script.

        Raises:
            UsageError: this worker has several processes, or this is a child of the worker.
        """
        if not self.processes.alone:
            raise UsageError(
                "session.server is for workers with one process. Set worker.processes: 1, and more replicas"
            )
        if self._tensors is None:
            client, size = self._client, self.spec.parameter_server.slice_bytes
            self._tensors = Tensors(client, self._owner, bucket_bytes=size, renew=client.limits.renew)
            self._on_joined()
        return self._tensors

    def loader(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        records: int | None = None,
        prefetch: Callable[[Any], Mapping[str, Any]] | None = None,
        prefetch_staleness: int = 0,
        **options: Any,
    ) -> ElasticLoader:
        """An iterable over this worker's share of the records.

        Args:
            source: a map-style data set, or a `torch.utils.data.DataLoader` over one, whose batch size,
                `shuffle`, `drop_last` and other options are then used. The job's `data.seed` fixes a random
                order. Without a DataLoader the job's `data.shuffle` says whether the order is random.
                Or an `IterableDataset`, or a DataLoader over one: its records are its items in their order,
                whatever `data.shuffle` says. Each iteration, in each worker, must give the same
                items. Its method `iterate_from(number)` is used, if it has one; see docs/guides/data.md.
            batch_size: the number of records in a batch of one worker.
            epochs: how often each record is trained, by all workers together.
            records: how many of a stream's items, from the first, make an epoch; by default its length.
            prefetch: returns the ids that a batch needs of tables that grow, by the tables' names, such as
                `lambda batch: {"user": batch[0]}`. Their rows are fetched during the previous step.
            prefetch_staleness: with 1, in mode async, rows are used as fetched, without the steps made since.
            options: those of DataLoader: num_workers, collate_fn, pin_memory, drop_last, ...

        Raises:
            InvalidModel: the data set has no length, or is empty; or a stream has none, and records is not
                given.
            UsageError: an argument or an option of the DataLoader cannot be used in a job.
        """
        loader = ElasticLoader(
            self._runtime,
            source,
            batch_size=batch_size,
            epochs=epochs,
            records=records,
            prefetch=prefetch
            and Prefetch(prefetch, prefetch_staleness, lambda: self._runtime.spec.consistency.mode),
            options=options,
        )
        self._loaders.append(loader)
        return loader

    @property
    def state(self) -> ScriptState:
        """The job's mapping of names to small plain values, such as a best score.

        All workers read the same values; each use asks the parameter server. The chief writes it
        (see `is_chief`): `session.state["best"] = 0.9`, or several at once with `session.state.update(...)`.
        It is part of the checkpoints that are made from then on. So it is there when another worker becomes
        the chief, and after `--resume`; when the job goes back to a checkpoint, the state goes back with it.

        Values are JSON, at most 64 KiB of text together. Reading and writing block for a call. With
        several processes in a worker, only process 0 may use it.
        """
        return self._runtime.state

    def scheduler(self, scheduler: S, *, interval: Interval | None = None) -> S:
        """Let the session step a learning-rate scheduler by the job's progress; returns the scheduler.

        The script must not step it. So all workers have the same learning rate at each version, whenever they
        joined, also after a resume.

        Args:
            interval: the scheduler takes one step for each "step" (version of the model), each "epoch" that
                is complete, or each "sample" (record that is in the model or was skipped). The number of
                versions in an epoch depends on the number of workers, the number of samples does not. So with
                "sample" a schedule of `len(dataset) * epochs` steps ends with the job. Or a function: given
                that number of samples, it returns how many steps the scheduler should have taken. For
                ReduceLROnPlateau leave interval out: each worker steps it with its value after an epoch.
                One worker's value counts for all, and workers that join receive the scheduler's state.

        Raises:
            UsageError: another interval, `session.optimizer` was not called before, or the scheduler is of
                another optimizer.
        """
        if self._optimizer is None:
            raise UsageError("call session.optimizer(...) before session.scheduler(...)")
        check_interval(scheduler, interval)
        self._optimizer.check_scheduler(scheduler)
        self._runtime.schedule.add(
            scheduler, interval, lambda: self._loaders[-1].ended if self._loaders else None
        )
        self._runtime.check(self._runtime.schedule.current())
        return scheduler

    @property
    def stopped(self) -> str:
        """The reason that a script gave to `stop`, as far as this worker knows; "" if none has called it."""
        return self._runtime.stopped

    def stop(self, reason: str) -> None:
        """End the training early on all workers; the job succeeds. An example: the loss no longer improves.

        Other workers finish the steps that they have begun. Then every loader ends, the last version is
        written to disk, every worker gets its values, and `is_chief` is true on exactly one worker. Leave the
        loop with `break` after this call, or let it end. Blocks until the parameter server has answered.

        Args:
            reason: part of the job's final message, for example "the validation loss has not improved".

        Raises:
            UsageError: no reason is given, or `session.optimizer` was not called before.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"session.stop needs a reason in words, but got {reason!r}")
        self._runtime.stop(reason.strip())

    def seed(self, base: int = 0) -> int:
        """Seed torch, `random` and numpy for this worker at its current version; returns the seed.

        With `torch.manual_seed(0)` all workers draw the same dropout masks. After this call they do not. A
        step draws the same numbers again in another process, since `base`, worker and version make the seed.
        """
        return seed_everything(
            base,
            worker=self.worker,
            version=self.version,
            local=self._runtime.local.on_version if self._runtime.local else 0,
            process=self.processes.rank,
        )

    def report(self, **metrics: Any) -> None:
        """Report values to the job, as in `loss=loss` or `test_accuracy=0.97`: one number each.

        Between a batch and its `optimizer.step()` they are sent with the step. The job's value of a version
        is the mean over the steps that it is made of, weighted by their records, and `loss` becomes part of
        the job's loss curve. At other times values are sent at once, and are not averaged.

        Raises:
            UsageError: a value is not a number.
        """
        self._runtime.report(metrics)

    def weigh(self, weight: float | torch.Tensor) -> None:
        """Say what the gradient of the next backward() weighs, such as the number of tokens in its loss.

        Without this call, the weight of a step is its number of records. If the loss is a mean over tokens,
        pass their number, before each backward() of a step. Then the gradient of a version is sum(weight *
        gradient) / sum(weight) over its steps: the gradient of the mean over all of their tokens, as one
        process computes it. Averaged buffers have the same weights. Schedules and `report` count records.

        If a step is made of several backward() calls, its weight is the sum of theirs, and its gradient is
        what the script accumulates. For the mean over all tokens, divide each sum of losses by their number.

        With several processes in a worker, each passes the weight of its own part of the batch. That may be
        0, as of a part without tokens, if another process has some: the gradient has to be finite, but does
        not count. Divide its loss by `max(1, tokens)`. In mode `local`, the weight of an exchange is the sum
        over its steps. In modes `async` and `bounded`, it counts only among the steps of one version.

        Args:
            weight: a positive number of at most 2**64, or 0 in some of a worker's processes, or a tensor with
                such a number, whose device is waited for.

        Raises:
            UsageError: it is not such a number; no batch is in hand; it is called a second time for one
                backward(), or after backward() has begun to send gradients. Nothing has changed then.
        """
        self._runtime.weigh(checked_weight(weight, processes=self._runtime.slices.processes))

    def metric(self, name: str, value: Any, *, reduce: Reduction = "mean") -> None:
        """Report a value of this step. The job reduces the values of all steps of a version to one.

        The value counts exactly once if the step gets into the model, and otherwise not at all. Of several
        values of one batch the last one counts; those of several batches of a step are reduced in the same
        way. Does not wait for a tensor's device before the step.

        Args:
            value: a number, or a tensor with one element.
            reduce: "mean", weighted by records, "sum" or "max".

        Raises:
            UsageError: the value is not a number; or a sum or a maximum is reported, but not between a
                batch and its `optimizer.step()`.
        """
        self._runtime.report({name: value}, reduce=reduce)

    def finish(self) -> None:
        """At the script's end, call `at_finish` and wait for pushes to `session.server`, unless it leaves."""
        if self.open:
            for call in self.at_finish:
                call()
        if self._tensors is not None and os.getpid() == self._owner:
            self._tensors.finish(lambda: self._runtime.draining)

    def close(self, *, failed: bool = False) -> None:
        """Leave the job and free all resources. This worker's records go to other workers. Idempotent.

        It happens by itself when the process ends. In a notebook, call it before `elastic_ps.connect()` to
        train anew. `failed`: the script has failed, so a step that it has not finished is not a mistake.
        """
        if os.getpid() == self._owner:
            if self._tensors is not None:
                self._tensors.close(self._client.limits.goodbye)
            self._runtime.close(failed=failed)
            for loader in self._loaders:
                loader.close()

    @property
    def open(self) -> bool:
        """Whether this process has created the session, and has not closed it."""
        return os.getpid() == self._owner and not self._runtime.closed

    @property
    def asked_to_leave(self) -> bool:
        """Whether this process was asked to leave; see `Membership.asked_to_leave`."""
        return self._runtime.asked_to_leave

    @property
    def came_late(self) -> bool:
        """See `Runtime.came_late`."""
        return self._runtime.came_late

    def drain(self) -> None:
        """Leave after the current step. May be called from a signal handler."""
        self._runtime.drain()
