"""What scripts report, and what they are told of a version, is the same whoever comes, goes or dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from elastic_ps.errors import UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, events, make_mlp, running_job
from tests.testing.oracle import assert_equal_up_to_round_off, mse, replay
from tests.testing.polling import LIMIT, eventually
from tests.testing.trained import Models, alone, await_training, sgd, training

Seen = dict[int, dict[str, float]]
"""By version: the job's metrics then."""


class Halt(Exception):
    """A worker vanishes."""


def counting(
    job: Job,
    data: Numbers,
    seen: Seen,
    batch: int,
    before_step: Callable[[Session, int], None] = lambda session, step: None,
) -> Callable[[Session], None]:
    """A script that reports how many records it has, and looks at what the job has made of all workers'.

    In mode `sync` no later version is made while a worker has not pushed its next step.
    """

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        try:
            for step, (x, y) in enumerate(session.loader(data, batch)):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                session.report(share=float(len(x)), loss=float(len(x)))
                session.metric("records", len(x), reduce="sum")
                session.metric("largest", torch.tensor(len(x)), reduce="max")
                before_step(session, step)
                optimizer.step()
                seen[session.version] = look(job, session)
        except Halt:
            session.close()

    return script


def look(job: Job, session: Session) -> dict[str, float]:
    """The job's metrics of the version that this worker has just got, and will push a step for.

    A shard sends a version a moment before shard 0 has counted it.
    """
    eventually(lambda: job.version >= session.version, "the version is counted")
    return dict(job.status().progress.metrics)


def pushes(job: Job, worker: int, step: int) -> int:
    """How many buckets of this step a worker has begun to push."""
    found = events(job.history, f"worker-{worker}")
    return sum(e["event"] == "push" and e["step"] == step for e in found)


def check(job: Job, seen: Seen) -> None:
    """Exactly the steps that a version is made of were counted."""
    for commit in job.commits():
        sizes = [c["samples"] for c in commit["contributions"]]
        if commit["version"] in seen:
            found = seen[commit["version"]]
            assert (found["records"], found["largest"]) == (sum(sizes), max(sizes))
            assert found["share"] == pytest.approx(sum(size * size for size in sizes) / sum(sizes))
            assert "loss" not in found, "it has a curve"


def test_sum_mean_and_maximum_when_a_worker_vanishes_with_half_a_step_pushed(tmp_path: Path) -> None:
    """The round starts again: the values of the others count once."""
    data, seen = Numbers(600), Seen()
    with running_job(tmp_path, parameterServer={"bucketBytes": 1024}, data={"shardRecords": 10}) as job:
        begun = threading.Event()

        def vanish(session: Session, step: int) -> None:
            if step == 3:
                eventually(lambda: pushes(job, 2, step) > 0, "some buckets are pushed")
                raise Halt

        def late(session: Session, step: int) -> None:
            if not step:
                await_training(job, 0, 1)
            if session.version >= 5:  # nobody goes on without worker 2
                assert begun.wait(LIMIT)

        job.start(0, counting(job, data, seen, 4, late))
        job.start(1, counting(job, data, seen, 7, late))
        job.until(lambda: job.version > 3, "some steps")
        vanishing = job.start(2, counting(job, data, {}, 5, vanish))
        job.until(lambda: training(job, 2) or not vanishing.is_alive(), "worker 2 waits for a step")
        begun.set()
        job.until(lambda: not vanishing.is_alive(), "worker 2 vanishes")
        job.join()
        check(job, seen)
        makers = {frozenset(c["worker"] for c in commit["contributions"]) for commit in job.commits()}
        assert job.status().progress.loss is not None
    assert {frozenset({0, 1}), frozenset({0, 1, 2})} <= makers
    assert len(seen) > 20


def test_they_are_counted_once_when_the_parameter_server_is_lost(tmp_path: Path) -> None:
    data, seen, once = Numbers(240), Seen(), threading.Lock()
    server = {"checkpoint": {"everyVersions": 5, "interval": "1h"}}
    with running_job(tmp_path, checkpoints=tmp_path / "kept", parameterServer=server) as job:

        def lose(session: Session, step: int) -> None:
            del step
            if session.version >= 12 and once.acquire(blocking=False):
                job.restart(0)

        for worker in range(2):
            job.start(worker, counting(job, data, seen, 4, lose))
        job.join()
        # A version may have been made twice; what was seen is that of the second time or of the first.
        last = {commit["version"]: commit for commit in job.commits()}
        for version, commit in last.items():
            if version in seen and version > max(last) - 5:
                sizes = [c["samples"] for c in commit["contributions"]]
                assert seen[version]["records"] == sum(sizes)
        assert job.status().term == 2


def test_batches_of_a_step_become_one_value(tmp_path: Path) -> None:
    data, seen = Numbers(21), list[dict[str, float]]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(session.loader(data, 4)):
            last = number % 3 == 2
            if last:
                mse(model, x, y).backward()
            else:
                with optimizer.no_sync():
                    mse(model, x, y).backward()
            session.report(size=len(x))
            session.metric("records", len(x), reduce="sum")
            if last:
                optimizer.step()
                optimizer.zero_grad()
                seen.append(look(job, session))

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
    assert seen[0] == {"size": 4.0, "records": 12.0}
    assert seen[1] == {"size": pytest.approx((16 + 16 + 1) / 9), "records": 9.0}


def test_the_processes_of_a_worker_are_counted_once(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(20), 10):
            mse(model, x, y).backward()
            session.metric("records", len(x), reduce="sum")
            session.metric("rank", rank, reduce="max")
            session.report(mean=rank)
            optimizer.step()
            optimizer.zero_grad()

    with running_job(tmp_path, worker={"processes": 3}) as job:
        job.start_processes(0, script)
        job.join()
        found = job.status().progress.metrics
    assert found == {"records": 10.0, "rank": 2.0, "mean": pytest.approx((0 * 4 + 1 * 3 + 2 * 3) / 10)}


def test_in_mode_local_the_steps_of_an_exchange_become_one_value(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(32), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            session.metric("records", len(x), reduce="sum")
            optimizer.step()

    with running_job(tmp_path, consistency={"mode": "local", "steps": 4}) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.metrics == {"records": 16.0}


def test_a_sum_outside_of_a_step_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(8), 4):
            mse(model, x, y).backward()
            optimizer.step()
            session.metric("records", len(x), reduce="sum")

    with pytest.raises(UsageError, match=r"reduce='sum'.*outside of a step"):
        alone(tmp_path, script)


def test_four_workers_in_the_place_of_two_have_twice_the_learning_rate(tmp_path: Path) -> None:
    """At each version all workers know the same of it; the next step has the rate that follows from it."""
    data, models = Numbers(1200), Models()
    told: dict[int, set[tuple[int, int, float]]] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        loader = session.loader(data, 4)
        session.scheduler(LambdaLR(optimizer, lambda _: session.world_size), interval="step")
        models[session.worker] = model
        for x, y in loader:
            both.wait(LIMIT)
            know = (session.world_size, session.global_batch_size, optimizer.param_groups[0]["lr"])
            told.setdefault(session.version, set()).add(know)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.version >= 12:
                more.wait(LIMIT)
            optimizer.step()

    both, more = threading.Event(), threading.Event()
    fields: dict[str, Any] = {"worker": {"replicas": 2}, "data": {"shardRecords": 8}}
    with running_job(tmp_path, **fields) as job:
        for worker in range(2):
            job.start(worker, script)
        job.until(lambda: training(job, 0) and training(job, 1), "two begin")
        both.set()
        job.until(lambda: job.version > 5, "some steps")
        for worker in (2, 3):
            job.start(worker, script)
        job.until(lambda: all(training(job, worker) for worker in (2, 3)), "they wait for a step")
        more.set()
        job.join()
        commits = job.commits()
    made = {0: (2, 8)} | {
        c["version"]: (len(c["contributions"]), sum(each["samples"] for each in c["contributions"]))
        for c in commits
    }
    assert {workers for workers, _ in made.values()} >= {2, 4}
    for version, knows in told.items():
        workers, samples = made[version]
        assert knows == {(workers, samples, 0.01 * workers)}

    def rates(version: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * made[version][0]

    def replayed(model: torch.nn.Module) -> None:
        replay(
            commits,
            data,
            model,
            lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
            job.spec,
            before=rates,
        )

    assert_equal_up_to_round_off(models[0], make_mlp(), replayed)


def test_a_job_that_goes_on_knows_what_its_version_was_made_of(tmp_path: Path) -> None:
    kept, told = tmp_path / "kept", list[Any]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        told.append((session.version, session.world_size))
        for step, (x, y) in enumerate(session.loader(Numbers(40), 4, epochs=2)):
            told.append((session.version, session.world_size, session.global_batch_size))
            mse(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4 and session.version == 5:
                session.drain()

    for resume in ("no", "require"):
        with running_job(tmp_path / resume, checkpoints=kept, resume=resume, worker={"replicas": 3}) as job:
            job.start(0, script)
            job.join()
    assert told[:3] == [(0, 3), (0, 3, 12), (1, 1, 4)]
    assert (5, 1) in told


def test_no_record_is_trained_before_the_first_version(tmp_path: Path) -> None:
    """Also in the worker that brings the model, and so has pulled none."""
    found = list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        found.append(session.samples)
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(8), 4):
            found.append(session.samples)
            mse(model, x, y).backward()
            optimizer.step()
        found.append(session.samples)

    with running_job(tmp_path) as job:
        job.run(script, workers=1)
    assert found == [0, 0, 4, 8]


def test_the_size_of_a_version_is_not_known_before_there_is_a_loader(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        assert session.global_batch_size

    with pytest.raises(UsageError, match=r"call session\.loader\(\.\.\.\) first"):
        alone(tmp_path, script)
