"""Workers that come, wait and go, as the parameter server sees them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.server.node import Node
from elastic_ps.worker.session import Session
from tests.integration.harness import Job, Numbers, make_mlp, running_job, wait_until
from tests.integration.oracle import mse


def computing(job: Job) -> set[int]:
    """The workers that the rounds wait for, or will from the next one on."""
    return {member.worker for member in job.status().members if member.state == "training"}


def test_workers_that_wait_for_a_round_do_not_keep_the_server_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    advance = Node.advance
    monkeypatch.setattr(Node, "advance", lambda self, order: told.append(order) or advance(self, order))
    hold = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in session.loader(Numbers(64), 4):
            mse(model, x, y).backward()
            if session.worker == 0:
                hold.wait(30)
            optimizer.step()

    with running_job(tmp_path) as job:
        try:
            job.start(0, script)
            wait_until(lambda: computing(job) == {0}, "worker 0 computes")
            for worker in (1, 2, 3):
                job.start(worker, script)
            wait_until(lambda: computing(job) == {0, 1, 2, 3}, "all wait for worker 0")
            before = len(told)
            threading.Event().wait(0.5)
            assert len(told) - before < 10
        finally:
            hold.set()
        job.join()
