"""`elastic_ps.checkpoints`: what a script that evaluates loops over.

The same script evaluates for a job that trains, for `elastic-ps evaluate`, and by itself on a directory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from elastic_ps.checkpoint import plain
from elastic_ps.checkpoint.store import Store
from elastic_ps.contract import env
from elastic_ps.errors import CheckpointCorrupt, UsageError, UserError

logger = logging.getLogger(__name__)


class Checkpoint:
    """A checkpoint that is to be evaluated. Belongs to one thread.

    Attributes:
        version: how many optimizer steps the model has taken.
        directory: the directory that holds it, while the loop is at it.
        metrics: what `report` has been given.
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
            own: what the script of the workers names in `session.optimizer(..., own=[...])`; no checkpoint
                has it, and it keeps its values.

        Raises:
            InvalidModel: the model has nothing of a name in `own`.
            ModelMismatch: the model or the optimizer does not fit. Neither has been changed.
        """
        plain.load_checkpoint(self.directory, model, optimizer, version=self.version, own=own)

    def report(self, **metrics: Any) -> None:
        """Report values, as in `loss=loss` or `**{"prec@1": 93.1}`: one number each.

        They are the job's as soon as the loop asks for the next checkpoint. If the loop was left, they are
        when the script begins another one, or ends without an error. A later value of the same name takes the
        place of an earlier one. A number that is not finite is left out of the results.

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
    """Where checkpoints come from, and where results go to."""

    def begin(self) -> Checkpoint | None:
        """The next checkpoint; None if there will be no other. Blocks until that is known."""

    def finish(self, checkpoint: Checkpoint) -> None:
        """The script is done with it."""

    def close(self) -> None:
        """Free all resources. Idempotent."""


class DirectorySource:
    """The whole checkpoints that a directory holds now, oldest first.

    Broken ones are left out and told. If none is whole, `begin` raises CheckpointCorrupt.

    Args:
        version: only this one; None for all.
    """

    def __init__(self, directory: Path, version: int | None = None) -> None:
        self._store = Store(directory)
        versions = self._store.versions()
        if not versions or (version is not None and version not in versions):
            which = "no checkpoint" if version is None else f"no checkpoint of version {version}"
            known = f"; it has {', '.join(map(str, versions))}" if versions else ""
            raise UserError(f"{directory} has {which} (a directory version-*){known}")
        self._left = iter(versions if version is None else [version])
        self._found = False  # one that is whole

    def begin(self) -> Checkpoint | None:
        broken: CheckpointCorrupt | None = None
        for version in self._left:
            try:
                self._store.manifest(version)
            except CheckpointCorrupt as error:
                logger.warning("the checkpoint of version %d is left out: %s", version, error)
                broken = error
                continue
            self._found = True
            return Checkpoint(version, self._store.directory)
        if broken is not None and not self._found:
            raise CheckpointCorrupt(f"no checkpoint is whole, so none is evaluated: {broken}") from broken
        return None

    def finish(self, checkpoint: Checkpoint) -> None:
        """Nobody is told."""

    def close(self) -> None:
        """Nothing is held."""


_source: Source | None = None

_left: list[tuple[Source, Checkpoint]] = []
"""What scripts have left a loop at, after a report: by `break`, or because something has failed."""


def use(source: Source) -> None:
    """From now on `checkpoints()` without a directory gives those of this source."""
    global _source
    _source = source


def checkpoints(directory: Path | str | None = None) -> Iterator[Checkpoint]:
    """The checkpoints to evaluate, one after the other.

    In the evaluator of a job, each checkpoint as it appears, oldest first, until training is over and the
    last version is evaluated. The loop then ends. It blocks while there is none.

    Args:
        directory: the checkpoints of this directory as they are now, oldest first. With None, those of the
            job that this process evaluates, or of the directory that was given to `elastic-ps evaluate`.

    Raises:
        UsageError: this process evaluates for no job, and no directory is given.
        UserError: the directory has no checkpoint.
        CheckpointCorrupt: all checkpoints of the directory are broken.
        ConnectionLost: the job's parameter server has not answered for minutes.
    """
    settle()
    return _each(_source_of(directory))


def settle(*, evaluated: bool = True) -> None:
    """The script goes on after a loop that it has left, or has ended. Raises as `Source.finish`.

    Args:
        evaluated: what it has reported of the last checkpoint is all. Else it has failed, or was stopped, and
            that checkpoint is to be evaluated again.
    """
    while _left:
        source, checkpoint = _left.pop()
        try:
            if evaluated:
                source.finish(checkpoint)
        finally:
            source.close()


def _source_of(directory: Path | str | None) -> Source:
    if directory is not None:
        return DirectorySource(Path(directory))
    if _source is not None:
        return _source
    if not env.in_job():
        raise UsageError(
            "this process evaluates for no job. Give a directory, as in elastic_ps.checkpoints('DIR'), start "
            "it with `elastic-ps evaluate DIR`, or name it in the job's spec.evaluator"
        )
    environment = env.read()
    if environment.role != "evaluator":
        raise UsageError(
            f"elastic_ps.checkpoints() is for the job's evaluator, but this process is its "
            f"{environment.role}. Give a directory to read checkpoints from there"
        )
    from elastic_ps.evaluation.remote import JobSource
    from elastic_ps.transport import credentials, ways

    connection = ways.connect(environment.addresses[0], credentials=credentials.of_process(environment))
    return JobSource(environment.job, connection, run=environment.run)


def _each(source: Source) -> Iterator[Checkpoint]:
    left = False
    try:
        while (checkpoint := source.begin()) is not None:
            try:
                yield checkpoint
            except GeneratorExit:
                if left := bool(checkpoint.metrics):
                    _left.append((source, checkpoint))
                raise
            source.finish(checkpoint)
    finally:
        if not left:
            source.close()
