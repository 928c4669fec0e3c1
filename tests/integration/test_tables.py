"""Embeddings with sparse gradients: a step sends only touched rows, and trains what one process does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.codec.several import Several
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.model.description import ModelDescription
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, running_job
from tests.testing.oracle import assert_each_record_once, mse, replay
from tests.testing.tiers import per_change
from tests.testing.trained import await_standbys, await_training
from tests.testing.transports import whole_jobs

Optimizers = Callable[[torch.nn.Module], torch.optim.Optimizer | dict[str, torch.optim.Optimizer]]
Models = dict[int, "Recommender"]


class Recommender(torch.nn.Module):
    """A table of single rows, one of bags, of which some are empty, and a dense layer."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.version = -1  # that a worker has ended with
        self.user = torch.nn.Embedding(60, 3, sparse=True, dtype=dtype)
        self.tags = torch.nn.EmbeddingBag(40, 4, mode="sum", sparse=True, dtype=dtype)
        self.last = torch.nn.Linear(7, 1, dtype=dtype)
        random = torch.Generator().manual_seed(3)  # workers are threads, which share the global one
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, generator=random)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = (x.float().abs() * 100).long()
        sizes = numbers[:, 1] % 3
        offsets = sizes.cumsum(0) - sizes
        tags = numbers[:, 2:4][torch.arange(2) < sizes[:, None]] % 40
        joined = torch.cat([self.user(numbers[:, 0] % 60), self.tags(tags, offsets)], 1)
        out: torch.Tensor = self.last(joined)
        return out

    def tables(self) -> list[torch.Tensor]:
        return [self.user.weight, self.tags.weight]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adagrad(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def two_adams(model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
    assert isinstance(model, Recommender)
    return {
        "tables": torch.optim.SparseAdam(model.tables(), lr=0.05),
        "rest": torch.optim.Adam(model.last.parameters(), lr=0.01),
    }


def alone(make: Optimizers) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    """The same for one process."""

    def made(model: torch.nn.Module) -> torch.optim.Optimizer:
        given = make(model)
        return Several(given) if isinstance(given, Mapping) else given

    return made


def trainer(
    make: Optimizers,
    data: Numbers,
    models: Models,
    *,
    epochs: int = 1,
    begin: Callable[[], object] = lambda: None,
    each: Callable[[Session], object] = lambda session: None,
    **options: Any,
) -> Callable[[Session], None]:
    """An ordinary script."""

    def script(session: Session) -> None:
        model = Recommender()
        optimizer = session.optimizer(make(model), model, **options)
        models[session.worker] = model
        for x, y in session.loader(data, 4, epochs=epochs):
            begin()
            optimizer.zero_grad()
            mse(model, x.double(), y.double()).backward()
            each(session)
            optimizer.step()
        model.version = session.version

    return script


def loss_of(model: Recommender, x: torch.Tensor, y: torch.Tensor, *, whole: bool) -> torch.Tensor:
    """`whole`: all rows of a table have a gradient."""
    loss: torch.Tensor = mse(model, x.double(), y.double())
    return loss + 0.0 * model.user.weight.sum() if whole else loss


def together(job: Job) -> Callable[[], object]:
    """For `begin`: no step is made before both workers compute."""
    return lambda: await_training(job, 0, 1)


def final(job: Job, models: Models) -> list[Recommender]:
    """The models of the workers that have ended with the last version."""
    found = [model for model in models.values() if model.version == job.commits()[-1]["version"]]
    assert found
    return found


def check(job: Job, data: Numbers, models: Models, make: Optimizers, *, epochs: int = 1) -> None:
    """All workers have what one process computes on the same records, up to round-off."""
    job.join()
    commits = job.commits()
    assert_each_record_once(commits, records=len(data), epochs=epochs)
    exact = Recommender()
    replay(commits, data, exact, alone(make), job.spec)
    assert any(len(commit["contributions"]) > 1 for commit in commits)
    for model in final(job, models):
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("make", [sgd, adagrad, two_adams])
@pytest.mark.parametrize("shards", [1, 2])
def test_tables_are_trained_as_in_one_process(tmp_path: Path, make: Optimizers, shards: int) -> None:
    data, models = Numbers(160), Models()
    with running_job(tmp_path, parameterServer={"replicas": shards, "bucketBytes": 1024}) as job:
        for worker in range(2):
            job.start(worker, trainer(make, data, models, epochs=2, begin=together(job)))
        check(job, data, models, make, epochs=2)


@pytest.mark.parametrize(
    ("make", "workers", "processes", "whole"),
    per_change(
        [(two_adams, 1, 3, False), (two_adams, 2, 2, False), (sgd, 1, 2, True)],
        keep=[(two_adams, 2, 2, False), (sgd, 1, 2, True)],
    ),
)
def test_processes_of_a_worker_add_up_their_rows(
    tmp_path: Path, make: Optimizers, workers: int, processes: int, whole: bool
) -> None:
    """The last batches have fewer records than processes. `whole`: one has a gradient of all rows."""
    data, models = Numbers(131), dict[tuple[int, int], Recommender]()

    def script(session: Session, rank: int) -> None:
        model = models[session.worker, rank] = Recommender()
        optimizer = session.optimizer(make(model), model)
        for x, y in session.loader(data, 5, epochs=2):
            optimizer.zero_grad()
            loss_of(model, x, y, whole=whole and rank == 1).backward()
            optimizer.step()

    server, each = {"replicas": 2, "bucketBytes": 1024}, {"processes": processes}
    with running_job(tmp_path, parameterServer=server, worker=each, data={"shardRecords": 13}) as job:
        for worker in range(workers):
            job.start_processes(worker, script)
        job.join()
        commits = job.commits()
        assert_each_record_once(commits, records=len(data), epochs=2)
        exact = Recommender()
        replay(commits, data, exact, alone(make), job.spec)
    for model in models.values():
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("make", "whole"), [(two_adams, False), (adagrad, True)])
def test_processes_make_local_steps_with_the_rows_of_all(
    tmp_path: Path, make: Optimizers, whole: bool
) -> None:
    """`whole`: one has a gradient of all rows."""
    data, models = Numbers(32), list[Recommender]()

    def script(session: Session, rank: int) -> None:
        model = Recommender()
        models.append(model)
        optimizer = session.optimizer(make(model), model)
        for x, y in session.loader(data, 5):
            optimizer.zero_grad()
            loss_of(model, x, y, whole=whole and rank == 1).backward()
            optimizer.step()

    fields: dict[str, Any] = {
        "consistency": {"mode": "local", "steps": 3, "outer": "average"},
        "worker": {"processes": 2},
        "data": {"shuffle": False},
    }
    with running_job(tmp_path, **fields) as job:
        job.start_processes(0, script)
        job.join()
    exact = Recommender()
    optimizer = alone(make)(exact)
    for x, y in torch.utils.data.DataLoader(data, 5):
        optimizer.zero_grad()
        mse(exact, x.double(), y.double()).backward()
        optimizer.step()
    for model in models:
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_a_process_that_sends_many_rows_waits_for_no_other_one(tmp_path: Path) -> None:
    """Process 0 skips the step before it has said what it has: the rows are more than a socket holds."""

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4096, 256, sparse=True)
            self.last = torch.nn.Linear(256, 1)

    skipped = list[int]()

    def script(session: Session, rank: int) -> None:
        model = Large()
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(session.loader(Numbers(16), 4)):
            optimizer.zero_grad()
            every = torch.arange(4096) if rank else torch.arange(4)
            looked_up = model.table(every).mean(0, keepdim=True) if rank or number else x.new_zeros(1, 256)
            torch.nn.functional.mse_loss(model.last(looked_up).expand_as(y), y).backward()
            if number == 0:
                skipped.append(rank)
                optimizer.skip()
            else:
                optimizer.step()

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        assert job.status().progress.records_skipped == 4
    assert sorted(skipped) == [0, 1]


@pytest.mark.covering(1)
@whole_jobs
@pytest.mark.parametrize(
    "consistency",
    [
        {"globalBatchSize": 12},
        {"mode": "async"},
        {"mode": "bounded", "maxStaleness": 2},
        {"mode": "accumulate", "gradients": 3},
        {"backupWorkers": 1},
    ],
    ids=lambda consistency: next(iter(reversed(consistency))),
)
def test_each_mode_trains_each_record_of_a_table_once(
    tmp_path: Path, transport: str, consistency: dict[str, Any]
) -> None:
    data, models = Numbers(120), Models()
    with running_job(tmp_path, transport=transport, consistency=consistency, worker={"replicas": 2}) as job:
        for worker in range(2):
            job.start(worker, trainer(two_adams, data, models))
        job.join()
        assert_each_record_once(job.commits(), records=len(data), epochs=1)
        if "globalBatchSize" in consistency:
            check(job, data, models, two_adams)


@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
@pytest.mark.parametrize("make", per_change([adagrad, two_adams], keep=[two_adams]))
def test_a_lost_parameter_server_changes_no_bit(tmp_path: Path, make: Optimizers, durability: str) -> None:
    def trained(directory: Path, *, lose: bool) -> Recommender:
        models, once = Models(), threading.Lock()
        server: dict[str, Any] = {"replicas": 2, "bucketBytes": 1024, "durability": durability}
        server["checkpoint"] = {"everyVersions": 3, "interval": "1h"}
        fields: dict[str, Any] = {"consistency": {"deterministic": True}, "worker": {"replicas": 2}}
        fields |= {"parameterServer": server, "data": {"shardRecords": 8}}
        with running_job(directory, checkpoints=directory / "kept", **fields) as job:

            def each(session: Session) -> None:
                if durability == "standby" and session.version == 3:
                    await_standbys(job)
                ready = session.version >= 7 and (durability == "checkpoint" or job.followed)
                if lose and ready and once.acquire(blocking=False):
                    job.restart(0)

            job.run(trainer(make, Numbers(160), models, each=each), workers=2)
            assert (job.status().term > 1) == lose
            return final(job, models)[0]

    lost, whole = trained(tmp_path / "1", lose=True), trained(tmp_path / "2", lose=False)
    assert lost.version == whole.version
    assert all(torch.equal(a, b) for a, b in zip(lost.parameters(), whole.parameters(), strict=True))


def test_the_whole_gradient_is_clipped(tmp_path: Path) -> None:
    data, models = Numbers(96), Models()

    def clipped(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def clipping(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(lambda *_: clipped(model))
        return optimizer

    with running_job(tmp_path, parameterServer={"replicas": 2, "bucketBytes": 1024}) as job:
        for worker in range(2):
            job.start(worker, trainer(sgd, data, models, max_grad_norm=0.05))
        job.join()
        exact = Recommender()
        replay(job.commits(), data, exact, clipping, job.spec)
    for ours, theirs in zip(final(job, models)[0].parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("processes", [1, 2])
def test_only_rows_that_were_looked_up_are_sent(tmp_path: Path, processes: int) -> None:
    """Also if others have a codec. A worker gets the whole table when it joins, and at the end."""
    rows, width = 50_000, 8

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(rows, width, sparse=True)
            self.last = torch.nn.Linear(width, 1)

    def script(session: Session, *_: int) -> None:
        model = Wide()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(160), 4):
            optimizer.zero_grad()
            looked_up = model.table((x[:, 0].abs() * 1e4).long() % rows)
            torch.nn.functional.mse_loss(model.last(looked_up), y).backward()
            optimizer.step()

    fields: dict[str, Any] = {"compression": {"codec": "topk", "values": "bf16"}}
    with running_job(tmp_path, worker={"processes": processes}, **fields) as job:
        for worker in range(2):
            if processes > 1:
                job.start_processes(worker, script)
            else:
                job.start(worker, script)
        job.join()
        traffic = job.status().traffic
    assert job.commits()[-1]["version"] >= 20
    assert 0 < traffic.pushed_bytes < rows * width * 4 / 10
    assert 0 < traffic.pulled_bytes < rows * width * 4 * 8, "in 40 steps"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda m: torch.optim.Adam(m.parameters()),
            "user.weight has sparse gradients, but Adam changes all",
        ),
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
            "momentum=0.9 of parameter group 0",
        ),
        (lambda m: torch.optim.Adagrad(m.parameters(), weight_decay=0.1), "weight_decay=0.1 of parameter"),
        (lambda m: torch.optim.SparseAdam([*m.parameters()]), "last.weight has dense gradients here"),
    ],
)
def test_an_optimizer_that_changes_every_row_is_refused(make: Any, match: str) -> None:
    model = Recommender()
    with pytest.raises(InvalidModel, match=match):
        ModelDescription(model, make(model))


def test_a_weight_decay_that_a_script_sets_later_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Recommender()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(16), 4):
            mse(model, x.double(), y.double()).backward()
            optimizer.param_groups[0]["weight_decay"] = 0.1
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        with pytest.raises(InvalidModel, match=r"weight_decay=0.1 of parameter group 0 acts on all rows"):
            job.join()
        assert job.version == 0


def test_a_change_that_a_script_makes_to_a_table_is_noticed(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Recommender()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(16), 4):
            mse(model, x.double(), y.double()).backward()
            with torch.no_grad():
                model.user.weight[0] += 1
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        with pytest.raises(UsageError, match=r"the script has changed user\.weight"):
            job.join()


def test_values_that_a_script_assigns_are_the_next_version(tmp_path: Path) -> None:
    models = Models()

    def script(session: Session) -> None:
        model = models[session.worker] = Recommender()
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(session.loader(Numbers(32), 4)):
            mse(model, x.double(), y.double()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                with torch.no_grad():
                    model.user.weight[:] = 0.25
                session.assign(model)
                assert bool((model.user.weight == 0.25).all())

    with running_job(tmp_path) as job:
        job.run(script, workers=1)
    changed = (models[0].user.weight != 0.25).any(1).sum()
    assert 0 < changed <= 24, "rows of six batches"


@pytest.mark.parametrize(
    "fields", [{"strategy": "all-reduce"}, {"consistency": {"mode": "local", "steps": 2}}]
)
def test_where_no_server_steps_gradients_are_as_torch_has_them(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    data, models = Numbers(64), Models()
    with running_job(tmp_path, worker={"replicas": 2}, **fields) as job:
        job.run(trainer(sgd, data, models, begin=together(job)), workers=2)
        assert_each_record_once(job.commits(), records=len(data), epochs=1)
        if "strategy" in fields:
            check(job, data, models, sgd)
