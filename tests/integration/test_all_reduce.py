"""`strategy: all-reduce`: the workers add gradients up among themselves; records count as ever."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.checkpoint.plain import load_checkpoint
from elastic_ps.collectives.groups import Broken, Group, Store, host_towards, require_safe
from elastic_ps.core.all_reduce import Barrier
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import ConnectionLost, InvalidJob, InvalidModel, Refused, UsageError
from elastic_ps.local import Launcher, Options
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import WorkerLimits
from tests.testing import machine
from tests.testing.harness import Job, Numbers, make_mlp, make_spec, running_job
from tests.testing.histories import check_histories
from tests.testing.launching import forks, make_job, version_of, wait_for_end, wait_for_workers
from tests.testing.oracle import (
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    ranges_of,
    replay,
)
from tests.testing.polling import LIMIT, eventually
from tests.testing.trained import await_training
from tests.testing.watched import Watched

STEADY = "tests.testing.scripts.steady:main"
Models = dict[int, torch.nn.Module]
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.005)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    session: Session,
    data: Numbers,
    make: Make = adam,
    *,
    each: Callable[[Session, int], object] = lambda session, step: None,
    epochs: int = 1,
    batch_size: int = 5,
) -> torch.nn.Module:
    """The ordinary loop. `each` is called before a step."""
    model = make_mlp()
    optimizer = session.optimizer(make(model), model)
    for step, (x, y) in enumerate(session.loader(data, batch_size, epochs=epochs)):
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        each(session, step)
        session.report(loss=loss)
        optimizer.step()
    return model


def assert_right(job: Job, models: Models, data: Numbers, make: Make, *, epochs: int = 1) -> None:
    """Each record is in the model once, all workers have the same bits, and they are those of one process."""
    commits = check_histories(job.history, records=len(data), epochs=epochs)
    assert not check(read(job.history), Data(len(data), epochs))
    first, *others = models.values()
    for model in others:
        for ours, theirs in zip(model.parameters(), first.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert_equal_up_to_round_off(
        first, make_mlp(), lambda model: replay(commits, data, model, make, job.spec)
    )


def both_are_there(job: Job) -> None:
    """Wait until workers 0 and 1 take part in rounds."""
    await_training(job, 0, 1)


def running(tmp_path: Path, **fields: Any) -> Any:
    checkpoints = tmp_path / "checkpoints"
    return running_job(tmp_path, strategy="all-reduce", checkpoints=checkpoints, **fields)


@pytest.mark.covering(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("make", [adam, sgd])
def test_versions_are_those_of_one_process(tmp_path: Path, workers: int, make: Make) -> None:
    data, models = Numbers(131), Models()

    def script(session: Session) -> None:
        models[session.worker] = train(session, data, make, epochs=2)

    with running(tmp_path, data={"shardRecords": 13}) as job:
        job.run(script, workers=workers)
        assert_right(job, models, data, make, epochs=2)


def test_no_gradient_and_no_value_of_a_step_comes_to_the_parameter_server(tmp_path: Path) -> None:
    """Only the first version and the last one do."""
    data, models = Numbers(100), Models()

    def script(session: Session) -> None:
        models[session.worker] = train(session, data, each=lambda *_: both_are_there(job))

    with running(tmp_path) as job:
        job.run(script, workers=2)
        assert len(job.commits()) >= 10
        assert not sum(member.traffic.pushed_bytes for member in job.status().members)
        pulled = sum(member.traffic.pulled_bytes for member in job.status().members)
        size = sum(4 * parameter.numel() for parameter in models[0].parameters())
        assert pulled <= 2 * size
        assert_right(job, models, data, adam)


def test_a_newcomer_gets_the_state_from_a_peer(tmp_path: Path) -> None:
    """Adam's moments included: no version is on disk but the first, so the parameter server has no other."""
    data, models = Numbers(400), Models()

    def script(session: Session) -> None:
        def each(session: Session, step: int) -> None:
            if session.worker == 0 and step == 4:
                job.start(1, script)
                both_are_there(job)

        models[session.worker] = train(session, data, each=each)

    with running(tmp_path) as job:
        job.start(0, script)
        job.join()
        steps = [len(commit["contributions"]) for commit in job.commits()]
        assert steps[:3] == [1, 1, 1]
        assert 2 in steps
        assert_right(job, models, data, adam)


def test_a_newcomer_that_has_copied_the_state_is_enough(tmp_path: Path) -> None:
    """Its source ends before the two have made a step together."""
    data, models = Numbers(200), Models()

    def script(session: Session) -> None:
        def each(session: Session, step: int) -> None:
            if session.worker == 0 and step == 4:
                job.start(1, script)
                both_are_there(job)
            if session.worker == 1 and not step:
                job.declare_gone(0)

        models[session.worker] = train(session, data, each=each)

    with running(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().term == 1, "no version was lost"
        assert_right(job, models, data, adam)


def test_a_pause_of_the_parameter_server_costs_no_version(tmp_path: Path) -> None:
    """It finds that all leases have ended before a worker can call again."""
    data, models = Numbers(200), Models()

    def script(session: Session) -> None:
        def each(session: Session, step: int) -> None:
            if not step:
                both_are_there(job)
            if session.worker == 0 and step == 4:
                job.let_fall_silent(0, 1)

        models[session.worker] = train(session, data, each=each)

    with running(tmp_path) as job:
        job.stop_time()
        job.run(script, workers=2)
        assert job.status().term == 1, "no version was lost"
        assert_right(job, models, data, adam)


def test_a_worker_that_was_not_told_of_the_last_version_does_not_hold_it(tmp_path: Path) -> None:
    """It is dropped before the answer comes, so nobody has made the step, and the job goes back."""
    data, lost = Numbers(20), list[int]()

    def answer(method: str, header: bytes) -> None:
        if method == "Meet" and pb.MeetReply.FromString(header).version == 4 and not lost:
            lost.append(job.version)
            job.let_fall_silent(0)
            job.let_a_lease_pass()
            raise ConnectionLost("a test has cut the connection")

    with running(tmp_path) as job:
        job.stop_time()
        job.through = lambda _, inner: Watched(inner, lambda *_: None, answer=answer)
        job.run(lambda session: train(session, data), workers=1)
        assert lost == [4]
        assert job.status().term == 2
        assert not check(read(job.history), Data(len(data), 1))


@pytest.mark.parametrize("returns", [True, False])
def test_a_newcomer_waits_for_the_holder_of_the_version_that_fell_silent(
    tmp_path: Path, returns: bool
) -> None:
    """After a lease the job goes back to its newest checkpoint."""
    data, models = Numbers(200), Models()

    def newcomer_waits() -> bool:
        with job.coordinator.job.lock:
            rounds, _ = job.coordinator.job.state.all_reduce
            return bool(rounds.group == [1] and rounds.together(Barrier.STATE))

    def script(session: Session) -> None:
        def each(session: Session, step: int) -> None:
            if session.worker == 0 and step == 4:
                job.start(1, script)
                both_are_there(job)
                job.let_fall_silent(0)
                job.until(newcomer_waits, "the newcomer lacks the version")
                assert job.status().term == 1
                if not returns:
                    job.let_a_lease_pass()
                    job.until(lambda: job.status().term == 2, "the job has gone back")
                    raise SystemExit

        models[session.worker] = train(session, data, each=each)

    with running(tmp_path) as job:
        job.stop_time()
        job.start(0, script)
        job.join()
        assert job.status().term == (1 if returns else 2)
        if returns:
            assert_right(job, models, data, adam)
        assert not check(read(job.history), Data(len(data), 1))


@pytest.mark.parametrize("keeps", [True, False], ids=["checkpoints", "no checkpoints"])
def test_a_newcomer_at_the_end_gets_the_last_version(tmp_path: Path, keeps: bool) -> None:
    """It comes before the others have handed that over, and may be the one that saves the model."""
    data, models, entered = Numbers(40), Models(), threading.Event()

    def late(method: str, frame: Frame) -> None:
        if method == "Init" and pb.InitRequest.FromString(frame.header).HasField("version"):
            assert entered.wait(LIMIT)

    def script(session: Session) -> None:
        models[session.worker] = train(session, data)

    def newcomer(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adam(model), model)
        entered.set()
        for _ in session.loader(data, 5):
            raise AssertionError("all records are trained")
        assert optimizer is not None
        models[session.worker] = model

    checkpoints = tmp_path / "checkpoints" if keeps else None
    with running_job(tmp_path, strategy="all-reduce", checkpoints=checkpoints) as job:
        job.through = lambda _, inner: Watched(inner, late)
        for worker in range(2):
            job.start(worker, script)
        job.until(lambda: job.status().progress.records_applied == len(data), "all is trained")
        job.start(2, newcomer)
        job.join()
        assert_right(job, models, data, adam)
    assert len(models) == 3


def test_a_learning_rate_that_is_set_before_the_loop_counts(tmp_path: Path) -> None:
    """Also that of the worker which has brought the model."""
    rates: list[float] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        optimizer.param_groups[0]["lr"] = 0.25
        for x, y in session.loader(Numbers(20), 5):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])

    with running(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.coordinator.job.state.settings.groups[0]["lr"] == 0.25
    assert rates == [0.25] * 4


def test_a_worker_that_vanishes_in_a_step_costs_no_record(tmp_path: Path) -> None:
    """It is gone after the others have waited for it; they make the round without it, with what they have."""
    data, models = Numbers(200), Models()

    def script(session: Session) -> None:
        def each(session: Session, step: int) -> None:
            both_are_there(job)
            if step == 3 and session.worker == 1:
                job.until(lambda: session.version == job.version, "the other waits")
                job.declare_gone(1)
                raise SystemExit

        models[session.worker] = train(session, data, each=each)

    with running(tmp_path) as job:
        job.run(script, workers=2)
        assert_right(job, models, data, adam)


def test_gradients_are_added_up_while_backward_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a group has made a version. Worker 1 is gone in the middle of a backward, with a part sent."""
    data, models = Numbers(200), Models()
    computing, begun = threading.local(), set[int]()
    add_up = Group.all_reduce

    def note(self: Group, tensor: torch.Tensor, *, maximum: bool = False) -> None:
        if getattr(computing, "version", None) is not None:
            begun.add(computing.version)
        add_up(self, tensor, maximum=maximum)
        if computing.vanishes:
            job.declare_gone(1)
            raise SystemExit

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp((6, 300, 300, 1))
        optimizer = session.optimizer(adam(model), model)
        computing.version, computing.vanishes = None, False
        for step, (x, y) in enumerate(session.loader(data, 5)):
            if session.worker == 1 or step < 8:
                both_are_there(job)
            optimizer.zero_grad()
            loss = mse(model, x, y)
            computing.version, computing.vanishes = session.version, session.worker == 1 and step == 8
            loss.backward()
            computing.version, computing.vanishes = None, False
            optimizer.step()

    # Worker 1 vanishes with a part sent, which no script and no connection of the job sees.
    monkeypatch.setattr(Group, "all_reduce", note)
    with running(tmp_path) as job:
        job.start(0, script)
        job.until(lambda: bool(job.status().members), "the first one joins")
        job.start(1, script)
        job.join()
        assert len(begun) > 5
        commits = check_histories(job.history, records=200, epochs=1)
        assert not check(read(job.history), Data(200, 1))
    assert_equal_up_to_round_off(
        models[0], make_mlp((6, 300, 300, 1)), lambda model: replay(commits, data, model, adam, job.spec)
    )


def test_a_step_that_is_skipped_is_in_no_sum(tmp_path: Path) -> None:
    """A part of it may have been added up already."""
    data, models = Numbers(120), Models()

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 5)):
            both_are_there(job)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 1 and step == 4:
                optimizer.skip()
                continue
            optimizer.step()

    with running(tmp_path) as job:
        job.run(script, workers=2)
        commits = job.commits()
        trained = [i for commit in commits for r in ranges_of(commit) for i in range(r.start, r.stop)]
        assert len(trained) == len(set(trained)) == 115
    assert_equal_up_to_round_off(
        models[0], make_mlp(), lambda model: replay(commits, data, model, sgd, job.spec)
    )


def test_who_is_gone_between_the_sum_and_the_commit_takes_its_step_with_it(tmp_path: Path) -> None:
    """Two workers have added up; one says so, the other is gone. The first one makes the step without it."""
    data, models = Numbers(120), Models()

    def vanish(method: str, frame: Frame) -> None:
        if method == "Meet":
            finish = pb.MeetRequest.FromString(frame.header).finish
            if (finish.caller.worker, finish.step) == (1, 3):
                job.declare_gone(1)

    def script(session: Session) -> None:
        models[session.worker] = train(session, data, each=lambda *_: both_are_there(job))

    with running(tmp_path) as job:
        job.through = lambda _, inner: Watched(inner, vanish)
        job.run(script, workers=2)
        assert_right(job, models, data, adam)


def test_a_group_that_loses_the_connection_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker finds the connection broken, when the other may have its sum. Nobody is declared gone."""
    data, models = Numbers(120), Models()
    wait = Group.wait
    broken: list[int] = []

    def fail(self: Group, look: Callable[[], None]) -> None:
        wait(self, look)
        if self.rank == 1 and len(broken) < 2 and job.version > 3 * (1 + len(broken)):
            broken.append(job.version)
            raise Broken("connection reset by peer")

    def script(session: Session) -> None:
        models[session.worker] = train(session, data, each=lambda *_: both_are_there(job))

    # A real reset might come before the sum is there; this one comes after it.
    monkeypatch.setattr(Group, "wait", fail)
    with running(tmp_path) as job:
        job.worker_limits = WorkerLimits(recovery=timedelta(seconds=0.1))
        job.run(script, workers=2)
        assert len(broken) == 2
        assert len(job.status().members) == 2
        assert_right(job, models, data, adam)


def test_buffers_are_the_mean_and_the_maximum_as_with_a_parameter_server(tmp_path: Path) -> None:
    """Batch normalisation: running statistics are averaged, counts go up by one in each version."""
    data = Numbers(80)
    states: dict[str, list[dict[str, torch.Tensor]]] = {"all-reduce": [], "parameter-server": []}

    def script(session: Session) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), make_mlp())
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            both_are_there(job)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        states[job.spec.strategy].append({k: v.clone() for k, v in model.state_dict().items()})

    for strategy in states:
        path, schedule = tmp_path / strategy, {"shardRecords": 8, "shuffle": False}
        with running_job(path, strategy=strategy, checkpoints=path / "checkpoints", data=schedule) as job:
            job.run(script, workers=2)
            versions = job.version
        for state in states[strategy]:
            assert int(state["0.num_batches_tracked"]) == versions
            for key, value in state.items():
                assert torch.equal(value, states[strategy][0][key])


def test_a_version_has_the_buffers_that_it_was_made_with(tmp_path: Path) -> None:
    """Worker 0 is gone before it sends a checkpoint. Worker 1, which sends it, has begun its next step."""
    due, begun = 5, threading.Event()
    expected: dict[str, torch.Tensor] = {}

    def vanish(method: str, frame: Frame) -> None:
        if method == "Init" and pb.InitRequest.FromString(frame.header).version == due:
            assert begun.wait(LIMIT)
            job.declare_gone(0)
            raise SystemExit

    def script(session: Session) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), make_mlp())
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(60), 4):
            if session.version < due:
                both_are_there(job)
            elif session.version == due:
                expected.update({k: v.clone() for k, v in model.state_dict().items()})
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.version == due:
                begun.set()
            optimizer.step()

    checkpoint = {"checkpoint": {"everyVersions": due, "keep": 100}}
    with running(tmp_path, parameterServer=checkpoint) as job:
        job.through = lambda worker, inner: Watched(inner, vanish) if worker == 0 else inner
        job.run(script, workers=2)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), make_mlp())
    load_checkpoint(tmp_path / "checkpoints", model, version=due)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_norm_is_limited_as_by_a_parameter_server(tmp_path: Path) -> None:
    data, models = Numbers(60), Models()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, max_grad_norm=0.05)
        models[session.worker] = model
        for x, y in session.loader(data, 5):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    def replayed(model: torch.nn.Module) -> None:
        class Clipped(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                return super().step(closure)

        replay(commits, data, model, lambda m: Clipped(m.parameters(), lr=0.05, momentum=0.9), job.spec)

    with running(tmp_path) as job:
        job.run(script, workers=2)
        commits = check_histories(job.history, records=60, epochs=1)
    assert_equal_up_to_round_off(models[0], make_mlp(), replayed)


def test_a_job_goes_on_from_a_checkpoint_after_its_parameter_server_is_lost(tmp_path: Path) -> None:
    data, models, lost = Numbers(300), Models(), list[int]()

    def script(session: Session) -> None:
        def each(session: Session, step: int) -> None:
            if not step:
                both_are_there(job)
            if session.worker == 0 and session.version >= 15 and not lost:
                lost.append(session.version)
                job.restart(0)

        models[session.worker] = train(session, data, each=each)

    checkpoint = {"checkpoint": {"everyVersions": 5}}
    with running(tmp_path, parameterServer=checkpoint) as job:
        job.run(script, workers=2)
        assert not check(read(job.history), Data(300, 1))
        assert job.status().term == 2
    first, second = models.values()
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_is_whole_and_another_job_goes_on_from_it(tmp_path: Path) -> None:
    """The state is that of one process at the same version, Adam's moments included."""
    data, models = Numbers(200), Models()

    def script(session: Session) -> None:
        models[session.worker] = train(session, data, epochs=epochs)

    commits: list[dict[str, Any]] = []
    for epochs in (1, 2):
        with (
            running(tmp_path / str(epochs))
            if epochs == 1
            else running_job(
                tmp_path / "2",
                strategy="all-reduce",
                checkpoints=tmp_path / "1" / "checkpoints",
                resume="auto",
            ) as job
        ):
            job.run(script, workers=2)
            commits += job.commits()
    assert_each_record_once(commits, records=200, epochs=2)
    assert_equal_up_to_round_off(
        models[0], make_mlp(), lambda model: replay(commits, data, model, adam, job.spec)
    )


def test_what_has_come_from_the_parameter_server_is_not_fetched_again(tmp_path: Path) -> None:
    """Each call breaks off after its first bucket, as one for a large model may."""
    asked, come = list[int](), list[bytes]()

    def before(method: str, frame: Frame) -> None:
        if method == "Pull":
            asked.append(len(pb.PullRequest.FromString(frame.header).buckets))
            come.clear()

    def answer(method: str, header: bytes) -> None:
        if method == "Pull":
            come.append(header)
            if len(come) > 1:
                raise ConnectionLost("a test has cut the connection")

    with running(tmp_path, parameterServer={"bucketBytes": 1024}) as job:
        job.worker_limits = WorkerLimits(patience=timedelta(seconds=2))
        job.through = lambda _, inner: Watched(inner, before, answer=answer)
        job.run(lambda session: train(session, Numbers(40)), workers=1)
    assert asked == [*range(len(asked), 0, -1)]
    assert len(asked) > 1


def test_a_script_may_pause_evaluate_and_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Between epochs nobody computes; the last to stop hands the version over, so that nothing is lost."""
    caplog.set_level(logging.INFO)
    data, models, seen = Numbers(60), Models(), []

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp()
        optimizer = session.optimizer(adam(model), model)
        loader = session.loader(data, 5, epochs=5)
        for epoch in loader.epochs():
            for x, y in loader:
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
            session.pause()
            if session.is_chief:
                seen.append(epoch)
                if epoch == 2:
                    session.stop("enough")
        assert optimizer.state_dict()["state"]

    with running(tmp_path) as job:
        job.run(script, workers=2)
        assert job.status().term == 1, "no version was lost"
        assert "is broken" not in caplog.text, "all know which group makes a version"
        assert job.version
    first, second = models.values()
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_skip_their_last_steps_hand_the_version_over_too(tmp_path: Path, workers: int) -> None:
    data, models = Numbers(60), Models()

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp()
        optimizer = session.optimizer(adam(model), model)
        loader, last = session.loader(data, 5, epochs=2), False
        while not last:
            last = True
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                if step == 3:
                    last = False
                    optimizer.skip()
                    break
                optimizer.step()
            session.pause()
            time.sleep(0.1 * session.worker)

    with running(tmp_path) as job:
        job.run(script, workers=workers)
        assert job.status().term == 1, "no version was lost"


@pytest.mark.parametrize("what", ["gradient", "buffer"])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_not_finite_is_refused_where_it_is_made(tmp_path: Path, overlap: bool, what: str) -> None:
    def script(session: Session) -> None:
        norm = torch.nn.BatchNorm1d(6)
        model = torch.nn.Sequential(norm, make_mlp())
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        for step, (x, y) in enumerate(session.loader(Numbers(50), 5)):
            wrong = float("nan") if step == 2 else 1.0
            optimizer.zero_grad()
            if what == "buffer":
                assert norm.running_mean is not None
                norm.running_mean.mul_(wrong)
            (mse(model, x, y) * (wrong if what == "gradient" else 1.0)).backward()
            optimizer.step()

    with running(tmp_path) as job:
        job.start(0, script)
        with pytest.raises(Refused, match="values are NaN or Inf"):
            job.join()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"parameterServer": {"replicas": 2}}, "parameterServer.replicas 2 does not work with"),
        ({"parameterServer": {"durability": "standby"}}, "durability standby does not work with"),
        ({"consistency": {"mode": "async"}}, "consistency.mode async does not work with"),
        ({"consistency": {"mode": "bounded", "maxStaleness": 2}}, "consistency.mode bounded does not work"),
        ({"consistency": {"deterministic": True}}, "consistency.deterministic does not work with"),
        ({"consistency": {"globalBatchSize": 8}}, "consistency.globalBatchSize does not work with"),
        ({"consistency": {"backupWorkers": 1}}, "consistency.backupWorkers does not work with"),
        ({"compression": {"codec": "int8"}}, r"compression \(codec\) does not work with"),
        ({"worker": {"processes": 2}}, "worker.processes 2 does not work with"),
        ({"strategy": "allreduce"}, "strategy"),
        (
            {"strategy": "parameter-server", "unencryptedAllReduce": True},
            "unencryptedAllReduce works only with strategy all-reduce",
        ),
    ],
    ids=lambda each: "" if isinstance(each, str) else next(iter(each)),
)
def test_what_needs_gradients_on_a_parameter_server_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidJob, match=said):
        make_spec(**{"strategy": "all-reduce", **fields})


def test_assigned_values_are_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        with pytest.raises(UsageError, match=r"session\.assign does not work with strategy all-reduce"):
            session.assign(model)

    with running(tmp_path) as job:
        job.start(0, script)
        job.join()


def clamped(weight: torch.Tensor) -> None:
    weight.clamp_(-0.2, 0.1)


def rows_limited(weight: torch.Tensor) -> None:
    norms = weight.norm(dim=1, keepdim=True)
    weight.mul_(torch.where(norms > 0.4, 0.4 / norms, 1.0))


def zeros_kept(weight: torch.Tensor) -> None:
    weight[1] = 0.0


@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ({"clamp": (-0.2, 0.1)}, clamped),
        ({"max_norm": 0.4}, rows_limited),
        ({"keep_zeros": True}, zeros_kept),
    ],
)
def test_limits_are_kept_also_by_a_newcomer(
    tmp_path: Path, option: dict[str, Any], limit: Callable[[torch.Tensor], None]
) -> None:
    """A peer sends it values within the limits. Otherwise their models would differ from then on."""
    data, models = Numbers(400), Models()

    def blank(model: torch.nn.Module) -> torch.nn.Parameter:
        weight = next(model.parameters())
        with torch.no_grad():
            weight[1] = 0.0
        return weight

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        blank(model)
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first], **option}, {"params": rest}], lr=0.05, momentum=0.9)

    def script(session: Session) -> None:
        def each(session: Session, step: int) -> None:
            if session.worker == 0 and step == 4:
                job.start(1, script)
                both_are_there(job)

        models[session.worker] = train(session, data, make, each=each)

    def replayed(model: torch.nn.Module, *, within: bool) -> None:
        weight = blank(model)

        @torch.no_grad()
        def after(*_: object) -> None:
            limit(weight)

        replay(commits, data, model, make, job.spec, after=after if within else None)

    with running(tmp_path) as job:
        job.start(0, script)
        job.join()
        commits = job.commits()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert_equal_up_to_round_off(models[0], make_mlp(), lambda model: replayed(model, within=True))
    with pytest.raises(AssertionError):
        assert_equal_up_to_round_off(models[0], make_mlp(), lambda model: replayed(model, within=False))


class Packed(torch.nn.Module):
    """One of its parameters is of whole numbers, which no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_mlp()
        self.packed = torch.nn.Parameter(torch.arange(-4, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


def test_limits_leave_alone_what_is_not_trained(tmp_path: Path) -> None:
    models = Models()

    def script(session: Session) -> None:
        model = models[session.worker] = Packed()
        optimizer = session.optimizer(sgd(model), model, clamp=(-0.2, 0.1))
        for x, y in session.loader(Numbers(40), 5):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running(tmp_path) as job:
        job.run(script, workers=2)
    for model in models.values():
        assert isinstance(model, Packed)
        assert torch.equal(model.packed, torch.arange(-4, 4))
        for parameter in model.body.parameters():
            assert -0.2 <= parameter.min() <= parameter.max() <= 0.1


def test_rows_that_are_larger_than_a_bucket_may_be_limited(tmp_path: Path) -> None:
    """Workers have them whole. A parameter server has parts of them, and refuses that."""

    def script(session: Session) -> None:
        model = torch.nn.Linear(600, 2, bias=False)
        optimizer = session.optimizer(
            torch.optim.SGD([{"params": model.parameters(), "max_norm": 0.5}], lr=0.1), model
        )
        for x, y in session.loader(Numbers(20), 5):
            optimizer.zero_grad()
            (model(x.repeat(1, 100)[:, :600]).sum() - y.sum()).backward()
            optimizer.step()
        assert float(model.weight.detach().norm(dim=1).max()) <= 0.5 + 1e-6

    with running(tmp_path, parameterServer={"bucketBytes": 1024}) as job:
        job.run(script, workers=2)


def test_a_worker_with_another_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = threading.Event()

    def script(session: Session) -> None:
        if session.worker == 1:
            assert first.wait(LIMIT)
            machine.has_torch(monkeypatch, "2.1.0+cu118")
        model = make_mlp()
        try:
            session.optimizer(sgd(model), model)
        finally:
            if session.worker == 0:
                first.set()
                job.until(lambda: bool(job.errors), "the other is refused")

    with running(tmp_path) as job:
        for worker in range(2):
            job.start(worker, script)
        said = (
            "worker 1 has torch 2.1.0, and worker 0 has torch .* all of them need the same version of torch"
        )
        with pytest.raises(InvalidModel, match=said):
            job.join()


def test_workers_with_certificates_do_not_speak_without_them() -> None:
    """Unless the job says so."""
    spec = make_spec(strategy="all-reduce")
    require_safe("127.0.0.1", spec, secured=True)
    require_safe("10.0.0.3", spec, secured=False)
    for host in ("10.0.0.3", "fd00::3"):
        require_safe(host, make_spec(strategy="all-reduce", unencryptedAllReduce=True), secured=True)
        said = f"reached at {host}: .*nobody is asked for a certificate.*set unencryptedAllReduce: true"
        with pytest.raises(UsageError, match=said):
            require_safe(host, spec, secured=True)


def test_a_store_is_found_at_its_own_address_alone() -> None:
    """Whoever reaches it can change what is in it: on one machine that is nobody of the network."""
    store = Store("127.0.0.1")
    port = int(store.address.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_a_worker_waits_until_the_parameter_server_has_an_address() -> None:
    """Its pod may wait for a node. Till then it is unknown at which address others find this worker."""
    assert host_towards("127.0.0.2:80", within=timedelta()) == "127.0.0.1"
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"no route to the parameter server at nowhere\.invalid:80"):
        host_towards("nowhere.invalid:80", within=timedelta(seconds=1))
    assert time.monotonic() - began >= 1


def test_the_consistency_of_a_running_job_stays(tmp_path: Path) -> None:
    there = threading.Event()

    def script(session: Session) -> None:
        train(session, Numbers(40), each=lambda session, step: there.wait(LIMIT))

    with running(tmp_path) as job:
        job.start(0, script)
        job.change(1, mode="async")
        job.until(lambda: bool(job.status().tuning.problem), "it is refused")
        assert "strategy all-reduce, which is always sync" in job.status().tuning.problem
        there.set()
        job.join()


# --- real processes


def steady(hurry: Path, records: int, **worker: Any) -> Any:
    spec = {
        "entrypoint": STEADY,
        "strategy": "all-reduce",
        "worker": {"replicas": 2, **worker},
        "parameterServer": {"checkpoint": {"everyVersions": 10}},
    }
    return make_job(spec=spec, records=records, batch_size=4, seconds=0.05, hurry=str(hurry))


@pytest.mark.nightly
def test_workers_are_killed_and_their_number_changes(tmp_path: Path) -> None:
    """Nobody starts again but who was killed, and each record is in the model once."""
    hurry, records = tmp_path / "hurry", 9000
    with Launcher(
        steady(hurry, records), Options(forks=forks(), root=tmp_path / "state", history=tmp_path / "history")
    ) as launcher:
        launcher.start()
        two = wait_for_workers(launcher, lambda w: len(w) == 2, "two workers train")

        def moves(what: str) -> None:
            version = version_of(launcher)
            eventually(lambda: version_of(launcher) > version + 3, what)

        moves("two make versions")
        os.kill(two[0], signal.SIGKILL)
        again = wait_for_workers(
            launcher, lambda w: len(w) == 2 and w[0] != two[0], "the killed one is replaced"
        )
        assert again[1] == two[1]
        moves("they go on")
        launcher.directory.scale(4)
        four = wait_for_workers(launcher, lambda w: len(w) == 4, "four workers train")
        assert (four[0], four[1]) == (again[0], again[1])
        moves("four make versions")
        os.kill(four[2], signal.SIGKILL)
        launcher.directory.scale(2)
        wait_for_workers(launcher, lambda w: w.keys() == {0, 1}, "two are left")
        moves("two go on")
        hurry.touch()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    check_histories(tmp_path / "history", records=records, epochs=1)
    assert not check(read(tmp_path / "history"), Data(records, 1))


@pytest.mark.nightly
def test_all_workers_are_killed_and_the_parameter_server_too(tmp_path: Path) -> None:
    """The job goes back to a checkpoint: what it had of later versions is undone, and trained again."""
    hurry, records = tmp_path / "hurry", 4500
    with Launcher(
        steady(hurry, records), Options(forks=forks(), root=tmp_path / "state", history=tmp_path / "history")
    ) as launcher:
        launcher.start()
        two = wait_for_workers(launcher, lambda w: len(w) == 2, "two workers train")
        eventually(lambda: version_of(launcher) > 12, "a checkpoint is behind them")
        for pid in two.values():
            os.kill(pid, signal.SIGKILL)
        wait_for_workers(
            launcher, lambda w: len(w) == 2 and not {*w.values()} & {*two.values()}, "they are replaced"
        )
        version = version_of(launcher)
        eventually(lambda: version_of(launcher) > version + 12, "they go on")
        server = next(p.pid for p in launcher.status().processes if p.role == "ps")
        os.kill(server, signal.SIGKILL)
        version = version_of(launcher)
        eventually(lambda: version_of(launcher) > version, "they go on with another parameter server")
        hurry.touch()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert not check(read(tmp_path / "history"), Data(records, 1))
