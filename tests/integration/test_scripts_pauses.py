"""`session.pause()`: the others train on while a worker does something else in the middle of an epoch."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Numbers, Tally, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.polling import LIMIT
from tests.testing.trained import await_training, training


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_others_train_on_and_each_record_counts_once(tmp_path: Path, num_workers: int) -> None:
    data, versions = Numbers(300), dict[str, int]()
    paused, resumed = threading.Event(), threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        workers = num_workers if session.worker == 0 else 0
        for step, (x, y) in enumerate(session.loader(data, 3, num_workers=workers)):
            if step == 0:
                await_training(job, 0, 1)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if (session.worker, step) == (0, 3):
                session.pause()
                before = session.version
                paused.set()
                assert resumed.wait(LIMIT), "worker 1 trains on"
                assert session.version == before, "it evaluates one version"
                versions["resumed"] = -1
            elif versions.get("resumed") == -1 and session.worker == 0:
                versions["resumed"] = session.version
            if session.worker == 1 and paused.is_set() and not resumed.is_set():
                versions["meanwhile"] = versions.get("meanwhile", 0) + 1
                if versions["meanwhile"] == 10:
                    resumed.set()
                    job.until(lambda: training(job, 0), "worker 0 goes on")

    with running_job(tmp_path, data={"shardRecords": 12}) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=300, epochs=1)
    assert versions["resumed"] > 10, "its next step is made on the newest version"


def test_in_a_loop_over_epochs_and_alone(tmp_path: Path) -> None:
    data = Indexes(24)

    def script(session: Session) -> None:
        model = Tally(24)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        loader = session.loader(data, 4, epochs=2)
        for _ in loader.epochs():
            for batch in loader:
                optimizer.zero_grad()
                (model(batch) * len(batch)).backward()
                optimizer.step()
                session.pause()
                session.pause()
            session.pause()
        assert model.weight.tolist() == [-2.0 * 4] * 24

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()


def test_in_the_middle_of_a_step_it_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        with pytest.raises(UsageError, match=r"session\.optimizer\(\.\.\.\) before session\.pause"):
            session.pause()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in session.loader(Numbers(20), 10):
            with pytest.raises(UsageError, match=r"Call it after optimizer\.step\(\)"):
                session.pause()
            mse(model, x, y).backward()
            with pytest.raises(UsageError, match=r"Call it after optimizer\.step\(\)"):
                session.pause()
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert_each_record_once(job.commits(), records=20, epochs=1)


@pytest.mark.parametrize("computes", [True, False], ids=["after backward", "before"])
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves the loop", "pauses"])
def test_what_was_skipped_before_it_counts_as_skipped_once(
    tmp_path: Path, computes: bool, leaves: bool
) -> None:
    """Nobody trains it, also if some of its gradients had been sent."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        loader = session.loader(Numbers(40), 4)
        steps = 0
        while steps < 7:
            for x, y in loader:
                skips = steps in (1, 3, 4)
                steps += 1
                if computes or not skips:
                    mse(model, x, y).backward()
                if not skips:
                    optimizer.step()
                    optimizer.zero_grad()
                    continue
                optimizer.zero_grad()
                optimizer.skip()
                if leaves:
                    break
                session.pause()

    server = {"bucketBytes": 1024}
    with running_job(tmp_path, worker={"replicas": 1}, parameterServer=server) as job:
        job.start(0, script)
        job.join()
        progress = job.status().progress
    assert (progress.records_applied, progress.records_skipped) == (28, 12)
    assert check(read(tmp_path / "history"), Data(40, 1)) == []
