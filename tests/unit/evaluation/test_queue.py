"""The evaluator's queue: a result is on disk before it is acknowledged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_ps.api.job import Evaluator
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import CheckpointCorrupt, CheckpointError, RefusalCode, Refused, StorageUnavailable
from elastic_ps.evaluation.queue import EvaluationQueue
from elastic_ps.evaluation.results import read


class Full(Store):
    """Its disk may be full."""

    full = False

    def write_beside(self, *given: Any, **named: Any) -> None:
        if self.full:
            raise CheckpointError("No space left on device")
        super().write_beside(*given, **named)


def test_a_result_that_could_not_be_written_is_not_acknowledged_before_it_is(tmp_path: Path) -> None:
    store = Full(tmp_path)
    queue = EvaluationQueue(store, Evaluator(entrypoint="a:b"), store.next_term())
    queue.written(7)
    assert queue.begin("one", None) == (7, False)
    store.full = True
    for _ in range(2):
        with pytest.raises(Refused, match="cannot be written to disk yet"):
            queue.finish(7, {"accuracy": 0.5}, "")
    store.full = False
    queue.finish(7, {"accuracy": 0.5}, "")
    found = read(tmp_path)
    assert found is not None
    assert [each["version"] for each in found["state"]["results"]] == [7]
    assert EvaluationQueue(store, Evaluator(entrypoint="a:b"), 2).results() == queue.results()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageUnavailable("Stale file handle"), RefusalCode.NOT_READY),
        (CheckpointCorrupt("no digest"), RefusalCode.INVALID),
    ],
)
def test_a_file_that_cannot_be_read_now_may_be_asked_for_again(
    tmp_path: Path, error: CheckpointError, code: RefusalCode
) -> None:
    class Failing(Store):
        def describe(self, version: int) -> Manifest:
            raise error

    queue = EvaluationQueue(Failing(tmp_path), Evaluator(entrypoint="a:b"), 1)
    with pytest.raises(Refused, match=str(error)) as refused:
        next(queue.read(7, "manifest.json"))
    assert refused.value.code is code
