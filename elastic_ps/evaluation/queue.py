"""The evaluator's queue on shard 0: keeps checkpoints until they are evaluated, and hands them out.

The evaluator reads a checkpoint through the parameter server, not from the volume, which on a cluster is
often mounted by one node only. `evaluation.decisions` decides; its state is written to the checkpoint
directory, so that a new parameter server continues with it.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from elastic_ps.api.job import Evaluator
from elastic_ps.api.status import EvaluationStatus
from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.manifest import MANIFEST
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import CheckpointCorrupt, CheckpointError, RefusalCode, Refused, StorageUnavailable
from elastic_ps.evaluation import results as stored
from elastic_ps.evaluation.decisions import Evaluation, Evaluations

logger = logging.getLogger(__name__)

CHUNK = 4 * 1024 * 1024
"""The bytes of a file in one frame."""


class EvaluationQueue:
    """The evaluator's work, on shard 0. Thread-safe.

    Args:
        store: the directory that all shards share.
        spec: the job's evaluator.
        term: the term in which to write to the directory; changed when a new one begins.

    Raises:
        StorageUnavailable: the earlier evaluations cannot be read at the moment.
    """

    def __init__(self, store: Store, spec: Evaluator, term: int) -> None:
        best = spec.best
        self.term = term
        self._store, self._spec = store, spec
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # the file must never become older
        self._work = Evaluations(
            every=spec.every,
            backlog=spec.backlog,
            metric=best.metric if best is not None else None,
            highest=best is not None and best.mode == "max",
        )
        try:
            found = stored.read(store.directory)
            if found is not None:
                self._work.restore(found["state"])
        except (CheckpointCorrupt, KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("cannot read the results of earlier evaluations, which are lost: %r", error)
        self._unwritten = False  # a change could not be written

    # --- for the checkpointer

    def asks(self, version: int, *, since: int) -> bool:
        """See `Evaluations.asks`."""
        with self._lock:
            return self._work.asks(version, since=since)

    @property
    def held(self) -> frozenset[int]:
        """The versions that may not be deleted."""
        with self._lock:
            return self._work.held

    def written(self, version: int) -> None:
        """Add a checkpoint that is on disk. Blocks for the disk."""

        def change(work: Evaluations) -> None:
            if work.wants(version):
                work.add(version)

        self._change(change)

    def go_back(self, version: int) -> None:
        """Go back to a checkpoint of this version. Blocks for the disk."""
        there = self._store.versions()

        def change(work: Evaluations) -> None:
            work.go_back(version, there)
            if work.wants(version):
                work.add(version)

        self._change(change)

    # --- for the status

    def status(self) -> EvaluationStatus:
        with self._lock:
            return self._work.status()

    def results(self) -> list[Evaluation]:
        """The results, in the order of evaluation."""
        with self._lock:
            return list(self._work.results)

    # --- for the evaluator

    def finish(self, version: int, metrics: Mapping[str, float], problem: str) -> None:
        """Take the result of a version, or why it cannot be evaluated. Blocks for the disk."""
        if problem:
            logger.warning("the evaluator cannot read the checkpoint of version %d: %s", version, problem)
            self._change(lambda work: work.give_up(version))
            return
        if self._change(lambda work: work.finish(version, metrics)) is not None:
            logger.info("%s", self.status())
            wanted = self._work.metric
            if wanted is not None and not math.isfinite(metrics.get(wanted, math.nan)):
                text = (
                    "version %d cannot be the best: evaluator.best.metric is %r, and the script reported %s"
                )
                logger.warning(text, version, wanted, dict(metrics) or "nothing")
        with self._lock:
            if self._unwritten:
                raise Refused(RefusalCode.NOT_READY, "the result cannot be written to disk yet")

    def begin(self, process: str, last: int | None) -> tuple[int | None, bool]:
        """The version to evaluate next, and, if there is none, whether there will be no more.

        Args:
            process: a name of the evaluator's process.
            last: the last version on disk, if training is over.
        """

        with self._lock:
            if last is None and not self._work.waiting and not self._unwritten:
                return None, False  # the usual case, which needs no look at the results

        def change(work: Evaluations) -> int | None:
            if last is not None:
                work.add_last(last)
            return work.begin(process)

        version = self._change(change)
        return version, version is None and last is not None

    def read(self, version: int, name: str) -> Iterator[memoryview]:
        """A file of a checkpoint, in pieces. Blocks for the disk.

        Raises:
            Refused: INVALID: there is no such file, or it is damaged. NOT_READY: it cannot be read now.
        """
        try:
            if name not in (MANIFEST, *(file.file for file in self._store.describe(version).files)):
                raise Refused(RefusalCode.INVALID, f"the checkpoint of version {version} has no {name!r}")
            path = self._store.path(version) / name
            with files.reading(path), files.open_to_read(path) as file:
                while piece := file.read(CHUNK):
                    yield memoryview(piece)
        except CheckpointError as error:
            passes = isinstance(error, StorageUnavailable)
            raise Refused(RefusalCode.NOT_READY if passes else RefusalCode.INVALID, str(error)) from error

    _T = TypeVar("_T")

    def _change(self, change: Callable[[Evaluations], _T]) -> _T:
        """Change the state, log the versions that were given up, and write the state."""
        with self._writing:
            with self._lock:
                before, missed = self._text(), set(self._work.missed)
                answer, after = change(self._work), self._text()
                given_up = set(self._work.missed) - missed
            for version in sorted(given_up):
                logger.warning("the checkpoint of version %d will not be evaluated", version)
            if after != before or self._unwritten:
                try:
                    self._store.write_beside(stored.FILE, after, term=self.term)
                    self._unwritten = False
                except CheckpointError as error:
                    self._unwritten = True
                    logger.warning("cannot write the evaluations: %s", error)
        return answer

    def _text(self) -> str:
        spec, best = self._spec, self._work.best
        document: dict[str, Any] = {
            "entrypoint": spec.entrypoint,
            "arguments": spec.arguments,
            "best": best.version if best is not None else None,
            "state": self._work.to_json(),
        }
        return json.dumps(document, indent=1)
