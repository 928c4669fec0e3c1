"""With backup workers a round does without the slowest, and the result is still the right one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ps.core.consistency import AskedRounds
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import InvalidJob, RefusalCode, Refused, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, events, make_mlp, make_spec, running_job
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change
from tests.testing.trained import alone, check_against_replay, sgd, together

BACKUP = {"backupWorkers": 1}
ACCUMULATE = {"mode": "accumulate", "gradients": 2}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("where", per_change(["forward", "backward"], keep=["backward"]))
@pytest.mark.parametrize(
    "consistency", per_change([BACKUP, ACCUMULATE], keep=[BACKUP]), ids=["backup workers", "accumulate"]
)
def test_the_others_do_not_wait_for_the_slowest(
    tmp_path: Path, consistency: dict[str, Any], shards: int, where: str
) -> None:
    """Each of its steps takes as long as ten rounds of the others, who in plain `sync` would wait for it."""
    data = Numbers(1200)

    def slow(session: Session) -> None:
        until = min(session.version + 10, 120)  # at the end the others need the records that it holds
        eventually(lambda: job.version >= until, "the others make ten versions")

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=False)
        for x, y in together(job, session.loader(data, 4), 3):
            if session.worker == 2 and where == "forward":
                slow(session)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 2 and where == "backward":
                slow(session)
            optimizer.step()

    with running_job(
        tmp_path,
        consistency=consistency,
        data={"shardRecords": 8},
        worker={"replicas": 3},
        parameterServer={"replicas": shards, "bucketBytes": 1024},
    ) as job:
        job.run(script, workers=3)
        commits, members = job.commits(), {m.worker: m for m in job.status().members}
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert check(read(tmp_path / "history"), Data(len(data), 1)) == []
    assert members[2].late > 3
    assert members[2].steps < len(commits) / 5
    made_of = [len(commit["contributions"]) for commit in commits]
    assert made_of.count(2) > len(commits) / 2


@pytest.mark.parametrize("shards", [1, 2])
def test_who_is_late_does_not_change_the_answer(tmp_path: Path, shards: int) -> None:
    """Two workers, of whom one is enough, so that they turn one another away; learning rates change."""

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)

    check_against_replay(
        tmp_path,
        make_mlp,
        sgd,
        scheduler=halve,
        interval="step",
        consistency=BACKUP,
        parameterServer={"replicas": shards, "bucketBytes": 1024},
    )


def test_a_worker_that_has_begun_and_dies_is_not_waited_for(tmp_path: Path) -> None:
    """What it had pushed was in the sums: the round starts again, and is made without it."""
    data, blocked, pushed = Numbers(400), threading.Event(), threading.Event()

    def pushes() -> int:
        return sum(event["event"] == "push" for event in events(job.history, "worker-1"))

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        rounds_without_0 = 0
        for step, (x, y) in enumerate(together(job, session.loader(data, 4), 3)):
            if session.worker == 0 and step == 3:
                blocked.set()  # from now on rounds are made of the other two's steps
                eventually(pushed.is_set, "worker 1 has pushed")
            rounds_without_0 += blocked.is_set()
            before = pushes()
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 1 and rounds_without_0 == 3:
                eventually(lambda: pushes() > before, "worker 1 pushes")  # noqa: B023 (at once)
                pushed.set()
                return
            optimizer.step()

    with running_job(tmp_path, consistency=BACKUP, parameterServer={"bucketBytes": 1024}) as job:
        job.run(script, workers=3)
        commits = job.commits()
        [member] = [m for m in job.status().members if m.worker == 1]
    assert member.state == "lost"
    assert pushed.is_set()
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert check(read(tmp_path / "history"), Data(len(data), 1)) == []


def test_a_worker_that_hangs_before_it_pushes_is_declared_hung(tmp_path: Path) -> None:
    """Rounds go on without it, at most until there are no records but those that it holds."""
    data, stuck, release = Numbers(200), threading.Event(), threading.Event()
    refusals: list[RefusalCode] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        try:
            for step, (x, y) in enumerate(together(job, session.loader(data, 4), 3)):
                optimizer.zero_grad()
                if session.worker == 1 and step == 3:
                    stuck.set()
                    assert release.wait(LIMIT)
                mse(model, x, y).backward()
                optimizer.step()
        except Refused as refusal:
            refusals.append(refusal.code)

    with running_job(
        tmp_path,
        consistency=BACKUP,
        worker={"replicas": 3, "leaseDuration": "10m", "progressTimeout": "2s"},
        data={"shardRecords": 8},
    ) as job:
        job.stop_time()
        for worker in range(3):
            job.start(worker, script)
        state = job.coordinator.job.state
        rounds = state.rounds
        assert isinstance(rounds, AskedRounds)
        # A round waits for it if it holds records that were late twice.
        job.until(lambda: state.starved == {0, 2} or 1 in rounds.owed, "the others lack what it holds")
        job.let_hang(1)
        job.until(lambda: job.status().progress.finished, "the others train all records")
        members = job.status().members
        release.set()
        job.join()
        assert_each_record_once(job.commits(), records=len(data), epochs=1)
    assert [m.worker for m in members if m.state == "hung"] == [1]
    assert refusals == [RefusalCode.HUNG]


def test_an_accumulation_that_may_have_to_be_repeated_is_refused_at_once(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(Numbers(40), 4)):
            assert step < 2
            with optimizer.no_sync():
                mse(model, x, y).backward()

    with pytest.raises(UsageError, match=r"for epoch in loader.epochs\(\)"):
        alone(tmp_path, script, consistency=BACKUP)


def test_not_in_a_deterministic_job() -> None:
    with pytest.raises(InvalidJob, match="backupWorkers 1 cannot be combined with deterministic: true"):
        make_spec(consistency={"backupWorkers": 1, "deterministic": True})
