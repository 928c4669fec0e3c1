"""Mode `local` with fragments: exchanged in turn, with the bytes of one at a time, and by the papers' rules.

The reference is plain torch in one process, on the records that the parameter server's history names.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.fragments import fragments, turn
from elastic_ps.core.ledger import Range
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import InvalidModel
from elastic_ps.worker.session import Session
from tests.integration.test_local_steps import BATCH, Dying, adamw, local, steps_on, train
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.inside import push_pull_of, runtime_of
from tests.testing.oracle import (
    Adapted,
    Commit,
    assert_equal_up_to_round_off,
    mse,
)
from tests.testing.polling import LIMIT
from tests.testing.tiers import per_change
from tests.testing.trained import alone

OUTER = ["diloco", "average", "easgd", "downpour"]
RULES = pytest.mark.parametrize("outer", OUTER)


def fragments_of(session: Session, count: int) -> list[set[int]]:
    """For each fragment, the numbers of the model's parameters in it."""
    strategy = push_pull_of(session)
    flat = strategy.flat
    found = fragments(flat.layout, count)
    return [{i for i, own in enumerate(flat.buckets_of) if each.issuperset(own)} for each in found]


def check_histories(job: Job, data: Any, *, epochs: int = 1) -> None:
    most = job.spec.consistency.most_stale
    assert check(read(job.history), Data(len(data), epochs), max_staleness=most) == []


class Worker:
    """One worker of the reference: its model, and for each fragment the values that it has begun with."""

    def __init__(self, model: torch.nn.Module, count: int) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = adamw(self.model)
        self.base = [p.detach().clone() for p in model.parameters()]
        self.exchanges = 0
        self.trained = [0] * count


def reference(
    commits: Sequence[Commit], data: Numbers, model: torch.nn.Module, rule: Consistency, parts: list[set[int]]
) -> None:
    """Train `model` in place, in the dtype that it has: a version for each commit."""
    name, rate = rule.outer or "diloco", rule.outer_rule.learning_rate
    assert rule.steps is not None
    center, count = list(model.parameters()), len(parts)
    outer = torch.optim.SGD(center, lr=rate, momentum=rule.outer_rule.momentum, nesterov=name == "diloco")
    adapted = Adapted(outer, rule, adaptive=True)
    workers: dict[int, Worker] = {}
    versions = [copy.deepcopy(model)]
    for commit in commits:
        outer.zero_grad()
        total = sum(c["samples"] for c in commit["contributions"])
        exchanged: list[tuple[Worker, int]] = []
        for c in commit["contributions"]:
            based = versions[commit["version"] - 1 - c["staleness"]]
            first = versions[0] if name == "easgd" else based
            worker = workers.setdefault(c["worker"], Worker(first, count))
            steps_on(worker.model, worker.optimizer, data, [Range(*r) for r in c["records"]])
            worker.trained = [n + sum(r[2] - r[1] for r in c["records"]) for n in worker.trained]
            at = commit["version"] - 1 if rule.waits_for_all else worker.exchanges
            last = len(c["records"]) < rule.steps // count
            about = range(count) if last else [turn(at, count)]
            assert c["samples"] == max(worker.trained[f] for f in about)
            worker.exchanges += 1
            with torch.no_grad():
                for f in about:
                    worker.trained[f] = 0
                    for i in parts[f]:
                        mine = list(worker.model.parameters())[i]
                        at = list(based.parameters())[i] if name == "easgd" else worker.base[i]
                        distance = at - mine
                        grad = distance * (c["samples"] / total)
                        center[i].grad = grad if center[i].grad is None else center[i].grad + grad
                        if name == "easgd":
                            mine.add_(distance, alpha=rate)
                        else:
                            exchanged.append((worker, i))
        adapted.before(commit)
        outer.step()
        with torch.no_grad():
            for worker, i in exchanged:
                worker.base[i].copy_(center[i])
                list(worker.model.parameters())[i].copy_(center[i])
        versions.append(copy.deepcopy(model))


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize(("steps", "count"), [(4, 2), (9, 3)])
def test_it_is_the_rule_of_the_paper(tmp_path: Path, outer: str, steps: int, count: int) -> None:
    """Two workers on two shards."""
    data, models, exclusive = Numbers(172), dict[int, torch.nn.Module](), threading.Lock()
    meet, parts = threading.Barrier(2), list[list[set[int]]]()

    def script(session: Session) -> None:
        model = make_mlp((6, 16, 16, 16, 1))
        optimizer = session.optimizer(adamw(model), model)
        parts.append(fragments_of(session, count))
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            if not number and outer == "easgd":
                meet.wait(LIMIT)  # both begin with version 0
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if outer == "easgd":
                with (
                    exclusive
                ):  # nobody exchanges between another one's look at the job's values and its push
                    optimizer.step()
            else:
                optimizer.step()
        models[session.worker] = model

    with running_job(
        tmp_path,
        consistency=local(steps, outer, fragments=count),
        data={"shardRecords": 8},
        parameterServer={"replicas": 2, "bucketBytes": 1024},
    ) as job:
        job.run(script, workers=2)
        commits, rule = job.commits(), job.spec.consistency
        check_histories(job, data)
    assert parts[0] == parts[1]
    for model in models.values():
        assert_equal_up_to_round_off(
            model,
            make_mlp((6, 16, 16, 16, 1)),
            lambda plain: reference(commits, data, plain, rule, parts[0]),
        )


@RULES
def test_one_fragment_is_what_there_is_without_any(tmp_path: Path, outer: str) -> None:
    models = list[torch.nn.Module]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        train(session, model, optimizer, session.loader(Numbers(80), BATCH))
        models.append(model)

    for number, chosen in enumerate([{}, {"fragments": 1}]):
        alone(tmp_path / str(number), script, consistency=local(3, outer, **chosen))
    plain, one = (model.state_dict() for model in models)
    assert all(torch.equal(plain[name], one[name]) for name in plain)


def test_an_exchange_has_the_bytes_of_one_fragment(tmp_path: Path) -> None:
    """In both directions. After the loop there is one exchange of all, without records if there are none."""
    seen = list[tuple[int, int]]()
    sizes = list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        parameters = list(model.parameters())
        sizes.extend(sum(parameters[i].nbytes for i in part) for part in fragments_of(session, 2))
        for x, y in session.loader(Numbers(32), BATCH):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            seen.append(counts(session))
        seen.append(counts(session))

    def counts(session: Session) -> tuple[int, int]:
        found = runtime_of(session).client.traffic.counts()
        return found.pushed_bytes, found.pulled_bytes

    commits = alone(
        tmp_path, script, consistency=local(4, fragments=2), parameterServer={"bucketBytes": 1024}
    )
    a, b = sizes
    expected = [0, a, a, a + b, a + b, 2 * a + b, 2 * a + b, 2 * a + 2 * b, 3 * a + 3 * b]
    assert [pushed for pushed, _ in seen] == expected
    assert [pulled for _, pulled in seen] == expected
    assert [c["samples"] for commit in commits for c in commit["contributions"]] == [8, 16, 16, 16, 8]
    assert [len(c["records"]) for commit in commits for c in commit["contributions"]] == [2, 2, 2, 2, 0]


@RULES
def test_at_the_end_of_the_loop_the_model_is_the_jobs(tmp_path: Path, outer: str) -> None:
    """The job is not over before what every worker has made of every fragment is in it."""
    models = dict[int, torch.nn.Module]()
    versions = list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        loader = session.loader(Numbers(96), BATCH, epochs=2)
        for _ in loader.epochs():
            train(session, model, optimizer, loader)
        models[session.worker] = model
        versions.append(session.version)

    with running_job(
        tmp_path,
        consistency=local(2, outer, fragments=2),
        data={"shardRecords": 8},
        parameterServer={"bucketBytes": 1024},
    ) as job:
        job.run(script, workers=3)
        last = job.version
        check_histories(job, Numbers(96), epochs=2)
    assert versions == [last] * 3
    first, *others = (model.state_dict() for model in models.values())
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("outer", per_change(OUTER, keep=["diloco", "easgd"]))
def test_a_worker_dies_and_a_parameter_server_too(tmp_path: Path, outer: str) -> None:
    data = Numbers(400)
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        consistency=local(4, outer, fragments=2),
        data={"shardRecords": 32},
        parameterServer={
            "replicas": 2,
            "bucketBytes": 1024,
            "checkpoint": {"everyVersions": 2, "interval": "1h"},
        },
    ) as job:
        script = Dying(job, data, worker=1, paced=True)
        for worker in range(2):
            job.start(worker, script)
        job.until(script.dead.is_set, "worker 1 dies")
        job.start(1, script)
        script.more()
        job.restart(1)
        script.most = math.inf
        job.join()
        check_histories(job, data)


# --- bad input


def test_more_fragments_than_the_model_has_tensors(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = torch.nn.Linear(6, 1)
        session.optimizer(adamw(model), model)

    with pytest.raises(InvalidModel, match=r"fragments is 3, but the model can be divided into 2 at most"):
        alone(tmp_path, script, consistency=local(5, fragments=3))
