"""Gradient hooks that run on several threads at the same time, as autograd runs those of several devices."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.worker.session import Session
from elastic_ps.worker.strategies.push_pull import PushPull
from elastic_ps.worker.wire.dialogue import Step
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import flat_of
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.polling import LIMIT

PARTS = 3


def make_parts() -> torch.nn.ModuleList:
    return torch.nn.ModuleList(make_mlp((6, 1), seed=part) for part in range(PARTS))


def test_hooks_on_several_threads_make_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the model has its backward on a thread, and all copy their first gradient together.

    A step that began a second time would forget the buckets that were ready.
    """
    data, ours, copied, begun = Numbers(20), make_parts(), threading.local(), list[int]()
    begin = PushPull.begin

    def counted(exchange: PushPull, step: Step, *arguments: Any, **named: Any) -> None:
        begun.append(step.number)
        begin(exchange, step, *arguments, **named)

    # How often a step begins shows only where buckets are forgotten by that.
    monkeypatch.setattr(PushPull, "begin", counted)

    def script(session: Session) -> None:
        optimizer = session.optimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours)
        contribution = flat_of(optimizer).writable_contribution

        def together(index: int) -> torch.Tensor:
            if not hasattr(copied, "once") and threading.current_thread().name.startswith("backward"):
                copied.once = True
                meeting.wait(LIMIT)
            return contribution(index)

        # The threads meet where a gradient is copied, and no hook of a script is called there.
        monkeypatch.setattr(flat_of(optimizer), "writable_contribution", together)
        for x, y in session.loader(data, 4):
            meeting = threading.Barrier(PARTS)
            optimizer.zero_grad()
            with ThreadPoolExecutor(PARTS, thread_name_prefix="backward") as threads:
                for done in [threads.submit(mse(part, x, y).backward) for part in ours]:
                    done.result()
            optimizer.step()

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job.start(0, script)
        job.join()
        assert_each_record_once(job.commits(), records=len(data), epochs=1)
    assert begun == [0, 1, 2, 3, 4]
    theirs = make_parts()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for start in range(0, len(data), 4):
        optimizer.zero_grad()
        for part in theirs:
            mse(part, data.x[start : start + 4], data.y[start : start + 4]).backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
