"""The checkpoints that are evaluated, one after the other, and where they come from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from elastic_ps.checkpoint import plain
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import CheckpointCorrupt, CheckpointUnreadable, UsageError

logger = logging.getLogger(__name__)


class Checkpoint:
    """A checkpoint to evaluate. For one thread only.

    Attributes:
        version: the number of optimizer steps that the model has taken.
        directory: its directory, which exists until the loop goes on.
        metrics: the reported values.
    """

    def __init__(self, version: int, directory: Path) -> None:
        self.version = version
        self.directory = directory
        self.metrics: dict[str, float] = {}

    def load(
        self,
        model: torch.nn.Module,
        optimizer: plain.AnyOptimizer | None = None,
        *,
        own: Sequence[str] = (),
    ) -> None:
        """Load it into a model, and its optimizer's state into an optimizer. Blocks for reading the files.

        Tensors keep their devices; the model stays in training or evaluation mode, as it is.

        Args:
            own: the names that the workers' script gives to `session.optimizer(..., own=[...])`. No
                checkpoint has these tensors, and they keep their values.

        Raises:
            InvalidModel: the model has nothing with a name in `own`.
            ModelMismatch: the model or the optimizer does not fit. Neither has been changed.
        """
        plain.load_checkpoint(self.directory, model, optimizer, own=own)

    def report(self, **metrics: Any) -> None:
        """Report values, as in `loss=loss` or `**{"prec@1": 93.1}`: one number each.

        The job gets them when the loop asks for the next checkpoint, or, if the loop was left, when the
        script begins another one or ends without an error. A later value replaces an earlier one of the same
        name. Numbers that are not finite are left out of the results.

        Raises:
            UsageError: a value is not one number.
        """
        for name, value in metrics.items():
            try:
                self.metrics[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
                what = f"a {type(value).__name__}{shape}"
                raise UsageError(f"checkpoint.report({name}=...) takes one number, but got {what}") from error


class Source(Protocol):
    """A source of checkpoints, which takes the results."""

    def begin(self) -> Checkpoint | None:
        """The next checkpoint; None if there will be no more. Blocks until that is known."""

    def finish(self, checkpoint: Checkpoint) -> None:
        """Take the results of a checkpoint that the script is done with."""

    def close(self) -> None:
        """Free all resources. Idempotent."""


class DirectorySource:
    """The complete checkpoints of a directory, oldest first, and those that are written meanwhile.

    Broken ones are skipped, with a warning. If none is complete, `begin` raises CheckpointCorrupt.

    Args:
        version: only this one; None for all.
    """

    def __init__(self, directory: Path, version: int | None = None) -> None:
        self._store, self._only, self._last = Store(directory), version, -1
        self._store.chosen(version)
        self._found = False  # a complete one

    def begin(self) -> Checkpoint | None:
        broken: CheckpointCorrupt | None = None
        while (version := self._next()) is not None:
            self._last = version
            try:
                self._store.manifest(version)
            except CheckpointUnreadable:
                raise
            except CheckpointCorrupt as error:
                logger.warning("the checkpoint of version %d is skipped: %s", version, error)
                broken = error
                continue
            self._found = True
            return Checkpoint(version, self._store.path(version))
        if broken is not None and not self._found:
            raise CheckpointCorrupt(
                f"all checkpoints are damaged, so none is evaluated: {broken}"
            ) from broken
        return None

    def _next(self) -> int | None:
        """The next version; older ones may have been deleted meanwhile."""
        later = (each for each in self._store.versions() if each > self._last)
        return next((each for each in later if self._only in (None, each)), None)

    def finish(self, checkpoint: Checkpoint) -> None:
        """Results go nowhere."""

    def close(self) -> None:
        """There is nothing to free."""
