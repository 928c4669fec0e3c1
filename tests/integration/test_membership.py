"""Workers that come, wait and go, as the parameter server sees them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from elastic_ps.contract import env
from elastic_ps.errors import UsageError
from elastic_ps.server.calls.node import Node
from elastic_ps.server.orders import Advance, Report
from elastic_ps.server.process import ParameterServer
from elastic_ps.transport.grpc import GrpcConnection, GrpcServer
from elastic_ps.worker import current
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.polling import LIMIT, eventually
from tests.testing.service import environment
from tests.testing.trained import await_training


def computing(job: Job) -> set[int]:
    """The workers that the rounds wait for, or will from the next one on."""
    return {member.worker for member in job.status().members if member.state == "training"}


def test_workers_that_wait_for_a_round_do_not_keep_the_server_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Advance] = []
    original = Node.advance

    def advance(node: Node, order: Advance) -> Report:
        told.append(order)
        return original(node, order)

    # What shard 0 orders of its own shard goes over no connection.
    monkeypatch.setattr(Node, "advance", advance)
    hold = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in session.loader(Numbers(64), 4):
            mse(model, x, y).backward()
            if session.worker == 0:
                assert hold.wait(LIMIT)
            optimizer.step()

    with running_job(tmp_path) as job:
        try:
            job.start(0, script)
            job.until(lambda: computing(job) == {0}, "worker 0 computes")
            for worker in (1, 2, 3):
                job.start(worker, script)
            job.until(lambda: computing(job) == {0, 1, 2, 3}, "all wait for worker 0")
            before = len(told)
            threading.Event().wait(0.5)
            assert len(told) - before < 10
        finally:
            hold.set()
        job.join()


def test_a_newcomer_gets_what_is_not_trained_as_well(tmp_path: Path) -> None:
    """Parameters that the optimizer does not have keep the first worker's values; they have no versions."""
    models: dict[int, torch.nn.Module] = {}

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp(seed=session.worker)
        sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer = session.optimizer(sgd, model)
        for x, y in session.loader(Numbers(64), 4):
            if session.worker == 0 and session.version == 3:
                job.start(1, script)
                job.until(lambda: 1 in computing(job), "worker 1 waits")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert any(len(commit["contributions"]) == 2 for commit in job.commits())
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_slow_worker_is_seen_and_so_is_the_age_of_what_is_on_disk(tmp_path: Path) -> None:
    """The others' time does not hold what they wait for the slow one."""
    seen = threading.Event()

    def others_are_done() -> bool:
        rounds = job.coordinator.job.state.rounds
        return rounds.expected - {1} <= rounds.done.keys()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=False)
        for step, (x, y) in enumerate(session.loader(Numbers(120), 4)):
            if step == 0:
                await_training(job, 0, 1, 2)
            if session.version >= 8:
                assert seen.wait(LIMIT)
            mse(model, x, y).backward()
            if session.worker == 1:  # also where the others are held up
                eventually(others_are_done, "the others have made their steps")
                time.sleep(0.1)
            optimizer.step()
            optimizer.zero_grad()

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"interval": "1h"}},
        worker={"replicas": 3},
    ) as job:
        for worker in range(3):
            job.start(worker, script)
        job.until(lambda: job.version >= 8, "the workers have a mean")
        status = job.status()
        seconds = {member.worker: member.step_seconds for member in status.members}
        later = job.status()
        seen.set()
        job.join()
        ended = job.status()
    assert seconds[1] > 0.1
    assert max(status.members, key=lambda member: member.slowness or 0).worker == 1
    assert min(seconds[0], seconds[2]) < seconds[1]
    assert status.progress.durable_version == 0
    assert status.durable_age_seconds <= later.durable_age_seconds
    assert ended.progress.durable_version == ended.progress.version, "the last one is kept before the end"
    written = datetime.fromisoformat(status.progress.durable_time).timestamp()
    assert abs(time.time() - status.durable_age_seconds - written) < 60


def test_a_process_trains_once_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has used nothing but tensors of the server may come back."""
    contract = replace(environment(), role="worker", addresses=("127.0.0.1:1",))
    for name, value in contract.to_variables().items():
        monkeypatch.setenv(name, value)
    with running_job(tmp_path) as job:
        before, session = job.session(0), job.session(0)
        monkeypatch.setattr(current, "_current", before)  # as a process has it
        assert current.connect() is before
        before.close()
        again = current.connect()
        again.close()
        assert again is not before
        monkeypatch.setattr(current, "_current", session)
        model = make_mlp()
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        if not (child := os.fork()):  # such as a process of a DataLoader
            os._exit(0 if current.connect() is not session else 1)
        assert os.waitpid(child, 0)[1] == 0
        session.close()
        with pytest.raises(UsageError, match=r"that it trained in, .* start a job for each"):
            current.connect()


JOINS = """
import elastic_ps, torch
session, model = elastic_ps.connect(), torch.nn.Linear(4, 1)
session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
input()
"""


def test_a_worker_knows_it_from_its_environment(tmp_path: Path) -> None:
    """In a process of its own, which keeps the session."""
    listener, given = GrpcServer("127.0.0.1:0"), environment()
    server = ParameterServer(given, listener, lambda _: GrpcConnection(listener.address))
    contract = replace(
        given,
        role="worker",
        addresses=(listener.address,),
        hostname="digits-worker-0",
        joined=tmp_path / "joined",
    )
    command, variables = [sys.executable, "-c", JOINS], {**env.inherited(), **contract.to_variables()}
    try:
        with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE) as worker:
            try:
                eventually((tmp_path / "joined").exists, "it has joined")
                (member,) = server.status().members
            finally:
                worker.kill()
    finally:
        server.close(keep=False)
    assert member.host == "digits-worker-0"
