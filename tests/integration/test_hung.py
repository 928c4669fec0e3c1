"""A worker that lives and makes no progress does not hold the others up for ever."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.job import TrainingJob, parse_job
from elastic_ps.contract import exits
from elastic_ps.contract.env import Role
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.local import Launcher, Options
from elastic_ps.server.limits import ServerLimits
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import WorkerLimits
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.launching import forks
from tests.testing.oracle import mse
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change
from tests.testing.trained import asks

WAITED = r"the others have waited for its step for \d+\.\d s"
"""At least as long as `progressTimeout`."""


IN_ORDER = {"globalBatchSize": 12, "deterministic": True}


@pytest.mark.parametrize(
    ("shards", "consistency", "hanging"),
    per_change(
        [(1, {}, 1), (2, {}, 1), (1, IN_ORDER, 0), (2, IN_ORDER, 0), (1, IN_ORDER, 1)],
        keep=[(2, {}, 1), (1, IN_ORDER, 0)],
    ),
)
def test_the_others_go_on_and_the_worker_is_told(
    tmp_path: Path, shards: int, consistency: dict[str, Any], hanging: int
) -> None:
    """Its earlier pushes are void, its records go to the others, and its next call is refused by name.

    Of workers that push one after the other, those after it wait for their turn, and are not hung.
    """
    stuck, release = threading.Event(), threading.Event()
    refusals: list[Refused] = []
    told: list[str] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        try:
            for step, (x, y) in enumerate(session.loader(Numbers(400), 4)):
                if not step:
                    job.until(lambda: asks(job, 0, 1, 2), "three workers ask for records")
                optimizer.zero_grad()
                mse(model, x, y).backward()  # pushes all buckets but the last
                if session.worker == hanging and step >= 3 and not stuck.is_set():
                    stuck.set()
                    assert release.wait(LIMIT)
                optimizer.step()
        except Refused as refusal:
            refusals.append(refusal)

    with running_job(
        tmp_path,
        worker={"replicas": 3, "leaseDuration": "10s", "progressTimeout": "2s"},
        consistency=consistency,
        parameterServer={"replicas": shards, "bucketBytes": 1024},
    ) as job:
        job.on_hung = told.append
        job.stop_time()
        for worker in range(3):
            job.start(worker, script)
        job.until(lambda: stuck.is_set() and len(job.sessions) == 3, "a worker is stuck")
        job.let_hang(hanging)
        job.until(lambda: job.status().progress.finished, "the others train all records")
        [member] = [m for m in job.status().members if m.state == "hung"]
        assert member.worker == hanging
        assert re.fullmatch(WAITED, member.reason)
        eventually(lambda: bool(told), "its heartbeat is told")
        release.set()
        job.join()
        commits = job.commits()
    assert told[0] == f"worker {hanging} was declared hung: {member.reason}"
    assert [refusal.code for refusal in refusals] in ([RefusalCode.HUNG], [])
    assert (
        sum(c["incarnation"] == member.incarnation for k in commits for c in k["contributions"])
        == member.steps
    )
    assert check(read(tmp_path / "history"), Data(400, 1)) == []


@pytest.mark.parametrize("server", [{"bucketBytes": 1024}, {"replicas": 2}])
def test_who_waits_for_its_turn_waits_for_as_long_as_it_takes(tmp_path: Path, server: dict[str, Any]) -> None:
    """The parameter server answers it, so its patience does not end."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step, (x, y) in enumerate(session.loader(Numbers(40), 4)):
            if session.worker == 0 and step == 2:
                time.sleep(1)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    worker, consistency = {"replicas": 2}, {"deterministic": True}
    limits = ServerLimits(shard_answer=timedelta(milliseconds=50))
    fields: dict[str, Any] = {"worker": worker, "consistency": consistency, "parameterServer": server}
    with running_job(tmp_path, limits=limits, **fields) as job:
        job.worker_limits = WorkerLimits(patience=timedelta(milliseconds=300))
        job.run(script, workers=2)
    assert check(read(tmp_path / "history"), Data(40, 1)) == []


def hanging_job(tmp_path: Path, how: str, *, limit: str = "4s") -> TrainingJob:
    spec = {
        "entrypoint": "tests.testing.scripts.steady:main",
        "arguments": {
            "records": 4000,  # who is killed when all is trained has not failed
            "seconds": 0.01,
            "hurry": str(tmp_path / "never"),
            "stuck": str(tmp_path / "stuck"),
            "frozen": how == "frozen",
        },
        "worker": {
            "replicas": 2,
            "leaseDuration": "2s" if how == "frozen" else "6s",
            "progressTimeout": limit,
        },
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    return parse_job({**document, "metadata": {"name": f"hang-{how}"}, "spec": spec}, source="test")


def test_a_process_says_on_request_where_its_threads_are(tmp_path: Path) -> None:
    job = hanging_job(tmp_path, "looping", limit="600s")
    with Launcher(job, Options(forks=forks(), root=tmp_path)) as launcher:
        launcher.start()
        eventually((tmp_path / "stuck").exists, "worker 1 is in its loop")
        pids = {(p.role, p.index): p.pid for p in launcher.status().processes}
        requests: list[tuple[Role, int, str]] = [("worker", 1, "in go_on_for_ever"), ("ps", 0, "in _tick")]
        for role, index, where in requests:
            os.kill(pids[role, index], signal.SIGUSR1)
            log = launcher.directory.log(role, index)
            eventually(lambda: where in log.read_text(), f"the {role} says so")  # noqa: B023 (at once)
        assert {(p.role, p.index): p.pid for p in launcher.status().processes} == pids, "it goes on"


@pytest.mark.parametrize("how", per_change(["looping", "frozen"], keep=["looping"]))
def test_its_process_is_replaced(tmp_path: Path, how: str) -> None:
    """It ends itself, and says where it hung; if no thread of it can run, the launcher kills it."""
    options = Options(forks=forks(), root=tmp_path, history=tmp_path / "history")
    with Launcher(hanging_job(tmp_path, how), options) as launcher:
        launcher.start()
        assert launcher.wait(timedelta(seconds=3 * LIMIT)), launcher.status()
        outcome = launcher.outcome()
        log = launcher.directory.log("worker", 1).read_text()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert (tmp_path / "stuck").exists()
    assert outcome.status.failures == 1
    texts = "\n".join(event.text for event in outcome.record.events)
    if how == "looping":
        assert "worker 1 was declared hung at version" in texts
        assert re.search(WAITED, texts)
        assert f"exit status {exits.HUNG}" in texts
        assert "steady.py" in log, "where its threads were"
    else:
        assert "killing worker 1: it was declared lost (silent for 2 s) and has not come back for" in texts
    assert check(read(tmp_path / "history"), Data(4000, 1)) == []
