"""Scripts that stop early, leave epochs, or iterate once more after the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.errors import UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Job, Tally, running_job
from tests.testing.polling import LIMIT
from tests.testing.trained import alone, await_training, failing

RECORDS = 240
REASON = "the validation loss has not improved"


def optimizer_for(session: Session, model: torch.nn.Module) -> torch.optim.Optimizer:
    return session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()


class Ends:
    """What the workers of a stopped job have seen at their ends."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.chiefs: list[int] = []
        self.reasons: list[str] = []

    def note(self, session: Session, model: Tally) -> None:
        if session.is_chief:
            self.chiefs.append(session.worker)
        self.values.append(model.weight.detach().clone())
        self.reasons.append(session.stopped)


def check_stopped(job: Job, ends: Ends) -> None:
    """All workers have the same values, one is the chief, and the last version is on disk."""
    progress = job.status().progress
    assert progress.finished
    assert progress.stopped == REASON
    assert 0 < progress.records_applied < progress.records_expected
    assert progress.durable_version == progress.version
    assert len(ends.chiefs) == 1
    assert ends.reasons == [REASON] * len(ends.values)
    assert all(torch.equal(values, ends.values[0]) for values in ends.values)


@pytest.mark.parametrize(
    "consistency",
    [
        {},
        {"deterministic": True},
        {"backupWorkers": 1},
        {"mode": "bounded", "maxStaleness": 1},
        {"mode": "accumulate", "gradients": 3},
        {"mode": "async"},
    ],
    ids=["sync", "deterministic", "backup workers", "bounded", "accumulate", "async"],
)
def test_a_script_stops_the_job(tmp_path: Path, consistency: dict[str, Any]) -> None:
    """Worker 0 leaves its loop by break; worker 1's loop, over epochs, comes to its end."""
    ends = Ends()

    def script(session: Session) -> None:
        model = Tally(RECORDS)
        optimizer = optimizer_for(session, model)
        loader = session.loader(Indexes(RECORDS), 4, epochs=3)
        if session.worker == 0:
            for batch in loader:
                if session.version == 0:
                    await_training(job, 0, 1)
                train(model, optimizer, batch)
                if session.version >= 5:
                    session.stop(f" {REASON} ")
                    break
        else:
            for _ in loader.epochs():
                for batch in loader:
                    if session.version == 0:
                        await_training(job, 0, 1)
                    train(model, optimizer, batch)
        ends.note(session, model)

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        worker={"replicas": 2},
        consistency=consistency,
    ) as job:
        job.run(script, workers=2)
        check_stopped(job, ends)


def test_a_stop_outlives_the_parameter_server(tmp_path: Path) -> None:
    """It is lost right after it was told, and its checkpoint does not know of the stop."""
    ends, told = Ends(), threading.Event()

    def script(session: Session) -> None:
        model = Tally(RECORDS)
        optimizer = optimizer_for(session, model)
        loader = session.loader(Indexes(RECORDS), 4)
        for batch in loader:
            if session.version == 0:
                await_training(job, 0, 1)
            train(model, optimizer, batch)
            if session.worker == 0 and session.version >= 5 and not session.stopped:
                job.until(lambda: (job.status().progress.durable_version or 0) >= 2, "a checkpoint is there")
                session.stop(REASON)
                job.restart(0)
                told.set()
            if session.worker == 1 and session.version >= 5:
                assert told.wait(LIMIT)
        ends.note(session, model)

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 2}},
    ) as job:
        job.run(script, workers=2)
        check_stopped(job, ends)


def test_a_batch_in_hand_when_the_job_is_stopped_is_not_trained(tmp_path: Path) -> None:
    seen: list[int] = []

    def script(session: Session) -> None:
        model = Tally(RECORDS)
        optimizer = optimizer_for(session, model)
        for batch in session.loader(Indexes(RECORDS), 4):
            seen.append(len(batch))
            if len(seen) == 3:
                model(batch).backward()
                session.stop(REASON)
                continue
            train(model, optimizer, batch)
        assert session.is_chief
        assert session.version == 2

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.records_applied == 8
    assert len(seen) == 3


@pytest.mark.parametrize("epochs", [True, False], ids=["epochs", "one loop"])
def test_a_stop_amid_accumulated_gradients_leaves_no_step_to_make(tmp_path: Path, epochs: bool) -> None:
    """The script calls step() for the rest after its loop, as docs/guides/scripts.md says."""

    def script(session: Session) -> None:
        model = Tally(RECORDS)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=False)
        loader = session.loader(Indexes(RECORDS), 4)
        for _ in loader.epochs() if epochs else [0]:
            held = 0
            for batch in loader:
                model(batch).backward()
                held += 1
                if session.version == 2 and held == 1:
                    session.stop(REASON)
                if held == 4:
                    optimizer.step()
                    optimizer.zero_grad()
                    held = 0
            if held:
                optimizer.step()
        assert session.is_chief
        assert session.version == 2

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.stopped == REASON


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_before_a_batch_is_loaded_ahead_leaves_no_step_to_make(tmp_path: Path, overlap: bool) -> None:
    def script(session: Session) -> None:
        model = Tally(RECORDS)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=overlap)
        batches = iter(session.loader(Indexes(RECORDS), 4))
        batch = next(batches, None)
        while batch is not None:
            optimizer.zero_grad()
            model(batch).backward()
            if session.version == 2:
                session.stop(REASON)
            batch = next(batches, None)
            optimizer.step()
        assert session.is_chief
        assert session.version == 2

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.stopped == REASON


def test_a_stop_needs_a_reason(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        with pytest.raises(UsageError, match="needs a reason"):
            session.stop(" ")
        with pytest.raises(UsageError, match=r"session\.optimizer"):
            session.stop(REASON)

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()


def test_a_break_in_an_epoch_goes_on_with_the_next_one(tmp_path: Path) -> None:
    """Records that are left are trained in the next epoch; those that are left in the last one stay."""
    steps: dict[int, int] = {}

    def script(session: Session) -> None:
        model = Tally(24)
        optimizer = optimizer_for(session, model)
        loader = session.loader(Indexes(24), 4, epochs=3)
        for epoch in loader.epochs():
            assert epoch not in steps
            steps[epoch] = 0
            for batch in loader:
                train(model, optimizer, batch)
                steps[epoch] += 1
                if epoch != 1 and steps[epoch] == 2:
                    break

    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        job.start(0, script)
        job.join()
        assert steps == {0: 2, 1: 10, 2: 2}
        progress = job.status().progress
        assert not progress.finished
        assert progress.records_applied == 14 * 4


def outer_loop(session: Session, data: Indexes) -> None:
    model = Tally(len(data))
    optimizer = optimizer_for(session, model)
    loader = session.loader(data, 4)
    for _ in range(5):
        for batch in loader:
            train(model, optimizer, batch)


def loader_in_the_loop(session: Session, data: Indexes) -> None:
    model = Tally(len(data))
    optimizer = optimizer_for(session, model)
    for _ in range(5):
        for batch in session.loader(data, 4):
            train(model, optimizer, batch)


def epochs_in_the_loop(session: Session, data: Indexes) -> None:
    model = Tally(len(data))
    optimizer = optimizer_for(session, model)
    loader = session.loader(data, 4)
    for _ in range(5):
        for _ in loader.epochs():
            for batch in loader:
                train(model, optimizer, batch)


@pytest.mark.parametrize("script", [outer_loop, loader_in_the_loop, epochs_in_the_loop])
def test_a_loop_after_the_end_says_how_to_train_several_epochs(tmp_path: Path, script: Any) -> None:
    failing(tmp_path, lambda s: script(s, Indexes(20)), UsageError, r"for epoch in loader\.epochs\(\)")


def test_an_epoch_is_iterated_once(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Tally(20)
        optimizer = optimizer_for(session, model)
        loader = session.loader(Indexes(20), 4, epochs=2)
        for _ in loader.epochs():
            for batch in loader:
                train(model, optimizer, batch)
            for batch in loader:
                model(batch)

    failing(tmp_path, script, UsageError, "a second loop over the records of epoch 0")


def test_a_worker_that_waits_in_an_earlier_epoch_is_not_the_chief_of_the_last(tmp_path: Path) -> None:
    """A batch is an epoch, so that one worker waits for records until the other has trained the last ones."""
    chiefs: list[int] = []

    def script(session: Session) -> None:
        model = Tally(20)
        optimizer = optimizer_for(session, model)
        loader = session.loader(Indexes(20), 20, epochs=4)
        for epoch in loader.epochs():
            for batch in loader:
                train(model, optimizer, batch)
            if session.is_chief:
                chiefs.append(epoch)

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
    assert sorted(chiefs) == [0, 1, 2, 3]


@pytest.mark.parametrize("when", ["at first", "after the loader is made"])
def test_the_chief_is_not_known_before_the_loop(tmp_path: Path, when: str) -> None:
    def script(session: Session) -> None:
        if when == "at first":
            print(session.is_chief)
        optimizer_for(session, Tally(20))
        session.loader(Indexes(20), 4)
        print(session.is_chief)

    failing(tmp_path, script, UsageError, r"is_chief is not known .* Read it after the loop; .*worker == 0")


def test_a_script_that_leaves_the_epochs_before_its_first_loop_is_not_the_chief(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        optimizer_for(session, Tally(20))
        for _ in session.loader(Indexes(20), 4, epochs=2).epochs():
            break
        assert not session.is_chief

    alone(tmp_path, script)


@pytest.mark.parametrize("where", ["loop", "last epoch", "loop over the last epoch"])
def test_the_chief_is_not_known_within_the_last_loop(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once."""

    def script(session: Session) -> None:
        model = Tally(20)
        optimizer = optimizer_for(session, model)
        loader = session.loader(Indexes(20), 4, epochs=2)
        for epoch in range(1) if where == "loop" else loader.epochs():
            assert epoch == 0 or where != "last epoch" or not session.is_chief
            for batch in loader:
                train(model, optimizer, batch)
                assert where == "last epoch" or session.is_chief is (epoch == 0 and where != "loop")
            assert session.is_chief
        assert session.is_chief

    alone(tmp_path, script)
    assert caplog.text.count("session.is_chief is not known before the end of the loop") == 1


@pytest.mark.parametrize("used", [False, True])
def test_a_loader_that_the_script_does_not_use_says_nothing_of_the_chief(tmp_path: Path, used: bool) -> None:
    """A step is made of an epoch, so the other loader's loop has ended before its last step.

    Or the script does not use it any more, as where a notebook's cells are run again.
    """
    chiefs: list[bool] = []

    def script(session: Session) -> None:
        model = Tally(20)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=False)
        first = session.loader(Indexes(20), 4, epochs=2)
        if used:
            next(iter(first))
        loader = session.loader(Indexes(20), 4, epochs=2)
        for _ in loader.epochs():
            for batch in loader:
                model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            chiefs.append(session.is_chief)

    commits = alone(tmp_path, script)
    assert (len(commits), chiefs) == (2, [True, True])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_worker_is_the_chief_in_each_epoch(tmp_path: Path, accumulate: int) -> None:
    """The parameter server is lost on the way. Two batches make a step, and the last one may be alone."""
    records, epochs = 44, 3
    chiefs: list[int] = []
    once = threading.Lock()

    def script(session: Session) -> None:
        model = Tally(records)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=False)
        loader = session.loader(Indexes(records), 4, epochs=epochs)
        for epoch in loader.epochs():
            held = 0
            for batch in loader:
                model(batch).backward()
                held += 1
                if held == accumulate:
                    optimizer.step()
                    optimizer.zero_grad()
                    held = 0
            if held:
                optimizer.step()
                optimizer.zero_grad()
            if session.is_chief:
                chiefs.append(epoch)
            if epoch == 1 and once.acquire(blocking=False):
                job.until(lambda: (job.status().progress.durable_version or 0) >= 1, "a checkpoint is there")
                job.restart(0)
        if session.is_chief:
            chiefs.append(epochs)

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 1}},
    ) as job:
        job.run(script, workers=2)
    assert sorted(set(chiefs)) == [0, 1, 2, 3]
    assert chiefs.count(2) == chiefs.count(3) == 1
