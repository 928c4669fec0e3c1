"""Refuses settings of a Trainer of Lightning that cannot work in a job. Each has a sentence."""

from __future__ import annotations

from types import CodeType
from typing import Any

from elastic_ps.errors import UsageError
from elastic_ps.integrations.processes import too_many_devices

_PACKAGES = ("lightning", "pytorch_lightning")
RESUME = (
    "trainer.fit(ckpt_path=...) cannot be used in a job: a job continues from its own checkpoints, which "
    "hold model, optimizer, schedules and the remaining records. Start it with `elastic-ps run JOB --resume "
    "DIR`. To begin with the weights of a checkpoint, load them into the module before trainer.fit(...)"
)
_REPEATING = (
    "LearningRateFinder",
    "BatchSizeFinder",
    "StochasticWeightAveraging",
    "WeightAveraging",
    "GradientAccumulationScheduler",
    "BaseFinetuning",
    "ModelPruning",
)


_OF_BATCH = ("training_step", "on_train_batch_start", "on_train_batch_end")


def _code(module: Any, method: str) -> CodeType:
    return getattr(getattr(module, method), "__code__", _code.__code__)


def check(trainer: Any) -> None:
    """Raises UsageError: what the Trainer is set up for cannot work in a job."""
    strategy, module = trainer.strategy, trainer.lightning_module
    too_many, fit = too_many_devices(strategy.parallel_devices, strategy.num_nodes), trainer.fit_loop
    share = trainer.limit_train_batches  # as an integer, it counts batches
    unlimited = (isinstance(share, float) and share == 1.0) or trainer.fast_dev_run
    names = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    refused = [name for name in _REPEATING if name in names]
    accumulated = trainer.accumulate_grad_batches
    problems: list[tuple[bool, str]] = [
        (
            strategy.elastic is not None,
            "trainer.fit(...) is called a second time, but a job trains one model once. Start another job",
        ),
        (
            bool(too_many),
            too_many,
        ),
        (
            bool(vars(strategy)["_layer_sync"]),
            "sync_batchnorm needs a process group, which a job does not have. Leave it out; the job averages "
            "the statistics of BatchNorm over the workers. Or use GroupNorm",
        ),
        (
            trainer.overfit_batches > 0 or not unlimited,
            "limit_train_batches and overfit_batches train a part of the records, but a job trains every "
            "record once in each epoch. Leave them out, and give the DataLoader a torch.utils.data.Subset",
        ),
        (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "reload_dataloaders_every_n_epochs makes a new DataLoader, but a job counts the records of one "
            "data set. Leave it out",
        ),
        (
            fit.max_epochs == -1 and fit.max_steps == -1,
            "max_epochs is -1, so the training has no end, but a job has to know how many records it trains. "
            "Set max_epochs or max_steps; session.stop or a callback may end it earlier",
        ),
        (
            str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm))
            == "value",
            "gradient_clip_algorithm is 'value', which clips each element of a gradient, but gradients are "
            "added up on the parameter server. Use 'norm'",
        ),
        (
            accumulated > 1 and bool(strategy.session.spec.consistency.global_batch_size),
            f"accumulate_grad_batches is {accumulated}, but with consistency.globalBatchSize the job adds up "
            "gradients until it has that many records: leave accumulate_grad_batches out",
        ),
        (
            bool(refused),
            f"a job cannot use {', '.join(refused)}, which trains several times, counts one worker's steps, "
            "or changes what a step is made of. Leave it out",
        ),
        (
            "dataloader_iter" in _code(module, "training_step").co_varnames,
            "training_step(dataloader_iter) takes batches itself, but the job says which records make a "
            "batch. Let it take (batch, batch_idx)",
        ),
        (
            bool(asking := [name for name in _OF_BATCH if "is_last_batch" in _code(module, name).co_names]),
            f"trainer.is_last_batch is read in {' and '.join(asking)}, but a worker knows of no batch "
            "whether it is its last one of the epoch. Use on_train_epoch_end; for a schedule, call "
            "self.trainer.strategy.session.scheduler(schedule, interval='epoch') in on_train_start",
        ),
        (
            type(module).lr_scheduler_step.__module__.partition(".")[0] not in _PACKAGES,
            f"{type(module).__name__} has a method lr_scheduler_step, but the job steps schedulers. Leave it "
            "out",
        ),
    ]
    for given, said in problems:
        if given:
            raise UsageError(said)


def check_optimizers(given: list[Any], module: Any) -> None:
    """Raises UsageError: the module's `configure_optimizers` has returned None."""
    if any(type(each).__name__ == "_MockOptimizer" for each in given):  # Lightning puts it there
        raise UsageError(
            f"{type(module).__name__}.configure_optimizers returns None, so Lightning trains without an "
            "optimizer, but a job has one, whose steps the parameter server makes. Return a torch optimizer"
        )


def refuse_steps(scheduler: Any) -> None:
    """Make `scheduler.step()` raise UsageError, in a module with manual optimization.

    Each worker would make steps of its own, and which ones one process would make only the module knows.
    """
    kind = type(scheduler)

    def step(*_: object, **__: object) -> None:
        raise UsageError(
            f"the module steps the {kind.__name__} that configure_optimizers returned, but each worker would "
            "count its own steps. Keep the scheduler in the module, as self.schedule, instead of returning "
            "it; in on_train_start call self.trainer.strategy.session.scheduler(self.schedule, "
            "interval='epoch'), or with another interval; and remove step()"
        )

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})  # no attribute: its state has those
