"""A worker that is asked to leave, of a job whose parameter server is gone, as when a job is deleted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from elastic_ps.contract import env, exits
from elastic_ps.errors import TransportError
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import WorkerLimits
from tests.testing.addresses import addresses
from tests.testing.harness import Numbers, events, make_mlp, make_spec, running_job
from tests.testing.polling import LIMIT, eventually


@pytest.mark.parametrize("server", [{}, {"bucketBytes": 1024}, {"replicas": 2, "bucketBytes": 1024}])
@pytest.mark.parametrize("asked_first", [True, False])
def test_it_does_not_wait_for_an_end_of_its_step(
    tmp_path: Path, server: dict[str, Any], asked_first: bool
) -> None:
    """Else it would keep its machine until it is killed."""
    in_step, alone = threading.Event(), threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in session.loader(Numbers(400), 4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            if session.version == 2:
                in_step.set()
                assert alone.wait(LIMIT)
            optimizer.step()

    with running_job(tmp_path, parameterServer=server) as job:
        job.worker_limits = WorkerLimits(leaving=timedelta(seconds=0.5))
        worker = job.start(0, script)
        assert in_step.wait(LIMIT)
        if asked_first:
            job.sessions[0].drain()
        while job.servers:
            job.servers.pop(0).close(keep=False)
        alone.set()
        if not asked_first:
            time.sleep(0.2)
            job.sessions[0].drain()
        worker.join(LIMIT)
        assert not worker.is_alive()
        [error] = job.errors
        assert isinstance(error, TransportError)
        assert "the parameter server has not answered for " in str(error)
        job.errors.clear()


CLOSES = """
import time, elastic_ps
def main():
    elastic_ps.connect().close()
    print("closed", flush=True)
    time.sleep(600)
"""


def test_whose_session_was_closed_before_it_joined_ends_at_once(tmp_path: Path) -> None:
    """The script goes on with something else, which nothing would end before it is killed."""
    (tmp_path / "closes.py").write_text(CLOSES)
    environment = env.ProcessEnvironment(
        job="test",
        spec=make_spec(entrypoint="closes:main"),
        role="worker",
        index=0,
        addresses=tuple(addresses(1)),
    )
    variables = {**env.inherited(), **environment.to_variables()}
    command, outputs = [sys.executable, "-m", "elastic_ps.worker"], {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, cwd=tmp_path, **outputs) as worker:  # type: ignore[call-overload]
        try:
            assert worker.stdout.readline() == "closed\n"
            worker.terminate()
            assert worker.wait(LIMIT) == exits.LEFT
        finally:
            worker.kill()


class Processes:
    """A parameter server and a worker, which are started by hand. The server has no directory."""

    def __init__(self, path: Path) -> None:
        self._address, self._http = addresses(2)
        self._history = path
        self._spec = make_spec(
            entrypoint="tests.testing.scripts.steady:main",
            arguments={"records": 4000, "seconds": 0.2, "hurry": str(path / "never"), "widths": [6, 4, 1]},
        )

    def start(self, role: Literal["ps", "worker"]) -> subprocess.Popen[str]:
        environment = env.ProcessEnvironment(
            job="test",
            spec=self._spec,
            role=role,
            index=0,
            addresses=(self._address,),
            bind=self._address if role == "ps" else "127.0.0.1:0",
            http=self._http,
            history=self._history,
        )
        variables = {**env.inherited(), **environment.to_variables(), "OMP_NUM_THREADS": "1"}
        module = "elastic_ps.server" if role == "ps" else "elastic_ps.worker"
        command = [sys.executable, "-m", module]
        return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)

    def await_step(self) -> None:
        """Wait until the worker has made a step."""
        eventually(
            lambda: any(event["event"] == "applied" for event in events(self._history, "worker-0")),
            "the worker trains",
        )


def test_it_has_left_then_and_has_not_failed(tmp_path: Path) -> None:
    """With real processes: the parameter server is killed, then the worker gets SIGTERM within a step."""
    job = Processes(tmp_path)
    with job.start("ps") as server, job.start("worker") as worker:
        try:
            job.await_step()
            server.kill()
            server.wait(LIMIT)
            worker.terminate()
            _, said = worker.communicate(timeout=LIMIT)
        finally:
            server.kill()
            worker.kill()
    assert worker.returncode == exits.LEFT, said
    assert "left in the middle of a step: " in said


@pytest.mark.nightly
def test_a_worker_whose_model_is_lost_ends_as_one_that_may_begin_anew(tmp_path: Path) -> None:
    """With real processes: the parameter server is killed, and another one comes, which has no checkpoint."""
    job = Processes(tmp_path)
    server, worker = job.start("ps"), job.start("worker")
    with worker:
        try:
            with server:
                job.await_step()
                server.kill()
            server = job.start("ps")
            with server:
                _, said = worker.communicate(timeout=LIMIT)
                server.kill()
        finally:
            server.kill()
            worker.kill()
    assert worker.returncode == exits.LOST, said
    assert "has lost the model and has no checkpoint to continue from" in said
