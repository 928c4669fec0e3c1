"""With bounded staleness nobody waits for a slow worker before it is too far behind, and nothing is lost.

Some of it is tested in mode `async`, too, in which nobody waits for a slow worker at all.
"""

from __future__ import annotations

import copy
import math
import threading
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ps.core.ledger import Range
from elastic_ps.data.shuffle import permutation
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame
from elastic_ps.worker.session import Session
from elastic_ps.worker.strategies import push_pull
from tests.testing.harness import Job, Numbers, events, make_mlp, running_job
from tests.testing.inside import push_pull_of, runtime_of
from tests.testing.oracle import Adapted, assert_each_record_once, mse, ranges_of
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change
from tests.testing.trained import adam, sgd, together, training
from tests.testing.watched import Watched

MOST = 6


def bounded(most: int = MOST) -> dict[str, Any]:
    return {"mode": "bounded", "maxStaleness": most}


ASYNC = {"mode": "async"}
INCONSISTENT = {"mode": "async", "reads": "inconsistent"}
MODES = pytest.mark.parametrize(
    "consistency", [bounded(), ASYNC, INCONSISTENT], ids=["bounded", "async", "inconsistent"]
)


def check_histories(job: Job, data: Numbers, *, most: float = MOST) -> None:
    """Every record is in the model once, and no step was too stale; call it when the job is over."""
    assert_each_record_once(job.commits(), records=len(data), epochs=1)
    assert check(read(job.history), Data(len(data), 1), max_staleness=most) == []


def staleness(commits: list[dict[str, Any]], worker: int) -> list[int]:
    return [c["staleness"] for commit in commits for c in commit["contributions"] if c["worker"] == worker]


def near_the_end(job: Job, data: Numbers) -> bool:
    """When a slow worker holds records that the others wait for."""
    return bool(job.status().progress.records_applied > len(data) - 100)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("where", per_change(["forward", "backward", "pull"], keep=["backward"]))
def test_the_others_go_on_as_far_as_the_bound(tmp_path: Path, shards: int, where: str) -> None:
    """The slow worker's steps end only when the others have made all the versions that they may make.

    With `pull` its requests arrive late, so that it gets newer versions than the ones that it asks for. The
    bound counts from those that it got.
    """
    data = Numbers(800)

    def late(method: str, frame: Frame) -> None:
        if method == "Pull" and (asked := pb.PullRequest.FromString(frame.header)).contributor:
            eventually(lambda: job.version >= asked.version + 2 or near_the_end(job, data), "others go on")

    def slow(session: Session) -> None:
        until = session.version + MOST
        eventually(
            lambda: job.version >= until or near_the_end(job, data),
            "the others make as many versions as they may",
        )

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=False)
        for x, y in together(job, session.loader(data, 4), 3):
            if session.worker == 2 and where == "forward":
                slow(session)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 2 and where != "forward":
                slow(session)
            optimizer.step()

    with running_job(
        tmp_path,
        consistency=bounded(),
        data={"shardRecords": 8},
        worker={"replicas": 3},
        parameterServer={"replicas": shards, "bucketBytes": 1024},
    ) as job:
        if where == "pull":
            job.through = lambda worker, inner: Watched(inner, late) if worker == 2 else inner
        job.run(script, workers=3)
        commits, members = job.commits(), {m.worker: m for m in job.status().members}
    check_histories(job, data)
    # From near the end on, nobody is slow.
    ends = list(accumulate(sum(r.records for r in ranges_of(commit)) for commit in commits))
    slows = staleness([c for c, end in zip(commits, ends, strict=True) if end <= len(data) - 100], 2)
    assert slows.count(MOST) > len(slows) / 2
    assert members[2].steps < (members[0].steps + members[1].steps) / 4
    assert (
        sum(2 not in [c["worker"] for c in commit["contributions"]] for commit in commits) > len(commits) / 2
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(
    ("consistency", "server"),
    [
        (bounded(), {}),
        (INCONSISTENT, {}),
        (ASYNC, {"bucketBytes": 1024}),
        (ASYNC | {"stalenessScale": "inverse"}, {"bucketBytes": 1024, "replicas": 2}),
        (ASYNC | {"stalenessScale": "none"}, {}),
    ],
)
def test_the_result_is_that_of_the_recorded_rounds(
    tmp_path: Path, make: Any, consistency: dict[str, Any], server: dict[str, Any]
) -> None:
    """Each step's gradient is that of the version it was computed on: plain torch, given both, agrees.

    With a single bucket a pull cannot find values of several versions; with consistent reads it must not.
    """
    data, models = Numbers(240), dict[int, torch.nn.Module]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(make(model), model)
        for x, y in together(job, session.loader(data, 4), 3):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        models[session.worker] = model

    with running_job(
        tmp_path, consistency=consistency, data={"shardRecords": 8}, parameterServer=server
    ) as job:
        job.run(script, workers=3)
        commits, spec = job.commits(), job.spec
    check_histories(job, data, most=spec.consistency.most_stale)
    assert any(stale for worker in range(3) for stale in staleness(commits, worker))

    model = make_mlp().double()
    optimizer = make(model)
    adapted = Adapted(optimizer, spec.consistency)
    versions = [copy.deepcopy(model)]
    for commit in commits:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for c in commit["contributions"]:
            then = copy.deepcopy(versions[commit["version"] - 1 - c["staleness"]])
            then.zero_grad()
            indices = [
                permutation(len(data), r.epoch, shuffle=True, seed=spec.data.seed)[i]
                for r in (Range(*each) for each in c["records"])
                for i in range(r.start, r.stop)
            ]
            mse(then, data.x[indices].double(), data.y[indices].double()).backward()
            for one, p in zip(total, then.parameters(), strict=True):
                assert p.grad is not None
                one += p.grad * c["samples"]
        samples = sum(c["samples"] for c in commit["contributions"])
        for p, one in zip(model.parameters(), total, strict=True):
            p.grad = one / samples
        adapted.before(commit)
        optimizer.step()
        versions.append(copy.deepcopy(model))
    for ours, exact in zip(models[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("consistency", "shards"),
    per_change([(ASYNC, 2), (INCONSISTENT, 1)], keep=[(INCONSISTENT, 1)]),
    ids=["consistent", "inconsistent"],
)
def test_with_async_nobody_waits_for_the_slowest(
    tmp_path: Path, consistency: dict[str, Any], shards: int
) -> None:
    """Each of its steps ends when the others have made thirty versions. Each step is a version of its own.

    The others wait for its next step after some more, else all might be trained before it has made a few.
    """
    data, based = Numbers(800), [0]

    def slow(session: Session) -> None:
        based[0] = session.version
        until = session.version + 30
        eventually(lambda: job.version >= until or near_the_end(job, data), "the others go on")

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.02), model)
        for x, y in session.loader(data, 4):
            if session.worker == 2:
                slow(session)
            else:
                eventually(lambda: job.version < based[0] + 33 or near_the_end(job, data), "it begins a step")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(
        tmp_path,
        consistency=consistency,
        data={"shardRecords": 8},
        parameterServer={"replicas": shards, "bucketBytes": 1024},
    ) as job:
        job.run(script, workers=3)
        commits, told = job.commits(), job.status().progress.staleness
    check_histories(job, data, most=math.inf)
    every = sorted(stale for worker in range(3) for stale in staleness(commits, worker))
    assert (told.p50, told.max) == (every[(len(every) - 1) // 2], every[-1])
    assert {len(commit["contributions"]) for commit in commits} == {1}
    slows = staleness(commits, 2)
    assert sum(stale >= 30 for stale in slows) > 3, slows
    pulled = [
        {v for _, v, _ in e["values"]}
        for w in range(3)
        for e in events(job.history, f"worker-{w}")
        if e["event"] == "values"
    ]
    if consistency == ASYNC:
        assert {len(versions) for versions in pulled[2:]} == {1}, "each was read wholly"


def test_a_newcomer_computes_on_one_version_though_others_are_made_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of two versions are not taken for those of the later one, which it is about to compute on."""
    monkeypatch.setattr(push_pull, "FETCHES", 1)
    data, shards = Numbers(200), iter(range(2))
    first, made, computes = threading.Event(), threading.Event(), threading.Event()

    def through(worker: int, inner: Connection) -> Connection:
        if worker == 0:
            return inner
        if next(shards) == 0:
            return Watched(inner, after=lambda method, _: first.set() if method == "Pull" else None)

        def late(method: str, frame: Frame) -> None:
            if method == "Pull":
                assert made.wait(LIMIT)

        return Watched(inner, late)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            if session.worker == 1:
                computes.set()
            elif step == 3:
                job.start(1, script)
                assert first.wait(LIMIT)
            elif step == 4:
                made.set()
                assert computes.wait(LIMIT)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(
        tmp_path,
        consistency=ASYNC,
        data={"shardRecords": 8},
        parameterServer={"replicas": 2, "bucketBytes": 1024},
    ) as job:
        job.through = through
        job.start(0, script)
        job.join()
    check_histories(job, data, most=math.inf)
    told = events(job.history, "worker-1")
    began = next(n for n, e in enumerate(told) if e["event"] == "push")
    read_last = [e for e in told[:began] if e["event"] == "values"][-1]
    assert len({version for _, version, _ in read_last["values"]}) == 1


def test_with_consistent_reads_others_wait_for_who_reads(tmp_path: Path) -> None:
    """Worker 1 is slow to say that it has read a version, and nobody makes the next one meanwhile."""
    data, seen = Numbers(200), list[tuple[int, int]]()

    def slow_to_read(session: Session) -> None:
        strategy = push_pull_of(session)
        says = strategy.computes_on

        def late(version: int) -> None:
            rounds = job.coordinator.job.state.rounds
            if version < 20:
                eventually(lambda: rounds.done or job.status().progress.finished, "another one has pushed")
            seen.append((version, job.version))
            says(version)

        strategy.computes_on = late  # type: ignore[method-assign]

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        if session.worker == 1:
            slow_to_read(session)
        for x, y in together(job, session.loader(data, 4), 2):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, consistency=ASYNC, data={"shardRecords": 8}) as job:
        job.run(script, workers=2)
    assert seen
    assert all(now <= version for version, now in seen), seen
    check_histories(job, data, most=math.inf)


def test_alone_it_is_sync(tmp_path: Path) -> None:
    """With the schedule and all; `check_against_replay` has two workers, of whom one comes too late."""
    data, models = Numbers(80), list[torch.nn.Module]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(adam(model), model)
        session.scheduler(lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5), interval="step")
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        models.append(model)

    for number, consistency in enumerate((bounded(1), ASYNC, INCONSISTENT, {})):
        with running_job(tmp_path / str(number), consistency=consistency) as job:
            job.start(0, script)
            job.join()
        check_histories(job, data, most=0)
    for model in models[:-1]:
        for ours, theirs in zip(model.parameters(), models[-1].parameters(), strict=True):
            assert torch.equal(ours, theirs)


@MODES
def test_a_worker_that_dies_while_it_pushes_has_contributed_nothing(
    tmp_path: Path, consistency: dict[str, Any]
) -> None:
    data, pushes, blocked = Numbers(400), list[str](), threading.Event()

    def dies(method: str, frame: Frame) -> None:
        if method == "Push":
            pushes.append(method)
            if len(pushes) == 8:  # of three buckets each: in the middle of the third step
                blocked.set()
                runtime_of(next(each for each in job.sessions if each.worker == 1)).client.close()
                job.declare_gone(1)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        try:
            for x, y in together(job, session.loader(data, 4), 3):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
        except Exception:
            if session.worker != 1:
                raise

    with running_job(
        tmp_path,
        consistency=consistency,
        parameterServer={"bucketBytes": 1024},
        worker={"replicas": 3},
    ) as job:
        job.through = lambda worker, inner: Watched(inner, dies) if worker == 1 else inner
        job.run(script, workers=3)
        commits = job.commits()
        [member] = [m for m in job.status().members if m.worker == 1]
    assert blocked.is_set()
    assert (member.state, member.steps) == ("lost", 2)
    assert [e["bucket"] for e in events(job.history, "worker-1") if e["event"] == "push"][6:] != []
    assert len(staleness(commits, 1)) == 2
    check_histories(job, data, most=job.spec.consistency.most_stale)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("consistency", "durability"),
    [
        (bounded(3), "checkpoint"),
        (bounded(3), "standby"),
        (ASYNC, "standby"),
        (INCONSISTENT, "checkpoint"),
    ],
    ids=["bounded, checkpoint", "bounded, standby", "async, standby", "inconsistent, checkpoint"],
)
def test_a_lost_parameter_server_loses_nothing(
    tmp_path: Path, durability: str, consistency: dict[str, Any]
) -> None:
    """The steps under way are void; those who wait to be let in learn it, too."""
    data = Numbers(900)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 2:
                threading.Event().wait(0.02)
            optimizer.step()

    with running_job(
        tmp_path,
        transport="grpc",
        checkpoints=tmp_path / "checkpoints",
        consistency=consistency,
        parameterServer={
            "replicas": 2,
            "bucketBytes": 1024,
            "durability": durability,
            "checkpoint": {"everyVersions": 4, "interval": "1h"},
        },
        worker={"replicas": 3},
    ) as job:
        for worker in range(3):
            job.start(worker, script)
        for term, (shard, version) in enumerate([(0, 15), (1, 35), (0, 55)], start=2):
            job.until(lambda v=version: job.version >= v, f"version {version}")  # type: ignore[misc]
            if durability == "standby":
                job.until(lambda: job.followed, "the standbys have every round")
            job.restart(shard)
            job.until(lambda e=term: job.status().term >= e, f"term {term}")  # type: ignore[misc]
        job.join()
    histories = read(job.history)
    assert check(histories, Data(len(data), 1), max_staleness=job.spec.consistency.most_stale) == []
    assert len(histories.restored) >= 3


def test_a_worker_that_hangs_at_the_bound_is_declared_hung(tmp_path: Path) -> None:
    data, stuck, release = Numbers(200), threading.Event(), threading.Event()
    refusals: list[RefusalCode] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        try:
            for step, (x, y) in enumerate(together(job, session.loader(data, 4), 2)):
                optimizer.zero_grad()
                if session.worker == 1 and step == 2:
                    stuck.set()
                    assert release.wait(LIMIT)
                mse(model, x, y).backward()
                optimizer.step()
        except Refused as refusal:
            refusals.append(refusal.code)

    with running_job(
        tmp_path,
        consistency=bounded(),
        worker={"replicas": 2, "leaseDuration": "10s", "progressTimeout": "2s"},
        data={"shardRecords": 8},
    ) as job:
        job.stop_time()
        for worker in range(2):
            job.start(worker, script)
        job.until(stuck.is_set, "worker 1 is stuck")
        job.let_hang(1)
        job.until(lambda: job.status().progress.finished, "the other trains all records")
        members = job.status().members
        release.set()
        job.join()
    assert [m.worker for m in members if m.state == "hung"] == [1]
    assert refusals == [RefusalCode.HUNG]
    check_histories(job, data)


def test_a_schedule_does_not_go_back_when_a_slow_worker_contributes(tmp_path: Path) -> None:
    """It is stepped with each version, whoever has made that."""
    data, rates, joined, came = Numbers(600), list[float](), threading.Event(), list[int]()
    lock = threading.Lock()

    def third() -> bool:
        if training(job, 2):
            came.append(2)
        return bool(came)

    def slow(session: Session) -> None:
        until = session.version + 3
        eventually(lambda: job.version >= until or near_the_end(job, data), "the others go on")

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        session.scheduler(lr_scheduler.ExponentialLR(optimizer, 0.97), interval="step")
        for x, y in session.loader(data, 4):
            if session.worker == 0:
                slow(session)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            with lock:
                rates.append(coordinator.job.state.settings.groups[0]["lr"])
            if len(rates) > 20:
                joined.set()
                eventually(third, "worker 2 trains")

    with running_job(tmp_path, consistency=bounded(), data={"shardRecords": 8}) as job:
        coordinator = job.coordinator
        for worker in range(2):
            job.start(worker, script)
        assert joined.wait(LIMIT)
        job.start(2, script)
        job.join()
        versions = job.version
    check_histories(job, data)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.1 * 0.97**versions, rel=0.2)
