"""Hugging Face's `Trainer`, and those that TRL makes of it, train as part of a job.

`prepare_trainer(trainer)` gives a trainer that is made already a class of its own, whose methods come before
those of the script's class. The Trainer's loop stays: the job says which records it gets, makes its steps,
and ends it. See docs/guides/huggingface.md.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import DefaultFlowCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler
from transformers.utils import ENV_VARS_TRUE_VALUES

from elastic_ps.contract import env
from elastic_ps.errors import UsageError
from elastic_ps.integrations.accelerate import ElasticAccelerator
from elastic_ps.integrations.epochs import OpenEpochs
from elastic_ps.integrations.processes import as_only_process, is_one_of_several, own_gpu
from elastic_ps.integrations.transformers_best import Best
from elastic_ps.integrations.transformers_checks import check
from elastic_ps.standalone import connect
from elastic_ps.worker.session import Session

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Trainer)

_alone = TrainingArguments.__post_init__


def _hiding_ranks(arguments: TrainingArguments) -> None:
    """Hide ranks, for which it would begin a process group. Without them it would use all GPUs."""
    if not env.in_job():
        try:
            _alone(arguments)
        except ValueError:
            with as_only_process("transformers"):  # raises if there are ranks of another launcher
                raise
        return
    with as_only_process("transformers"):
        _alone(arguments)
    if is_one_of_several() and arguments.device.type == "cuda":
        own = own_gpu()
        torch.cuda.set_device(own)
        vars(arguments).update(_setup_devices=own, _n_gpu=1)
        arguments.distributed_state.device = own


TrainingArguments.__post_init__ = _hiding_ranks

_RESUME = (
    "trainer.train(resume_from_checkpoint=...) cannot be used in a job: a job continues from its own "
    "checkpoints, which hold model, optimizer, schedule and the remaining records. Start it with "
    "`elastic-ps run JOB --resume DIR`"
)

_AGAIN = "trainer.train() is called a second time, but a job trains one model once. Start another job"
_NO_SAMPLE = "There seems not to be a single sample"  # a warning where others have trained an epoch
_NO_LABEL = (
    "records without any labelled token (all labels are -100) are skipped. If there are many, check the "
    "collator: perhaps its template is not in the text, or truncation cuts the labels off"
)
_NO_UPLOAD = (
    "%s does not upload checkpoint-%d: worker 0 has the run, but this worker, the chief, has written the "
    "checkpoint. Upload it in a callback's on_save, or after trainer.train() where "
    "trainer.is_world_process_zero() is true"
)
_TRACKERS = tuple(INTEGRATION_TO_CALLBACK.values())
_UPLOADING = ("_log_model", "_log_artifacts", "sync_checkpoints")  # attributes of them


def prepare_trainer(
    trainer: T,
    *,
    session: Session | None = None,
    records: int | None = None,
    overlap: bool = True,
    base: Literal["external"] | None = None,
) -> T:
    """Let a trainer train as part of a job; returns it. To be called before `trainer.train()`.

    It may be any whose class leaves the DataLoader for training to `Trainer`, such as TRL's SFTTrainer,
    DPOTrainer and RewardTrainer.

    Args:
        session: by default the process's own, see `elastic_ps.connect`.
        records: the items that make an epoch, if the data are a stream; see `Session.loader`.
        overlap: send gradients while backward runs; see `Session.optimizer`. False if a callback changes
            gradients, or `training_step` runs backward several times.
        base: see `Session.optimizer`.

    Raises:
        UsageError: what the trainer is set up for cannot work in a job; the message says what to do.
    """
    with as_only_process("transformers"):
        session = session or connect()
    if not isinstance(trainer, _InJob):
        kind = type(trainer)
        trainer.__class__ = type(kind.__name__, (_InJob, kind), {})
    trainer.join_job(session, records=records, overlap=overlap, base=base)
    return trainer


class ElasticMixin:
    """A mixin for a class of one's own: `class MyTrainer(ElasticMixin, Trainer)`.

    It takes the arguments of the other class and those of `prepare_trainer`, which is not needed then. In a
    worker of several processes it also keeps transformers from beginning a process group.
    """

    def __init__(
        self: Any,
        *args: Any,
        session: Session | None = None,
        records: int | None = None,
        overlap: bool = True,
        base: Literal["external"] | None = None,
        **kwargs: Any,
    ) -> None:
        with as_only_process("transformers"):
            super().__init__(*args, **kwargs)
        prepare_trainer(self, session=session, records=records, overlap=overlap, base=base)


class _InJob:
    """What a trainer does otherwise in a job. It is in front of the trainer's class."""

    _trained = False
    _saved_at: int | None = None  # the steps in the Trainer's checkpoint, where this worker writes it

    def join_job(
        self: Any,
        session: Session,
        *,
        records: int | None = None,
        overlap: bool = True,
        base: Literal["external"] | None = None,
    ) -> None:
        """Belong to this session; see `prepare_trainer`, which raises the same."""
        check(self, session, own=_InJob)
        self.session, self.best_of_job = session, Best(self, session)
        self.group = 0
        self._skips = self._counts = self._has_warned = False
        self._rate: Any = None
        self._items: Any = None
        self.accelerator.__class__ = _OfTrainer
        self.accelerator.join_job(
            session,
            epochs=math.ceil(self.args.num_train_epochs),
            records=records,
            max_grad_norm=self.args.max_grad_norm or None,
            overlap=overlap,
            base=base,
        )
        self.accelerator.check()
        self.accelerator.take_over(self.args)
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.is_world_process_zero()
        after = isinstance(next(iter(self.callback_handler.callbacks), None), DefaultFlowCallback)
        self.callback_handler.callbacks.insert(int(after), _Flow(self))  # before those of the script
        self.callback_handler.on_save = self._on_save

    # Where the work is.

    def is_world_process_zero(self: Any) -> bool:
        """Return whether this worker logs: worker 0, but after the training the chief, which also saves."""
        of = self.accelerator
        return bool(of.is_main_process if self._trained else of.is_local_main_process)

    def is_local_process_zero(self: Any) -> bool:
        """Return whether this worker shows progress: worker 0."""
        return bool(self.accelerator.is_local_main_process)

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's. Blocks until all records of the job are in the model.

        Raises:
            UsageError: `resume_from_checkpoint` is given: a job resumes otherwise. Or it is called again.
        """
        if resume_from_checkpoint:
            raise UsageError(_RESUME)
        if self.accelerator.has_begun:
            raise UsageError(_AGAIN)
        log = logging.getLogger(Trainer.__module__)
        log.addFilter(needed := lambda record: _NO_SAMPLE not in record.getMessage())
        try:
            given = (None, *args) if args else ()  # the script's own may take none
            result = super().train(*given, **kwargs)  # type: ignore[misc]
            self._trained = True
            return result
        finally:
            log.removeFilter(needed)

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        """Raises UsageError: `train` of the script's own has asked the Trainer's to resume."""
        raise UsageError(_RESUME)

    def hyperparameter_search(self, *_: Any, **__: Any) -> None:
        """Raises UsageError: a job trains one model."""
        raise UsageError(
            "trainer.hyperparameter_search(...) trains several models, but a job trains one. Start a job for "
            "each set of hyperparameters: examples/sweep"
        )

    def get_train_dataloader(self: Any) -> Any:
        """The job's records, as `Session.loader` gives them."""
        self.accelerator.is_for_training = True
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            self.accelerator.is_for_training = False

    def set_initial_training_values(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Like the Trainer's, but that the job says when an epoch and the training end."""
        epochs, steps, *others, batches, most = super().set_initial_training_values(*args, **kwargs)  # type: ignore[misc]
        return (_Endless.of(epochs), _Endless.of(steps), *others, _Batches.of(self, batches), most)

    def create_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's. The job steps it, once for each step that one process would make."""
        super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        scheduler = self.lr_scheduler  # the Trainer does not ask what the method returns, either
        wrapped = self.accelerator.prepare_scheduler(scheduler)
        self.lr_scheduler = scheduler if isinstance(scheduler, ReduceLROnPlateau) else wrapped
        return self.lr_scheduler

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's: the batches of one optimizer step. There are fewer at the end of an epoch."""
        samples, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.group, self._items = len(samples), items
        if items is not None:
            self._counts = self.session.processes.gather("the labels of a step", bool(items), any)
            items = items if items else 1  # so that the gradient of a slice without labels is 0, not NaN
        self._rate = super()._get_learning_rate()  # type: ignore[misc]
        self.control.should_epoch_stop |= not samples
        return samples, items

    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like the Trainer's. Reports the loss to the job, and weighs a mean over tokens by their number.

        If a step has no token that counts, it is not made, and its records are skipped.
        """
        if self._items is not None:
            if not self._counts:
                if not self._has_warned:
                    logger.warning(_NO_LABEL)
                self._skips = self._has_warned = True
                self.accelerator.sync_gradients = False  # optimizer.step() does nothing
                return torch.zeros((), device=self.args.device)
            self.session.weigh(self._items / self.group)
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self._items is None or self._items:
            self.session.report(loss=loss * self.group)  # the Trainer divides it by their number
        return loss

    def end_step(self: Any) -> None:
        """Skip the batches of a step without tokens: otherwise the next backward() would count for them."""
        if self._skips:
            self._skips = False
            self.accelerator.skip_step()

    def _get_learning_rate(self: Any) -> Any:
        """The rate of the step under way. The session sets the next one within `optimizer.step()`."""
        return super()._get_learning_rate() if self._rate is None else self._rate  # type: ignore[misc]

    def _maybe_log_save_evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        training = self.accelerator.training
        if self.control.should_training_stop:
            if not (training.finished or self.session.stopped):
                self.session.stop("a callback of the Trainer has ended the training")
        elif self.best_of_job.is_known and not training.within and self.accelerator.is_main_process:
            self.best_of_job.keep()

    def _determine_best_metric(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._counting_steps(self.accelerator.steps_of_job):
            return super()._determine_best_metric(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        self._saved_at = self.accelerator.steps_of_job if self.accelerator.is_main_process else None
        with self._counting_steps(self._saved_at):
            if self._saved_at is not None:
                super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _on_save(self: Any, args: Any, state: Any, control: Any) -> Any:
        """Call the callbacks, on the worker that has saved something.

        The state says there that this is the first process. Only trackers know better: worker 0 has the run.
        """
        if self._saved_at is None:
            control.should_save = False
            return control
        logs, part = state.is_world_process_zero, copy.copy(self.callback_handler)
        every = part.callbacks
        trackers = [each for each in every if not logs and isinstance(each, _TRACKERS)]
        if names := [type(each).__name__ for each in trackers if _uploads(each)]:
            logger.warning(_NO_UPLOAD, " and ".join(names), self._saved_at)
        try:
            with self._counting_steps(self._saved_at):
                part.callbacks = trackers
                control = CallbackHandler.on_save(part, args, state, control)
                part.callbacks = [each for each in every if each not in trackers]
                state.is_world_process_zero = True
                return CallbackHandler.on_save(part, args, state, control)
        finally:
            state.is_world_process_zero = logs

    def _finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's. Only the chief may remove all checkpoints but the best."""
        if self.args.save_total_limit == 1:
            saves, best = self.accelerator.is_main_process, self.state.best_model_checkpoint
            self.state.best_model_checkpoint = best if saves and best and Path(best).exists() else None
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _counting_steps(self: Any, steps: int | None) -> Iterator[None]:
        """Name a checkpoint by the steps of one process: the next one may be written by another worker."""
        own = self.state.global_step
        self.state.global_step = own if steps is None else steps
        try:
            yield
        finally:
            self.state.global_step = own

    def save_model(self: Any, *args: Any, **kwargs: Any) -> None:
        """Like the Trainer's on the chief, for which it may block; in the middle of an epoch on worker 0."""
        if self.accelerator.is_main_process:
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def push_to_hub(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Like `save_model`; None on other workers."""
        if not self.accelerator.is_main_process:
            return None
        return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]


class _OfTrainer(ElasticAccelerator):
    """The `Accelerator` of a trainer."""

    def take_over(self, args: Any) -> None:
        """Heed what the trainer's arguments say. Raises as `check_accumulation`."""
        if args.gradient_accumulation_steps > 1:
            self.check_accumulation(args.gradient_accumulation_steps)
        self.is_for_training = False
        self._accumulates = True  # the Trainer says with which backward() a step follows
        self._max_steps, self._steps = args.max_steps, args.gradient_accumulation_steps

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """The job's records, if it is for training."""
        if not self.is_for_training:
            return Accelerator.prepare_data_loader(self, data_loader, *args, **kwargs)
        if self._max_steps > 0:
            given = self._records
            try:
                batches = len(data_loader) if given is None else math.ceil(given / data_loader.batch_size)
            except TypeError:
                batches = 0  # a stream without a length, about which session.loader says what to do
            self._epochs = math.ceil(self._max_steps / max(1, math.ceil(batches / self._steps)))
        loader = self.session.loader(data_loader, epochs=self._epochs, records=self._records)
        if self._steps > 1:
            loader.batches.grouped = True  # it loads all batches of a step before it computes on them
        self.training = _Loader(
            loader, self.session, epochs=self._epochs, place=lambda batch: batch, ended=lambda: None
        )
        return self.training

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Like `ElasticAccelerator`'s. Statistics of modules in training mode belong to no base."""
        for model in self._models[-1:] if self._base else ():
            model.train()  # the Trainer does so only before its first forward
        return super().prepare_optimizer(*args, **kwargs)

    def unscale_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Like accelerate's, if a step follows: otherwise the scaler would not expect the next gradients."""
        if self.sync_gradients:
            super().unscale_gradients(*args, **kwargs)

    @property
    def has_begun(self) -> bool:
        """Whether the optimizer belongs to the job."""
        return self._elastic is not None

    @property
    def batches_of_step(self) -> int:
        """How many batches an optimizer step of one process has."""
        return int(self._steps)

    def skip_step(self) -> None:
        """Make no step with the batches in hand."""
        assert self._elastic is not None
        self._elastic.skip()

    def _steps_of_one_process(self, samples: int) -> int:
        steps = super()._steps_of_one_process(samples)
        return min(steps, self._max_steps) if self._max_steps > 0 else steps

    @property
    def steps_of_job(self) -> int:
        """With how many steps one process would have trained the records of the job so far."""
        return self._steps_of_one_process(self.session.samples)

    @property
    def has_made_all(self) -> bool:
        """Whether the job has trained the records of `max_steps` steps of one process."""
        return bool(0 < self._max_steps <= self.steps_of_job)

    def _is_stepped_by_mistake(self) -> bool:
        return False


class _Endless(int):
    """A limit that no loop comes to; the Trainer logs the one of a single process."""

    @classmethod
    def of(cls, logged: int) -> _Endless:
        """The limit instead of `logged`."""
        made = cls(sys.maxsize)
        made._logged = logged
        return made

    def __format__(self, spec: str) -> str:
        return format(self._logged, spec)

    _logged: int


class _Batches(int):
    """How many batches an epoch has, with which the Trainer compares how many it has trained.

    A worker may be given fewer, or more if some are lost. So this number is equal to those that it was given
    when the last step of its epoch has fewer than the others.
    """

    @classmethod
    def of(cls, trainer: Any, number: int) -> _Batches:
        """The number for a single worker that loses none."""
        made = cls(number)
        made._trainer = trainer
        return made

    def __eq__(self, trained: object) -> bool:
        accelerator = self._trainer.accelerator
        is_short = self._trainer.group < accelerator.batches_of_step
        return bool(is_short and trained == accelerator.training.of_loop)

    __hash__ = int.__hash__
    _trainer: Any


class _Loader(OpenEpochs):
    """The job's epochs as they come, for the Trainer's loop.

    Attributes:
        of_loop: how many batches the last loop has yielded.
    """

    number = of_loop = 0

    def __iter__(self) -> Iterator[Any]:
        while not self.ends():
            self.begin_epoch()
            self.of_loop = 0
            try:
                for batch in self._loader:
                    self.batches += 1
                    self.of_loop += 1
                    yield batch
            finally:
                self.looping = False
            if self.of_loop or self.comes_through:
                return

    def is_chief(self) -> bool:
        """Between two loops and after the last one: `Session.is_chief`."""
        return self._session.is_chief


class _Flow(TrainerCallback):  # type: ignore[misc]
    """Ends the Trainer's loop when the job's records are trained, and not before."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved = self._evaluated = -1  # the versions that were the last to be so
        self._begun = False

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        state.num_train_epochs = math.ceil(args.num_train_epochs)

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Take a share of all steps, as the arguments may give, for one of this worker's steps."""
        if not self._begun:  # `eval_on_start` has evaluated before, which does not count
            self._begun = True
            self._trainer.best_of_job.take_over()
        for name in ("logging_steps", "eval_steps", "save_steps"):
            share = getattr(args, name)
            if share and share < 1:
                steps = state.max_steps * share / self._trainer.session.world_size
                setattr(state, name, max(1, math.ceil(steps)))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A worker may make more steps than the Trainer expects, or fewer."""
        self._trainer.end_step()
        session, training = self._trainer.session, self._trainer.accelerator.training
        state.epoch = training.number + min(1.0, training.of_loop / len(training))
        if state.global_step >= state.max_steps:  # the Trainer takes it for the last one
            control.should_training_stop = False
            control.should_evaluate &= _is_due(state, state.eval_steps)
            control.should_save &= _is_due(state, state.save_steps)
        if self._trainer.accelerator.has_made_all:
            session.stop(f"max_steps={args.max_steps}")
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        session, training = self._trainer.session, self._trainer.accelerator.training
        if not (training.looping or session.stopped):
            state.epoch = training.number + 1.0
            # The Trainer's own callback has asked with the share that this worker has trained.
            control.should_evaluate |= args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
        if training.looping:  # a callback has left the epoch; others may train what is left of it
            self._trainer.accelerator.skip_step()
            if training.is_last and not session.stopped:
                session.stop("a callback of the Trainer has left the last epoch")
        if not training.of_loop:  # the Trainer would end
            control.should_training_stop = False
        if training.finished or ((training.is_last or session.stopped) and training.ends()):
            control.should_training_stop = True
            # As the Trainer does with its last step.
            control.should_save |= args.save_strategy == "steps" and self._saved < session.version
            control.should_evaluate |= (
                args.eval_strategy == "steps"
                and args.eval_delay <= state.global_step
                and self._evaluated < session.version
            )

    def on_save(self, *_: Any, **__: Any) -> None:
        self._saved = self._trainer.session.version

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._evaluated = self._trainer.session.version


def _uploads(tracker: Any) -> bool:
    """Return whether a tracker of transformers is set up to upload each checkpoint."""
    if isinstance(tracker, INTEGRATION_TO_CALLBACK["clearml"]):  # it decides where it has the run
        return os.environ.get("CLEARML_LOG_MODEL", "TRUE").upper() in ENV_VARS_TRUE_VALUES
    given = [getattr(tracker, name, None) for name in _UPLOADING]
    return any(each not in (None, False, "false", "end") for each in given)  # as W&B names them


def _is_due(state: Any, every: int | None) -> bool:
    return bool(every) and state.global_step % every == 0
