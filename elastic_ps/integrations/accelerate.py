"""Hugging Face accelerate: a script written for its `Accelerator` trains as part of a job.

`ElasticAccelerator` takes the place of `Accelerator` in the script, which otherwise stays as it is. Each
worker is the only process for accelerate; the job divides the records and adds up the gradients. See
docs/guides/huggingface.md.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, send_to_device
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, RandomSampler

from elastic_ps.errors import UsageError
from elastic_ps.integrations.epochs import EpochLoader
from elastic_ps.integrations.gradients import ClippedSteps
from elastic_ps.integrations.processes import as_only_process, leads
from elastic_ps.standalone import connect
from elastic_ps.worker.optimizer import ElasticOptimizer
from elastic_ps.worker.session import Session

logger = logging.getLogger(__name__)

_RESUME = (
    "{call} cannot be used in a job: a job continues from its own checkpoints, which hold model, optimizer, "
    "schedules and the remaining records. Start it with `elastic-ps run JOB --resume DIR`. To begin with "
    "weights that were saved elsewhere, load them into the model before accelerator.prepare(...)"
)
_CHANGED = (
    "a gradient was changed between accelerator.backward() and optimizer.step(). That changed the "
    "gradient of this worker alone; the job takes the mean over all workers afterwards. To limit the norm "
    "of the mean, call accelerator.clip_grad_norm_ and use ElasticAccelerator(max_grad_norm=...). To change "
    "the gradient of each worker, use ElasticAccelerator(overlap=False)"
)
_BY_HAND = (
    "this script makes a step of {batches} batches, but the job steps the prepared scheduler once every "
    "{steps} batches. Use "
    "ElasticAccelerator(gradient_accumulation_steps={batches}), and write `with "
    "accelerator.accumulate(model):` around backward and step. Or do not prepare the scheduler, and call "
    "accelerator.session.scheduler(scheduler, interval=...)"
)
_UNPREPARED = (
    "there is a scheduler, but it is not prepared. So its step() counts this worker's own calls, and after "
    "--resume it begins anew. If the script calls it for each batch, each of N workers makes about 1/N of "
    "the steps: call scheduler = accelerator.prepare(scheduler). If it calls it for each epoch: call "
    "accelerator.session.scheduler(scheduler, interval='epoch'), and remove scheduler.step()"
)
_HARMLESS = ("gradient_accumulation_plugin", "dynamo_plugin")
_SHARDING = (
    "accelerate is set up for {what}, but each worker of a job holds the whole model, and the job adds up "
    "the gradients. Leave it out"
)


class ElasticAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` whose processes are the workers of a job. For one thread.

    The first DataLoader that is prepared has the records of the job; others are for evaluation, and each
    worker reads all of them. `gather`, `gather_for_metrics` and `reduce` return this worker's values.
    `is_main_process` is true on worker 0. After a loop over the training data it is true on the chief
    instead, and may block until that is known (see `Session.is_chief`). `wait_for_everyone` returns at once.

    Args:
        epochs: how many loops over the training data the script makes.
        records: the items that make an epoch, if the data are a stream; see `Session.loader`.
        max_grad_norm: what the script passes to `clip_grad_norm_`, if it calls that.
        overlap: send gradients while backward runs, for scripts that use `accumulate`; see
            `Session.optimizer`. With False a script may change its own worker's gradients before the step.
        session: by default the process's own, see `elastic_ps.connect`.
        base: see `Session.optimizer`.
        options: those of `Accelerator`.

    Raises:
        UsageError: accelerate would divide the work itself, or another launcher has started this process.
    """

    def __init__(
        self,
        *,
        epochs: int,
        records: int | None = None,
        max_grad_norm: float | None = None,
        overlap: bool = True,
        session: Session | None = None,
        base: Literal["external"] | None = None,
        **options: Any,
    ) -> None:
        for name, given in options.items():
            divides = name.endswith(("_plugin", "_plugins", "parallelism_config"))
            if divides and given is not None and name not in _HARMLESS:
                raise UsageError(_SHARDING.format(what=name))
        with as_only_process("accelerate"):
            self.join_job(
                session or connect(),
                epochs=epochs,
                records=records,
                max_grad_norm=max_grad_norm,
                overlap=overlap,
                base=base,
            )
            super().__init__(**options)
        self.check()

    def join_job(
        self,
        session: Session,
        *,
        epochs: int,
        records: int | None = None,
        max_grad_norm: float | None = None,
        overlap: bool = True,
        base: Literal["external"] | None = None,
    ) -> None:
        """Belong to this session; for an `Accelerator` that has got this class later. See the constructor."""
        self.session = session
        self._epochs, self._records = epochs, records
        self._max_grad_norm, self._overlap, self._base = max_grad_norm, overlap, base
        self._clipped = ClippedSteps(None if self._local else max_grad_norm)
        self._elastic: ElasticOptimizer | None = None
        self.training: EpochLoader | None = None
        self._accumulates = self._in_accumulate = self._shuffled = False
        self._counted = 0  # the most records that were in the model when the script has counted a step
        self._unscheduled = 0  # optimizer steps since the script has stepped its scheduler
        self._made_late = False  # the last optimizer step was made after the loop with its batches
        self._made: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None], int]] = []

    def check(self) -> None:
        """Raises UsageError: accelerate would divide the work itself."""
        if self.distributed_type != DistributedType.NO:
            raise UsageError(_SHARDING.format(what=self.distributed_type))
        if self.split_batches:
            raise UsageError(
                "split_batches divides a batch among processes. In a job consistency.globalBatchSize gives "
                "the batch of all workers: leave split_batches out, and set it with `elastic-ps run SCRIPT "
                "--set consistency.globalBatchSize=N`"
            )
        if self.gradient_accumulation_steps > 1:
            self.check_accumulation(self.gradient_accumulation_steps)

    def check_accumulation(self, steps: int) -> None:
        """Raises UsageError: the job adds up gradients, and the script would, too."""
        if self.session.spec.consistency.global_batch_size:
            raise UsageError(
                f"gradient_accumulation_steps is {steps}, but with consistency.globalBatchSize the job adds "
                "up gradients until it has that many records: leave gradient_accumulation_steps out"
            )

    @property
    def is_main_process(self) -> bool:
        """True on worker 0. After a loop over the training data, true on the chief instead."""
        training = self.training
        if training is None or training.within or not training.entered:
            return self.is_local_main_process
        return training.is_chief()

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is worker 0, which shows progress and logs."""
        return self.session.worker == 0 and leads()

    @property
    def is_last_process(self) -> bool:
        """Like `is_main_process`."""
        return self.is_main_process

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which does nothing unless `is_main_process` is true when it is called."""
        return lambda *args, **kwargs: function(*args, **kwargs) if self.is_main_process else None

    on_last_process = on_main_process

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which does nothing on other workers than worker 0."""
        return lambda *args, **kwargs: function(*args, **kwargs) if self.is_local_main_process else None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on worker 0."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Like accelerate's, on worker 0, which has the trackers. Warns if only the chief calls it."""
        if self.log_with and not self.is_local_main_process and self.is_main_process:
            logger.warning(
                "accelerator.log(...) does nothing here: worker 0 has the trackers, but after a loop over "
                "the training data is_main_process is true on the chief. Call it on all workers, without "
                "asking for is_main_process"
            )
        super().log(*args, **kwargs)

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Like accelerate's on worker 0; other workers have no tracker, and log nothing."""
        if self.is_local_main_process:
            super().init_trackers(*args, **kwargs)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Like accelerate's. The optimizer joins the job, with the model that it trains. Blocks.

        Raises:
            UsageError: there are two optimizers, one without its model, or the wrong DataLoader comes first.
            InvalidModel, ModelMismatch: see `Session.optimizer` and `Session.loader`.
        """
        order = sorted(range(len(args)), key=lambda i: not isinstance(args[i], torch.nn.Module))
        placed = None if device_placement is None else [device_placement[i] for i in order]
        prepared = super().prepare(*(args[i] for i in order), device_placement=placed)
        if len(args) == 1:
            return prepared
        by_place = dict(zip(order, prepared, strict=True))
        return tuple(by_place[i] for i in range(len(args)))

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:  # noqa: ARG002
        """Move the optimizer to the job; see `prepare`. `device_placement` has no effect."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = [m for m in self._models if trained <= {id(p) for p in m.parameters()}]
        if not models or self._elastic is not None:
            raise UsageError(
                "accelerator.prepare(...) takes one optimizer, together with its model or after it, as in "
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader). Put several "
                "models that one optimizer trains into one torch.nn.ModuleDict, and prepare that. For "
                'several optimizers, call session.optimizer({...}, model) instead: see "One model, one or '
                'several optimizers" in docs/guides/scripts.md'
            )
        overlap = self._overlap and self.scaler is None
        limit = None if self._local else self._max_grad_norm
        self._elastic = self.session.optimizer(
            optimizer, models[-1], overlap=overlap, max_grad_norm=limit, base=self._base
        )
        self._torch_optimizer = optimizer
        self._elastic.register_step_pre_hook(self._check_step)
        self._elastic.register_step_post_hook(self._stepped)
        return super().prepare_optimizer(self._elastic, device_placement=False)

    @property
    def _local(self) -> bool:
        return self.session.spec.consistency.mode == "local"

    def _check_step(self, *_: object) -> None:
        """Raise UsageError if the script clips or accumulates in a way that the job does not know of."""
        for parameter, made, version in self._made:
            gradient = parameter.grad
            if gradient is not None and (gradient is not made() or gradient._version != version):
                raise UsageError(_CHANGED)
        counted = any(not isinstance(each.scheduler, ReduceLROnPlateau) for each in self._schedulers)
        batches = 0 if self.training is None else self.training.computed
        if counted and batches > self.batches_of_step:
            raise UsageError(_BY_HAND.format(batches=batches, steps=self.batches_of_step))
        if self._elastic is not None and not (self._local or self._elastic.scheduled):
            steps = [each.step for each in (self._torch_optimizer, *self._optimizers)]
            if any(hasattr(step, "_wrapped_by_lr_sched") for step in steps):  # as torch marks them
                logger.warning(_UNPREPARED)
                self._elastic.scheduled = True
        self._clipped.begin(self._elastic)

    def _stepped(self, *_: object) -> None:
        self._clipped.end()
        self._unscheduled += 1
        self._made_late = self.training is not None and not self.training.looping
        if self._in_accumulate:
            self._count_step()

    def _count_step(self) -> None:
        """Let the script count a step, by `sync_gradients`, unless it was lost, or repeats a lost one.

        Else a script that ends with a number of steps would end before the last records. Only of mode sync is
        it known whether the model has got further.
        """
        session, consistency = self.session, self.session.spec.consistency
        samples = session.samples
        if consistency.mode != "sync" or consistency.global_batch_size or samples > self._counted:
            self._counted = samples
            return
        self.sync_gradients = False  # until the script comes to `accumulate` again
        assert self._elastic is not None
        self._elastic.zero_grad()  # the script's own call now does nothing

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, **options: Any
    ) -> Any:
        """The first one becomes the job's; see `Session.loader`. Others stay whole on each worker."""
        shuffled = isinstance(data_loader.sampler, RandomSampler)
        if self.training is not None:
            if shuffled and not self._shuffled:
                raise UsageError(
                    "the first DataLoader that accelerator.prepare(...) got has a fixed order, but this one "
                    "has a random order. The job trains on the first one: prepare the training DataLoader "
                    "before those for evaluation"
                )
            return super().prepare_data_loader(data_loader, device_placement=device_placement, **options)
        self._shuffled = shuffled
        places = self.device_placement if device_placement is None else device_placement
        self.training = EpochLoader(
            self.session.loader(data_loader, epochs=self._epochs, records=self._records),
            self.session,
            epochs=self._epochs,
            place=(lambda batch: send_to_device(batch, self.device)) if places else (lambda batch: batch),
            ended=self._step_with_rest,
        )
        self.session.at_finish.append(partial(self.training.heed_break, ends=True))
        return self.training

    def _step_with_rest(self) -> None:
        """At the end of an epoch, as accelerate does with the last batch."""
        self.step = 0
        if self._elastic is not None and self._elastic.owes_step:
            self._clipped.as_last()
            self.sync_gradients = True
            self._optimizers[-1].step()
            self._optimizers[-1].zero_grad()

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The job steps it, once for each optimizer step that one process would make; see `prepare`.

        So the schedule of a script that counts `len(loader) * epochs` steps ends with the job, whatever the
        number of workers. The script's `step()` does nothing, but for ReduceLROnPlateau.
        """
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return scheduler
        if self.training is None or self._elastic is None:
            raise UsageError(
                "accelerator.prepare(...) needs the optimizer and the training DataLoader before a "
                "scheduler, or in the same call: the job steps a scheduler by the records that are trained"
            )
        plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.session.scheduler(scheduler, interval=None if plateau else self._steps_of_one_process)
        wrapped = _Scheduler(scheduler, self._optimizers, self._is_stepped_by_mistake)
        self._schedulers.append(wrapped)
        return wrapped

    @property
    def batches_of_step(self) -> int:
        """How many batches an optimizer step of one process has."""
        return int(self.gradient_accumulation_steps)

    def _is_stepped_by_mistake(self) -> bool:
        """Whether the script, which steps a scheduler now, does so between two epochs."""
        unscheduled, self._unscheduled = self._unscheduled, 0
        training = self.training
        if training is None or training.within or not training.begun:
            return False
        return not self._made_late or unscheduled > 1

    def _steps_of_one_process(self, samples: int) -> int:
        """The optimizer steps that one process would have made with so many records."""
        assert self.training is not None
        epoch, steps = self.training.records, self.batches_of_step
        of_epoch = -(-len(self.training) // steps)
        complete, rest = divmod(samples, epoch)
        return complete * of_epoch + min(of_epoch, -(-rest // (self.training.batch_size * steps)))

    def epochs(self) -> Iterator[int]:
        """The number of each epoch, from the one that the job has reached.

        With `for epoch in range(...)` a worker that joins late also comes to the end of each earlier epoch,
        without records.
        """
        if self.training is None:
            raise UsageError("call accelerator.prepare(...) with the training DataLoader first")
        return self.training.epochs()

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Like accelerate's. At the end of an epoch a step is made with what is left."""
        self._accumulates = self._in_accumulate = True
        if self.training is not None and self.training.ends_group:
            self.step = self.batches_of_step - 1  # so that it makes a step, as with accelerate's last batch
        for other in self.gradient_state.dataloader_references:
            if other is not None:
                other.end_of_dataloader = False  # its last batch, if a script has left it there, ends no step
        try:
            with super().accumulate(*models):
                yield
        finally:
            self._accumulates = self._in_accumulate = False

    @contextmanager
    def no_sync(self, model: Any = None) -> Iterator[None]:  # noqa: ARG002
        """While this is open, backward() adds up gradients on the worker and sends none."""
        with nullcontext() if self._elastic is None else self._elastic.no_sync():
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Like accelerate's. Sends gradients only in `accumulate`, where it is known that a step follows."""
        groups = [] if self._elastic is None else self._elastic.param_groups
        trained = [parameter for group in groups for parameter in group["params"]]
        sends = self._accumulates and self.sync_gradients
        with nullcontext() if sends else self.no_sync():
            super().backward(loss, **kwargs)
        own = sends or self._local or self.scaler is not None or not self._overlap
        self._made = [
            (p, weakref.ref(p.grad), p.grad._version) for p in trained if not own and p.grad is not None
        ]

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """The parameter server clips the gradient of all workers in the next step. Does not change gradients.

        Returns the 2-norm of this worker's own gradient. In mode `local` it is accelerate's own, which clips.

        Raises:
            UsageError: `max_grad_norm` was not given at the start, or it is another norm.
        """
        if self._local:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[no-any-return]
        self.unscale_gradients()
        return self._clipped.clip(
            self._elastic, parameters, max_norm, norm_type, call="clip_grad_norm_", how="ElasticAccelerator"
        )

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Like accelerate's where `is_main_process` is true."""
        if self.is_main_process:
            super().save(obj, f, safe_serialization)

    def save_state(self, *args: Any, **kwargs: Any) -> str | None:
        """Like accelerate's where `is_main_process` is true; None elsewhere. Blocks.

        A job does not need it: it writes checkpoints of its own. With `automatic_checkpoint_naming` the
        numbers go on from those of other workers.
        """
        if not self.is_main_process:
            return None
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            names = [path.name for path in Path(self.project_dir, "checkpoints").glob("checkpoint_*")]
            numbers = [int(number) for name in names if (number := name.rpartition("_")[2]).isdecimal()]
            project.iteration = max([project.iteration - 1, *numbers]) + 1
        return super().save_state(*args, **kwargs)  # type: ignore[no-any-return]

    def load_state(self, *_: Any, **__: Any) -> None:
        """Raises UsageError: a job resumes otherwise."""
        raise UsageError(_RESUME.format(call="accelerator.load_state(...)"))

    def skip_first_batches(self, *_: Any, **__: Any) -> None:
        """Raises UsageError: a job resumes otherwise."""
        raise UsageError(_RESUME.format(call="accelerator.skip_first_batches(...)"))


class _Scheduler(AcceleratedScheduler):  # type: ignore[misc]
    """One that the job steps, as the script sees it."""

    def __init__(self, scheduler: Any, optimizers: list[Any], by_mistake: Callable[[], bool]) -> None:
        super().__init__(scheduler, optimizers)
        self._by_mistake = by_mistake

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing; but a ReduceLROnPlateau is stepped with its value.

        Raises:
            UsageError: the script steps it between two epochs, so it counts these.
        """
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(*args, **kwargs)
        elif self._by_mistake():
            raise UsageError(
                f"the {type(self.scheduler).__name__} is stepped between two epochs, but the job steps "
                "prepared schedulers itself, as if after each optimizer step. Do not prepare it: call "
                "accelerator.session.scheduler(scheduler, interval='epoch'), and remove scheduler.step()"
            )
