"""The best checkpoint and early stopping: the chief stays, and the job keeps what it knows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.errors import UsageError
from elastic_ps.local import Launcher, Options
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Tally, running_job
from tests.testing.launching import forks, make_job, wait_for_end

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "accumulate": {"mode": "accumulate", "gradients": 2},
    "async": {"mode": "async"},
    "local": {"mode": "local", "steps": 2},
}


@pytest.mark.parametrize("consistency", MODES.values(), ids=MODES)
def test_one_worker_is_the_chief_of_all_epochs(tmp_path: Path, consistency: dict[str, Any]) -> None:
    """Also of those that the others have trained while it evaluated."""
    epochs, chiefs = 5, list[tuple[int, int]]()

    def script(session: Session) -> None:
        model = Tally(16)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for epoch in (loader := session.loader(Indexes(16), 4, epochs=epochs)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            if session.is_chief:
                chiefs.append((epoch, session.worker))
                if epoch == 1:
                    session.pause()
                    job.until(lambda: job.status().progress.epoch >= 4, "the other one trains on")

    with running_job(tmp_path, consistency=consistency) as job:
        job.run(script, workers=2)
    assert [epoch for epoch, _ in chiefs] == list(range(epochs))
    assert len({worker for _, worker in chiefs}) == 1


def test_a_chief_that_asks_in_some_epochs_comes_to_all_of_them(tmp_path: Path) -> None:
    """It saves each second one, and the others have trained several while it was busy."""
    epochs, chiefs = 6, list[tuple[int, int]]()

    def script(session: Session) -> None:
        model = Tally(16)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for epoch in (loader := session.loader(Indexes(16), 4, epochs=epochs)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            if epoch % 2 and session.is_chief:
                chiefs.append((epoch, session.worker))
                if epoch == 1:
                    session.pause()
                    job.until(lambda: job.status().progress.records_applied == 16 * epochs, "all are trained")

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
    assert [epoch for epoch, _ in chiefs] == [1, 3, 5]


@pytest.mark.parametrize("exits", [False, True])
def test_a_chief_whose_script_fails_while_it_saves_is_replaced_by_a_chief(
    tmp_path: Path, exits: bool
) -> None:
    arguments = {"folder": str(tmp_path), "exits": exits}
    spec = {"entrypoint": "tests.testing.scripts.failing_chief:main", "arguments": arguments}
    options = Options(forks=forks(), root=tmp_path / "run")
    with Launcher(make_job(workers=1, spec=spec), options) as launcher:
        launcher.start()
        wait_for_end(launcher)
        assert launcher.outcome().verdict.phase == "Succeeded"
    assert (tmp_path / "saved").exists()


def test_a_chief_that_breaks_out_of_both_loops_is_the_chief_no_more(tmp_path: Path) -> None:
    """The inner `break` gives its records back, so that it computes nothing at the outer one."""
    chiefs: dict[int, int] = {}

    def script(session: Session) -> None:
        model = Tally(16)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for epoch in (loader := session.loader(Indexes(16), 4, epochs=3)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                if chiefs.get(0) == session.worker:
                    break
            if chiefs.get(0) == session.worker:
                break
            if session.is_chief:
                chiefs[epoch] = session.worker
        if chiefs[0] == session.worker:
            job.until(lambda: 2 in chiefs, "the other one is the chief of the last epoch")

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
    assert chiefs[2] != chiefs[0]


def test_what_the_chief_has_written_outlives_the_parameter_server(tmp_path: Path) -> None:
    """It goes on from a checkpoint of the same version that was made before."""

    def script(session: Session) -> None:
        assert dict(session.state) == {}
        with pytest.raises(UsageError, match=r"call session.optimizer.* before writing session.state"):
            session.state["best"] = 0.1
        model = Tally(8)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        with pytest.raises(
            UsageError, match=r"writes session\.state, but only the chief may, and .* `if session\.is_chief:`"
        ):
            session.state["best"] = 0.1
        for epoch in (loader := session.loader(Indexes(8), 8, epochs=3)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            if session.is_chief and epoch == 0:
                job.until(lambda: job.status().progress.durable_version == session.version, "it is on disk")
                session.state.update(best=0.9, scores=[0.9])
                job.restart(0)
            assert dict(session.state) == {"best": 0.9, "scores": (0.9,)} or not epoch
        job.restart(0)
        session.state["best"] = 0.95
        del session.state["scores"]
        assert dict(session.state) == {"best": 0.95}

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 1}},
    ) as job:
        job.start(0, script)
        job.join()


@pytest.mark.parametrize("fault", ["restart", "declare_gone"])
def test_a_value_is_reported_though_the_worker_has_to_join_again(tmp_path: Path, fault: str) -> None:
    """It is reported outside of a step, after the worker has evaluated for a while."""

    def script(session: Session) -> None:
        model = Tally(8)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for epoch in (loader := session.loader(Indexes(8), 8, epochs=3)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            if session.is_chief and epoch == 0:
                job.until(lambda: job.status().progress.durable_version == session.version, "it is on disk")
                getattr(job, fault)(0)
                session.report(test_accuracy=0.5)
        assert model.weight.tolist() == [-3.0] * 8

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 1}},
    ) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.metrics == {"test_accuracy": 0.5}


def test_what_the_chief_has_written_is_given_up_with_its_version(tmp_path: Path) -> None:
    """The job comes to the same version again, and the worker joins again then."""
    versions: list[int] = []

    def script(session: Session) -> None:
        model = Tally(8)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for _ in (loader := session.loader(Indexes(8), 8, epochs=4)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            if session.is_chief and not versions:
                session.state["best"] = 0.9
            elif session.version == 2:
                job.until(lambda: job.status().progress.durable_version == 2, "it is on disk")
            else:
                continue
            versions.append(session.version)
            job.restart(0)
        assert dict(session.state) == {}

    checkpoint = {"everyVersions": 2, "interval": "1h"}
    with running_job(
        tmp_path, checkpoints=tmp_path / "checkpoints", parameterServer={"checkpoint": checkpoint}
    ) as job:
        job.start(0, script)
        job.join()
    assert versions == [1, 2]


def test_an_answer_of_before_the_job_went_back_counts_no_more(tmp_path: Path) -> None:
    """The checkpoint does not know of the chief that was chosen since. Both were the chief of one epoch."""
    told, other_told = threading.Event(), threading.Event()
    chiefs: list[tuple[int, int]] = []

    def on_disk() -> bool:
        progress = job.status().progress
        return bool(progress.records_applied >= 16 and progress.durable_version == progress.version)

    def script(session: Session) -> None:
        model = Tally(16)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for epoch in (loader := session.loader(Indexes(16), 8, epochs=2)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            session.pause()
            if epoch == 0 and session.worker == 0:
                job.until(on_disk, "the epoch is on disk")
                assert session.is_chief
                job.restart(0)
                told.set()
                job.until(other_told.is_set, "the other worker has asked")
            elif epoch == 0:
                job.until(told.is_set, "the first worker has asked")
            if session.is_chief:
                chiefs.append((epoch, session.worker))
            other_told.set()

    with running_job(
        tmp_path,
        worker={"replicas": 2},
        consistency={"deterministic": True},
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 1}},
    ) as job:
        job.run(script, workers=2)
    assert chiefs == [(0, 1), (1, 1)]


def test_a_chief_that_has_left_its_loop_says_so_again_when_it_joins_again(tmp_path: Path) -> None:
    """The job goes back to a checkpoint of before. Else nobody would be the chief of the epochs to come."""
    chiefs: list[tuple[int, int]] = []
    left = threading.Event()

    def script(session: Session) -> None:
        model = Tally(16)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        loader = session.loader(Indexes(16), 16, epochs=4)
        for epoch in loader.epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                if not left.is_set():
                    job.until(
                        lambda: job.status().progress.durable_version == session.version, "it is on disk"
                    )
            if session.is_chief:
                chiefs.append((epoch, session.worker))
            if session.worker == 0 and epoch == 1:
                break
        if session.worker == 0:
            job.restart(0)
            session.state["best"] = 0.9
            left.set()
            job.until(lambda: any(epoch == 3 for epoch, _ in chiefs), "the last epoch has a chief")

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 1}},
    ) as job:
        job.start(0, script)
        job.until(left.is_set, "the chief has left its loop")
        job.start(1, script)
        job.join()
    assert [worker for epoch, worker in chiefs if epoch > 1] == [1, 1]
