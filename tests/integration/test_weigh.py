"""`session.weigh`: with losses that are means over tokens, a job computes what one process computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.data.shuffle import permutation
from elastic_ps.errors import UsageError
from elastic_ps.worker.loader import ElasticLoader
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, make_mlp, running_job
from tests.testing.oracle import Commit, assert_each_record_once, replay
from tests.testing.tiers import per_change
from tests.testing.trained import alone, await_training, failing

LONGEST = 9
FEATURES = 6


class Ragged(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Records of 1 to 9 tokens, padded: x has the tokens, y the targets, which are NaN without a token.

    With `gaps`, every second record has no token.
    """

    def __init__(self, records: int, *, gaps: bool = False) -> None:
        random = torch.Generator().manual_seed(1)
        self._x = torch.randn(records, LONGEST, FEATURES, generator=random, dtype=torch.float64)
        lengths = torch.randint(1, LONGEST + 1, (records, 1), generator=random)
        if gaps:
            lengths[::2] = 0
        self._y = torch.sin(self._x.sum(2)).masked_fill(torch.arange(LONGEST) >= lengths, math.nan)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index], self._y[index]


DATA = Ragged(72)


def tokens(y: torch.Tensor) -> int:
    return int(y.isfinite().sum())


def total_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The sum over the tokens."""
    there = y.isfinite()
    return (model(x[there]).squeeze(1) - y[there]).square().sum()


def mean_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    return total_loss(model, x, y) / tokens(y)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.005)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def mlp() -> torch.nn.Module:
    return make_mlp().double()


Models = dict[tuple[int, int], torch.nn.Module]


def trainer(job: Job, models: Models, make: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> Any:
    def script(session: Session, rank: int = 0) -> None:
        models[session.worker, rank] = model = mlp()
        optimizer = session.optimizer(make(model), model)
        for step, (x, y) in enumerate(session.loader(DATA, 5)):
            if step == 0 and job.spec.consistency.global_batch_size is None:  # one may have all of a version
                await_training(job, 0, 1)
            optimizer.zero_grad()
            session.weigh(tokens(y))
            mean_loss(model, x, y).backward()
            optimizer.step()

    return script


def check(model: torch.nn.Module, commits: list[Commit], spec: Any, make: Any) -> None:
    """The model is that of one process, which has computed the mean over the tokens of each version."""
    assert_each_record_once(commits, records=len(DATA), epochs=1)
    together = any(len(commit["contributions"]) > 1 for commit in commits)
    assert together or spec.consistency.global_batch_size
    expected = mlp()
    replay(commits, DATA, expected, make, spec, loss=mean_loss)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


LOCAL = {"consistency": {"mode": "local", "steps": 1, "outer": "average"}}
WAYS: dict[str, dict[str, Any]] = {
    "two parameter servers": {"parameterServer": {"replicas": 2, "bucketBytes": 1024}},
    "one call": {},
    "all-reduce": {"strategy": "all-reduce"},
    "group of processes": {"worker": {"processes": 2}},
    "local steps": LOCAL,
    "local steps of a group": LOCAL | {"worker": {"processes": 2}},
    "globalBatchSize": {"consistency": {"globalBatchSize": 12}},
    "accumulate": {"consistency": {"mode": "accumulate", "gradients": 3}},
    "deterministic": {"consistency": {"deterministic": True}, "worker": {"replicas": 2}},
    "standby": {"parameterServer": {"durability": "standby"}},
}


@pytest.mark.parametrize("way", per_change(WAYS, keep=[*WAYS][:7]))
def test_a_version_is_the_mean_over_the_tokens_of_all_workers(tmp_path: Path, way: str) -> None:
    models, make = Models(), sgd if "local" in way else adam
    with running_job(tmp_path, data={"shardRecords": 7}, **WAYS[way]) as job:
        for worker in range(2):
            job.start_processes(worker, trainer(job, models, make))
        job.join()
        check(models[0, 0], job.commits(), job.spec, make)


MIXED = ("two parameter servers", "one call", "all-reduce", "group of processes", "local steps")


@pytest.mark.parametrize("way", per_change({way: WAYS[way] for way in MIXED}, keep=MIXED[1:]))
def test_a_version_of_steps_that_were_weighed_and_others_is_refused(tmp_path: Path, way: str) -> None:
    def script(session: Session, rank: int = 0) -> None:
        del rank
        model = mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DATA, 5):
            await_training(job, 0, 1)
            if session.worker:
                session.weigh(tokens(y))
            mean_loss(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, data={"shardRecords": 7}, **WAYS[way]) as job:
        for worker in range(2):
            job.start_processes(worker, script)
        with pytest.raises(UsageError, match=r"of worker 1 was weighed .* of worker 0 was not"):
            job.join()
        assert all(len(commit["contributions"]) == 1 for commit in job.commits())


def threes(loader: ElasticLoader) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Three batches at a time, and what is left at the end."""
    for _ in loader.epochs():
        group = []
        for batch in loader:
            group.append(batch)
            if len(group) == 3:
                yield group
                group = []
        if group:
            yield group


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("way", ["one call", "all-reduce", "group of processes"])
def test_accumulated_gradients_weigh_what_was_said_for_each(tmp_path: Path, way: str, overlap: bool) -> None:
    """Worker 1 says it once for all batches of a step, worker 0 for each of them."""
    models = Models()

    def script(session: Session, rank: int = 0) -> None:
        models[session.worker, rank] = model = mlp()
        optimizer = session.optimizer(adam(model), model, overlap=overlap)
        for group in threes(session.loader(DATA, 3)):
            await_training(job, 0, 1)
            whole = sum(tokens(y) for _, y in group)
            optimizer.zero_grad()
            if session.worker:
                session.weigh(whole)
            for number, (x, y) in enumerate(group, start=1):
                if not session.worker:
                    session.weigh(tokens(y))
                with nullcontext() if number == len(group) else optimizer.no_sync():
                    (total_loss(model, x, y) / whole).backward()
            optimizer.step()

    with running_job(tmp_path, data={"shardRecords": 9}, **WAYS[way]) as job:
        for worker in range(2):
            job.start_processes(worker, script)
        job.join()
        check(models[0, 0], job.commits(), job.spec, adam)


def test_a_contribution_of_local_steps_weighs_the_sum_of_their_weights(tmp_path: Path) -> None:
    """The average of the workers' values is weighed by it."""
    models, expected, most = Models(), mlp(), 0
    consistency = {"mode": "local", "steps": 3, "outer": "average"}
    with running_job(tmp_path, consistency=consistency, data={"shardRecords": 10}) as job:
        job.run(trainer(job, models, sgd), workers=2)
        commits = job.commits()
    assert_each_record_once(commits, records=len(DATA), epochs=1)
    for commit in commits:
        moved, total = [torch.zeros_like(p) for p in expected.parameters()], 0
        for each in commit["contributions"]:
            own, weight = copy.deepcopy(expected), 0
            optimizer = sgd(own)
            for epoch, start, stop in each["records"]:  # of a batch
                indexes = permutation(len(DATA), epoch, shuffle=True, seed=0)[start:stop]
                x, y = (torch.stack(column) for column in zip(*(DATA[i] for i in indexes), strict=True))
                optimizer.zero_grad()
                mean_loss(own, x, y).backward()
                optimizer.step()
                weight += tokens(y)
            assert each["weight"] == weight
            total, most = total + weight, max(most, len(each["records"]) * len(commit["contributions"]))
            with torch.no_grad():
                for sum_, mine, base in zip(moved, own.parameters(), expected.parameters(), strict=True):
                    sum_.add_(mine - base, alpha=weight)
        with torch.no_grad():
            for parameter, sum_ in zip(expected.parameters(), moved, strict=True):
                parameter.add_(sum_ / total)
    assert most == 6, "two workers have exchanged three steps each"
    for ours, theirs in zip(models[0, 0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_steps_of_an_exchange_are_all_weighed_or_none(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = mlp()
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(session.loader(DATA, 5)):
            if number != 2:
                session.weigh(tokens(y))
            mean_loss(model, x, y).backward()
            optimizer.step()

    fields = {"consistency": {"mode": "local", "steps": 4, "outer": "average"}}
    failing(tmp_path, script, UsageError, "for only some of the steps exchanged together", **fields)


def test_all_batches_of_a_step_are_weighed_or_one_for_all(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = mlp()
        optimizer = session.optimizer(adam(model), model, overlap=False)
        for group in threes(session.loader(DATA, 3)):
            for number, (x, y) in enumerate(group):
                if number:
                    session.weigh(tokens(y))
                total_loss(model, x, y).backward()
            optimizer.step()

    failing(tmp_path, script, UsageError, "was called for 2 of the 3 batches of a step")


def test_records_are_counted_as_before(tmp_path: Path) -> None:
    """By schedules, by the size of the version's batch, and in the means of what is reported."""
    seen: list[int] = []

    def script(session: Session) -> None:
        model = mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DATA, 30):
            session.weigh(0.25 * len(x))
            mean_loss(model, x, y).backward()
            session.report(records=len(x))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(session.global_batch_size)

    commits = alone(tmp_path, script)
    assert seen == [30, 30, 12]
    assert [(c["samples"], c["weight"]) for commit in commits for c in commit["contributions"]] == [
        (30, 7.5),
        (30, 7.5),
        (12, 3.0),
    ]


@pytest.mark.parametrize("weight", [0, -3, math.nan, math.inf, 1e30, "many", None, torch.ones(2)])
def test_a_weight_is_a_positive_number(tmp_path: Path, weight: Any) -> None:
    def script(session: Session) -> None:
        model = mlp()
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(session.loader(DATA, 30)):
            if number == 1:
                with pytest.raises(UsageError, match=r"takes a positive number.* given: .*optimizer\.skip"):
                    session.weigh(weight)
            session.weigh(torch.tensor(tokens(y)))
            mean_loss(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert len(alone(tmp_path, script)) == 3, "nothing had changed"


@pytest.mark.parametrize(
    ("when", "match"),
    [
        ("before a batch", "was called without a batch"),
        ("after the step", "was called without a batch"),
        ("twice", "was called twice for one backward"),
        ("after backward", "was called after backward"),
    ],
)
def test_it_is_called_once_between_a_batch_and_its_backward(tmp_path: Path, when: str, match: str) -> None:
    def script(session: Session) -> None:
        model = mlp()
        optimizer = session.optimizer(sgd(model), model)

        def now(moment: str) -> None:
            if moment == when:
                session.weigh(1)

        now("before a batch")
        for x, y in session.loader(DATA, 40):
            session.weigh(tokens(y))
            now("twice")
            mean_loss(model, x, y).backward()
            now("after backward")
            optimizer.step()
            now("after the step")

    failing(tmp_path, script, UsageError, match)


def test_all_processes_of_a_worker_say_it(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        model = mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DATA, 40):
            if not rank:
                session.weigh(tokens(y))
            mean_loss(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        with pytest.raises(UsageError, match="in only some of this worker's processes"):
            job.join()


def test_a_part_without_tokens_weighs_nothing(tmp_path: Path) -> None:
    data, seen, models = Ragged(90, gaps=True), set[tuple[int, bool]](), Models()

    def script(session: Session, rank: int) -> None:
        models[0, rank] = model = mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 6):
            optimizer.zero_grad()
            session.weigh(tokens(y))
            seen.add((rank, tokens(y) > 0))
            (total_loss(model, x, y) / max(1, tokens(y))).backward()
            optimizer.step()

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        expected = mlp()
        replay(job.commits(), data, expected, sgd, job.spec, loss=mean_loss)
    assert seen == {(0, False), (0, True), (1, False), (1, True)}
    for ours, theirs in zip(models[0, 0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_parts_without_tokens_are_refused_if_no_process_has_any(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        del rank
        model = mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DATA, 40):
            session.weigh(0)
            mean_loss(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        with pytest.raises(UsageError, match=r"got 0 in each process of this worker.*optimizer\.skip\(\) in"):
            job.join()


def test_a_refused_step_may_be_skipped(tmp_path: Path) -> None:
    refused: set[int] = set()

    def script(session: Session, rank: int) -> None:
        model = mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(DATA, 10):
            if rank not in refused:
                session.weigh(0)
            mean_loss(model, x, y).backward()
            try:
                optimizer.step()
            except UsageError:
                refused.add(rank)
                optimizer.skip()

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        assert len(job.commits()) == 7, "of eight steps"
    assert refused == {0, 1}


def test_a_process_without_records_of_the_last_batch_weighs_what_it_said_for_all(tmp_path: Path) -> None:
    """Batches of 5, 5 and 1 records are loaded first, and process 1 has none of the last one."""
    weights: list[float] = []

    def script(session: Session, rank: int) -> None:
        model = mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=False)
        for group in threes(session.loader(Ragged(11), 5)):
            session.weigh(10 + rank)
            for x, y in group:
                mean_loss(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        weights += [c["weight"] for commit in job.commits() for c in commit["contributions"]]
    assert weights == [21]
