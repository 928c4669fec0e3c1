"""Mode `local`: workers make steps by themselves, exchanges are versions, and each record counts once.

The reference is plain torch in one process, with the outer rules as their papers have them. It makes the
local steps on the records that the parameter server's history names, which are one range for each batch.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ps.api.consistency import OUTER_RULES, Consistency
from elastic_ps.codec.delayed import DelayedNesterov
from elastic_ps.core.ledger import Range
from elastic_ps.data.shuffle import permutation
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import InvalidModel, Refused, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Job, Numbers, Tally, make_mlp, running_job
from tests.testing.inside import push_pull_of, vanish
from tests.testing.oracle import (
    Adapted,
    Commit,
    MakeOptimizer,
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
)
from tests.testing.polling import LIMIT, eventually
from tests.testing.trained import alone, await_training, sgd, training

BATCH = 4


def local(steps: int, outer: str | None = None, **options: Any) -> dict[str, Any]:
    chosen = {"outer": outer} if outer else {}
    return {"mode": "local", "steps": steps, **chosen, **options}


ASYNCHRONOUS = ("easgd", "downpour")
RULES = pytest.mark.parametrize("outer", ["diloco", "average", *ASYNCHRONOUS])
ASYNCHRONOUS_RULES = pytest.mark.parametrize("outer", ASYNCHRONOUS)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(session: Session, model: torch.nn.Module, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()


def check_histories(job: Job, data: Any, *, epochs: int = 1) -> None:
    """Every record is in the model once; call it when the job is over."""
    most = job.spec.consistency.most_stale
    assert check(read(job.history), Data(len(data), epochs), max_staleness=most) == []


# --- the reference


def steps_on(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Numbers,
    ranges: Sequence[Range],
    *,
    after: Callable[[], object] = lambda: None,
) -> None:
    """A step for each range."""
    for r in ranges:
        order = permutation(len(data), r.epoch, shuffle=True, seed=0)
        pairs = [data[i] for i in order[r.start : r.stop]]
        x, y = (torch.stack(column).to(next(model.parameters()).dtype) for column in zip(*pairs, strict=True))
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
        after()


def reference(
    commits: Sequence[Commit],
    data: Numbers,
    model: torch.nn.Module,
    make: MakeOptimizer,
    rule: Consistency,
) -> None:
    """Train `model` in place: a version for each commit, by workers that keep their optimizer's state."""
    name, rate = rule.outer or "diloco", rule.outer_rule.learning_rate
    center = list(model.parameters())
    momentum = rule.outer_rule.momentum
    outer = (
        DelayedNesterov(center, lr=rate, momentum=momentum, every=2)
        if name == "delayed"
        else torch.optim.SGD(
            center, lr=rate, momentum=momentum, nesterov=name == "diloco" and rule.outer_nesterov is not False
        )
    )
    adapted = Adapted(outer, rule, adaptive="eps" in make(model).defaults)
    versions = [copy.deepcopy(model)]
    workers: dict[int, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}
    for commit in commits:
        total, change = 0, [torch.zeros_like(p) for p in center]
        for c in commit["contributions"]:
            if c["worker"] not in workers:
                own = copy.deepcopy(versions[0])
                workers[c["worker"]] = own, make(own)
            own, inner = workers[c["worker"]]
            base = versions[commit["version"] - 1 - c["staleness"]]
            with torch.no_grad():
                if name != "easgd":
                    for mine, pulled in zip(own.parameters(), base.parameters(), strict=True):
                        mine.copy_(pulled)
            steps_on(own, inner, data, [Range(*r) for r in c["records"]])
            total += c["samples"]
            with torch.no_grad():
                for mine, at, sum_ in zip(own.parameters(), base.parameters(), change, strict=True):
                    distance = mine - at
                    sum_.sub_(distance, alpha=c["samples"])
                    if name == "easgd":
                        mine.sub_(distance, alpha=rate)
        for parameter, sum_ in zip(center, change, strict=True):
            parameter.grad = sum_ / total
        adapted.before(commit)
        outer.step()
        versions.append(copy.deepcopy(model))


# --- it is what it is called


@pytest.mark.parametrize("steps", [1, 5])
def test_one_worker_whose_values_are_taken_as_they_are_trains_as_its_optimizer_does(
    tmp_path: Path, steps: int
) -> None:
    """Differences are added to what they were taken from, so that it is the same up to round-off."""
    data, models = Numbers(80), list[torch.nn.Module]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        train(session, model, optimizer, session.loader(data, BATCH))
        models.append(model)

    rule = local(steps, outerLearningRate=1, outerMomentum=0)
    commits = alone(tmp_path, script, consistency=rule)
    assert len(commits) == 20 // steps
    plain = make_mlp()
    ranges = [Range(*r) for commit in commits for c in commit["contributions"] for r in c["records"]]
    steps_on(plain, adamw(plain), data, ranges)
    for ours, theirs in zip(models[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("steps", [1, 5])
def test_what_was_trained_before_it_was_frozen_is_exchanged(tmp_path: Path, steps: int) -> None:
    """Scripts of GANs freeze each network while they train the other one, also at the step that exchanges."""
    model, plain, batches = make_mlp(), make_mlp(), list[Any]()

    def train(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, given: Any) -> None:
        for step, (x, y) in enumerate(given):
            model[0].requires_grad_(step % 2 == 0)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            batches.append((x, y))

    def script(session: Session) -> None:
        train(model, session.optimizer(sgd(model), model), session.loader(Numbers(80), BATCH))

    alone(tmp_path, script, consistency=local(steps, outerLearningRate=1, outerMomentum=0))
    train(plain, sgd(plain), list(batches))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("outer", "options"),
    [("diloco", {"outerNesterov": False}), *((outer, {}) for outer in OUTER_RULES)],
)
def test_it_is_the_rule_of_the_paper(tmp_path: Path, outer: str, options: dict[str, Any]) -> None:
    """Two workers on two shards, of which one is slower; the last exchanges have fewer steps than others."""
    data, models, turn = Numbers(172), dict[int, torch.nn.Module](), threading.Lock()
    meet = threading.Barrier(2)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            if not number and outer == "easgd":
                meet.wait(LIMIT)  # both begin with version 0
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if outer == "easgd":
                with turn:  # nobody exchanges between another one's look at the job's values and its push
                    optimizer.step()
            else:
                optimizer.step()
        models[session.worker] = model

    with running_job(
        tmp_path,
        consistency=local(3, outer, **options),
        data={"shardRecords": 8},
        worker={"replicas": 2},
        parameterServer={"replicas": 2, "bucketBytes": 1024},
    ) as job:
        job.run(script, workers=2)
        commits, rule = job.commits(), job.spec.consistency
        check_histories(job, data)
    sizes = [len(c["records"]) for commit in commits for c in commit["contributions"]]
    assert sizes.count(3) >= len(sizes) - 4
    assert sum(sizes) == 43, "each batch is one range"
    for model in models.values():
        assert_equal_up_to_round_off(model, make_mlp(), lambda m: reference(commits, data, m, adamw, rule))


# --- records


class Dying:
    """A script whose worker `worker` vanishes after its step number `last`, in its first process.

    The others begin when that worker has records, and after `waits` steps wait until it is gone.

    Attributes:
        dead: set when it has vanished.
        most: nobody makes a step on this version or a later one. With `paced`, two more versions are made
            from that moment on, until the test says otherwise.
    """

    def __init__(
        self,
        job: Job,
        data: Numbers,
        worker: int,
        *,
        last: int = 9,
        waits: int = 20,
        hold: Callable[[int], None] = lambda _: None,
        paced: bool = False,
    ) -> None:
        self.dead, self.most, self._paced = threading.Event(), math.inf, paced
        self._job, self._data, self._worker = job, data, worker
        self._last, self._waits, self._hold = last, waits, hold

    def __call__(self, session: Session) -> None:
        model, dies = make_mlp(), session.worker == self._worker and not self.dead.is_set()
        optimizer = session.optimizer(adamw(model), model)
        for number, (x, y) in enumerate(session.loader(self._data, BATCH)):
            if dies:
                self._hold(number)
            elif session.worker != self._worker:
                self._keep_company(number)
            eventually(lambda: session.version < self.most, "the test goes on")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if dies and number == self._last:
                vanish(session)
                self._job.declare_gone(self._worker)
                self.most = self._job.version + 2 if self._paced else math.inf
                self.dead.set()
                return

    def more(self) -> None:
        """Wait for the versions that may be made, and allow two more."""
        self._job.until(lambda: self._job.version >= self.most, "two more versions")
        self.most = self._job.version + 2

    def _keep_company(self, number: int) -> None:
        if number == 0:
            eventually(
                lambda: training(self._job, self._worker) or self.dead.is_set(), "the worker has records"
            )
        if number == self._waits:
            eventually(self.dead.is_set, "the worker dies")


@RULES
def test_a_worker_that_dies_loses_what_it_has_trained_since_its_last_exchange(
    tmp_path: Path, outer: str
) -> None:
    """Others train its records, and a process in its place begins with the job's values."""
    data = Numbers(480)
    with running_job(tmp_path, consistency=local(4, outer), data={"shardRecords": 32}) as job:
        script = Dying(job, data, worker=1)  # after two exchanges
        for worker in range(2):
            job.start(worker, script)
        job.until(script.dead.is_set, "worker 1 dies")
        job.start(1, script)
        job.join()
        check_histories(job, data)
        assert_each_record_once(job.commits(), records=480, epochs=1)
        states = {(m.worker, m.state) for m in job.status().members}
    assert (1, "lost") in states


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_worker_that_is_asked_to_leave_exchanges_what_it_has(tmp_path: Path, accumulated: int) -> None:
    """The records of its three local steps count, as its own, but not those of a step that it has begun."""
    data, left = Indexes(40), threading.Event()

    def script(session: Session) -> None:
        model = Tally(40)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for number, batch in enumerate(session.loader(data, 2)):
            if session.worker == 0:
                eventually(left.is_set, "worker 1 has left")
            model(batch).backward()
            if session.worker == 1 and number == (2 if accumulated == 1 else 6):
                session.drain()
            if (number + 1) % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
        finals.append(model.weight.detach().clone())

    finals = list[torch.Tensor]()
    with running_job(tmp_path, consistency=local(10, "downpour"), data={"shardRecords": 20}) as job:
        leaving = job.start(1, script)
        job.until(lambda: not leaving.is_alive(), "worker 1 leaves")
        left.set()
        commits = job.commits()
        job.start(0, script)
        job.join()
    assert [c["samples"] for commit in commits for c in commit["contributions"]] == [6 * accumulated]
    assert [w.tolist() for w in finals] == [[-1.0] * 40]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("outer", "durability"),
    [("diloco", "standby"), ("delayed", "standby"), ("easgd", "checkpoint")],
)
def test_parameter_servers_are_lost(tmp_path: Path, durability: str, outer: str) -> None:
    data = Numbers(600)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        loader = session.loader(data, BATCH, epochs=2)
        for _ in loader.epochs():
            train(session, model, optimizer, loader)

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        consistency=local(3, outer),
        data={"shardRecords": 32},
        parameterServer={
            "replicas": 2,
            "bucketBytes": 1024,
            "durability": durability,
            "checkpoint": {"everyVersions": 2, "interval": "1h"},
        },
    ) as job:
        for worker in range(3):
            job.start(worker, script)
        for term, (shard, version) in enumerate([(0, 5), (1, 12)], start=2):
            job.until(lambda v=version: job.version >= v, f"version {version}")  # type: ignore[misc]
            if durability == "standby":
                job.until(lambda: job.followed, "the standbys have every round")
            job.restart(shard)
            job.until(lambda e=term: job.status().term >= e, f"term {term}")  # type: ignore[misc]
        job.join()
        check_histories(job, data, epochs=2)
    assert len(read(job.history).restored) == 2


@RULES
def test_at_the_end_of_an_epoch_and_of_the_loop_the_model_is_the_jobs(tmp_path: Path, outer: str) -> None:
    """Also where a script leaves the loop; the local steps up to there count."""
    seen = list[tuple[torch.Tensor, int]]()

    def script(session: Session) -> None:
        model = Tally(30)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        loader = session.loader(Indexes(30), 3, epochs=3)
        for epoch in loader.epochs():
            for number, batch in enumerate(loader):
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                if epoch == 1 and number == 4:
                    break
            strategy = push_pull_of(session)
            assert strategy.version == job.version
            assert torch.equal(model.weight, strategy.flat.value(0))
            seen.append((model.weight.detach().clone(), int(job.status().progress.records_applied)))

    with running_job(tmp_path, consistency=local(4, outer), data={"shardRecords": 30}) as job:
        job.start(0, script)
        job.join()
        check_histories(job, Indexes(30), epochs=3)
    assert [applied for _, applied in seen] == [30, 45, 90]
    if outer in ("average", "downpour"):
        assert seen[-1][0].tolist() == [-3.0] * 30


@pytest.mark.parametrize("finished", [True, False])
def test_a_script_that_stops_the_training_keeps_what_it_has_trained(tmp_path: Path, finished: bool) -> None:
    """If it stops in the middle of a step, what was not exchanged is in the model of nobody."""

    def script(session: Session) -> None:
        model = Tally(40)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for number, batch in enumerate(session.loader(Indexes(40), 4)):
            optimizer.zero_grad()
            model(batch).backward()
            if number == 4:
                session.stop("enough")
            if number < 4 or finished:
                optimizer.step()
        assert float(model.weight.detach().sum()) == (-20 if finished else -12)

    commits = alone(tmp_path, script, consistency=local(3, "average"))
    samples = [c["samples"] for commit in commits for c in commit["contributions"]]
    assert samples == ([12, 8] if finished else [12])


def test_skipped_batches_and_steps_of_several_batches(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Tally(48)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for number, batch in enumerate(session.loader(Indexes(48), 4)):
            if number % 2 == 0:
                optimizer.zero_grad()
            model(batch).backward()
            if number == 5:
                optimizer.skip()
            elif number % 2:
                optimizer.step()
        assert float(model.weight.detach().sum()) == -40

    commits = alone(tmp_path, script, consistency=local(2, "average"))
    assert [c["samples"] for commit in commits for c in commit["contributions"]] == [16, 16, 8]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_worker_goes_on_from_the_jobs_values_after_an_exchange_that_is_not_finite(
    tmp_path: Path, overlap: int
) -> None:
    """The records of the exchange are skipped."""
    refused: list[int] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for number, (x, y) in enumerate(session.loader(Numbers(32), 4)):
            optimizer.zero_grad()
            (mse(model, x, y) * (math.nan if number == 0 else 1.0)).backward()
            try:
                optimizer.step()
            except Refused:
                refused.append(number)
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())

    commits = alone(tmp_path, script, consistency=local(2, "average", overlap=overlap))
    assert [c["samples"] for commit in commits for c in commit["contributions"]] == [8, 8, 8]
    assert refused == [1 + overlap]


# --- what stays with the worker


def test_schedulers_and_the_optimizers_state_are_the_workers_own(tmp_path: Path) -> None:
    rates, loss = list[float](), list[float]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adamw(model), model)
        schedule = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        for x, y in session.loader(Numbers(40), BATCH):
            optimizer.zero_grad()
            found = mse(model, x, y)
            found.backward()
            optimizer.step()
            session.report(loss=found)
            loss.append(found.item())
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {10}
        optimizer.load_state_dict(adamw(model).state_dict())
        assert optimizer.state_dict()["state"] == {}

    with running_job(tmp_path, consistency=local(5)) as job:
        job.start(0, script)
        job.join()
        curve = job.coordinator.job.state.results.loss.points
    assert rates == [0.01 * 0.5 ** (n // 3) for n in range(1, 11)]
    assert [version for version, _ in curve] == [1, 2]
    # The last local step's loss is reported after its exchange, at once.
    assert curve[0][1] == pytest.approx(sum(loss[:4]) / 4)


def test_a_schedule_of_the_jobs_progress_is_where_the_job_is_also_for_a_newcomer(tmp_path: Path) -> None:
    data, joined = Numbers(400), threading.Event()
    rates: dict[int, list[tuple[int, float]]] = {0: [], 1: []}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        session.scheduler(lr_scheduler.ExponentialLR(optimizer, gamma=0.9), interval="step")
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            if session.worker == 0 and number == 20:
                joined.set()
                eventually(lambda: training(job, 1), "the other one joins")
            rates[session.worker].append((session.version, optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, consistency=local(4), data={"shardRecords": 16}) as job:
        job.start(0, script)
        job.until(joined.is_set, "worker 0 has made some exchanges")
        job.start(1, script)
        job.join()
    assert rates[1]
    for version, rate in rates[0] + rates[1]:
        assert rate == pytest.approx(0.02 * 0.9**version)


@pytest.mark.parametrize("every", [6, 100], ids=["checkpoint", "beginning"])
def test_a_schedule_goes_back_with_the_job(tmp_path: Path, every: int) -> None:
    rates = list[tuple[int, float]]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        session.scheduler(lr_scheduler.ExponentialLR(optimizer, gamma=0.9), interval="step")
        for number, (x, y) in enumerate(session.loader(Numbers(240), BATCH)):
            if number == 42:
                job.until(lambda: job.status().progress.durable_version == kept_last, "it is on disk")
                job.restart(0)
            rates.append((session.version, optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    checkpoint = {"checkpoint": {"everyVersions": every}}
    kept, kept_last = tmp_path / "kept", every % 100
    with running_job(tmp_path, checkpoints=kept, consistency=local(4), parameterServer=checkpoint) as job:
        job.run(script, workers=1)
    assert [version for version, _ in rates[40:48]] == [10] * 4 + [kept_last] * 4
    for version, rate in rates:
        assert rate == pytest.approx(0.02 * 0.9**version)


@pytest.mark.parametrize("gamma", [1.0, 0.9], ids=["alone", "with a schedule"])
def test_a_rate_that_one_worker_has_lowered_is_everyones(tmp_path: Path, gamma: float) -> None:
    """The other worker's, and that of who resumes the job."""
    rates = list[tuple[str, int, float]]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        if gamma < 1:
            session.scheduler(lr_scheduler.ExponentialLR(optimizer, gamma), interval="step")
        scheduler = session.scheduler(lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        for x, y in session.loader(Numbers(400), BATCH):
            if session.version == 0:
                await_training(job, 0, 1)
            rates.append((resume, session.version, optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if resume == "no" and session.version == 2 and session.worker == 0 and not scheduler.last_epoch:
                scheduler.step(1.0)
                scheduler.step(1.0)
            if resume == "no" and session.version >= 5:
                session.drain()

    for resume in ("no", "require"):
        with running_job(
            tmp_path / resume,
            checkpoints=tmp_path / "checkpoints",
            resume=resume,
            consistency=local(4),
            data={"shardRecords": 16},
        ) as job:
            job.run(script, workers=2)
    assert {version for at, version, _ in rates if at == "no"} >= {0, 2, 3, 4}
    assert min(version for at, version, _ in rates if at != "no") >= 5
    for _, version, rate in rates:
        if version != 2:  # worker 0 lowers it in the middle of that
            assert rate == pytest.approx((0.02 if version < 2 else 0.002) * gamma**version)


def test_a_rate_that_a_worker_lowers_while_it_pauses_is_not_lost(tmp_path: Path) -> None:
    """The others exchange values meanwhile, with the rate as it was."""
    lasts = dict[int, tuple[int, float]]()
    lowered, back = threading.Event(), threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        session.scheduler(lr_scheduler.ExponentialLR(optimizer, 0.9), interval="step")
        scheduler = session.scheduler(lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        for x, y in session.loader(Numbers(400), BATCH):
            if not session.version:
                await_training(job, 0, 1)
            if session.worker and session.version >= 5 and not back.is_set():
                job.until(lambda: lowered.is_set() and training(job, 0), "worker 0 takes part again")
                back.set()
            lasts[session.worker] = session.version, optimizer.param_groups[0]["lr"]
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.version == 2 and session.worker == 0 and not scheduler.last_epoch:
                session.pause()
                scheduler.step(1.0)
                scheduler.step(1.0)
                job.until(lambda: job.version >= 4, "the other worker goes on")
                lowered.set()

    with running_job(tmp_path, consistency=local(4), data={"shardRecords": 16}) as job:
        job.run(script, workers=2)
    for version, rate in lasts.values():
        assert version > 4
        assert rate < 0.5 * 0.02 * 0.9**version


@pytest.mark.parametrize("overlap", [None, 2])
def test_each_local_step_draws_random_numbers_of_its_own(tmp_path: Path, overlap: int | None) -> None:
    """Also one that is made while an exchange is under way, on the version before."""
    seeds = list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(40), BATCH):
            seeds.append(session.seed())
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    alone(tmp_path, script, consistency=local(5) | ({"overlap": overlap} if overlap else {}))
    assert len(set(seeds)) == 10


def test_an_optimizer_that_evaluates_the_loss_itself(tmp_path: Path) -> None:
    """LBFGS cannot run on a parameter server, but on a worker."""
    losses = list[float]()

    def script(session: Session) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 1)
        optimizer = session.optimizer(torch.optim.LBFGS(model.parameters(), max_iter=4), model)
        for x, y in session.loader(Numbers(64), 16, epochs=2):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
                optimizer.zero_grad()
                loss = mse(model, x, y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())

    commits = alone(tmp_path, script, consistency=local(2))
    assert len(commits) == 4
    assert_each_record_once(commits, records=64, epochs=2)
    assert losses[-1] < losses[0]


def make_normalised() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def test_statistics_of_normalisation_are_exchanged_with_the_values(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_normalised()
        optimizer = session.optimizer(sgd(model), model)
        train(session, model, optimizer, session.loader(Numbers(80), 8))
        models[session.worker] = model

    models = dict[int, torch.nn.Module]()
    with running_job(tmp_path, consistency=local(3), data={"shardRecords": 8}) as job:
        job.run(script, workers=2)
    ours, theirs = (models[w].state_dict() for w in range(2))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert float(ours["1.running_mean"].abs().sum()) > 0


@ASYNCHRONOUS_RULES
def test_statistics_of_workers_that_do_not_wait_become_the_jobs(tmp_path: Path, outer: str) -> None:
    """A version has the buffers of the worker that has made it, and this worker goes on from those."""

    def script(session: Session) -> None:
        model = make_normalised()
        optimizer = session.optimizer(sgd(model), model)
        loader, seen = session.loader(Numbers(160), 8), list[int]()
        for x, y in loader:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            seen.append(int(model.get_buffer("1.num_batches_tracked")))
        assert seen == sorted(seen)
        models[session.worker], steps[session.worker] = model, len(seen)

    models, steps = dict[int, torch.nn.Module](), dict[int, int]()
    with running_job(tmp_path, consistency=local(3, outer), data={"shardRecords": 8}) as job:
        job.run(script, workers=2)
        check_histories(job, Numbers(160))
    assert sum(steps.values()) == 20
    for worker, model in models.items():
        assert steps[worker] <= int(model.get_buffer("1.num_batches_tracked")) <= 20
        assert not torch.equal(model.get_buffer("1.running_mean"), torch.zeros(8))
        assert not torch.equal(model.get_buffer("1.running_var"), torch.ones(8))


@ASYNCHRONOUS_RULES
def test_what_the_script_changes_itself_is_exchanged_with_the_values(tmp_path: Path, outer: str) -> None:
    """Buffers, and tensors that are named. With one worker they are what the script has made of them."""

    class Taught(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make_normalised()
            self.teacher = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            self.register_buffer("place", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)  # type: ignore[no-any-return]

    def script(session: Session) -> None:
        model = Taught()
        optimizer = session.optimizer(sgd(model.body), model, averaged=["teacher"], broadcast=["place"])
        for step, (x, y) in enumerate(session.loader(Numbers(80), 8)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            with torch.no_grad():
                model.teacher.add_(step)
                model.get_buffer("place").add_(1)
            kept.append({name: model.state_dict()[name].clone() for name in named})
        kept.append({name: model.state_dict()[name].clone() for name in named})

    named = ("teacher", "place", "body.1.num_batches_tracked")
    kept = list[dict[str, torch.Tensor]]()
    alone(tmp_path, script, consistency=local(3, outer))
    for step, values in enumerate(kept[:-1], start=1):
        assert values["teacher"].tolist() == [sum(range(step))] * 3
        assert values["place"].tolist() == [step]
        assert int(values["body.1.num_batches_tracked"]) == step
    assert all(torch.equal(kept[-1][name], kept[-2][name]) for name in named)


# --- bad input


def test_what_a_script_cannot_do(tmp_path: Path) -> None:
    def clamped(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model, clamp=(-1, 1))

    def assigning(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        session.assign(model)

    def bringing(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model, state=sgd(model).state_dict())

    for number, (script, kind, match) in enumerate(
        [
            (clamped, InvalidModel, "clamp=.*, but in mode local the script's own optimizer makes the steps"),
            (bringing, UsageError, "call optimizer.load_state_dict.state. before session.optimizer"),
            (assigning, UsageError, "session.assign needs consistency.mode sync"),
        ]
    ):
        with pytest.raises(kind, match=match):
            alone(tmp_path / str(number), script, consistency=local(2))


@pytest.mark.parametrize("closed", [False, True], ids=["backward before the step", "closure"])
def test_a_step_without_a_batch_is_refused_before_it_changes_the_model(tmp_path: Path, closed: bool) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        before = copy.deepcopy(model.state_dict())

        def closure() -> Any:
            loss = mse(model, torch.ones(2, 6), torch.zeros(2, 1))
            loss.backward()
            return loss

        if not closed:
            closure()
        with pytest.raises(UsageError, match="this step's batch did not come from"):
            optimizer.step(closure if closed else None)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        train(session, model, optimizer, session.loader(Numbers(8), BATCH))

    alone(tmp_path, script, consistency=local(2))


def test_a_step_after_a_batch_that_was_given_back_while_the_worker_joined_again(tmp_path: Path) -> None:
    """Worker 0 is declared gone when its script leaves the loop, where its exchange notices it."""

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(session.loader(Numbers(40), BATCH)):
            if number:
                job.declare_gone(0)
                break
            mse(model, x, y).backward()
            optimizer.step()
        assert session.generation == 1
        mse(model, x, y).backward()
        optimizer.step()

    with running_job(tmp_path, consistency=local(5)) as job:
        job.start(0, script)
        with pytest.raises(UsageError, match=r"Run backward\(\) inside the loop"):
            job.join()
