"""Versions of a constant number of records: with any workers, the model is that of one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ps.data.shuffle import permutation
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, events, make_mlp, running_job
from tests.testing.oracle import Commit, mse, ranges_of
from tests.testing.polling import eventually
from tests.testing.tiers import per_change
from tests.testing.trained import alone, asks, sgd

DATA = Numbers(100)


def plain(data: Numbers, *, size: int, epochs: int, double: bool = False) -> torch.nn.Module:
    """What plain torch makes of the data, in batches of `size`, in the order of the job."""
    model = make_mlp().double() if double else make_mlp()
    optimizer = sgd(model)
    for epoch in range(epochs):
        order = torch.tensor(permutation(len(data), epoch, shuffle=True, seed=0)[:])
        for batch in order.split(size):
            optimizer.zero_grad()
            x, y = data.x[batch], data.y[batch]
            mse(model, x.double() if double else x, y.double() if double else y).backward()
            optimizer.step()
    return model


def records_of(commit: Commit) -> list[tuple[int, int]]:
    return sorted((r.epoch, i) for r in ranges_of(commit) for i in range(r.start, r.stop))


def check_sets(commits: list[Commit], *, records: int, size: int, epochs: int) -> None:
    """Each version has the next `size` records; the last of an epoch has the rest."""
    sets = [
        [(epoch, i) for i in range(start, min(start + size, records))]
        for epoch in range(epochs)
        for start in range(0, records, size)
    ]
    assert [records_of(commit) for commit in commits] == sets


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x.detach().double() - y.detach().double()).abs().max()) for x, y in pairs)


def script_of(models: dict[int, torch.nn.Module], **loading: Any) -> Callable[[Session], None]:
    """A loop as in plain torch, over the epochs."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DATA, 8, epochs=2, **loading):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        models[session.worker] = model

    return script


@pytest.mark.parametrize("shards", [1, 2])
def test_one_worker_makes_steps_of_the_global_batch(tmp_path: Path, shards: int) -> None:
    models: dict[int, torch.nn.Module] = {}
    server = {"replicas": shards, "bucketBytes": 1024}
    commits = alone(tmp_path, script_of(models), consistency={"globalBatchSize": 24}, parameterServer=server)
    check_sets(commits, records=100, size=24, epochs=2)
    assert difference(models[0], plain(DATA, size=24, epochs=2)) < 1e-6


@pytest.mark.parametrize("double", per_change([False, True], keep=[True]))
def test_a_job_that_goes_from_two_workers_to_six_and_to_three_trains_as_one_machine(
    tmp_path: Path, double: bool
) -> None:
    """Three workers come in the middle of versions; one of them dies while it pushes, two more leave."""
    data, size, epochs = Numbers(500), 48, 3
    models: dict[int, torch.nn.Module] = {}
    computing: Callable[[], int] = lambda: sum(m.state == "training" for m in job.status().members)  # noqa: E731
    six_computed = threading.Event()

    def six_compute() -> bool:
        if computing() == 6:
            six_computed.set()
        return six_computed.is_set()

    def pushes(session: Session) -> int:
        return sum(e["event"] == "push" for e in events(job.history, f"worker-{session.worker}"))

    def script(session: Session) -> None:
        model = make_mlp().double() if double else make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 5, epochs=epochs):
            if session.version == 3:  # else version 5 may be handed out before all are there
                job.until(lambda: asks(job, *range(6)), "six workers ask for records")
            if session.version == 4:  # nobody takes the part of one that is still coming
                eventually(six_compute, "six workers compute")
            if session.worker == 0 and session.version == 12:
                eventually(lambda: computing() == 3, "three workers compute")
            before = pushes(session) if session.worker == 5 else 0
            optimizer.zero_grad()
            mse(model, x.double() if double else x, y.double() if double else y).backward()
            if session.worker == 5 and session.version >= 10:
                eventually(lambda: pushes(session) > before, "worker 5 pushes")  # noqa: B023 (at once)
                return
            if session.worker in (3, 4) and session.version >= 9:
                session.drain()
            optimizer.step()
        models[session.worker] = model

    with running_job(
        tmp_path,
        consistency={"globalBatchSize": size, "deterministic": True},
        worker={"replicas": 2, "leaseDuration": "5s"},
        parameterServer={"bucketBytes": 1024},
    ) as job:
        for worker in range(2):
            job.start(worker, script)
        job.until(lambda: job.version >= 3, "version 3")
        for worker in range(2, 6):
            job.start(worker, script)
        job.join()
        commits = job.commits()
    check_sets(commits, records=len(data), size=size, epochs=epochs)
    assert check(read(job.history), Data(len(data), epochs), batch=size) == []
    workers = [len({c["worker"] for c in commit["contributions"]}) for commit in commits]
    assert workers[-1] == 3
    assert 6 in workers
    assert workers[2] <= 2
    assert models.keys() == {0, 1, 2}
    alike = plain(data, size=size, epochs=epochs, double=double)
    assert difference(models[0], alike) < (1e-12 if double else 2e-6)


@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
def test_parameter_servers_are_lost(tmp_path: Path, durability: str) -> None:
    models: dict[int, torch.nn.Module] = {}
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        consistency={"globalBatchSize": 20},
        parameterServer={
            "replicas": 2,
            "bucketBytes": 1024,
            "durability": durability,
            "checkpoint": {"everyVersions": 2, "interval": "1h"},
        },
    ) as job:
        for worker in range(3):
            job.start(worker, script_of(models))
        job.until(lambda: job.version >= 3, "version 3")
        if durability == "standby":
            job.until(lambda: job.followed, "the standbys have every round")
        job.restart(0)
        job.join()
    histories = read(job.history)
    assert check(histories, Data(len(DATA), 2), batch=20) == []
    assert len(histories.restored) == 1
    assert difference(models[1], plain(DATA, size=20, epochs=2)) < 1e-6


def test_processes_that_load_records_serve_one_version_after_another(tmp_path: Path) -> None:
    models: dict[int, torch.nn.Module] = {}
    commits = alone(tmp_path, script_of(models, num_workers=2), consistency={"globalBatchSize": 40})
    check_sets(commits, records=100, size=40, epochs=2)
    assert difference(models[0], plain(DATA, size=40, epochs=2)) < 1e-6


@pytest.mark.parametrize(
    ("records", "size", "workers"),
    [(34, 32, 2), (34, 17, 1), (35, 33, 2)],
    ids=["of an epoch", "of a portion", "of both"],
)
def test_what_is_left_is_not_cut_into_single_records(
    records: int, size: int, workers: int, tmp_path: Path
) -> None:
    """Batch norm refuses a batch of one record, in torch, too."""
    data, batches = Numbers(records), list[int]()

    def script(session: Session) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in session.loader(data, 16, epochs=2):
            batches.append(len(x))
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, consistency={"globalBatchSize": size}) as job:
        for worker in range(workers):
            job.start(worker, script)
        job.join()
        commits = job.commits()
    check_sets(commits, records=records, size=size, epochs=2)
    assert sum(batches) == 2 * records
    assert min(batches) > 1


def test_with_drop_last_the_rest_of_an_epoch_is_left_out(tmp_path: Path) -> None:
    models: dict[int, torch.nn.Module] = {}
    with running_job(tmp_path, consistency={"globalBatchSize": 30}) as job:
        for worker in range(2):
            job.start(worker, script_of(models, drop_last=True))
        job.join()
        commits, progress = job.commits(), job.status().progress
    assert [len(records_of(commit)) for commit in commits] == [30] * 6
    assert (progress.records_applied, progress.records_skipped) == (180, 20)
    assert check(read(job.history), Data(len(DATA), 2), batch=30) == []


def test_a_schedule_counts_versions(tmp_path: Path) -> None:
    """Each has five steps of this worker."""
    rates: list[float] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        session.scheduler(lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5), interval="step")
        for x, y in session.loader(DATA, 4):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    alone(tmp_path, script, consistency={"globalBatchSize": 20})
    assert rates == [0.02 * 0.5**version for version in range(5) for _ in range(5)]


@pytest.mark.parametrize(
    "consistency",
    per_change(
        [{"globalBatchSize": 40}, {"mode": "local", "steps": 10, "outer": "average"}],
        keep=[{"globalBatchSize": 40}],
    ),
    ids=["globalBatchSize", "local"],
)
def test_a_slow_worker_gets_less_to_compute(tmp_path: Path, consistency: dict[str, Any]) -> None:
    """It takes four times as long for a batch, and has fewer records in most versions; each counts once."""
    data, taken = Numbers(1600), [0.01]

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            began = time.monotonic()
            time.sleep(4 * taken[0] if session.worker else 0.01)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if not session.worker:
                taken[0] = time.monotonic() - began  # on a busy machine, more than it sleeps
            optimizer.step()

    consistency = consistency | {"balance": "speed"}
    with running_job(tmp_path, consistency=consistency, data={"shardRecords": 8}) as job:
        job.run(script, workers=2)
        commits, members = job.commits(), {m.worker: m for m in job.status().members}
    assert check(read(job.history), Data(len(data), 1), batch=consistency.get("globalBatchSize")) == []
    both = [c["contributions"] for c in commits if len({step["worker"] for step in c["contributions"]}) == 2]
    of_slow = [
        sum(s["samples"] for s in steps if s["worker"]) / sum(s["samples"] for s in steps) for steps in both
    ]
    assert sum(share < 0.45 for share in of_slow) > len(of_slow) / 2, of_slow
    assert members[1].records < members[0].records
    assert members[1].records_per_second < members[0].records_per_second


def test_a_script_that_accumulates_itself_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=False)
        for number, (x, y) in enumerate(session.loader(DATA, 4), start=1):
            mse(model, x, y).backward()
            if number % 2 == 0:
                optimizer.step()

    with pytest.raises(
        UsageError, match=r"makes a step of several batches.* a version is made of 20 records"
    ):
        alone(tmp_path, script, consistency={"globalBatchSize": 20})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_script_that_loads_a_batch_before_its_step_is_refused(tmp_path: Path, overlap: bool) -> None:
    """The step would come too late for the last batch of a version."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        batches = iter(session.loader(DATA, 5))
        batch = next(batches, None)
        while batch is not None:
            optimizer.zero_grad()
            mse(model, *batch).backward()
            batch = next(batches, None)
            optimizer.step()

    with pytest.raises(UsageError, match=r"globalBatchSize.*step\(\) after .*, before the next batch"):
        alone(tmp_path, script, consistency={"globalBatchSize": 20})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_script_that_makes_no_step_with_some_batches_skips_them(tmp_path: Path, overlap: bool) -> None:
    """Also with the last batch of a version, and with gradients that are sent in part."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=overlap)
        for number, (x, y) in enumerate(session.loader(DATA, 5)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if number in (3, 5, 6):
                if number == 5 or overlap:
                    optimizer.skip()
                continue
            optimizer.step()

    with running_job(tmp_path, consistency={"globalBatchSize": 20}) as job:
        job.start(0, script)
        job.join()
        commits, progress = job.commits(), job.status().progress
    assert (progress.records_applied, progress.records_skipped) == (85, 15)
    assert [len(records_of(commit)) for commit in commits] == [15, 10, 20, 20, 20]
    assert check(read(job.history), Data(100, 1), batch=20) == []


def test_a_script_stops_the_training_in_the_middle_of_a_version(tmp_path: Path) -> None:
    """All workers end, with the same model; the last version has what was computed by then."""
    models: dict[int, torch.nn.Module] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DATA, 4, epochs=50):
            if session.worker == 0 and session.version >= 7:
                session.stop("it is good enough")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        models[session.worker] = model

    with running_job(tmp_path, consistency={"globalBatchSize": 24}) as job:
        job.run(script, workers=3)
        commits, progress = job.commits(), job.status().progress
    assert progress.stopped == "it is good enough"
    assert {len(records_of(commit)) for commit in commits[:-1]} == {24, 4}
    assert check(read(job.history), None) == []
    assert all(difference(models[0], models[worker]) == 0 for worker in (1, 2))


def test_a_worker_that_is_busy_between_epochs_has_its_part(tmp_path: Path) -> None:
    """And scripts that loop over epochs train the same as those that do not."""
    models: dict[int, torch.nn.Module] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(DATA, 8, epochs=3)
        for epoch in loader.epochs():
            for x, y in loader:
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
            if session.worker == epoch % 2:
                time.sleep(0.2)
        models[session.worker] = model

    with running_job(tmp_path, consistency={"globalBatchSize": 30}) as job:
        job.run(script, workers=2)
        commits = job.commits()
    check_sets(commits, records=100, size=30, epochs=3)
    assert difference(models[1], plain(DATA, size=30, epochs=3)) < 1e-6


@pytest.mark.parametrize("options", [{}, {"drop_last": True}], ids=str)
def test_more_records_than_an_epoch_has_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidModel, match="globalBatchSize is 101, but the data set has only 100 records"):
        alone(tmp_path, script_of({}, **options), consistency={"globalBatchSize": 101})
