"""Mode `local` with `overlap`: an exchange goes on while the worker makes its next steps.

The reference is plain torch in one process, on the records that the parameter server's history names.
"""

from __future__ import annotations

import copy
import math
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.consistency import Consistency
from elastic_ps.codec.delayed import DelayedNesterov
from elastic_ps.core.fragments import turn
from elastic_ps.core.ledger import Range
from elastic_ps.worker.session import Session
from elastic_ps.worker.strategies.strategy import Future
from tests.integration.test_fragments import fragments_of
from tests.integration.test_local_steps import BATCH, Dying, adamw, check_histories, local, steps_on, train
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import runtime_of
from tests.testing.oracle import Adapted, Commit, assert_equal_up_to_round_off, mse
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change
from tests.testing.trained import alone, await_training

WIDTHS = (6, 16, 16, 16, 1)


class Worker:
    """One worker of the reference.

    Attributes:
        base: the values of the job that it has last taken over.
        departed: for each parameter that is under way, what was exchanged, and what became of it.
    """

    def __init__(self, model: torch.nn.Module, count: int) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = adamw(self.model)
        self.base = [p.detach().clone() for p in model.parameters()]
        self.departed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.exchanges, self.trained = 0, [0] * count

    def land(self) -> None:
        with torch.no_grad():
            for i, (before, after) in self.departed.items():
                list(self.model.parameters())[i].add_(after - before)
                self.base[i] = after
        self.departed.clear()


def reference(
    commits: Sequence[Commit], data: Numbers, model: torch.nn.Module, rule: Consistency, parts: list[set[int]]
) -> None:
    """Train `model` in place, in the dtype that it has: a version for each commit."""
    assert rule.steps is not None
    lr, momentum = rule.outer_rule.learning_rate, rule.outer_rule.momentum
    center, count = list(model.parameters()), len(parts)
    outer: torch.optim.Optimizer = torch.optim.SGD(center, lr=lr, momentum=momentum, nesterov=momentum > 0)
    if rule.outer == "delayed":
        outer = DelayedNesterov(center, lr=lr, momentum=momentum, every=2)
    adapted = Adapted(outer, rule, adaptive=True)
    workers: dict[int, Worker] = {}
    versions = [copy.deepcopy(model)]
    for commit in commits:
        outer.zero_grad()
        total = sum(c["samples"] for c in commit["contributions"])
        exchanged: list[tuple[Worker, int, bool]] = []
        for c in commit["contributions"]:
            if c["worker"] not in workers:
                workers[c["worker"]] = Worker(versions[commit["version"] - 1 - c["staleness"]], count)
            worker = workers[c["worker"]]
            ranges = [Range(*r) for r in c["records"]]
            meanwhile = min(rule.overlap or 0, len(ranges))
            steps_on(worker.model, worker.optimizer, data, ranges[:meanwhile])
            worker.land()
            steps_on(worker.model, worker.optimizer, data, ranges[meanwhile:])
            worker.trained = [n + sum(r.records for r in ranges) for n in worker.trained]
            last = len(ranges) < rule.steps // count
            at = commit["version"] - 1 if rule.waits_for_all else worker.exchanges
            about = range(count) if last else [turn(at, count)]
            assert c["samples"] == max(worker.trained[f] for f in about)
            worker.exchanges += 1
            for f in about:
                worker.trained[f] = 0
                for i in parts[f]:
                    mine = list(worker.model.parameters())[i].detach()
                    grad = (worker.base[i] - mine) * (c["samples"] / total)
                    center[i].grad = grad if center[i].grad is None else center[i].grad + grad
                    exchanged.append((worker, i, last))
        adapted.before(commit)
        outer.step()
        for worker, i, last in exchanged:
            mine = list(worker.model.parameters())[i].detach()
            worker.departed[i] = mine.clone(), center[i].detach().clone()
            if last:
                worker.land()
        versions.append(copy.deepcopy(model))


@pytest.mark.covering(1)
@pytest.mark.parametrize("outer", ["diloco", "average", "delayed", "downpour"])
@pytest.mark.parametrize(("steps", "count", "overlap"), [(4, 1, 3), (6, 2, 1)])
def test_the_result_is_taken_over_some_steps_later(
    tmp_path: Path, outer: str, steps: int, count: int, overlap: int
) -> None:
    """Two workers on two shards; what the steps in between have changed is part of the next exchange."""
    data, models, parts = Numbers(172), dict[int, torch.nn.Module](), list[list[set[int]]]()

    def script(session: Session) -> None:
        model = make_mlp(WIDTHS)
        optimizer = session.optimizer(adamw(model), model)
        parts.append(fragments_of(session, count))
        train(session, model, optimizer, session.loader(data, BATCH))
        models[session.worker] = model

    with running_job(
        tmp_path,
        consistency=local(steps, outer, fragments=count, overlap=overlap),
        data={"shardRecords": 8},
        worker={"replicas": 2},
        parameterServer={"replicas": 2, "bucketBytes": 1024},
    ) as job:
        job.run(script, workers=2)
        commits, rule = job.commits(), job.spec.consistency
        check_histories(job, data)
    for model in models.values():
        assert_equal_up_to_round_off(
            model, make_mlp(WIDTHS), lambda plain: reference(commits, data, plain, rule, parts[0])
        )


@pytest.mark.parametrize(("steps", "options"), [(5, {"overlap": 3}), (6, {"overlap": 2, "fragments": 2})])
def test_one_worker_whose_values_are_taken_as_they_are_trains_as_its_optimizer_does(
    tmp_path: Path, steps: int, options: dict[str, Any]
) -> None:
    """No local step is lost by that, nor made twice."""
    data, models = Numbers(80), list[torch.nn.Module]()

    def script(session: Session) -> None:
        model = make_mlp(WIDTHS)
        optimizer = session.optimizer(adamw(model), model)
        train(session, model, optimizer, session.loader(data, BATCH))
        models.append(model)

    rule = local(steps, outerLearningRate=1, outerMomentum=0, **options)
    commits = alone(tmp_path, script, consistency=rule, parameterServer={"bucketBytes": 1024})
    plain = make_mlp(WIDTHS)
    ranges = [Range(*r) for commit in commits for c in commit["contributions"] for r in c["records"]]
    assert len(ranges) == 20
    steps_on(plain, adamw(plain), data, ranges)
    for ours, theirs in zip(models[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-6)


def test_a_worker_makes_its_next_steps_while_another_one_is_not_there_yet(tmp_path: Path) -> None:
    """Without overlap nobody would ever come to these steps."""
    data, sessions, versions = Numbers(400), dict[int, Session](), list[tuple[int, int]]()

    def members(worker: int) -> list[Any]:
        return [member for member in job.status().members if member.worker == worker]

    def two_steps_made_meanwhile() -> bool:
        steps = runtime_of(sessions[0]).local
        return steps is not None and steps.started is not None and steps.made >= 2

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        sessions[session.worker] = session
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            if not number:
                await_training(job, 0, 1)
            due = (steps := runtime_of(session).local) is not None and steps.made == 3
            if session.worker == 1 and not versions and due and any(m.steps for m in members(0)):
                before = session.version
                eventually(two_steps_made_meanwhile, "worker 0 makes two steps while its exchange waits")
                versions.append((before, job.version))
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(
        tmp_path,
        consistency=local(4, overlap=3),
        worker={"replicas": 2},
        data={"shardRecords": 8},
    ) as job:
        job.run(script, workers=2)
        check_histories(job, data)
    assert [before == after for before, after in versions] == [True], "it was the exchange of that version"


def test_statistics_of_normalisation_go_on_meanwhile(tmp_path: Path) -> None:
    """They are averaged as without overlap, and count the batches that came since."""
    data, models = Numbers(96), list[torch.nn.Module]()

    def script(session: Session) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = session.optimizer(adamw(model), model)
        train(session, model, optimizer, session.loader(data, BATCH))
        models.append(model)

    alone(tmp_path, script, consistency=local(4, "average", overlap=2))
    norm = models[0][1]  # type: ignore[index]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 24


@pytest.mark.parametrize("broadcast", [False, True])
def test_buffers_that_cannot_be_subtracted_are_taken_over_as_they_are(
    tmp_path: Path, broadcast: bool
) -> None:
    """A mask of -Inf, flags, and a counter that the script counts up while an exchange is under way."""
    data, models = Numbers(96), list[torch.nn.Module]()

    def script(session: Session) -> None:
        model = torch.nn.Linear(6, 1)
        model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        model.register_buffer("flags", torch.tensor([False, False, True]))
        model.register_buffer("counter", torch.tensor(0))
        buffers = dict(model.named_buffers())
        names = tuple(buffers) if broadcast else ()
        optimizer = session.optimizer(adamw(model), model, broadcast=names)
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            buffers["counter"] += 1
            buffers["flags"][0] |= number == 4  # after the fourth step, which begins an exchange
            optimizer.step()
        models.append(model)

    alone(tmp_path, script, consistency=local(4, "average", overlap=2))
    state = models[0].state_dict()
    assert torch.equal(state["mask"], torch.full((3, 3), -torch.inf).triu(1))
    assert state["flags"].tolist() == [True, False, True]
    assert int(state["counter"]) == 24


@pytest.mark.usefixtures("interruptible")
def test_a_script_that_is_interrupted_while_it_waits_for_an_exchange_goes_on(tmp_path: Path) -> None:
    """As with Ctrl-C in a notebook: the exchange is over then, and nobody believes that it was made."""
    data, blocked, interrupted = Numbers(400), threading.Event(), threading.Event()

    def other(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            if not number:
                await_training(job, 0)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if any(member.worker == 0 and member.steps for member in job.status().members):
                blocked.set()  # both take part in the open round, and it waits for this one
                interrupted.wait(LIMIT)
            optimizer.step()

    def waits() -> bool:
        strategy = runtime_of(session).strategy
        if strategy.under_way is None or session.version != job.version:
            return False
        frame, found = sys._current_frames().get(threading.main_thread().ident or 0), False  # noqa: SLF001  Python's
        while frame is not None:
            found, frame = found or frame.f_code is Future.finish.__code__, frame.f_back
        return found

    def interrupt() -> None:
        assert blocked.wait(LIMIT)
        eventually(waits, "the script waits for the exchange that the other worker holds up")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with running_job(
        tmp_path, consistency=local(2, overlap=1), worker={"replicas": 2}, data={"shardRecords": 8}
    ) as job:
        job.start(1, other)
        session = job.session(0)
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            train(session, model, optimizer, session.loader(data, BATCH))
        thread.join()
        steps = runtime_of(session).local
        assert steps is not None
        assert steps.started is None
        eventually(
            lambda: not any(t.name == "exchange" for t in threading.enumerate()), "nothing is left of it"
        )
        interrupted.set()
        train(session, model, optimizer, session.loader(data, BATCH))
        session.close()
        job.join()
        check_histories(job, data)


@pytest.mark.parametrize("outer", per_change(["diloco", "downpour"], keep=["downpour"]))
def test_a_worker_dies_and_a_parameter_server_too(tmp_path: Path, outer: str) -> None:
    """The worker dies with an exchange under way, and with steps that it has made since."""
    data = Numbers(400)
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        consistency=local(4, outer, fragments=1, overlap=3),
        data={"shardRecords": 32},
        worker={"replicas": 2},
        parameterServer={
            "replicas": 2,
            "bucketBytes": 1024,
            "checkpoint": {"everyVersions": 2, "interval": "1h"},
        },
    ) as job:
        script = Dying(
            job, data, worker=1, paced=True
        )  # after its tenth step: two after an exchange has begun
        for worker in range(2):
            job.start(worker, script)
        job.until(script.dead.is_set, "worker 1 dies")
        job.start(1, script)
        script.more()
        job.restart(0)
        script.more()
        job.restart(1)
        script.most = math.inf
        job.join()
        check_histories(job, data)


def test_a_script_leaves_its_loop_and_stops_with_an_exchange_under_way(tmp_path: Path) -> None:
    data, seen = Numbers(400), list[tuple[int, int]]()
    lock = threading.Lock()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.worker == 0 and number == 5:  # the fourth step has begun an exchange
                session.stop("enough")
                break
        with lock:
            seen.append((session.worker, session.version))

    with running_job(
        tmp_path, consistency=local(4, overlap=3), worker={"replicas": 2}, data={"shardRecords": 8}
    ) as job:
        job.run(script, workers=2)
        status = job.status()
        commits = job.commits()
    assert status.progress.stopped == "enough"
    counted = sum(r[2] - r[1] for commit in commits for c in commit["contributions"] for r in c["records"])
    assert counted == status.progress.records_applied
    mine = [c for commit in commits for c in commit["contributions"] if c["worker"] == 0]
    assert sum(len(c["records"]) for c in mine) == 6, "what it has trained is in the model"
