"""Workers of several processes that train tables that grow."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ps
from elastic_ps.embedding import SGD, LazyAdam, uniform
from elastic_ps.embedding.optimizers import RowOptimizer
from elastic_ps.embedding.table import State
from elastic_ps.errors import ModelMismatch, Refused
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.oracle import assert_each_record_once, mse, replay
from tests.testing.polling import LIMIT
from tests.testing.tiers import per_change

IDS, DIM, RECORDS = 30, 4, 64


class Clicks(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Two ids for each record, most of them small, and a number to be predicted."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = (torch.rand(RECORDS, 2, generator=generator) ** 3 * IDS).long()
        self.targets = torch.randn(RECORDS, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[index], self.targets[index]


class Model(torch.nn.Module):
    """A table, and a linear layer."""

    def __init__(self, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows, self.head = rows, torch.nn.Linear(2 * DIM, 1, dtype=torch.float64)
        torch.nn.init.constant_(self.head.weight, 0.1)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.rows(ids.long()).flatten(1))
        return found


def growing(name: str = "click", optimizer: RowOptimizer | None = None) -> Model:
    optimizer = optimizer or SGD(lr=0.2)
    init = uniform(-0.5, 0.5)
    return Model(elastic_ps.Embedding(name, DIM, optimizer=optimizer, init=init, dtype=torch.float64))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def rows_of(model: Model) -> State:
    assert isinstance(model.rows, elastic_ps.Embedding)
    return model.rows.table.state()


def trainer(
    make: Callable[[], Model] = growing,
    each: Callable[[Session], object] = lambda _: None,
    *,
    weigh: bool = False,
    until: float = math.inf,
    **loading: Any,
) -> Callable[[Session, int], None]:
    def script(session: Session, _: int) -> None:
        model = make()
        optimizer = session.optimizer(sgd(model), model)
        for ids, targets in session.loader(Clicks(), epochs=2, **loading):
            optimizer.zero_grad()
            if weigh:
                session.weigh(len(ids))
            mse(model, ids, targets).backward()
            each(session)
            optimizer.step()
            if session.version >= until:
                raise SystemExit

    return script


@pytest.mark.parametrize("processes", [1, 2])
def test_a_batch_whose_rows_have_no_finite_gradient_may_be_skipped(tmp_path: Path, processes: int) -> None:
    """In one process alone, or in one part of the batch."""
    refused: list[tuple[int, bool]] = []

    def script(session: Session, rank: int) -> None:
        model = growing()
        optimizer = session.optimizer(sgd(model), model)
        for number, (ids, targets) in enumerate(session.loader(Clicks(), batch_size=8)):
            optimizer.zero_grad()
            loss = mse(model, ids, targets)
            if number == 1 and rank == processes - 1:
                loss = loss + math.inf * model.rows(ids).sum()
            loss.backward()
            try:
                optimizer.step()
            except Refused as error:
                refused.append((rank, "the gradient of the table 'click'" in str(error)))

    fields: dict[str, Any] = {"parameterServer": {"replicas": 2}, "worker": {"processes": processes}}
    with running_job(tmp_path, **fields) as job:
        job.start_processes(0, script)
        job.join()
        progress = job.status().progress
    assert sorted(refused) == [(rank, True) for rank in range(processes)]
    assert (progress.records_applied, progress.records_skipped) == (RECORDS - 8, 8)


@pytest.mark.parametrize(("workers", "processes", "options"), [(1, 3, {"weigh": True}), (2, 2, {})])
def test_the_rows_are_those_of_one_process_on_the_same_records(
    tmp_path: Path, workers: int, processes: int, options: dict[str, Any]
) -> None:
    """Also if a slice has no records: its process computes on another slice, which must not count twice."""
    checkpoints = tmp_path / "checkpoints"
    fields: dict[str, Any] = {"parameterServer": {"replicas": 2}, "worker": {"processes": processes}}
    with running_job(tmp_path, checkpoints=checkpoints, data={"shardRecords": 13}, **fields) as job:
        for worker in range(workers):
            script = trainer(batch_size=5, prefetch=lambda batch: {"click": batch[0]}, **options)
            job.start_processes(worker, script)
        job.join()
        commits = job.commits()
        (counts,) = job.status().tables
    assert_each_record_once(commits, records=RECORDS, epochs=2)
    model, first = growing(), growing()
    elastic_ps.load_checkpoint(checkpoints, model)
    table = torch.nn.Embedding(IDS, DIM, dtype=torch.float64)
    table.weight.data = first.rows(torch.arange(IDS)).detach().clone()
    dense = Model(table)
    replay(commits, Clicks(), dense, sgd, job.spec)
    rows = rows_of(model)
    assert rows["ids"].tolist() == sorted(set(Clicks().ids.flatten().tolist()))
    assert rows["counts"].sum() == 2 * 2 * RECORDS
    assert counts.rows == len(rows["ids"])
    assert 0 < counts.used_ahead < counts.used
    weight = table.weight.detach()[rows["ids"]]
    torch.testing.assert_close(rows["values"], weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.head.weight, dense.head.weight, rtol=1e-12, atol=1e-12)


class Both(torch.nn.Module):
    """A model with a table that grows, and the same one with a parameter in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.growing, table = growing(), torch.nn.Embedding(IDS, DIM, dtype=torch.float64)
        table.weight.data = self.growing.rows(torch.arange(IDS)).detach().clone()
        self.dense = Model(table)


def test_a_batch_without_records_for_a_process_counts_once_in_a_step_of_several(tmp_path: Path) -> None:
    """The last of the 10 batches has a single record."""

    def script(session: Session, _: int) -> None:
        model = Both()
        optimizer = session.optimizer(sgd(model), model)
        for number, (ids, targets) in enumerate(session.loader(Clicks(), batch_size=7)):
            with nullcontext() if number % 2 else optimizer.no_sync():
                sum(mse(each, ids, targets) for each in (model.growing, model.dense)).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints", worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
    model = Both()
    elastic_ps.load_checkpoint(tmp_path / "checkpoints", model)
    rows = rows_of(model.growing)
    weight = model.dense.rows.get_parameter("weight").detach()[rows["ids"]]
    torch.testing.assert_close(rows["values"], weight, rtol=1e-12, atol=1e-12)
    assert rows["counts"].sum() == 2 * RECORDS


def lazy() -> Model:
    return growing(optimizer=LazyAdam(lr=0.1))


def trained(directory: Path, *, processes: int, faults: bool) -> State:
    """The rows of a job. `faults`: it loses a worker and a shard, and is resumed on three shards."""
    happened = [threading.Lock() for _ in range(2)]
    checkpoints = directory / "checkpoints"

    def once(event: int, session: Session, version: int) -> bool:
        return faults and session.version >= version and happened[event].acquire(blocking=False)

    def each(session: Session) -> None:
        if session.worker == 1 and once(0, session, 3):
            job.declare_gone(1)
        if once(1, session, 6):
            job.restart(1)

    for shards, resume in ((2, "no"), (3, "require"))[: 1 + faults]:
        with running_job(
            directory / str(shards),
            checkpoints=checkpoints,
            resume=resume,  # type: ignore[arg-type]
            consistency={"deterministic": True},
            worker={"replicas": 2, "processes": processes},
            parameterServer={"replicas": shards, "checkpoint": {"everyVersions": 4}},
            data={"shardRecords": 6},
        ) as job:
            until = 12 if faults and resume == "no" else math.inf
            for worker in range(2):
                job.start_processes(worker, trainer(lazy, each, batch_size=3, until=until))
            job.join()
    assert all(event.locked() == faults for event in happened)
    model = lazy()
    elastic_ps.load_checkpoint(checkpoints, model)
    return rows_of(model)


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_the_rows_are_the_same_bit_for_bit_after_faults_and_a_resume(tmp_path: Path, processes: int) -> None:
    found, expected = (
        trained(tmp_path / str(faults), processes=processes, faults=faults) for faults in (True, False)
    )
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("shards", [1, 2])
def test_the_only_workers_processes_look_rows_up_while_a_shard_has_lost_them(
    tmp_path: Path, shards: int
) -> None:
    together = threading.Barrier(2)

    def script(session: Session, rank: int) -> None:
        model = growing()
        optimizer = session.optimizer(sgd(model), model)
        for number, (ids, targets) in enumerate(session.loader(Clicks(), batch_size=8)):
            if number == 0:
                together.wait(LIMIT)
                if rank == 0:
                    job.restart(shards - 1)
                together.wait(LIMIT)
            optimizer.zero_grad()
            mse(model, ids, targets).backward()
            optimizer.step()

    fields: dict[str, Any] = {"worker": {"processes": 2}, "parameterServer": {"replicas": shards}}
    with running_job(tmp_path, **fields) as job:
        job.start_processes(0, script)
        job.join()
        assert_each_record_once(job.commits(), records=RECORDS, epochs=1)
        assert job.status().progress.records_applied == RECORDS


def test_processes_with_other_tables_are_an_error(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        trainer(lambda: growing(("click", "tap")[rank]), batch_size=4)(session, rank)

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        with pytest.raises(ModelMismatch, match=r"process 1 .* has the table 'tap' in place of .* 'click'"):
            job.join()


@pytest.mark.parametrize("processes", per_change([1, 2], keep=[1]))
def test_rows_survive_lost_workers_and_servers_a_rescale_and_a_resume(tmp_path: Path, processes: int) -> None:
    """Afterwards they are those of one process on the records of the versions that stayed."""
    checkpoints, stayed = tmp_path / "checkpoints", dict[int, dict[str, Any]]()
    happened = [threading.Lock() for _ in range(3)]

    def once(event: int, session: Session, version: int) -> bool:
        return session.version >= version and happened[event].acquire(blocking=False)

    def script(session: Session, rank: int) -> None:
        model = growing()
        optimizer = session.optimizer(sgd(model), model)
        for ids, targets in session.loader(Clicks(), batch_size=4, epochs=4):
            optimizer.zero_grad()
            mse(model, ids, targets).backward()
            if rank == 0 and session.worker == 1 and once(0, session, 3):
                job.declare_gone(1)
            if rank == 0 and session.worker == 0 and once(1, session, 6):
                job.start_processes(2, script)
            if rank == 0 and session.worker == 2 and once(2, session, 12):
                job.restart(1)
            optimizer.step()
            if resume == "no" and session.version >= 20:
                raise SystemExit

    for shards, resume in ((2, "no"), (3, "require")):
        with running_job(
            tmp_path / str(shards),
            checkpoints=checkpoints,
            resume=resume,  # type: ignore[arg-type]
            worker={"processes": processes},
            parameterServer={"replicas": shards, "checkpoint": {"everyVersions": 3}},
            data={"shardRecords": 6},
        ) as job:
            for worker in range(2):
                job.start_processes(worker, script)
            job.join()
            for commit in job.commits():
                stayed = {version: each for version, each in stayed.items() if version < commit["version"]}
                stayed[commit["version"]] = commit
    assert all(event.locked() for event in happened)
    assert_each_record_once(stayed.values(), records=RECORDS, epochs=4)
    model, first = growing(), growing()
    assert elastic_ps.load_checkpoint(checkpoints, model) == max(stayed)
    table = torch.nn.Embedding(IDS, DIM, dtype=torch.float64)
    table.weight.data = first.rows(torch.arange(IDS)).detach().clone()
    dense = Model(table)
    replay([*stayed.values()], Clicks(), dense, sgd, job.spec)
    rows = rows_of(model)
    assert rows["counts"].sum() == 4 * 2 * RECORDS
    torch.testing.assert_close(rows["values"], table.weight.detach()[rows["ids"]], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(model.head.weight, dense.head.weight, rtol=1e-11, atol=1e-11)
