"""The loop of Lightning's `Trainer` in a job.

The Trainer's loop stays. The job says which records it gets and when an epoch ends, makes its steps, and ends
it. So a loop over an epoch has no length: an own fetcher takes one batch after the other, and what Lightning
does with the last batch of an epoch is done when the next one is asked for and there is none: a step with
what was accumulated, and the validation.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from elastic_ps.contract import env
from elastic_ps.integrations.lightning_callbacks import SAVING, STOPPING, CallbackStates
from elastic_ps.integrations.lightning_epochs import Epochs


class _Unreached(int):
    """A limit for scripts to read. Lightning's loop does not reach it: the records of the job count."""

    def __le__(self, _: int, /) -> bool:
        return False  # `steps >= limit` asks the limit first, whose class is the narrower one


class Fetcher:
    """Takes the place of Lightning's fetchers, which need a length or take one batch ahead."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._batches: Iterator[Any] = iter(())
        self.reset()

    def __iter__(self) -> Fetcher:
        self.reset()
        self._batches = self._loop.epochs.begin()
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self.done = True
            self._loop.end_epoch()
            raise
        self.fetched += 1
        return batch

    def reset(self) -> None:
        """Lightning asks for it at the start, and at the end."""
        self.fetched, self.done, self.length = 0, False, None

    teardown = reset


class Loop:
    """Acts at points of Lightning's loop for which strategies have no hooks."""

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self.epochs: Epochs = strategy.epochs
        self._stepped_at = 0  # the number of batches at the last step
        self._max_steps = trainer.max_steps
        self._states = CallbackStates(trainer, strategy.session)
        self._run_validation: Callable[[], Any]
        # Of an epoch, after which to validate; None: a number of batches is given.
        interval = getattr(trainer, "val_check_interval", None)  # Lightning leaves it out if it is a time
        self._share_of_check = interval if isinstance(interval, float) else None

    @property
    def owes_step(self) -> bool:
        """Whether there are batches that no step was made with."""
        return bool(self.epochs.batches > self._stepped_at)

    def stepped(self, *_: object) -> None:
        """An optimizer has made a step."""
        self._stepped_at = self.epochs.batches

    def steps_of_one_process(self, samples: int, every: int) -> int:
        """How often Lightning would step a scheduler in one process that has trained so many records.

        `every`: in batches, the frequency of the scheduler.
        """
        of_epoch, accumulated = len(self.epochs), self._trainer.accumulate_grad_batches
        complete, rest = divmod(samples, self.epochs.records)
        together = math.lcm(accumulated, every)
        last = of_epoch % every == 0 and of_epoch % accumulated != 0  # its step is made with what is left
        batches = min(of_epoch, -(-rest // self.epochs.batch_size))
        within = batches // together + (last and batches == of_epoch)
        steps = int(complete * (of_epoch // together + last) + within)
        return min(steps, self._max_steps * accumulated // together) if self._max_steps > 0 else steps

    def epochs_of(self, samples: int, every: int) -> int:
        """How often it steps a scheduler that counts epochs."""
        epoch = self.epochs
        # Those of an epoch that `drop_last` leaves out are counted with a step of the next one.
        left = max(0, epoch.records - len(epoch) * epoch.batch_size)
        return int((samples + left) // epoch.records // every)

    # In the order in which they are called.

    def start(self) -> None:
        """Before the first batch. The loop has no length from now on."""
        trainer, fit, epoch_loop = self._trainer, self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        fit._data_fetcher = Fetcher(self)  # noqa: SLF001
        iter(fit._data_fetcher)  # noqa: SLF001
        self._run_validation, epoch_loop.val_loop.run = epoch_loop.val_loop.run, self._validate
        fit.max_batches = self._share  # which does not end the epoch
        progress = epoch_loop.batch_progress
        epoch_loop._num_ready_batches_reached = lambda: progress.is_last_batch  # noqa: SLF001
        epoch_loop.max_steps = _Unreached(self._max_steps) if self._max_steps > 0 else -1
        if self._share_of_check == 1:
            trainer.val_check_batch = math.inf
        if env.in_job() and threading.current_thread() is threading.main_thread():
            # Lightning's handler would end the process as if the training had succeeded.
            ours = trainer._signal_connector._original_handlers.get(signal.SIGTERM)  # noqa: SLF001
            if callable(ours):
                signal.signal(signal.SIGTERM, ours)
        self._states.load(STOPPING, SAVING)
        if self.epochs.ends():
            self._finish()

    def start_epoch(self) -> None:
        """Lightning begins an epoch. Raises StopIteration, which ends its loop, if there is none."""
        self._keep_states()  # callbacks end an epoch after the loop
        if self.epochs.ends():
            raise StopIteration
        self._number(self.epochs.next_number)
        self._trainer.fit_loop.max_batches = share = self._share
        if self._share_of_check and self._share_of_check < 1:
            self._trainer.val_check_batch = max(1, int(share * self._share_of_check))

    @property
    def _share(self) -> int:
        """How many batches of an epoch this worker is likely to get."""
        session = self._strategy.session
        alone = session.spec.consistency.may_be_stale  # then a version may be that of one worker
        workers: int = session.spec.worker.replicas if alone else session.world_size
        return -(-len(self.epochs) // workers)

    def _number(self, epoch: int) -> None:
        """Tell Lightning which epoch of the job's it is in."""
        progress = self._trainer.fit_loop.epoch_progress.current
        if progress.processed != epoch:
            begun = progress.started > progress.processed
            progress.ready, progress.processed, progress.completed = epoch + 1, epoch, epoch
            progress.started = epoch + begun

    def end_batch(self) -> None:
        """After a batch: the job may have trained the records of as many steps as are wanted."""
        self._correct_length()
        session, most = self._strategy.session, self._max_steps
        if most <= 0 or session.stopped:
            return
        by_hand = not self._trainer.lightning_module.automatic_optimization
        if most <= (session.version if by_hand else self.steps_of_one_process(session.samples, 1)):
            session.stop(f"max_steps={most}")

    def step_with_rest(self) -> None:
        """At the end of an epoch, as Lightning does with the last batch."""
        scaled = getattr(self._strategy.precision_plugin, "scaler", None) is not None
        trained = [p for group in self._strategy.elastic.param_groups for p in group["params"]]
        if not self.owes_step or (scaled and all(p.grad is None for p in trained)):
            return  # without a gradient, the step of a GradScaler raises an error
        epoch_loop = self._trainer.fit_loop.epoch_loop
        epoch_loop.batch_progress.is_last_batch = True
        if self._trainer.lightning_module.automatic_optimization:
            make = epoch_loop.automatic_optimization._optimizer_step  # noqa: SLF001
            make(epoch_loop.batch_idx, lambda: 0.0)
            epoch_loop._batches_that_stepped += 1  # noqa: SLF001
        else:
            self._strategy.elastic.step()
            self._strategy.elastic.zero_grad()

    def end_epoch(self) -> None:
        """There is no further batch of the epoch: validate."""
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        self._number(self.epochs.number)
        epoch_loop.batch_progress.is_last_batch = True
        self._correct_length(ended=True)
        batches, every = epoch_loop.batch_progress.current.ready, trainer.val_check_batch
        by_time_or_total = every is None or trainer.check_val_every_n_epoch is None
        validated = by_time_or_total or batches >= every
        if validated or not epoch_loop._should_check_val_epoch():  # noqa: SLF001
            return
        session = self._strategy.session
        complete = batches == len(self.epochs) or self.epochs_of(session.samples, 1) > self.epochs.number
        if session.stopped and not complete:
            return
        connector = trainer._logger_connector  # noqa: SLF001
        first = connector._first_loop_iter  # noqa: SLF001
        trainer.validating = True
        epoch_loop._batches_that_stepped -= 1  # noqa: SLF001 (loggers expect the step of the last batch)
        epoch_loop.val_loop.run()
        epoch_loop._batches_that_stepped += 1  # noqa: SLF001
        trainer.training = True
        connector._first_loop_iter = first  # noqa: SLF001

    def _correct_length(self, *, ended: bool = False) -> None:
        """Tell Lightning how many batches this worker has of the epoch, which nobody knows before."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        batches, callback = fit.epoch_loop.batch_progress.current.ready, trainer.progress_bar_callback
        if ended:
            fit.max_batches = max(1, batches)  # with 0 the training would end
        elif batches > fit.max_batches:
            fit.max_batches = len(self.epochs)  # so that not each of them looks like the last one
        if not batches or not getattr(callback, "is_enabled", False):
            return
        bar = getattr(callback, "train_progress_bar", None)
        if bar is not None and (ended or batches > (bar.total or 0)):
            bar.total = batches
            if ended:
                callback.on_train_batch_end(trainer, trainer.lightning_module, None, None, batches - 1)

    def _validate(self) -> Any:
        """In place of `run` of Lightning's loop for validation: the job's report has the values, too."""
        self._await_chief()
        outputs = self._run_validation()
        if self._strategy.saves():
            self._strategy.session.report(**metrics_of(outputs))
        self._keep_states()
        return outputs

    def _await_chief(self) -> None:
        """Go on with the previous chief's files, if this worker has become the chief. May block.

        The worker has counted the validations itself.
        """
        strategy = self._strategy
        before = strategy.was_chief
        if self._states.kept and strategy.saves() and strategy.was_chief and not before:
            self._states.load(SAVING)

    def _keep_states(self) -> None:
        if self._states.kept and self.epochs.begun and self._strategy.saves() and self._strategy.was_chief:
            self._states.keep()

    def end_epoch_of_trainer(self) -> None:
        """Lightning ends an epoch: is that the last one? May block."""
        if self.epochs.looping and self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._leave_epoch()
        stopped = self._strategy.session.stopped
        if (self.epochs.is_last or stopped) and self.epochs.ends():
            self._finish()
        self._await_chief()

    def _leave_epoch(self) -> None:
        """The module has asked for the end of the epoch, with -1 from `on_train_batch_start`."""
        self.epochs.leave_epoch()
        if self.owes_step:  # Lightning drops the gradients, too
            self._strategy.elastic.skip()
            self.stepped()
        if self.epochs.is_last:
            self.epochs.leave("on_train_batch_start has returned -1 in the last epoch")

    def _finish(self) -> None:
        """End Lightning's loop."""
        fit = self._trainer.fit_loop
        fit.min_epochs = fit.epoch_loop.min_steps = None
        self._trainer.should_stop = True

    def end(self) -> None:
        """Lightning has ended its loop: if there are records left, the training ends on all workers."""
        self._trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        if self.epochs.finished:
            return
        if self.owes_step:
            self._strategy.elastic.skip()
        self.epochs.leave("a callback of the Trainer has ended the training")


def metrics_of(outputs: Any) -> dict[str, float]:
    """Return the values that Lightning has logged, under names that are valid for metrics of a job."""
    logged = {name: value for each in outputs or () for name, value in each.items()}
    return {"".join(c if c.isalnum() else "_" for c in name): float(value) for name, value in logged.items()}


class Hooks:
    """A callback of Lightning's, in front of its class: the first one of the Trainer."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def on_train_start(self, *_: Any) -> None:
        """Called by Lightning, as are the others."""
        self._loop.start()

    def on_train_epoch_start(self, *_: Any) -> None:
        self._loop.start_epoch()

    def on_train_batch_end(self, *_: Any) -> None:
        self._loop.end_batch()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._loop.end_epoch_of_trainer()

    def on_train_end(self, *_: Any) -> None:
        self._loop.end()
