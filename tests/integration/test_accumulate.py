"""Versions of a fixed number of gradients: whoever computes them, the result is right and nothing is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ps.core.accumulate import AccumulateRounds
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import InvalidModel
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, events, make_mlp, running_job
from tests.testing.inside import push_pull_of
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.polling import LIMIT, eventually
from tests.testing.trained import alone, check_against_replay, sgd, together


def accumulate(gradients: int) -> dict[str, Any]:
    return {"mode": "accumulate", "gradients": gradients}


def check_histories(job: Job, data: Numbers, *, epochs: int = 1) -> None:
    """Every record is in the model once; call it when the job is over."""
    assert_each_record_once(job.commits(), records=len(data), epochs=epochs)
    assert check(read(job.history), Data(len(data), epochs)) == []


def contributors(commit: dict[str, Any]) -> list[int]:
    return [c["worker"] for c in commit["contributions"]]


def test_with_as_many_gradients_as_workers_it_is_sync(tmp_path: Path) -> None:
    """From the moment when all take part, each version has one step of each."""
    data, meet = Numbers(480), threading.Barrier(3)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(session.loader(data, 4)):
            if not number:
                meet.wait(LIMIT)  # all have records, so all take part
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, consistency=accumulate(3), data={"shardRecords": 16}) as job:
        job.run(script, workers=3)
        made_of = [contributors(commit) for commit in job.commits()]
        check_histories(job, data)
    assert len(made_of) == 480 // 4 // 3
    alike = made_of.count([0, 1, 2])
    assert alike >= len(made_of) - 3, "at the end there are no records for all of them"


@pytest.mark.covering(1)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("gradients", [1, 2, 5])
def test_the_result_is_that_of_the_recorded_rounds(tmp_path: Path, gradients: int, shards: int) -> None:
    """Two workers make versions of one, two or five steps; plain torch, given the same steps, agrees."""

    def halve(optimizer: Any) -> Any:
        return lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)

    check_against_replay(
        tmp_path,
        make_mlp,
        sgd,
        scheduler=halve,
        interval="step",
        consistency=accumulate(gradients),
        parameterServer={"replicas": shards, "bucketBytes": 1024},
    )


def test_a_slow_worker_adds_fewer_gradients(tmp_path: Path) -> None:
    """Its step is the last of each version. No step is dropped, and all versions but the last have eight."""
    data = Numbers(640)

    def slow() -> bool:
        rounds, progress = job.coordinator.job.state.rounds, job.status().progress
        return len(rounds.contributions) >= 7 or progress.records_applied > len(data) - 100

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in together(job, session.loader(data, 4), 2):
            optimizer.zero_grad()
            if session.worker == 1:
                eventually(slow, "the other one makes all steps but one")
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, consistency=accumulate(8), data={"shardRecords": 8}) as job:
        job.run(script, workers=2)
        commits, members = job.commits(), job.status().members
        check_histories(job, data)
    assert {len(contributors(commit)) for commit in commits[:-1]} == {8}
    assert [member.late for member in members] == [0, 0]
    shares = [contributors(commit).count(1) for commit in commits]
    assert shares.count(1) > len(commits) / 2


def test_a_worker_that_dies_while_it_pushes_makes_earlier_steps_void(tmp_path: Path) -> None:
    """What it had pushed is in the sums, so the round starts again; some gradients are gone by then.

    Worker 0 has made several steps for that version. It still has the gradients of the last one.
    """
    data, pushed = Numbers(480), threading.Event()

    def pushes(worker: int) -> list[dict[str, Any]]:
        return [e for e in events(job.history, f"worker-{worker}") if e["event"] == "push"]

    def worker_0_has_made_some() -> bool:
        return len(job.coordinator.job.state.rounds.contributions) >= 3

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for number, (x, y) in enumerate(together(job, session.loader(data, 4), 2)):
            optimizer.zero_grad()
            if session.worker == 1:
                eventually(worker_0_has_made_some, "worker 0 makes steps for this version")
            before = len(pushes(1))
            mse(model, x, y).backward()
            if session.worker == 1 and number == 3:
                eventually(lambda: len(pushes(1)) > before, "worker 1 pushes")  # noqa: B023 (at once)
                pushed.set()
                return
            optimizer.step()

    with running_job(tmp_path, consistency=accumulate(12), parameterServer={"bucketBytes": 1024}) as job:
        job.run(script, workers=2)
        commits, members = job.commits(), job.status().members
        check_histories(job, data)
    assert pushed.is_set()
    assert {m.worker: m.state for m in members}[1] == "lost"
    assert {len(contributors(commit)) for commit in commits[:-1]} == {12}
    sent = {(e["step"], e["version"]) for e in pushes(0)}
    counted = {(c["step"], commit["version"] - 1) for commit in commits for c in commit["contributions"]}
    assert sent - counted, "some steps of worker 0 became void"


@pytest.mark.parametrize(
    ("consistency", "shards"),
    [(accumulate(4), 1), ({"globalBatchSize": 16}, 1), ({"globalBatchSize": 16}, 2)],
    ids=["accumulate", "globalBatchSize", "globalBatchSize, 2 shards"],
)
def test_a_round_starts_again_while_backward_goes_on(
    tmp_path: Path, consistency: dict[str, Any], shards: int
) -> None:
    """A push of the step is refused before the script ends it, and nothing else tells the worker."""
    data, within, again = Numbers(160), threading.Event(), threading.Event()

    def rounds() -> AccumulateRounds:
        found = job.coordinator.job.state.rounds
        assert isinstance(found, AccumulateRounds)
        return found

    def both() -> bool:
        return {0, 1} <= job.coordinator.job.state.starved | rounds().expected

    def wait_for_another_attempt(gradient: torch.Tensor) -> None:
        within.set()
        eventually(lambda: rounds().attempt > 0, "the round starts again")
        again.set()

    def script(session: Session) -> None:
        model = make_mlp((6, 16, 16, 16, 16, 1))
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            middle = model[:4](x)
            here = session.version >= 2 and not again.is_set()
            if here and session.worker == 0:
                middle.register_hook(wait_for_another_attempt)
            elif here:
                eventually(within.is_set, "worker 0 has pushed some of its step")
            else:
                eventually(lambda: both() or again.is_set(), "both ask for records")
            mse(model[4:], middle, y).backward()
            if here and session.worker == 1:
                eventually(lambda: 1 in rounds().begun, "worker 1 pushes")
                return
            if here:
                time.sleep(0.2)  # the push of the attempt that is over is refused
            optimizer.step()

    server = {"bucketBytes": 1024, "replicas": shards}
    with running_job(tmp_path, consistency=consistency, parameterServer=server) as job:
        job.run(script, workers=2)
        members = job.status().members
        check_histories(job, data)
    assert again.is_set()
    assert {m.worker: m.state for m in members}[1] == "lost"


def test_a_script_stops_the_training_when_its_step_has_come_too_late(tmp_path: Path) -> None:
    """It makes no step with what it has computed, and gets the last version all the same."""
    data, models = Numbers(4000), dict[int, torch.nn.Module]()

    def too_late() -> bool:
        return any(m.late for m in job.status().members if m.worker == 1)

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            here = session.version
            if session.worker == 1:
                eventually(lambda: job.version > here, "worker 0 makes a version")  # noqa: B023 (at once)
            mse(model, x, y).backward()
            if session.worker == 1:
                eventually(too_late, "the step has come too late")
                session.stop("it is good enough")
                continue
            optimizer.step()

    server = {"bucketBytes": 1024}
    with running_job(tmp_path, consistency=accumulate(1), parameterServer=server) as job:
        job.run(script, workers=2)
        stopped = job.status().progress.stopped
    assert stopped == "it is good enough"
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
def test_parameter_servers_are_lost(tmp_path: Path, durability: str) -> None:
    data = Numbers(600)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        loader = session.loader(data, 4, epochs=2)
        for _ in loader.epochs():
            for x, y in loader:
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        consistency=accumulate(4),
        data={"shardRecords": 8},
        parameterServer={
            "replicas": 2,
            "bucketBytes": 1024,
            "durability": durability,
            "checkpoint": {"everyVersions": 3, "interval": "1h"},
        },
    ) as job:
        for worker in range(3):
            job.start(worker, script)
        for term, (shard, version) in enumerate([(0, 10), (1, 30)], start=2):
            job.until(lambda v=version: job.version >= v, f"version {version}")  # type: ignore[misc]
            if durability == "standby":
                job.until(lambda: job.followed, "the standbys have every round")
            job.restart(shard)
            job.until(lambda e=term: job.status().term >= e, f"term {term}")  # type: ignore[misc]
        job.join()
        last = job.commits()[-1]
    histories = read(job.history)
    assert check(histories, Data(len(data), 2)) == []
    assert len(histories.restored) == 2
    sizes = {len(committed.steps) for committed in histories.committed if committed.version < last["version"]}
    assert sizes == {4}


def test_what_an_encoded_step_leaves_over_counts_for_the_next_one_on_the_same_version(tmp_path: Path) -> None:
    """Each step's gradient is one in each element. What is not sent of it waits, also within a version."""
    left: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []

    def script(session: Session) -> None:
        model = torch.nn.Linear(512, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for _ in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        weights.append(model.weight.detach().flatten().clone())
        strategy = push_pull_of(session)
        left.extend(strategy.encoder.left_over.values())

    compression = {"codec": "topk", "options": {"ratio": 0.25}}
    commits = alone(tmp_path, script, consistency=accumulate(2), compression=compression)
    assert [len(commit["contributions"]) for commit in commits] == [2] * 5
    sent = -2 * weights[0]  # each version is the mean of two steps
    torch.testing.assert_close(sent + left[0], torch.full_like(sent, 10.0))


def test_more_gradients_than_the_job_has_are_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        for _ in session.loader(Numbers(21), 4, epochs=3):
            raise AssertionError("no records are handed out")

    expected = (
        "consistency.gradients is 19, but the job has only 18 steps: 21 records for 3 epochs, in batches"
    )
    with pytest.raises(InvalidModel, match=expected):
        alone(tmp_path, script, consistency=accumulate(19))
