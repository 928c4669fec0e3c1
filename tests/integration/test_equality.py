"""In `sync` mode a job computes what one process computes on the joined batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.core.settings import ALLOWED
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import (
    MakeOptimizer,
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    replay,
)
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change
from tests.testing.trained import await_training
from tests.testing.transports import whole_jobs

Models = dict[int, torch.nn.Module]
CLASSES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.005, "weight_decay": 0.01},
    "AdamW": {"lr": 0.005},
    "Adagrad": {"lr": 0.02},
    "RMSprop": {"lr": 0.002, "momentum": 0.5, "centered": True},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.005},
    "NAdam": {"lr": 0.005},
    "RAdam": {"lr": 0.005},
    "ASGD": {"lr": 0.05},
    "Rprop": {"lr": 0.005},
}


def optimizer_of(name: str, **options: Any) -> MakeOptimizer:
    cls = getattr(torch.optim, name)
    return lambda model: cls(model.parameters(), **(options or CLASSES[name]))


def trainer(
    make: MakeOptimizer,
    data: Numbers,
    models: Models,
    *,
    batch_size: int = 4,
    epochs: int = 1,
    before_step: Callable[[Session, int], None] = lambda session, step: None,
    dtype: torch.dtype = torch.float32,
) -> Callable[[Session], None]:
    """The ordinary loop; the model is put into `models`."""

    def script(session: Session) -> None:
        model = make_mlp().to(dtype)
        optimizer = session.optimizer(make(model), model)
        models[session.worker] = model
        batches = session.loader(data, batch_size, epochs=epochs)
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            mse(model, x.to(dtype), y.to(dtype)).backward()
            before_step(session, step)
            optimizer.step()

    return script


def together(job: Job, workers: int) -> Callable[[Session, int], None]:
    """For `before_step`: all workers compute before one of them ends its first step."""
    return lambda _, step: await_training(job, *range(workers)) if step == 0 else None


def check(job: Job, data: Numbers, models: Models, make: MakeOptimizer, *, epochs: int = 1) -> None:
    """Whoever saw the end has the parameters that the replay gives, all of them the same to the bit."""
    job.join()
    commits = job.commits()
    assert_each_record_once(commits, records=len(data), epochs=epochs)
    finished = list(models.values())
    assert finished
    dtype = next(finished[0].parameters()).dtype
    for model in finished[1:]:
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), finished[0].parameters(), strict=True)
        )
    assert_equal_up_to_round_off(
        finished[0], make_mlp().to(dtype), lambda model: replay(commits, data, model, make, job.spec)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(optimizer_of("SGD", lr=0.05, momentum=0.9), id="momentum"),
        pytest.param(
            optimizer_of("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01), id="nesterov"
        ),
        pytest.param(optimizer_of("Adam"), id="Adam"),
    ],
)
def test_fifty_steps_are_those_of_one_process(tmp_path: Path, make: MakeOptimizer, workers: int) -> None:
    data, models = Numbers(50 * 4 * workers), Models()
    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        for worker in range(workers):
            job.start(worker, trainer(make, data, models, before_step=together(job, workers)))
        check(job, data, models, make)
        assert len(job.commits()) >= 50
        joined = [len(commit["contributions"]) for commit in job.commits()]
        assert sum(count == workers for count in joined) > 25


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_double_precision_agrees_to_twelve_digits(tmp_path: Path, name: str) -> None:
    data, models, make = Numbers(600), Models(), optimizer_of(name)
    with running_job(tmp_path) as job:
        for worker in range(3):
            job.start(worker, trainer(make, data, models, dtype=torch.float64))
        job.join()
        exact = make_mlp().double()
        replay(job.commits(), data, exact, make, job.spec)
    for ours, theirs in zip(models[0].parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", per_change(ALLOWED, keep=["SGD", "Adam"]))
def test_every_optimizer_on_the_list(tmp_path: Path, name: str) -> None:
    data, models, make = Numbers(96), Models(), optimizer_of(name)
    with running_job(tmp_path, parameterServer={"replicas": 2, "bucketBytes": 1024}) as job:
        for worker in range(2):
            job.start(worker, trainer(make, data, models))
        check(job, data, models, make)


@pytest.mark.covering(1)
@whole_jobs
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_several_shards_train_what_one_process_does(tmp_path: Path, shards: int, transport: str) -> None:
    data, models, make = Numbers(400), Models(), optimizer_of("Adam")
    server = {"replicas": shards, "bucketBytes": 1024}
    with running_job(tmp_path, transport=transport, parameterServer=server) as job:
        for worker in range(2):
            job.start(worker, trainer(make, data, models))
        check(job, data, models, make)


def test_unequal_batches_weigh_by_their_samples(tmp_path: Path) -> None:
    data, models, make = Numbers(701), Models(), optimizer_of("SGD")
    with running_job(tmp_path, data={"shardRecords": 60}) as job:
        for worker, batch_size in enumerate((1, 3, 11)):
            begin = together(job, 3)
            job.start(worker, trainer(make, data, models, batch_size=batch_size, before_step=begin))
        check(job, data, models, make)
        sizes = {c["samples"] for commit in job.commits() for c in commit["contributions"]}
        assert {1, 3, 11} <= sizes


@pytest.mark.parametrize("overlap", [True, False])
def test_gradient_accumulation(tmp_path: Path, overlap: bool) -> None:
    """Every step is made of three backward passes, but for what is left at the end."""
    data, models, make = Numbers(241), Models(), optimizer_of("SGD")

    def script(session: Session) -> None:
        model = make_mlp()
        models[session.worker] = model
        optimizer = session.optimizer(make(model), model, overlap=overlap)
        loader = session.loader(data, 4, epochs=2)
        for _ in loader.epochs():
            for group in groups_of(3, loader):
                optimizer.zero_grad()
                whole = sum(len(x) for x, _ in group)
                for number, (x, y) in enumerate(group):
                    with optimizer.no_sync() if overlap and number < len(group) - 1 else nullcontext():
                        (mse(model, x, y) * len(x) / whole).backward()
                optimizer.step()

    with running_job(tmp_path) as job:
        for worker in range(2):
            job.start(worker, script)
        check(job, data, models, make, epochs=2)
        assert any(c["samples"] == 12 for commit in job.commits() for c in commit["contributions"])


def groups_of(size: int, batches: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    group = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


class Halt(Exception):
    """A worker's own failure, in the middle of a step."""


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", per_change(["SGD", "Adam"], keep=["Adam"]))
def test_workers_join_leave_and_vanish(tmp_path: Path, name: str, shards: int) -> None:
    """Worker 1 leaves after its 8th step, 2 joins later, 3 joins and vanishes with half of a step pushed."""
    data, models, make = Numbers(800), Models(), optimizer_of(name)
    gone: Models = {}

    def leave(session: Session, step: int) -> None:
        if step == 8:
            session.drain()

    def vanish(session: Session, step: int) -> None:
        if step == 5:
            history = job.history
            eventually(lambda: pushes(history, 3, step) >= 1, "some buckets are pushed")
            raise Halt

    server = {"replicas": shards, "bucketBytes": 1024}
    with running_job(tmp_path, parameterServer=server, data={"shardRecords": 16}) as job:
        hold = threading.Event()

        def late(session: Session, step: int) -> None:
            if step == 20:
                assert hold.wait(LIMIT)

        job.start(0, trainer(make, data, models, before_step=late))
        job.start(1, trainer(make, data, gone, before_step=leave))
        job.until(lambda: job.version > 5, "some steps")
        job.start(2, trainer(make, data, models))
        vanishing = job.start(3, swallow(Halt, trainer(make, data, gone, before_step=vanish)))
        hold.set()
        job.until(lambda: not vanishing.is_alive(), "worker 3 vanishes")
        check(job, data, models, make)
        outcomes = {member.worker: member.state for member in job.status().members}
        assert outcomes[1] == "left"
        assert outcomes[3] == "lost"
        assert {c["worker"] for commit in job.commits() for c in commit["contributions"]} == {0, 1, 2, 3}


def pushes(history: Path, worker: int, step: int) -> int:
    """How many buckets of this step a worker has begun to push."""
    from tests.testing.harness import events

    return sum(e["event"] == "push" and e["step"] == step for e in events(history, f"worker-{worker}"))


def swallow(kind: type[BaseException], script: Callable[[Session], None]) -> Callable[[Session], None]:
    """The script, whose failure is part of the test; the session is closed as by a process that ends."""

    def run(session: Session) -> None:
        try:
            script(session)
        except kind:
            session.close()

    return run


@whole_jobs
def test_closing_in_the_middle_of_a_step_does_not_wait(tmp_path: Path, transport: str) -> None:
    """What is under way when the session closes is given up, not tried again until patience ends."""
    data, make = Numbers(64), optimizer_of("SGD")

    def fail(session: Session, step: int) -> None:
        raise Halt

    server = {"bucketBytes": 1024}
    with running_job(tmp_path, transport=transport, parameterServer=server) as job:
        for worker in range(3):
            job.start(worker, swallow(Halt, trainer(make, data, {}, before_step=fail)))
        job.join()  # has a deadline, which is far below a client's patience
