"""Whatever way a script leaves its loop, each record is in the model once, and nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from elastic_ps.errors import ConnectionLost, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import (
    assert_each_record_once,
    mse,
)
from tests.testing.polling import eventually
from tests.testing.trained import (
    alone,
    await_training,
    failing,
    sgd,
)
from tests.testing.transports import whole_jobs

Stopping = Callable[[Session, Callable[[], None], Callable[[], None] | None], None]
"""A script. In its first step it calls the first function, which waits until both workers take part.

With another function, its loop is left; that waits for the other worker.
"""


def check_records(tmp_path: Path, script: Stopping) -> int:
    """Worker 0 stops and stays, worker 1 trains the rest, each record once. Returns the steps of worker 0."""
    with running_job(tmp_path) as job:

        def others_go_on() -> None:
            job.until(lambda: job.status().progress.finished, "the others go on")

        def meet() -> None:
            await_training(job, 0, 1)

        job.start(0, lambda s: script(s, meet, others_go_on))
        job.start(1, lambda s: script(s, meet, None))
        job.join()
        assert_each_record_once(job.commits(), records=120, epochs=1)
        return sum(m.steps for m in job.status().members if m.worker == 0)


def test_breaking_out_early_gives_the_records_back(tmp_path: Path) -> None:
    """Worker 0 stops iterating but stays; worker 1 trains all of the rest."""
    data = Numbers(120)

    def script(session: Session, meet: Callable[[], None], stop: Callable[[], None] | None) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if not step:
                meet()
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if stop and session.version >= 3:
                break
        if stop:
            stop()

    check_records(tmp_path, script)


def test_breaking_out_before_computing_gives_the_records_back(tmp_path: Path) -> None:
    """The loop is left with a batch that nothing was computed on."""
    data = Numbers(120)

    def script(session: Session, meet: Callable[[], None], stop: Callable[[], None] | None) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if not step:
                meet()
            if stop and step == 3:
                break
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        if stop:
            stop()

    check_records(tmp_path, script)


def test_a_step_after_breaking_out_lets_the_others_go_on(tmp_path: Path) -> None:
    """backward, break, step: the step counts, and nobody waits for this worker afterwards."""
    data = Numbers(120)

    def script(session: Session, meet: Callable[[], None], stop: Callable[[], None] | None) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if not step:
                meet()
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if stop and step == 3:
                break
            optimizer.step()
        if stop:
            optimizer.step()
            stop()

    assert check_records(tmp_path, script) == 4


def test_skipping_the_step_after_breaking_out_lets_the_others_go_on(tmp_path: Path) -> None:
    """backward, break, skip: nobody waits for this worker afterwards, and nobody trains that batch."""
    data = Numbers(120)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if not step:
                await_training(job, 0, 1)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 0 and step == 3:
                break
            optimizer.step()
        if session.worker == 0:
            optimizer.skip()
            job.until(lambda: job.status().progress.finished, "the others go on")

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
        progress = job.status().progress
    assert (progress.records_applied, progress.records_skipped) == (116, 4)


def test_iterating_again_after_breaking_out(tmp_path: Path) -> None:
    data = Numbers(120)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(data, 4)
        for breaking in (True, False):
            for step, (x, y) in enumerate(loader):
                if breaking and step == 3:
                    break
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
        assert session.is_chief

    assert_each_record_once(alone(tmp_path, script), records=120, epochs=1)


@pytest.mark.parametrize("overlap", [True, False])
def test_batches_left_without_a_step_are_an_error(tmp_path: Path, overlap: bool) -> None:
    """A script that accumulates and forgets the rest at the end would train it twice, or never."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        loader = session.loader(Numbers(5), 1)
        for _ in loader.epochs():
            for step, (x, y) in enumerate(loader):
                if overlap and step % 2 == 0:
                    with optimizer.no_sync():
                        mse(model, x, y).backward()
                else:
                    mse(model, x, y).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()

    failing(tmp_path, script, UsageError, r"optimizer.step\(\)")


def test_the_rest_of_an_accumulation_is_trained_after_a_plain_loop(tmp_path: Path) -> None:
    """The loop over the loader ends with three of four batches; the script makes its last step then."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=False)
        number = -1
        for number, (x, y) in enumerate(session.loader(Numbers(7), 1)):
            mse(model, x, y).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        if number % 4 != 3:
            optimizer.step()
        assert session.is_chief

    assert_each_record_once(alone(tmp_path, script), records=7, epochs=1)


def test_epochs_are_seen_one_after_the_other(tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(Numbers(90), 4, epochs=4)
        for epoch in loader.epochs():
            for x, y in loader:
                assert loader.epoch == epoch
                seen.setdefault(session.worker, []).append(epoch)
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=90, epochs=4)
        ranges = [c["records"] for commit in job.commits() for c in commit["contributions"]]
        assert all(len({r[0] for r in records}) == 1 for records in ranges), "no batch spans two epochs"
    assert all(epochs == sorted(epochs) for epochs in seen.values())


def test_records_of_an_earlier_epoch_do_not_begin_it_again(tmp_path: Path) -> None:
    """What worker 1 gives back of epoch 0 is trained by worker 0 in the epoch that it is in."""
    data, seen = Numbers(40), list[int]()
    ahead = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(data, 4, epochs=3)
        if session.worker == 1:
            for _ in loader:
                eventually(ahead.is_set, "worker 0 is in a later epoch")
                return
        for epoch in loader.epochs():
            seen.append(epoch)
            for x, y in loader:
                if epoch == 1:
                    ahead.set()
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()

    with running_job(tmp_path, data={"shardRecords": 4}, consistency={"backupWorkers": 1}) as job:
        job.start(1, script)
        job.until(lambda: any(m.state == "training" for m in job.status().members), "worker 1 has records")
        job.start(0, script)
        job.join()
        assert_each_record_once(job.commits(), records=40, epochs=3)
    assert seen == [0, 1, 2]


class ReadLater(Numbers):
    """One record cannot be read at first."""

    fails = True

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 9 and self.fails:
            self.fails = False
            raise OSError("Stale file handle")
        return super().__getitem__(index)


def test_a_record_that_cannot_be_read_ends_the_loop_over_its_epoch(tmp_path: Path) -> None:
    """As `break` does. A script that goes on has the records in the loop over the next epoch."""
    begun, failed = list[int](), list[OSError]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(ReadLater(24), 4, epochs=2)
        for epoch in loader.epochs():
            begun.append(epoch)
            try:
                for x, y in loader:
                    optimizer.zero_grad()
                    mse(model, x, y).backward()
                    optimizer.step()
            except OSError as error:
                failed.append(error)

    assert_each_record_once(alone(tmp_path, script), records=24, epochs=2)
    assert (begun, len(failed)) == ([0, 1], 1)


def test_an_iterator_that_outlives_the_loop_over_epochs(tmp_path: Path) -> None:
    """What it has fetched ahead was given back, and is trained once all the same."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(DataLoader(Numbers(40), batch_size=5, num_workers=1), epochs=2)
        epochs = loader.epochs()
        next(epochs)
        batches = iter(loader)
        next(batches)
        del epochs
        x, y = next(batches)
        mse(model, x, y).backward()
        del batches
        optimizer.step()
        for x, y in loader:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    assert_each_record_once(alone(tmp_path, script), records=40, epochs=2)


def test_a_data_loader_with_processes(tmp_path: Path) -> None:
    data = Numbers(120)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DataLoader(data, batch_size=4, num_workers=2, shuffle=True), epochs=2):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    commits = alone(tmp_path, script, data={"shardRecords": 60})
    assert_each_record_once(commits, records=120, epochs=2)


@pytest.mark.parametrize("again", [False, True])
def test_after_it_is_closed_a_session_says_so(tmp_path: Path, again: bool) -> None:
    """Between backward() and step(). The script makes the step, or loops again."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(Numbers(20), 5)
        for x, y in loader:
            mse(model, x, y).backward()
            break
        session.close()
        if again:
            next(iter(loader))
        optimizer.step()

    failing(tmp_path, script, ConnectionLost, "the connection was closed")


@whole_jobs
def test_a_script_that_raises_in_the_middle_of_a_step(tmp_path: Path, transport: str) -> None:
    data = Numbers(120)
    raised = threading.Event()

    def script(session: Session, *, fails: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if not step:
                await_training(job, 0, 1)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if fails and step == 3:
                raised.set()
                session.close()
                return
            optimizer.step()

    with running_job(tmp_path, transport=transport, parameterServer={"bucketBytes": 1024}) as job:
        job.start(0, lambda s: script(s, fails=True))
        job.start(1, lambda s: script(s, fails=False))
        job.join()
        assert raised.is_set()
        assert_each_record_once(job.commits(), records=120, epochs=1)
