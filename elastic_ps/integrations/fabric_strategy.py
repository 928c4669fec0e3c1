"""The strategy for Lightning Fabric, whichever of its two packages a script imports.

`elastic_ps.integrations.fabric` and `.lightning_fabric` combine this with the classes of their package.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import RandomSampler

from elastic_ps.errors import UsageError
from elastic_ps.integrations.epochs import EpochLoader
from elastic_ps.integrations.gradients import ClippedSteps, of_second_step
from elastic_ps.integrations.processes import OneDevice, as_only_process, leads, too_many_devices
from elastic_ps.standalone import connect
from elastic_ps.worker.optimizer import ElasticOptimizer
from elastic_ps.worker.session import Session

_RESUME = (
    "fabric.load(...) after fabric.setup(...) cannot be used in a job: a job continues from its own "
    "checkpoints, which hold model, optimizer, schedules and the remaining records. Start it with "
    "`elastic-ps run JOB --resume DIR`. To begin with weights that were saved elsewhere, load them into the "
    "model before fabric.setup(...)"
)
_SCHEDULED = (
    "fabric.setup(..., scheduler=...) gives Fabric a scheduler, but the job steps schedulers by the records "
    "that are trained. Leave it out, call fabric.strategy.session.scheduler(scheduler, interval='sample') "
    "(or 'epoch') after fabric.setup(...), and remove scheduler.step()"
)


class FabricInJob(OneDevice):
    """A strategy of Fabric's whose processes are the workers of a job. For one thread.

    The first DataLoader that is set up has the records of the job; others are for evaluation, and each worker
    reads all of them. `fabric.all_gather` and `all_reduce` return this worker's values, and `barrier` returns
    at once. `fabric.is_global_zero` is true on worker 0. After a loop over the training data it is true on
    the chief instead, and may block until that is known (see `Session.is_chief`).

    Args:
        epochs: how many loops over the training data the script makes.
        records: the items that make an epoch, if the data are a stream; see `Session.loader`.
        max_grad_norm: what the script passes to `fabric.clip_gradients(max_norm=...)`, if it calls that.
        overlap: send gradients while backward runs, if the script makes a step after each backward and has no
            GradScaler; see `Session.optimizer`.
        session: by default the process's own, see `elastic_ps.connect`.
        base: see `Session.optimizer`.
        options: those of Fabric's strategies: accelerator, checkpoint_io, precision.

    Attributes:
        session: of the job.
        elastic: the optimizer of the job, once it is set up.

    Raises:
        UsageError: another launcher has started this process as one of several.
    """

    trains_in_job = True  # for `worker.model.checks`
    environment_kind: type[Any]
    precision: Any

    def __init__(
        self,
        *,
        epochs: int,
        records: int | None = None,
        max_grad_norm: float | None = None,
        overlap: bool = False,
        session: Session | None = None,
        base: Literal["external"] | None = None,
        **options: Any,
    ) -> None:
        with as_only_process("Fabric"):
            self.session = session or connect()
        self.elastic: ElasticOptimizer | None = None
        self.num_nodes = self._num_nodes = 1
        self.cluster_environment = self.environment_kind()
        self._epochs, self._records, self._base = epochs, records, base
        self._max_grad_norm, self._overlap = None if self._local else max_grad_norm, overlap
        self._models: list[torch.nn.Module] = []
        self._training: EpochLoader | None = None
        self._shuffled = False
        self._clipped = ClippedSteps(self._max_grad_norm)
        super().__init__(**options)
        leader = self.session.worker == 0 and leads()
        # Fabric prints where local_rank is 0: in one process of the job.
        self.global_rank = self.local_rank = 0 if leader else max(1, self.session.worker)
        rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        """Fabric has found its devices. Raises UsageError: these are several."""
        if problem := too_many_devices(self.parallel_devices, self._num_nodes):
            raise UsageError(problem)

    @property
    def is_global_zero(self) -> bool:
        """True on worker 0. After a loop over the training data, true on the chief instead."""
        training = self._training
        if training is None or training.within or not training.entered:
            return bool(self.global_rank == 0)
        return training.is_chief()

    @property
    def _local(self) -> bool:
        return self.session.spec.consistency.mode == "local"

    # What is set up.

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Like Fabric's. An optimizer that is set up later may train it."""
        self._models.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Like Fabric's. See `setup_module_and_optimizers`, which raises the same. Blocks."""
        return self._join([optimizer])[0]

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Any], None]:
        """Like Fabric's. The optimizers join the job, with the model that they train. Blocks.

        Raises:
            UsageError: there is a scheduler, or the model is not known.
            InvalidModel, ModelMismatch: see `Session.optimizer`.
        """
        if scheduler is not None:
            raise UsageError(_SCHEDULED)
        return self.setup_module(module), self._join(optimizers), None

    def _join(self, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
        trained = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        models = [m for m in self._models if trained <= {id(p) for p in m.parameters()}]
        if not models or self.elastic is not None:
            raise UsageError(
                "a job trains one model, whose optimizers fabric.setup(...) takes together, as in model, "
                "optimizer = fabric.setup(model, optimizer). Put several networks, such as those of a GAN, "
                "into one torch.nn.ModuleDict, and set it up with both optimizers"
            )
        names = [str(index) for index, _ in enumerate(optimizers)]
        self.elastic = self.session.optimizer(
            optimizers[0] if len(optimizers) == 1 else dict(zip(names, optimizers, strict=True)),
            models[-1],
            overlap=self._overlap and getattr(self.precision, "scaler", None) is None,
            max_grad_norm=self._max_grad_norm,
            base=self._base,
        )
        self.elastic.second_step = of_second_step("fabric.strategy")
        return [self.elastic] if len(optimizers) == 1 else [self.elastic[name] for name in names]

    def process_dataloader(self, dataloader: Any) -> Any:
        """The first one becomes the job's; see `Session.loader`. Others stay whole on each worker.

        Raises:
            UsageError: one for evaluation comes first.
        """
        shuffled = isinstance(getattr(dataloader, "sampler", None), RandomSampler)
        if self._training is not None:
            if shuffled and not self._shuffled:
                raise UsageError(
                    "the first DataLoader that fabric.setup_dataloaders(...) got has a fixed order, but "
                    "this one has a random order. The job trains on the first one: set up the training "
                    "DataLoader before those for evaluation"
                )
            return dataloader
        self._shuffled = shuffled
        self._training = EpochLoader(
            self.session.loader(dataloader, epochs=self._epochs, records=self._records),
            self.session,
            epochs=self._epochs,
            place=lambda batch: batch,
            ended=self._step_with_rest,
        )
        self.session.at_finish.append(partial(self._training.heed_break, ends=True))
        return self._training

    def epochs(self) -> Iterator[int]:
        """The number of each epoch, from the one that the job has reached; see `ElasticAccelerator.epochs`.

        Raises:
            UsageError: there is no DataLoader yet.
        """
        if self._training is None:
            raise UsageError("call fabric.setup_dataloaders(...) with the training DataLoader first")
        return self._training.epochs()

    # Steps.

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Like Fabric's. The step is clipped if `fabric.clip_gradients` was called for it. Blocks."""
        with self._clipped.step(self.elastic):
            return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]

    def _step_with_rest(self) -> None:
        """At the end of an epoch: a step with the batches that no step was made with."""
        if self.elastic is not None and self.elastic.owes_step:
            self._clipped.as_last()
            self.optimizer_step(self.elastic)
            self.elastic.zero_grad()

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """The parameter server clips the gradient of all workers in the next step. Does not change gradients.

        Returns the 2-norm of this worker's own gradient. In mode `local` it is Fabric's own, which clips.

        Raises:
            UsageError: `max_grad_norm` was not given at the start, or it is another norm.
            RuntimeError: `error_if_nonfinite`, and the norm is not finite.
        """
        if self._local:
            norm: torch.Tensor = super().clip_gradients_norm(  # type: ignore[misc]
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
            return norm
        self.precision.unscale_gradients(optimizer)
        norm = self._clipped.clip(
            self.elastic,
            self.precision.main_params(optimizer),
            max_norm,
            norm_type,
            call="fabric.clip_gradients(max_norm=...)",
            how="ElasticStrategy",
        )
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradient is {norm.item()}, so it cannot be clipped")
        return norm

    def clip_gradients_value(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, clip_val: float
    ) -> None:
        """Like Fabric's in mode `local`. Raises UsageError in other modes."""
        if not self._local:
            raise UsageError(
                "fabric.clip_gradients(clip_val=...) clips each element of a gradient, but gradients are "
                "added up on the parameter server. Use max_norm, and ElasticStrategy(max_grad_norm=...)"
            )
        super().clip_gradients_value(module, optimizer, clip_val)  # type: ignore[misc]

    # Files.

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Like Fabric's where `is_global_zero` is true. Blocks.

        A job does not need it: it writes checkpoints of its own.
        """
        if self.is_global_zero:
            super().save_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Like Fabric's. Raises UsageError where it would resume a training: a job does so otherwise."""
        if state and self.elastic is not None:
            raise UsageError(_RESUME)
        return super().load_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]
