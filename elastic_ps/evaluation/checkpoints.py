"""`elastic_ps.checkpoints`: the loop of a script that evaluates.

The same script evaluates for a running job, for `elastic-ps evaluate`, and by itself on a directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from elastic_ps.contract import env
from elastic_ps.errors import UsageError
from elastic_ps.evaluation.source import Checkpoint, DirectorySource, Source

_source: Source | None = None

_left: list[tuple[Source, Checkpoint]] = []
"""The checkpoints at which scripts have left a loop after a report, by `break` or an error."""


def use(source: Source | None) -> None:
    """Let `checkpoints()` without a directory use this source; None: that of the process's environment."""
    global _source
    _source = source


def checkpoints(directory: Path | str | None = None) -> Iterator[Checkpoint]:
    """The checkpoints to evaluate, one after the other.

    In the evaluator of a job, the loop gets each checkpoint as it appears, oldest first, and blocks while
    there is none. It ends when training is over and the last version is evaluated.

    Args:
        directory: a directory, whose checkpoints the loop gets, oldest first. With None, it gets
            those of the job that this process evaluates, or of the directory that was given to `elastic-ps
            evaluate`.

    Raises:
        UsageError: this process evaluates for no job, and no directory is given.
        UserError: the directory has no checkpoint.
        CheckpointCorrupt: all checkpoints of the directory are broken.
        ConnectionLost: the job's parameter server has not answered for minutes.
    """
    settle()
    return _each(_source_of(directory))


def settle(*, evaluated: bool = True) -> None:
    """Finish the loops that the script has left. Raises like `Source.finish`.

    Args:
        evaluated: whether the reports of the last checkpoint are complete. Otherwise the script has failed or
            was stopped, and the checkpoint has to be evaluated again.
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
            "this process is not the evaluator of a job. Give a directory, as in "
            "elastic_ps.checkpoints('DIR'), start it with `elastic-ps evaluate DIR`, or name it in the job's "
            "spec.evaluator"
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
