"""Models with tables that grow: in a script that runs alone, and in a job."""

from __future__ import annotations

import copy
import io
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import elastic_ps
from elastic_ps.embedding import RowwiseAdagrad, Table, TableSpec, constant, uniform
from elastic_ps.embedding.optimizers import SGD, RowOptimizer
from elastic_ps.errors import InvalidModel, ModelMismatch, Refused, UsageError
from elastic_ps.standalone import connect
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.tiers import per_change

IDS, DIM, BATCH = 30, 4, 5


class Clicks(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Two ids for each record, most of them small, and a number to be predicted."""

    def __init__(self, records: int = 40) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = (torch.rand(records, 2, generator=generator) ** 3 * IDS).long()
        self.targets = torch.randn(records, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.ids[index, 0], self.ids[index, 1], self.targets[index]


class Model(torch.nn.Module):
    """Two layers that share a table, and a linear layer."""

    def __init__(self, one: torch.nn.Module, other: torch.nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other
        self.head = torch.nn.Linear(2 * DIM, 1, dtype=torch.float64)
        torch.nn.init.constant_(self.head.weight, 0.1)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.cat([self.one(one), self.other(other)], 1))
        return found


def layer(optimizer: RowOptimizer | None = None, **options: Any) -> elastic_ps.Embedding:
    optimizer = optimizer or SGD(lr=0.5)
    return elastic_ps.Embedding(
        "click", DIM, optimizer=optimizer, init=uniform(-0.5, 0.5), dtype=torch.float64, **options
    )


def growing() -> Model:
    return Model(layer(), layer())


def ids_of(batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"click": torch.stack([batch[0], batch[1]])}


def table_of(model: Model) -> Table:
    assert isinstance(model.one, elastic_ps.Embedding)
    return model.one.table


@pytest.fixture
def session() -> Iterator[Session]:
    made = connect()
    yield made
    made.close()


def test_a_script_alone_trains_as_plain_torch_with_a_dense_table(session: Session) -> None:
    model = growing()
    table = torch.nn.Embedding(IDS, DIM, dtype=torch.float64)
    table.weight.data = model.one(torch.arange(IDS)).detach().clone()
    dense = Model(table, table)
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert model.one.source is model.other.source
    loader = session.loader(Clicks(), batch_size=BATCH, epochs=3, prefetch=ids_of)
    for one, other, target in loader:
        for network in (model, dense):
            network.zero_grad()
            ((network(one, other) - target) ** 2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, lr in ((table.weight, 0.5), (dense.head.weight, 0.1), (dense.head.bias, 0.1)):
                assert parameter.grad is not None
                parameter.sub_(lr * parameter.grad)
    assert session.version == 24
    seen = table_of(model).state()
    assert seen["ids"].tolist() == sorted(set(Clicks().ids.flatten().tolist()))
    assert seen["counts"].sum() == 3 * 2 * 40
    torch.testing.assert_close(seen["values"], table.weight.detach()[seen["ids"]], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.head.weight, dense.head.weight, rtol=1e-12, atol=1e-12)


def test_no_row_is_trained_by_gradients_that_are_dropped(session: Session) -> None:
    model = growing()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for number, (one, other, target) in enumerate(session.loader(Clicks(), batch_size=BATCH)):
        if number != 1:
            optimizer.zero_grad()
        ((model(one, other) - target) ** 2).mean().backward()
        if number == 0:
            optimizer.skip()
        elif number == 2:
            optimizer.zero_grad()
        else:
            optimizer.step()
            first = {*one.tolist(), *other.tolist()}
            break
    assert {*table_of(model).state()["ids"].tolist()} == first
    assert table_of(model).steps == 1


Step = Callable[[Any, Any, int, Sequence[torch.Tensor]], None]


def loss_of(model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> Any:
    return ((model(batch[0], batch[1]) - batch[2]) ** 2).mean()


def sometimes_rows_alone(model: Model, optimizer: Any, number: int, batch: Sequence[torch.Tensor]) -> None:
    optimizer.zero_grad()
    if number % 2:
        loss_of(model, batch).backward()
    else:
        (model.one(batch[0]) * model.other(batch[1])).sum().backward()
    optimizer.step()


def graph(model: Model, optimizer: Any, number: int, batch: Sequence[torch.Tensor]) -> None:
    del number
    optimizer.zero_grad()
    loss_of(model, batch).backward(create_graph=True)
    optimizer.step()


def drops(model: Model, optimizer: Any, number: int, batch: Sequence[torch.Tensor]) -> None:
    """As for a loss that is not finite."""
    model.zero_grad()
    loss_of(model, batch).backward()
    if number != 1:
        optimizer.step()


def drops_by_hand(model: Model, optimizer: Any, number: int, batch: Sequence[torch.Tensor]) -> None:
    loss_of(model, batch).backward()
    if number != 1:
        optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


def begins_again(model: Model, optimizer: Any, number: int, batch: Sequence[torch.Tensor]) -> None:
    """As SAM does, with the gradients of the model and not of the optimizer."""
    del number
    (5 * loss_of(model, batch)).backward()
    model.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
    model.zero_grad()


def trains_a_copy(model: Model, optimizer: Any, number: int, batch: Sequence[torch.Tensor]) -> None:
    """Its gradients are not those of the model."""
    del number
    loss_of(model, batch).backward()
    (5 * loss_of(copy.deepcopy(model), batch)).backward()
    optimizer.step()
    model.zero_grad()


def adds_up(model: Model, optimizer: Any, number: int, batch: Sequence[torch.Tensor]) -> None:
    with optimizer.no_sync() if hasattr(optimizer, "no_sync") and number % 2 == 0 else nullcontext():
        loss_of(model, batch).backward()
    if number % 2:
        optimizer.step()
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("step", "steps"),
    [
        (sometimes_rows_alone, 8),
        (graph, 8),
        (drops, 7),
        (drops_by_hand, 7),
        (begins_again, 8),
        (trains_a_copy, 8),
        (adds_up, 4),
    ],
)
def test_a_script_does_with_gradients_of_rows_what_torch_allows(
    session: Session, step: Step, steps: int, biased: bool
) -> None:
    """`biased`: also with a single parameter beside the table."""
    model = growing()
    table = torch.nn.Embedding(IDS, DIM, dtype=torch.float64)
    table.weight.data = model.one(torch.arange(IDS)).detach().clone()
    dense = Model(table, table)
    for each in (model, dense):
        each.head.bias.requires_grad_(biased)
    sgd = torch.optim.SGD(model.head.parameters(), lr=0.1)
    optimizer = session.optimizer(sgd, model, overlap=False)
    rows = {"params": [table.weight], "lr": 0.5}
    expected = torch.optim.SGD([{"params": dense.head.parameters(), "lr": 0.1}, rows])
    batches = []
    for number, batch in enumerate(session.loader(Clicks(), batch_size=BATCH)):
        step(model, optimizer, number, batch)
        batches.append(batch)
    for number, batch in enumerate(batches):
        step(dense, expected, number, batch)
    assert session.version == steps
    torch.testing.assert_close(
        model.eval().one(torch.arange(IDS)), table.weight.detach(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(model.head.weight, dense.head.weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.head.bias, dense.head.bias, rtol=1e-12, atol=1e-12)


def test_rows_that_no_step_trains_are_warned_of(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    model, forgotten = growing(), elastic_ps.Embedding("else", DIM, optimizer=SGD(lr=0.5))
    session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    (model.one(torch.tensor([1])).sum() + forgotten(torch.tensor([1])).sum()).backward()
    (warning,) = (each for each in caplog.messages if "no step trains them" in each)
    assert "rows of the table 'else'" in warning


def test_a_copy_of_a_model_in_a_job_trains_no_rows_and_none_is_saved_whole(tmp_path: Path) -> None:
    model, batches = growing(), []
    with running_job(tmp_path) as job:
        session = job.session(0)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=False)
        for number, batch in enumerate(session.loader(Clicks(), batch_size=BATCH)):
            trains_a_copy(model, optimizer, number, batch)
            batches.append(batch)
        found = model.eval().one(torch.arange(IDS))
        assert torch.equal(copy.deepcopy(model).one(torch.arange(IDS)), found)
        with pytest.raises(UsageError, match=r"cannot be saved whole, because .* 'click' .*load_checkpoint"):
            torch.save(model, io.BytesIO())
        session.close()
    table = torch.nn.Embedding(IDS, DIM, dtype=torch.float64)
    table.weight.data = growing().one(torch.arange(IDS)).detach().clone()
    dense = Model(table, table)
    rows = {"params": [table.weight], "lr": 0.5}
    expected = torch.optim.SGD([{"params": dense.head.parameters(), "lr": 0.1}, rows])
    for number, batch in enumerate(batches):
        trains_a_copy(dense, expected, number, batch)
    torch.testing.assert_close(found, table.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wanted", [None, torch.tensor([1]), [1, 2]])
def test_a_prefetch_that_gives_no_tables_is_refused(session: Session, wanted: Any) -> None:
    model = growing()
    session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = session.loader(Clicks(), batch_size=BATCH, prefetch=lambda _: wanted)
    with pytest.raises(UsageError, match=rf"has returned {type(wanted).__name__}; expected a mapping"):
        next(iter(loader))


def test_rows_alone_step_with_the_rate_of_their_step(session: Session) -> None:
    """As in a job, where the parameter server knows it before the step."""
    model = Model(*(layer(SGD(lr=0.5, scheduled=True)) for _ in range(2)))
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = session.optimizer(wrapped, model)
    session.scheduler(torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.5), interval="step")
    batches = iter(session.loader(Clicks(), batch_size=BATCH))
    one, *_ = next(batches)
    before = model.one(one[:1]).detach().clone()
    model.one(one[:1]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.one(one[:1]).detach(), before - 0.5)


def test_a_gradient_of_a_table_that_is_not_finite_is_an_error(session: Session) -> None:
    model = growing()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    batches = iter(session.loader(Clicks(), batch_size=BATCH))
    batch = next(batches)
    (model.one(batch[0]).sum() * math.inf + model.head.bias.sum()).backward()
    with pytest.raises(Refused, match="the gradient of the table 'click' holds NaN or Inf"):
        optimizer.step()
    assert not len(table_of(model))
    one, *_ = next(batches)
    optimizer.zero_grad()
    model.one(one).sum().backward()
    optimizer.step()
    assert len(table_of(model)), "a script that catches it goes on"
    assert session.global_batch_size == BATCH, "with the next batch alone"


@pytest.mark.parametrize("several", [False, True])
def test_a_scale_of_gradients_is_refused(session: Session, several: bool) -> None:
    model, scaler = growing(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    sgd = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {str(i): each for i, each in enumerate(sgd)} if several else whole
    made = session.optimizer(given, model, overlap=False)
    optimizer = made["0"] if several else made
    one, other, target = next(iter(session.loader(Clicks(), batch_size=BATCH)))
    scaler.scale(((model(one, other) - target) ** 2).mean()).backward()
    with pytest.raises(UsageError, match="a GradScaler does not unscale gradients of tables that grow"):
        scaler.step(optimizer)
    assert not len(table_of(model))


def test_values_of_a_model_with_tables_are_not_assigned(session: Session) -> None:
    model = growing()
    session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(UsageError, match=r"session\.assign does not take a model with tables that grow"):
        session.assign(model)


def test_rows_that_were_loaded_are_the_least_recent_ones(session: Session) -> None:
    """A session counts versions from 0, but a table that is loaded has more."""
    spec = TableSpec(name="t", dim=1, init=constant(0.0), optimizer=SGD(lr=1.0))
    options: Any = {"table_bytes": 3 * spec.row_bytes, "when_full": "expire"}
    rows = elastic_ps.Embedding("t", 1, init=spec.init, optimizer=spec.optimizer, **options)
    model = torch.nn.ModuleDict({"rows": rows, "head": torch.nn.Linear(1, 1)})
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    one = np.ones(1, dtype=np.int64)
    for version in (98, 99, 100):
        rows.table.update(one * version, torch.ones(1, 1), one, version)
    for number, batch in enumerate(session.loader(Itself(), batch_size=1)):
        model["head"](rows(torch.zeros_like(batch) + number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            break
    assert rows.table.state()["ids"].tolist() == [0, 1, 100]


def test_a_prefetch_of_a_table_that_there_is_not_is_refused(session: Session) -> None:
    model = growing()
    session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = session.loader(Clicks(), batch_size=BATCH, prefetch=lambda batch: {"user": batch[0]})
    with pytest.raises(UsageError, match=r"prefetch names the table 'user', but the tables .* are 'click'"):
        next(iter(loader))


def test_layers_that_describe_a_table_differently_are_refused(session: Session) -> None:
    model = Model(layer(), layer(RowwiseAdagrad(lr=0.1)))
    with pytest.raises(ModelMismatch, match="the table 'click' has optimizer=SGD"):
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("{strategy: all-reduce}", "strategy: all-reduce"),
        ("{consistency: {mode: local, steps: 2}}", "consistency.mode: local"),
    ],
)
def test_jobs_that_cannot_train_a_table_are_refused_alone(tmp_path: Path, fields: str, said: str) -> None:
    job = tmp_path / "job.yaml"
    spec = fields[:-1] + ", entrypoint: 'x:main'}"
    job.write_text(
        f"{{apiVersion: elastic-ps.dev/v1alpha1, kind: TrainingJob, metadata: {{name: a}}, spec: {spec}}}"
    )
    session, model = connect(job), growing()
    try:
        with pytest.raises(InvalidModel, match=f"tables that grow, which are not trained with {said}"):
            session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    finally:
        session.close(failed=True)


def test_the_script_of_the_guide_runs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "embeddings.md").read_text()
    users, tags = (
        torch.arange(192) % 40,
        torch.randint(9, (192, 3), generator=torch.Generator().manual_seed(0)),
    )
    names: dict[str, Any] = {"dataset": torch.utils.data.TensorDataset(users, tags, torch.ones(192, 1))}
    exec(text.split("```python\n")[1].split("```")[0], names)
    names["session"].close()
    model = names["model"]
    assert model.user.table.state()["ids"].tolist() == list(range(40))
    assert len(model.tags.table) == 9


@pytest.mark.parametrize("consistency", ["{globalBatchSize: 10}", "{mode: accumulate, gradients: 2}"])
def test_a_version_of_several_steps_is_one_step_of_the_rows(tmp_path: Path, consistency: str) -> None:
    """Two batches of 5 make what one of 10 does, also alone, and with several optimizers and a scheduler."""
    found = []
    for size, given in ((5, f"consistency: {consistency}, "), (10, "")):
        job = tmp_path / "job.yaml"
        spec = f"{{{given}entrypoint: 'x:main', data: {{shuffle: false}}}}"
        job.write_text(
            "{apiVersion: elastic-ps.dev/v1alpha1, kind: TrainingJob, metadata: {name: a}, spec: "
            + spec
            + "}"
        )
        session = connect(job)
        model = Model(*(layer(RowwiseAdagrad(lr=0.5, scheduled=True)) for _ in range(2)))
        parts: dict[str, torch.optim.Optimizer] = {
            "w": torch.optim.SGD([model.head.weight], lr=0.1),
            "b": torch.optim.SGD([model.head.bias], lr=0.1),
        }
        optimizer = session.optimizer(parts, model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer["w"], 0.5)
        session.scheduler(scheduler, interval="step")
        for one, other, target in session.loader(Clicks(), batch_size=size):
            optimizer.zero_grad()
            ((model(one, other) - target) ** 2).mean().backward()
            optimizer.step()
        assert session.version == 4
        found.append(table_of(model).state())
        session.close()
    for name in ("ids", "counts", "steps"):
        assert torch.equal(torch.as_tensor(found[0][name]), torch.as_tensor(found[1][name]))
    torch.testing.assert_close(found[0]["values"], found[1]["values"], rtol=1e-12, atol=1e-12)


Batch = Sequence[torch.Tensor]


@pytest.mark.parametrize("prefetch", [None, ids_of])
def test_a_job_trains_as_one_process_on_the_same_records(tmp_path: Path, prefetch: Any) -> None:
    """Two workers, and rows on two shards; the checkpoint goes on with three, and plain torch loads it."""
    checkpoints, batches = tmp_path / "checkpoints", defaultdict[int, dict[int, Batch]](dict)

    def script(session: Session) -> None:
        model = growing()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for batch in session.loader(Clicks(), batch_size=BATCH, prefetch=prefetch):
            optimizer.zero_grad()
            ((model(batch[0], batch[1]) - batch[2]) ** 2).mean().backward()
            optimizer.step()
            batches[session.version][session.worker] = batch

    for shards, resume in ((2, "no"), (3, "require")):
        server = {"replicas": shards}
        with running_job(
            tmp_path / str(shards),
            checkpoints=checkpoints,
            resume=resume,  # type: ignore[arg-type]
            parameterServer=server,
            worker={"replicas": 2},
            data={"shuffle": False},
        ) as job:
            if resume == "no":
                job.run(script, workers=2)
                (counts,) = job.status().tables
            else:
                again, session = growing(), job.session(0)
                session.optimizer(torch.optim.SGD(again.parameters(), lr=0.1), again)
                resumed = again.one(torch.arange(IDS)).detach()
    rows = len({int(each) for each in Clicks().ids.flatten()})
    assert (counts.name, counts.rows, counts.admitted, counts.expired) == ("click", rows, rows, 0)
    assert 0 < counts.hits < counts.looked_up
    assert 0 <= counts.used_ahead < counts.used
    assert (counts.used_ahead > 0) == (prefetch is not None)
    model, expected = growing(), growing()
    table = torch.nn.Embedding(IDS, DIM, dtype=torch.float64)
    table.weight.data = expected.one(torch.arange(IDS)).detach().clone()
    dense = Model(table, table)
    for version in sorted(batches):
        one, other, target = (torch.cat(each) for each in zip(*batches[version].values(), strict=True))
        dense.zero_grad()
        ((dense(one, other) - target) ** 2).mean().backward()
        with torch.no_grad():
            for parameter, lr in ((table.weight, 0.5), (dense.head.weight, 0.1), (dense.head.bias, 0.1)):
                assert parameter.grad is not None
                parameter.sub_(lr * parameter.grad)
    assert sum(len(batch[0]) for each in batches.values() for batch in each.values()) == 40
    assert elastic_ps.load_checkpoint(checkpoints, model) == max(batches)
    torch.testing.assert_close(
        model.eval().one(torch.arange(IDS)), table.weight.detach(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(resumed, table.weight.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.head.weight, dense.head.weight, rtol=1e-12, atol=1e-12)


class Itself(torch.utils.data.Dataset[torch.Tensor]):
    """Each record is its own number."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize(
    ("mode", "lost"),
    per_change([("sync", 0), ("sync", 1), ("async", 1)], keep=[("sync", 0), ("async", 1)]),
)
def test_each_record_is_trained_once_when_a_shard_is_lost(tmp_path: Path, mode: str, lost: int) -> None:
    """A record is an id of its own, so its row counts how often it was trained."""
    epochs, checkpoints = 2, tmp_path / "checkpoints"
    restarted = threading.Lock()

    def script(session: Session) -> None:
        table = layer()
        model = torch.nn.ModuleDict({"rows": table, "head": torch.nn.Linear(DIM, 1, dtype=torch.float64)})
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = session.loader(
            Itself(),
            batch_size=3,
            epochs=epochs,
            prefetch=lambda ids: {"click": ids},
            prefetch_staleness=int(mode == "async"),
        )
        for ids in loader:
            optimizer.zero_grad()
            model["head"](table(ids)).mean().backward()
            if session.version == 6 and restarted.acquire(blocking=False):
                job.restart(lost)
            optimizer.step()

    consistency = {"mode": mode, **({"stalenessScale": "none"} if mode == "async" else {})}
    with running_job(
        tmp_path,
        checkpoints=checkpoints,
        parameterServer={"replicas": 2, "checkpoint": {"everyVersions": 4}},
        worker={"replicas": 2},
        consistency=consistency,
    ) as job:
        job.run(script, workers=2)
        assert job.status().term > 1
    model = torch.nn.ModuleDict({"rows": layer(), "head": torch.nn.Linear(DIM, 1, dtype=torch.float64)})
    elastic_ps.load_checkpoint(checkpoints, model)
    table = model["rows"]
    assert isinstance(table, elastic_ps.Embedding)
    rows = table.table.state()
    assert rows["ids"].tolist() == list(range(60))
    assert rows["counts"].tolist() == [epochs] * 60


def test_gradients_of_lost_batches_train_no_row(tmp_path: Path) -> None:
    """Steps are made of two batches. A shard is lost between the batches of one, which come again."""
    checkpoints = tmp_path / "checkpoints"

    def script(session: Session) -> None:
        table, restarted = layer(), False
        model = torch.nn.ModuleDict({"rows": table, "head": torch.nn.Linear(DIM, 1, dtype=torch.float64)})
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        first = True
        for ids in session.loader(Itself(), batch_size=3):
            with optimizer.no_sync() if first else nullcontext():
                model["head"](table(ids)).mean().backward()
            if not first:
                optimizer.step()
                optimizer.zero_grad()
            elif session.version == 6 and not restarted:
                job.restart(0)
                restarted = True
            first = not first
        if not first:
            optimizer.step()

    server = {"replicas": 2, "checkpoint": {"everyVersions": 4}}
    with running_job(
        tmp_path, checkpoints=checkpoints, parameterServer=server, data={"shardRecords": 3}
    ) as job:
        job.run(script, workers=1)
        assert job.status().term > 1
    model = torch.nn.ModuleDict({"rows": layer(), "head": torch.nn.Linear(DIM, 1, dtype=torch.float64)})
    elastic_ps.load_checkpoint(checkpoints, model)
    table = model["rows"]
    assert isinstance(table, elastic_ps.Embedding)
    assert table.table.state()["counts"].tolist() == [1] * 60
