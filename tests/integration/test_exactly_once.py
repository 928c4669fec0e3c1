"""Every record of every epoch is in the model exactly once, whatever workers come, go or die."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.local import Launcher, Options
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, events, make_mlp, running_job
from tests.testing.histories import check_histories, worker_steps
from tests.testing.launching import forks, make_job, version_of, wait_for_end, wait_for_workers
from tests.testing.oracle import mse
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change
from tests.testing.transports import BY_NAME

STEADY = "tests.testing.scripts.steady:main"


class Crash(Exception):
    """A process that ends in the middle of something."""


def churner(data: Numbers, epochs: int, fate: str, after: int) -> Callable[[Session], None]:
    """A worker that trains, and after some steps meets its fate."""

    def script(session: Session) -> None:
        model = make_mlp()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = session.optimizer(adam, model, overlap=fate != "crash before backward")
        try:
            for step, (x, y) in enumerate(session.loader(data, 3, epochs=epochs)):
                optimizer.zero_grad()
                if step == after and fate == "crash before backward":
                    raise Crash
                mse(model, x, y).backward()
                if step == after and fate == "crash in the step":
                    raise Crash
                if step == after and fate == "drain":
                    session.drain()
                optimizer.step()
                if step == after and fate == "break":
                    break
                if step == after and fate == "crash after the step":
                    raise Crash
        except Crash:
            session.close()

    return script


FATES = ["drain", "break", "crash before backward", "crash in the step", "crash after the step", "stay"]


@pytest.mark.parametrize(
    ("seed", "transport"),
    per_change(
        [(0, "inproc"), (1, "inproc"), *((2, transport) for transport in BY_NAME)],
        keep=[(2, "tcp")],
    ),
)
def test_workers_that_come_and_go_train_each_record_once(tmp_path: Path, seed: int, transport: str) -> None:
    """At any time three workers; each has a random fate, and the next one takes its place."""
    chance = random.Random(seed)
    data, epochs = Numbers(331), 2
    server = {"replicas": 1 + seed % 3, "bucketBytes": 1024}
    with running_job(tmp_path, transport=transport, parameterServer=server, data={"shardRecords": 17}) as job:
        places: dict[int, threading.Thread] = {}

        def finished() -> bool:
            for worker in range(3):
                thread = places.get(worker)
                if thread is None or not thread.is_alive():
                    fate, after = chance.choice(FATES), chance.randrange(12)
                    places[worker] = job.start(worker, churner(data, epochs, fate, after))
            return bool(job.status().progress.finished)

        job.until(finished, "all records are in the model")
        job.join()
    check_histories(tmp_path / "history", records=331, epochs=epochs)


def test_the_last_records_of_a_vanished_worker_are_trained_by_those_who_wait(tmp_path: Path) -> None:
    """Worker 0 holds the last records, worker 1 waits for the end, and 0 vanishes."""
    data = Numbers(40)
    holding, waiting = threading.Event(), threading.Event()

    def holder(session: Session) -> None:
        model = make_mlp()
        session.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
        for _ in session.loader(data, 8):
            holding.set()
            assert waiting.wait(LIMIT)
            break
        session.close()

    with running_job(tmp_path, data={"shardRecords": 40}) as job:
        job.start(0, holder)
        assert holding.wait(LIMIT)
        job.start(1, churner(data, 1, "stay", 0))
        job.until(lambda: len(job.status().members) == 2, "worker 1 has joined")
        waiting.set()
        job.join()
        assert job.status().progress.finished
    check_histories(tmp_path / "history", records=40, epochs=1)


# --- real processes


@contextmanager
def launched(
    tmp_path: Path, *, workers: int, spec: dict[str, Any] | None = None, **arguments: Any
) -> Iterator[Launcher]:
    job = make_job(workers=workers, spec={"entrypoint": STEADY, **(spec or {})}, **arguments)
    options = Options(forks=forks(), root=tmp_path / "state", history=tmp_path / "history")
    with Launcher(job, options) as launcher:
        launcher.start()
        yield launcher


@pytest.mark.nightly
def test_scaling_a_kill_and_a_drain_with_real_processes(tmp_path: Path) -> None:
    records, epochs, hurry = 1500, 3, tmp_path / "hurry"
    arguments: dict[str, Any] = {
        "records": records,
        "epochs": epochs,
        "batch_size": 2,
        "seconds": 0.1,
        "hurry": str(hurry),
    }
    with launched(tmp_path, workers=2, **arguments) as launcher:
        start = wait_for_workers(launcher, lambda w: len(w) == 2, "2 workers train")
        grown_at = eventually(lambda: version_of(launcher), "a step")
        launcher.directory.scale(3)
        grown = wait_for_workers(launcher, lambda w: len(w) == 3, "3 workers train")
        assert {i: grown[i] for i in start} == start, "those who train are not restarted"
        os.kill(grown[1], signal.SIGKILL)
        replaced = wait_for_workers(
            launcher, lambda w: w.get(1) not in (None, grown[1]), "the killed worker is replaced"
        )
        assert replaced[0] == start[0]
        os.kill(grown[2], signal.SIGTERM)
        wait_for_workers(
            launcher, lambda w: w.get(2) not in (None, grown[2]), "the worker that left is replaced"
        )
        launcher.directory.scale(1)
        assert wait_for_workers(launcher, lambda w: len(w) == 1, "1 worker trains") == {0: start[0]}
        hurry.touch()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    commits = check_histories(tmp_path / "history", records=records, epochs=epochs)
    history = tmp_path / "history"

    versions = [e["version"] for e in events(history, "worker-0", start[0]) if e["event"] == "applied"]
    assert versions == list(range(versions[0], len(commits) + 1)), "worker 0 lost no step"
    assert [f.name for f in history.glob("worker-0-*")] == [f"worker-0-{start[0]}.jsonl"]

    newcomer = events(history, "worker-2", grown[2])
    joined = next(e["version"] for e in newcomer if e["event"] == "join")
    assert joined >= grown_at > 0, "it starts from the version of that moment"
    assert min(e["version"] for e in newcomer if e["event"] == "push") >= joined
    assert newcomer[-1]["event"] == "left", "SIGTERM lets a worker say goodbye"
    applied, pushed = worker_steps(history)
    drained = {
        key for key in pushed if key[1] == next(e for e in newcomer if e["event"] == "join")["incarnation"]
    }
    assert drained <= applied.keys(), "nothing was computed in vain"
    assert launcher.record.last is not None
    assert launcher.record.last.progress.metrics["trained"] == 1.0, "one worker was the chief"


def test_a_script_that_forks_while_it_trains(tmp_path: Path) -> None:
    with launched(tmp_path, workers=1, records=240, fork_every=5) as launcher:
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    check_histories(tmp_path / "history", records=240, epochs=1)
