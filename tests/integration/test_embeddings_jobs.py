"""Jobs that train tables that grow: what happens to the rows when servers are lost, and who reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import elastic_ps
from elastic_ps import export as export_program
from elastic_ps.checkpoint.store import Store
from elastic_ps.drill import history
from elastic_ps.drill.recorded import read
from elastic_ps.embedding import SGD, LazyAdam, constant, uniform
from elastic_ps.embedding.placing import shard_of
from elastic_ps.embedding.table import State
from elastic_ps.errors import InvalidModel, ModelMismatch, RefusalCode, Refused
from elastic_ps.evaluation import checkpoints as scripts
from elastic_ps.evaluation.remote import JobSource
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, running_job
from tests.testing.inside import runtime_of
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change

DIM, RECORDS, BATCH, EPOCHS = 3, 60, 3, 4


class Skewed(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """An id for each record, most of them small, and a number to be predicted."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = (torch.rand(RECORDS, generator=generator) ** 3 * 40).long()
        self.targets = torch.randn(RECORDS, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[index], self.targets[index]


class Model(torch.nn.Module):
    """A table, with all that may happen to its rows, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = elastic_ps.Embedding(
            "rows",
            DIM,
            init=uniform(-0.5, 0.5),
            optimizer=LazyAdam(lr=0.1),
            dtype=torch.float64,
            admit_after=2,
            table_bytes=6 * (3 * DIM * 8 + 24),
            when_full="expire",
        )
        self.head = torch.nn.Linear(DIM, 1, dtype=torch.float64)
        torch.nn.init.constant_(self.head.weight, 0.1)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.rows(ids))
        return found


def train(
    session: Session, each: Callable[[Session], object] = lambda _: None, *, epochs: int = EPOCHS
) -> None:
    model = Model()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for ids, targets in session.loader(Skewed(), batch_size=BATCH, epochs=epochs):
        optimizer.zero_grad()
        ((model(ids) - targets) ** 2).mean().backward()
        each(session)
        optimizer.step()


def rows_in(checkpoints: Path, version: int | None = None) -> State:
    model = Model()
    elastic_ps.load_checkpoint(checkpoints, model, version=version)
    return model.rows.table.state()


def require_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def a_job(tmp_path: Path, *, server: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A deterministic job of two workers and two shards."""
    return running_job(
        tmp_path,
        **{
            "checkpoints": tmp_path / "checkpoints",
            "consistency": {"deterministic": True},
            "worker": {"replicas": 2},
            "data": {"shardRecords": 6},
            "parameterServer": {"replicas": 2, "checkpoint": {"interval": "1h"}, **(server or {})},
            **fields,
        },
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The rows of a job that nothing happens to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with a_job(directory) as job:
        job.run(train, workers=2)
    found = rows_in(directory / "checkpoints")
    assert len(found["ids"]) > 6  # in two shards
    return found


@pytest.mark.parametrize("lost", [0, 1])
def test_a_standby_has_the_rows_of_each_version(tmp_path: Path, undisturbed: State, lost: int) -> None:
    """No version is made again, and the rows are the same bit for bit."""
    restarted = threading.Lock()

    def lose(job: Job) -> Callable[[Session], None]:
        def each(session: Session) -> None:
            if session.version >= 6 and job.followed and restarted.acquire(blocking=False):
                job.restart(lost)

        return each

    with a_job(tmp_path, server={"durability": "standby"}) as job:
        job.run(lambda session: train(session, lose(job)), workers=2)
        assert restarted.locked()
        assert job.status().term == 2
        for undone in history.fate(read(job.history)).undone.values():
            assert undone == []
    require_equal(rows_in(tmp_path / "checkpoints"), undisturbed)


def test_checkpoints_have_what_changed_and_jobs_go_on_from_them(tmp_path: Path) -> None:
    """Also with another number of shards; and all rows are there, whatever older checkpoints are deleted."""

    def script(session: Session) -> None:
        model = Counting()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for ids in session.loader(Few(), batch_size=3):
            optimizer.zero_grad()
            if session.version == 20:  # the next checkpoint can be what the last one is based on
                eventually(lambda: not zero.checkpoints.writing, "a checkpoint is complete")
            model(ids).mean().backward()
            optimizer.step()

    checkpoints = tmp_path / "checkpoints"
    server: dict[str, Any] = {"checkpoint": {"everyVersions": 2, "keep": 2}}
    with a_job(tmp_path, server=server, data={"shuffle": False}) as job:
        zero = job.servers[0].shard_zero
        assert zero is not None
        job.run(script, workers=2)
    store = Store(checkpoints)
    last = store.describe(store.versions()[-1])
    assert {file.file for file in last.files} == {
        f"{kind}-{shard}-of-2.safetensors" for kind in ("shard", "base") for shard in range(2)
    }
    model = Counting()
    elastic_ps.load_checkpoint(checkpoints, model)
    rows = model.rows.table.state()
    assert rows["ids"].tolist() == list(range(RECORDS))
    assert rows["counts"].sum() == 3 * RECORDS
    assert rows["values"].sum().item() == pytest.approx(last.version)  # each version adds the mean of 1
    on: dict[str, Any] = {"checkpoints": checkpoints, "resume": "require", "data": {"shuffle": False}}
    with a_job(tmp_path / "again", server={"replicas": 3}, **on) as job:
        resumed, session = Counting(), job.session(0)
        session.optimizer(torch.optim.SGD(resumed.parameters(), lr=0.1), resumed)
        assert torch.equal(resumed.rows(torch.arange(RECORDS)).detach(), rows["values"])


def test_the_default_device_is_not_for_rows_of_checkpoints(tmp_path: Path) -> None:
    """`meta` stands in for a GPU. Version 0 has no rows."""
    with a_job(tmp_path) as job:
        job.run(train, workers=2)
    for version in (0, job.version):
        expected, model = rows_in(tmp_path / "checkpoints", version), Model()
        with torch.device("meta"):
            elastic_ps.load_checkpoint(tmp_path / "checkpoints", model, version=version)
        require_equal(model.rows.table.state(), expected)


def test_an_evaluator_and_an_export_read_the_rows(tmp_path: Path) -> None:
    """As `load_checkpoint` gives them: the values of all ids, also of those that have no row."""
    ids, seen, checkpoints = torch.arange(40), dict[int, torch.Tensor](), tmp_path / "checkpoints"
    evaluator = {"entrypoint": "tests:main", "every": 5, "backlog": 9}
    with a_job(tmp_path, evaluator=evaluator) as job:
        scripts.use(JobSource("test", job.open_connections()[0]))
        for worker in range(2):
            job.start(worker, train)
        try:
            for checkpoint in elastic_ps.checkpoints():
                model = Model().eval()
                checkpoint.load(model)
                seen[checkpoint.version] = model.rows(ids)
        finally:
            scripts.use(None)
        job.join()
        assert max(seen) == job.version
    last, model = max(seen), Model()
    elastic_ps.load_checkpoint(checkpoints, model)
    assert torch.equal(model.rows(ids), seen[last])
    for out in (tmp_path / "model.safetensors", tmp_path / "model.pt"):
        assert export_program.main([str(checkpoints), str(out)]) == 0
        found = torch.load(out) if out.suffix == ".pt" else safetensors.torch.load_file(out)
        assert found.keys() == {"head.weight", "head.bias", "rows.ids", "rows.values", "rows.weight"}
        assert torch.equal(found["rows.values"], seen[last][found["rows.ids"]])
        assert torch.equal(found["rows.weight"], seen[last][: found["rows.ids"][-1] + 1])


class Itself(torch.utils.data.Dataset[torch.Tensor]):
    """Each record is its own number."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Few(Itself):
    """Each id once, and then a few of them often."""

    def __len__(self) -> int:
        return 3 * RECORDS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index if index < RECORDS else index % 5)


class Counting(torch.nn.Module):
    """The loss of a record has the gradient -1 for its own row, which begins with 0."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        optimizer = SGD(lr=1.0, scheduled=True)
        self.rows = elastic_ps.Embedding(
            "rows", 1, init=constant(0.0), optimizer=optimizer, dtype=torch.float64, **options
        )
        self.bias = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bias - self.rows(ids)
        return found


def test_rows_whose_ids_do_not_occur_expire_by_time_also_after_a_server_is_lost(tmp_path: Path) -> None:
    """The rows of a new server are those of the checkpoint and of the versions since. All shards agree."""
    often = list(range(5))

    def train(session: Session) -> None:
        model = Counting(expire_after="1s")
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for number, ids in enumerate(session.loader(Few(), batch_size=3)):
            if number >= RECORDS // 3:
                time.sleep(0.05)  # longer pauses than a part of the time do not count
            if number == RECORDS // 2:
                job.restart(0)
            optimizer.zero_grad()
            model(ids).mean().backward()
            optimizer.step()

    with a_job(
        tmp_path,
        consistency={},
        worker={"replicas": 1},
        server={"checkpoint": {"everyVersions": 2}},
        data={"shuffle": False},
    ) as job:
        job.run(train, workers=1)
        (status,) = job.status().tables
        assert job.status().term == 2
    assert (status.rows, status.expired) == (len(often), RECORDS - len(often))
    model = Counting(expire_after="1s")
    elastic_ps.load_checkpoint(tmp_path / "checkpoints", model)
    assert model.rows.table.state()["ids"].tolist() == often


@pytest.mark.parametrize(
    ("consistency", "size"),
    per_change(
        [
            ({"mode": "accumulate", "gradients": 2}, None),
            ({"globalBatchSize": 6}, 6),
            ({"mode": "bounded", "maxStaleness": 1}, None),
            ({"mode": "async", "stalenessScale": "inverse"}, None),
        ],
        keep=[({"globalBatchSize": 6}, 6), ({"mode": "async", "stalenessScale": "inverse"}, None)],
    ),
)
def test_each_record_is_in_its_row_once_in_each_mode(
    tmp_path: Path, consistency: dict[str, Any], size: int | None
) -> None:
    """Also when a shard is lost: with the weight that it has in its version, where that is known."""
    restarted = threading.Lock()

    def script(session: Session) -> None:
        model = Counting()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for ids in session.loader(Itself(), batch_size=3, epochs=2):
            optimizer.zero_grad()
            model(ids).mean().backward()
            if session.version >= 5 and restarted.acquire(blocking=False):
                job.restart(1)
            optimizer.step()

    with a_job(tmp_path, server={"checkpoint": {"everyVersions": 4}}, consistency=consistency) as job:
        job.run(script, workers=2)
        assert job.status().term > 1
    model = Counting()
    elastic_ps.load_checkpoint(tmp_path / "checkpoints", model)
    rows = model.rows.table.state()
    assert rows["ids"].tolist() == list(range(RECORDS))
    assert rows["counts"].tolist() == [2] * RECORDS
    if size is not None:
        torch.testing.assert_close(rows["values"], torch.full((RECORDS, 1), 2 / size, dtype=torch.float64))
    else:
        assert bool(((rows["values"] > 0) & (rows["values"] <= 2 / 3)).all())


def test_a_full_table_that_does_not_fit_on_fewer_servers_is_refused(tmp_path: Path) -> None:
    """Also by another server than shard 0, which has no row here."""
    ids = [each for each in range(400) if shard_of(np.array([each]), 2)[0] == 1][:36]

    def script(session: Session) -> None:
        model = Counting(table_bytes=12 * 32)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for (id_,) in session.loader(torch.utils.data.TensorDataset(torch.tensor(ids)), 3):
            optimizer.zero_grad()
            model(id_).mean().backward()
            optimizer.step()

    with a_job(tmp_path, worker={"replicas": 1}, server={"replicas": 3}) as job:
        job.run(script, workers=1)
        assert job.status().tables[0].rows > 12
    with (
        pytest.raises(InvalidModel, match=r"the table 'rows' for one .* Resume with as many"),
        a_job(tmp_path, worker={"replicas": 1}, resume="require"),
    ):
        pass


def test_a_checkpoint_before_the_first_step_has_no_rows(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Counting()
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        eventually(lambda: Store(tmp_path / "checkpoints").versions(), "version 0 is on disk")

    with a_job(tmp_path) as job:
        job.run(script, workers=1)
    model, other = Counting(), Counting(admit_after=2)
    model.rows.table.update(np.arange(3), torch.ones(3, 1, dtype=torch.float64), np.ones(3, dtype=int), 1)
    assert elastic_ps.load_checkpoint(tmp_path / "checkpoints", model) == 0
    assert len(model.rows.table) == 0
    with pytest.raises(ModelMismatch, match="admit_after=2 in this layer and 1 in the checkpoint"):
        elastic_ps.load_checkpoint(tmp_path / "checkpoints", other)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (None, "the table 'rows': only in the model on the parameter server"),
        ({"admit_after": 2}, r"the table 'rows': this worker has \{\"admit_after\": 2\}, the other workers"),
    ],
    ids=["no table", "another table"],
)
def test_a_worker_with_other_tables_cannot_join(
    tmp_path: Path, options: dict[str, Any] | None, match: str
) -> None:
    """Its steps would have no rows, and no version could be made of them."""

    brought, refused = threading.Event(), threading.Event()

    def first(session: Session) -> None:
        model = Counting()
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        brought.set()
        assert refused.wait(LIMIT)

    def second(session: Session) -> None:
        model = Counting(**(options or {}))
        if options is None:
            del model.rows
        assert brought.wait(LIMIT)
        with pytest.raises(ModelMismatch, match=match):
            session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        refused.set()

    with a_job(tmp_path) as job:
        for worker, script in enumerate((first, second)):
            job.start(worker, script)
        job.join()


def test_the_rows_of_steps_that_came_too_late_are_freed(tmp_path: Path) -> None:
    kept = list[int]()

    def slow(until: int) -> None:
        eventually(lambda: job.version >= until, "the others make three versions")

    def script(session: Session) -> None:
        model = Counting()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for ids in session.loader(Itself(), batch_size=1, epochs=4):
            optimizer.zero_grad()
            model(ids).mean().backward()
            if session.worker == 2:
                slow(min(session.version + 3, 20))
            optimizer.step()
            kept.extend(server.node.shard.tables.waiting_steps for server in job.servers)

    with a_job(tmp_path, worker={"replicas": 3}, consistency={"backupWorkers": 1}) as job:
        job.run(script, workers=3)
        assert {member.worker: member.late for member in job.status().members}[2] > 2
    assert max(kept) <= 6, "one that is made, and one that is lost, of each worker"


def lose_the_model(job: Job) -> None:
    """Shard 1 loses it before it is on disk: the worker has to bring it again."""
    before = job.coordinator.job.term
    job.restart(1)
    eventually(lambda: job.coordinator.job.term > before, "shard 0 knows that the model is lost")


@pytest.mark.parametrize("within", [True, False], ids=["in a batch", "before a batch"])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_only_worker_looks_rows_up_while_a_shard_has_lost_them(
    tmp_path: Path, shards: int, within: bool
) -> None:
    def lose() -> None:
        if shards == 1:
            job.restart(0)
        else:
            lose_the_model(job)

    seen = list[torch.Tensor]()

    def script(session: Session) -> None:
        model = Model()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        if not within:
            lose()
            seen.append(model.rows(torch.arange(40)).detach())
        for number, (ids, targets) in enumerate(session.loader(Skewed(), batch_size=BATCH)):
            if within and not number:
                lose()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(ids), targets).backward()
            optimizer.step()

    with running_job(tmp_path, parameterServer={"replicas": shards}) as job:
        job.run(script, workers=1)
        assert job.status().progress.records_applied == RECORDS
    assert all(bool(row.any()) for rows in seen for row in rows), "the first values"


def test_rows_are_zeros_only_where_a_step_of_the_batch_may_follow(tmp_path: Path) -> None:
    """Such a step is dropped, but what a script evaluates after its step counts."""
    zeros = list[bool]()
    gone = Refused(RefusalCode.STALE_INCARNATION, "it was declared gone")

    def script(session: Session) -> None:
        model = Model()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for number, (ids, targets) in enumerate(session.loader(Skewed(), batch_size=BATCH)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(ids), targets).backward()
            for when in (1, 2):
                if number == when:
                    job.declare_gone(0)
                    zeros.append(runtime_of(session).rows_refused(gone))
                if when == 1:
                    optimizer.step()

    with running_job(tmp_path) as job:
        job.run(script, workers=1)
        assert job.status().progress.records_applied == RECORDS
    assert zeros == [True, False]


def test_the_optimizers_state_is_fetched_while_a_shard_has_lost_it(tmp_path: Path) -> None:
    states = list[dict[str, Any]]()

    def script(session: Session) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Linear(40, 1))
        optimizer = session.optimizer(torch.optim.Adam(model.parameters()), model)
        lose_the_model(job)
        states.append(optimizer.state_dict())
        for x, y in session.loader(Numbers(16), 4):
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    with running_job(tmp_path, parameterServer={"replicas": 2, "bucketBytes": 1024}) as job:
        job.run(script, workers=1)
        assert job.status().progress.records_applied == 16
    assert states
