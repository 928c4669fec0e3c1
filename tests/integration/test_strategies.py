"""What every `Strategy` promises: one script, whose workers lose a step, leave and come again, with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.histories import check_histories
from tests.testing.oracle import mse
from tests.testing.trained import await_training, training

LOCAL = {"consistency": {"mode": "local", "steps": 4}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "parameter server": {"parameterServer": {"replicas": 2}},
    "parameter server, one call": {},
    "all-reduce": {"strategy": "all-reduce"},
    "local steps": LOCAL,
    "group of processes": {"worker": {"processes": 2}},
    "local steps of a group": LOCAL | {"worker": {"processes": 2}},
}
RECORDS = 480
VOID, LEAVES = 5, 9
"""The steps in which worker 1 is declared gone, and worker 2 leaves, whom worker 0 awaits then."""


@pytest.mark.parametrize("fields", STRATEGIES.values(), ids=STRATEGIES)
def test_each_keeps_its_promises(tmp_path: Path, fields: dict[str, Any]) -> None:
    models: dict[tuple[int, int], torch.nn.Module] = {}
    void: list[int] = []
    leaves: list[int] = []

    def left() -> bool:
        return {member.worker: member.state for member in job.status().members}.get(2) == "left"

    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), model)
        for step, (x, y) in enumerate(session.loader(Numbers(RECORDS), 4)):
            if step == 0:
                await_training(job, 0, 1, 2)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if (session.worker, rank, step) == (1, 0, VOID):
                void.append(session.version)
                job.declare_gone(1)
            if (session.worker, rank, step) == (2, 0, LEAVES) and not leaves:
                leaves.append(session.version)
                session.drain()
            if (session.worker, rank) == (0, 0) and left():
                job.until(lambda: training(job, 1) and training(job, 2), "both are back")
            optimizer.step()
        models[session.worker, rank] = model

    with running_job(tmp_path, **fields) as job:
        for worker in range(3):
            job.start_processes(worker, script)
        job.until(left, "worker 2 leaves")
        job.start_processes(2, script)
        job.join()
        commits = check_histories(job.history, records=RECORDS, epochs=1)
        members = {(c["worker"], c["incarnation"]) for commit in commits for c in commit["contributions"]}
        of = [sum(worker == each for each, _ in members) for worker in range(3)]
        assert of == [1, 2, 2], "worker 1 has joined again, and worker 2 come again"
        assert (len(void), len(leaves)) == (1, 1)
        (first, *others) = models.values()
        assert len(models) == 3 * job.spec.worker.processes
        for model in others:
            for ours, theirs in zip(first.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours, theirs)
