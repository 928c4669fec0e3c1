"""The strategy for Lightning's `Trainer`, whichever of its two packages the Trainer is of.

`elastic_ps.integrations.lightning` and `.pytorch_lightning` combine this with the classes of their package.
See docs/guides/lightning.md.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from fsspec.core import url_to_fs
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from elastic_ps.contract import env
from elastic_ps.core.settings import MAX_GRAD_NORM
from elastic_ps.errors import UsageError
from elastic_ps.integrations.gradients import ClippedSteps, of_second_step
from elastic_ps.integrations.lightning_callbacks import act_where_saved, overwrite_config
from elastic_ps.integrations.lightning_checks import RESUME, check, check_optimizers, refuse_steps
from elastic_ps.integrations.lightning_epochs import Epochs
from elastic_ps.integrations.lightning_loop import Loop, metrics_of
from elastic_ps.integrations.processes import OneDevice, as_only_process, leads
from elastic_ps.standalone import connect
from elastic_ps.worker.optimizer import ElasticOptimizer
from elastic_ps.worker.session import Session

logger = logging.getLogger(__name__)

NAME = "elastic_ps"
"""The name of the strategy, as in `Trainer(strategy="elastic_ps")`."""

_OTHERS = "another worker has the checkpoint, and only that one runs the rest of the script"
_LAST_WEIGHTS = (
    "another worker has written the checkpoint, so trainer.%s(...) uses the last weights of the training"
)
_UPLOADS = (
    "the chief, which is another worker, has written the checkpoints. %s uploads from worker 0 those that it "
    "finds there under the names of its own. Upload others after trainer.fit(...) where "
    "trainer.is_global_zero is true"
)


class TrainsInJob(OneDevice):
    """A strategy of Lightning's, in front of `SingleDeviceStrategy`: each worker is one process for it.

    Args:
        records: the items that make an epoch, if the data are a stream; see `Session.loader`.
        overlap: send gradients while backward runs; see `Session.optimizer`. False if a hook of the module or
            of a callback changes gradients.
        max_grad_norm: what a module with manual optimization passes to `clip_gradients`, if it calls that.
        session: by default the process's own, see `elastic_ps.connect`.
        base: see `Session.optimizer`.
        options: those of Lightning's strategies: accelerator, checkpoint_io, precision_plugin.

    Attributes:
        session: of the job.
        elastic: the optimizer of the job, after the training has begun.

    Raises:
        UsageError: another launcher has started this process as one of several.
    """

    trains_in_job = True  # for `worker.model.checks`
    callback_kind: type[Any]
    environment_kind: type[Any]

    def __init__(
        self: Any,
        *,
        records: int | None = None,
        overlap: bool = True,
        max_grad_norm: float | None = None,
        session: Session | None = None,
        base: Literal["external"] | None = None,
        **options: Any,
    ) -> None:
        with as_only_process("Lightning"):
            pass
        self.session = session or connect()
        self.elastic: ElasticOptimizer | None = None
        self.num_nodes = 1
        self.cluster_environment = self.environment_kind()
        self.epochs: Epochs | None = None
        self._records, self._overlap, self._base = records, overlap, base
        self._max_grad_norm = max_grad_norm
        self._clipped = ClippedSteps(None if self._local else max_grad_norm)
        self._layer_sync = None  # Lightning puts that of sync_batchnorm here
        self._trained = False
        self.was_chief: bool | None = None  # when this worker asked last
        super().__init__(**options)
        self._launcher = self  # so that Lightning calls `launch`
        self._set_rank()

    # Where the work is.

    @property
    def is_global_zero(self: Any) -> bool:
        """True on worker 0, which logs and shows progress. After `Trainer.fit`, true on the chief instead."""
        return bool(self.session.is_chief if self._trained else self.session.worker == 0 and leads())

    def _set_rank(self) -> None:
        """Let `@rank_zero_only` follow `is_global_zero`.

        `Trainer.global_rank` stays 0 of 1: scripts divide data by it, and the job does that.
        """
        rank_zero_only.rank = 0 if self.is_global_zero else max(1, self.session.worker)

    # As what Lightning calls a launcher.

    is_interactive_compatible = True

    def launch(self: Any, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
        """Lightning calls it for `Trainer.fit`, `validate`, `test` and `predict`. It starts no process.

        Raises:
            SystemExit: the function loads a checkpoint of this training, and this worker is not the chief.
                The status is 0: its part is trained.
        """
        bound = inspect.signature(function).bind(*args, **kwargs)
        given = bound.arguments
        path = given.get("ckpt_path") or ("best" if given.get("model") is None else "")  # as Lightning does
        if self._trained and (path in ("best", "last") or (path and not Path(path).exists())):
            if not self.session.is_chief:
                logger.warning("the training is over, and this worker ends its script here: %s", _OTHERS)
                trainer.loggers = []  # Lightning would tell them of a failure, after the success of `fit`
                raise SystemExit(0)
            self._set_rank()
            if _lacks_checkpoint(trainer, path):
                logger.warning(_LAST_WEIGHTS, trainer.state.fn)
                given.update(model=trainer.lightning_module, ckpt_path=None)
        result = function(*bound.args, **bound.kwargs)
        if self._trained and trainer.state.fn in ("validate", "test") and self.session.is_chief:
            self.session.report(**metrics_of(result))
        if trainer.state.fn == "fit":
            self._trained = True
            self._set_rank()
            self._warn_of_uploads(trainer.loggers)
        return result

    def _warn_of_uploads(self, loggers: list[Any]) -> None:
        """Say that loggers, which log on worker 0, may lack the files that they are to upload."""
        names = [type(each).__name__ for each in loggers if getattr(each, "_log_model", False)]
        if names and not self.is_global_zero and self.session.worker == 0:
            logger.warning(_UPLOADS, " and ".join(names))

    def kill(self, signum: int) -> None:
        """Lightning calls it at a SIGTERM, for the processes that a launcher has started."""

    @property
    def _trainer(self: Any) -> Any:
        return self.lightning_module.trainer

    @property
    def _fits(self: Any) -> bool:
        return bool(self._trainer.state.fn == "fit")

    # What is set up.

    def setup_environment(self: Any) -> None:
        """Like Lightning's. Raises UsageError: the Trainer is set up for what cannot work in a job."""
        if self._fits:
            check(self._trainer)
        if env.in_job():
            overwrite_config(self._trainer)
        super().setup_environment()  # type: ignore[misc]

    def teardown(self: Any) -> None:
        """Like Lightning's, which resets all signals then, but not those of C, as `faulthandler`'s."""
        if self.lightning_module is not None:
            before = self._trainer._signal_connector._original_handlers  # noqa: SLF001
            before.update(dict.fromkeys([each for each in before if not callable(before[each])]))
        super().teardown()  # type: ignore[misc]

    def setup_optimizers(self: Any, trainer: Any) -> None:
        """Like Lightning's. The optimizers join the job, with the model. Blocks.

        Raises:
            UsageError: the module has no optimizer.
            InvalidModel, ModelMismatch: see `Session.optimizer` and `Session.loader`.
        """
        super().setup_optimizers(trainer)  # type: ignore[misc]
        given, module = self.optimizers, self.lightning_module
        check_optimizers(given, module)
        limit = None if self._local else trainer.gradient_clip_val or self._max_grad_norm
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        names = [str(index) for index, _ in enumerate(given)]
        self.elastic = self.session.optimizer(
            given[0] if len(given) == 1 else dict(zip(names, given, strict=True)),
            module,
            overlap=self._overlap and module.automatic_optimization and not scaled,
            max_grad_norm=limit,
            base=self._base,
        )
        self.elastic.second_step = of_second_step("self.trainer.strategy")
        self.optimizers = [self.elastic] if len(given) == 1 else [self.elastic[name] for name in names]
        for optimizer, own in zip(self.optimizers, given, strict=True):
            optimizer.optimizer = own  # LearningRateMonitor takes its name from there
        trainer.fit_loop.setup_data()
        self._loop = Loop(self, trainer)
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self._loop.stepped)
        for config in self.lr_scheduler_configs:
            if module.automatic_optimization:
                self._schedule(config)
            elif isinstance(config.scheduler, ReduceLROnPlateau):
                self.session.scheduler(config.scheduler)
            else:
                refuse_steps(config.scheduler)
        act_where_saved(trainer, self.saves)
        trainer.callbacks.insert(0, self.callback_kind(self._loop))

    @property
    def _local(self: Any) -> bool:
        return bool(self.session.spec.consistency.mode == "local")

    def _schedule(self: Any, config: Any) -> None:
        """The job steps a scheduler, once for each step that Lightning would make in one process."""
        if config.reduce_on_plateau:
            self.session.scheduler(config.scheduler)
            return
        loop, every = self._loop, int(config.frequency)
        count = loop.steps_of_one_process if config.interval == "step" else loop.epochs_of
        self.session.scheduler(config.scheduler, interval=lambda samples: count(samples, every))
        config.frequency = sys.maxsize  # Lightning does not step it

    def setup_precision_plugin(self: Any) -> None:
        """Like Lightning's. The parameter server clips gradients."""
        super().setup_precision_plugin()  # type: ignore[misc]
        plugin = self.precision_plugin
        if self._fits and not self._local:
            plugin.clip_gradients = self.clip_gradients
        elif self._fits and getattr(plugin, "scaler", plugin) is None:  # MixedPrecision in bfloat16
            # It would ask the optimizer whether it knows of a GradScaler, though there is none.
            plugin.clip_gradients = super(type(plugin), plugin).clip_gradients  # type: ignore[misc]

    def process_dataloader(self: Any, dataloader: Any) -> Any:
        """The one for training gives the job's records; others stay whole on each worker."""
        if not (self._fits and self._trainer.training):
            return dataloader
        if self.epochs is not None or not isinstance(dataloader, DataLoader):
            raise UsageError(
                "a job counts the records of one data set, so training takes one "
                f"torch.utils.data.DataLoader, once; this is another one, or a {type(dataloader).__name__}. "
                "Combine data sets with torch.utils.data.StackDataset or ConcatDataset"
            )
        fit = self._trainer.fit_loop
        # Each epoch makes a version or more.
        epochs = fit.max_steps if fit.max_epochs == -1 else fit.max_epochs
        self.epochs = Epochs(
            self.session.loader(dataloader, epochs=epochs, records=self._records),
            self.session,
            epochs=epochs,
            place=lambda batch: batch,
            ended=lambda: self._loop.step_with_rest(),
        )
        return self.epochs

    # Steps.

    def backward(self: Any, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like Lightning's. Sends gradients while it runs if it is known that a step follows."""
        trainer, blocked = self._trainer, True
        if self.lightning_module.automatic_optimization:
            self.session.report(loss=closure_loss.detach() * trainer.accumulate_grad_batches)
            blocked = trainer.fit_loop._should_accumulate()  # noqa: SLF001 (no other way)
        with self.elastic.no_sync() if blocked else nullcontext():
            loss: torch.Tensor = super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]
        return loss

    def clip_gradients(
        self: Any, _: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """The parameter server clips the mean over all workers in the next step. Does not change gradients.

        Raises:
            UsageError: no limit was given at the start, or it is not the norm.
        """
        if not clip_val or clip_val <= 0:
            return
        limited = self._trainer.gradient_clip_val or self._max_grad_norm
        if gradient_clip_algorithm not in (None, "norm") or not limited:
            automatic = f"Trainer(gradient_clip_val={clip_val})"
            if not self.lightning_module.automatic_optimization:  # for which Lightning refuses that
                automatic = f"ElasticStrategy(max_grad_norm={clip_val})"
            raise UsageError(
                "the parameter server limits the norm of the mean gradient of all workers, and must know "
                f"the limit before training starts. Set {automatic}, and gradient_clip_algorithm='norm'"
            )
        for group in self.elastic.param_groups:
            group[MAX_GRAD_NORM] = float(clip_val)
        self._clipped.ask()

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Like Lightning's. By hand, a step is clipped if `clip_gradients` was called for it. Blocks."""
        with self._clipped.step(self.elastic):
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    # Evaluation and saving.

    def on_validation_start(self: Any) -> None:
        """Within an epoch, the other workers train on meanwhile."""
        super().on_validation_start()  # type: ignore[misc]
        if self.epochs is not None and self.epochs.looping and not self._loop.owes_step:
            self.session.pause()

    def saves(self: Any) -> bool:
        """Whether this worker writes files, and reports: the chief. May block.

        Within the last epoch, and where the processes of a worker may not agree to ask, it is the
        previous chief, or worker 0.
        """
        epochs, session = self.epochs, self.session
        known = epochs is None or not epochs.entered
        if known or (
            epochs.looping and (epochs.is_last or session.stopped or session.spec.worker.processes > 1)
        ):
            return bool(self.is_global_zero if self.was_chief is None else self.was_chief)
        self.was_chief = session.is_chief
        return bool(self.was_chief)

    def optimizer_state(self: Any, optimizer: Any) -> dict[str, Any]:
        """Like Lightning's, fetched from the parameter server, where it is saved. Blocks."""
        return super().optimizer_state(optimizer) if self.saves() else {}  # type: ignore[misc]

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, **options: Any) -> None:
        """Like Lightning's where `saves` is true. May block."""
        if self.saves():
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, **options)

    def remove_checkpoint(self: Any, filepath: Any) -> None:
        """Like `save_checkpoint`."""
        if self.saves():
            self.checkpoint_io.remove_checkpoint(filepath)

    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Like Lightning's. Raises UsageError where it would resume a training: a job does so otherwise."""
        if self._fits:
            raise UsageError(RESUME)
        return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]


def _lacks_checkpoint(trainer: Any, path: Any) -> bool:
    """Return whether this process lacks the checkpoint at `path`, because another worker has written it."""
    if trainer.global_step == 0:  # this process has trained nothing
        return True
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not best or path not in ("best", best):
        return False
    filesystem, there = url_to_fs(best)
    return not filesystem.exists(there)
