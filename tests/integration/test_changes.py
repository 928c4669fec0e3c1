"""A running job gets another consistency: nothing is lost, and each version is made as its term says."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.compression import Compression
from elastic_ps.api.job import TrainingJob, parse_job
from elastic_ps.api.mutable import MutableFields
from elastic_ps.cli.setting import assignment, changed
from elastic_ps.core.stages import Course
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import UserError
from elastic_ps.local import Launcher, Options
from elastic_ps.local.state import write_atomically
from elastic_ps.server.limits import ServerLimits
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, events, make_mlp, running_job
from tests.testing.launching import forks, wait_for_workers
from tests.testing.oracle import assert_each_record_once, mse
from tests.testing.polling import eventually

SYNC: dict[str, Any] = {"mode": "sync"}
BOUNDED: dict[str, Any] = {"mode": "bounded", "maxStaleness": 3}
ASYNC: dict[str, Any] = {"mode": "async"}
ACCUMULATE: dict[str, Any] = {"mode": "accumulate", "gradients": 5}
BACKUP: dict[str, Any] = {"backupWorkers": 1}


EVERY = 10
"""Versions between two changes."""


class Changing:
    """A training script whose worker 0 has the job changed now and then, and waits until it is.

    Args:
        plan: the consistencies that it gets.
        kill: called at each change, before the job has been changed.
        ask: `Job.encode` if it gets compressions.
    """

    def __init__(
        self,
        data: Numbers,
        plan: list[dict[str, Any]],
        kill: Callable[[Job, int], object] = lambda *_: None,
        ask: Callable[..., None] = Job.change,
    ) -> None:
        self.data, self.kill, self.ask = data, kill, ask
        self.job: Job
        self.plan = list(enumerate(plan, 1))
        self.next = EVERY

    def __call__(self, session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for x, y in session.loader(self.data, 4):
            if session.worker == 0 and self.plan and session.version >= self.next:
                self.change(*self.plan[0])
                self.next = self.job.version + EVERY
                self.plan.pop(0)
            elif session.worker and self.plan:  # else no records might be left for the last change
                eventually(lambda: not self.plan or session.version < self.next + EVERY, "the job is changed")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    def change(self, generation: int, fields: dict[str, Any]) -> None:
        self.ask(self.job, generation, **fields)
        self.kill(self.job, generation)
        eventually(lambda: self.job.changed(generation), f"change {generation} is in force")


def consistencies(job: Job) -> list[dict[str, Any]]:
    """Of the terms, in order."""
    return [e["consistency"] for e in events(job.history, "ps-0") if e["event"] in ("start", "restore")]


def assert_nothing_lost(job: Job, data: Numbers) -> None:
    assert_each_record_once(job.commits(), records=len(data), epochs=1)
    assert check(read(job.history), Data(len(data), 1)) == []


@pytest.mark.parametrize("shards", [1, 2])
def test_a_job_goes_through_all_modes(tmp_path: Path, shards: int) -> None:
    data = Numbers(1200)
    plan = [BOUNDED, {**BOUNDED, "maxStaleness": 1}, ASYNC, ACCUMULATE, BACKUP, SYNC]
    script = Changing(data, plan)
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        worker={"replicas": 3},
        data={"shardRecords": 8},
        parameterServer={"replicas": shards, "bucketBytes": 1024},
    ) as job:
        script.job = job
        job.run(script, workers=3)
        status = job.status()
    assert not script.plan
    assert consistencies(job) == [{}, *plan[:-1], {}]
    assert (status.tuning.generation, status.tuning.consistency) == (len(plan), "mode: sync")
    assert status.term == len(plan) + 1
    assert [c["version"] for c in job.commits()] == list(range(1, len(job.commits()) + 1))
    assert_nothing_lost(job, data)
    terms = {term: list(each) for term, each in itertools.groupby(job.commits(), lambda c: c["term"])}
    assert all(len(c["contributions"]) == 1 for c in terms[4]), "each version of mode async is one step"
    assert max(len(c["contributions"]) for c in terms[5]) == 5


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
def test_a_parameter_server_that_dies_at_a_change(tmp_path: Path, durability: str) -> None:
    """It comes back with the newest wish, or takes that over as soon as it is back."""
    data = Numbers(800)
    plan = [BOUNDED, ASYNC, SYNC, BOUNDED, SYNC]

    def kill(job: Job, generation: int) -> None:
        before = job.coordinator.job
        if generation % 2:  # in the middle of the change
            eventually(
                lambda: job.changed(generation) or before.course is Course.PAUSED, "the change has begun"
            )
        job.restart(0)

    script = Changing(data, plan, kill)
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        worker={"replicas": 2},
        data={"shardRecords": 8},
        parameterServer={"replicas": 2, "bucketBytes": 1024, "durability": durability},
    ) as job:
        script.job = job
        job.run(script, workers=2)
        assert job.status().tuning.generation == len(plan)
    assert not script.plan
    assert check(read(job.history), Data(len(data), 1)) == []
    assert {str(c) for c in consistencies(job)} == {str(c) for c in ({}, BOUNDED, ASYNC)}


COMPRESSIONS: list[dict[str, Any]] = [
    {"codec": "int8", "values": "bf16"},
    {"codec": "topk", "options": {"ratio": 0.25}, "values": "int8"},
    {"codec": "tests.unit.codec.test_codecs:Negative", "lossless": "zstd", "values": "topk"},
    {"codec": "topk", "options": {"ratio": 0.1}, "values": "changed"},
    {"codec": "auto", "maxError": 1.0, "rules": [{"match": "*.bias", "codec": "none"}]},
    {},
]
"""Gradients and values change, with deltas and without, to a codec of the user's own and from it."""


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [{"mode": "sync"}, {"mode": "local", "steps": 2}], ids=lambda m: m["mode"])
@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
def test_the_compression_changes_while_parameter_servers_die_and_workers_join(
    tmp_path: Path, durability: str, mode: dict[str, Any]
) -> None:
    """All processes of a term encode and decode in the same way, and have the same values."""
    data, changes = Numbers(1400), len(COMPRESSIONS)

    def kill(job: Job, generation: int) -> None:
        before = job.coordinator.job
        if generation == 2:  # it joins just then
            job.start(2, script)
        if generation == 3:  # in the middle of the change
            eventually(lambda: job.changed(3) or before.course is Course.PAUSED, "the change has begun")
            job.restart(0)
        if generation == 4:
            job.restart(1)

    script = Changing(data, COMPRESSIONS, kill, Job.encode)
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        worker={"replicas": 3},
        consistency=mode,
        data={"shardRecords": 8},
        parameterServer={"replicas": 2, "bucketBytes": 1024, "durability": durability},
    ) as job:
        script.job = job
        job.run(script, workers=2)
        status = job.status()
    assert not script.plan
    assert (status.tuning.generation, status.tuning.compression) == (changes, "codec: none")
    histories = read(job.history)
    assert check(histories, Data(len(data), 1)) == []
    by_term = {each.term: each.compression for each in histories.codings}
    wanted = [Compression(), *map(Compression.model_validate, COMPRESSIONS)]
    assert [each for each, _ in itertools.groupby(by_term[term] for term in sorted(by_term))] == wanted


def test_all_processes_of_a_worker_take_another_compression_over(tmp_path: Path) -> None:
    data, told = Numbers(400), list[int]()

    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for x, y in session.loader(data, 4):
            if rank == 0 and session.version >= EVERY and not told:
                job.encode(1, codec="topk", values="int8")
                eventually(lambda: job.changed(1), "the change is in force")
                told.append(session.version)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(
        tmp_path, checkpoints=tmp_path / "checkpoints", worker={"processes": 2}, data={"shardRecords": 8}
    ) as job:
        job.start_processes(0, script)
        job.join()
        traffic = job.status().traffic
    assert told
    assert traffic.pushed_bytes < traffic.pushed_plain_bytes / 2
    assert traffic.pulled_bytes < traffic.pulled_plain_bytes
    assert_nothing_lost(job, data)


def test_local_steps_get_more(tmp_path: Path) -> None:
    data = Numbers(600)
    script = Changing(data, [{"mode": "local", "steps": 8, "outer": "average"}])
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        worker={"replicas": 2},
        consistency={"mode": "local", "steps": 2, "outer": "average"},
        data={"shardRecords": 32},
    ) as job:
        script.job = job
        job.run(script, workers=2)
    assert_nothing_lost(job, data)
    most = {
        term: max(sum(b - a for _, a, b in c["records"]) for each in commits for c in each["contributions"])
        for term, commits in itertools.groupby(job.commits(), lambda c: c["term"])
    }
    assert most == {1: 2 * 4, 2: 8 * 4}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "sync", "deterministic": True}, "deterministic stays as it is"),
    ({"mode": "local", "steps": 5}, "the place of the optimizer stays as it is"),
    ({"mode": "accumulate", "gradients": 1000}, "the job has only 100 steps"),
]


REFUSED_COMPRESSIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"codec": "tests.unit.codec.test_codecs:Nobody"},
        "tests.unit.codec.test_codecs:Nobody cannot be imported",
    ),
    ({"codec": "no.such:Codec"}, "no.such:Codec cannot be imported"),
    (
        {"codec": "tests.unit.codec.test_codecs:Heavy", "options": {"blok": 3}},
        "does not take the options {'blok': 3}",
    ),
    (
        {"codec": "tests.unit.codec.test_codecs:Needy"},
        "Needy cannot be made here: ModuleNotFoundError: No module named 'no_such_package'",
    ),
]


def test_a_change_that_cannot_be_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    data, told = Numbers(400), list[str]()
    asked_for: list[tuple[Callable[..., None], dict[str, Any], str]] = [
        (Job.change, *each) for each in REFUSED
    ]
    asked_for += [(Job.encode, *each) for each in REFUSED_COMPRESSIONS]

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for x, y in session.loader(data, 4):
            if len(told) < len(asked_for) and session.version >= EVERY:
                ask, asked, why = asked_for[len(told)]
                ask(job, len(told) + 1, **asked)
                told.append(
                    eventually(lambda why=why: why in (p := job.status().tuning.problem) and p, why)  # type: ignore[misc]
                )
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints", data={"shardRecords": 8}) as job:
        job.start(0, script)
        job.join()
        assert job.status().term == 1
    assert len(told) == len(asked_for)
    assert_nothing_lost(job, data)


def test_times_of_checkpoints_change_at_once(tmp_path: Path) -> None:
    data = Numbers(400)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for x, y in session.loader(data, 4):
            if session.version == EVERY:
                wanted = MutableFields.of(job.spec, generation=1)
                wanted.checkpoint.every_versions = 5
                write_atomically(job.wishes, wanted.to_json())
                eventually(lambda: job.changed(1), "the change is in force")
            if session.version == 2 * EVERY:
                eventually(lambda: job.status().progress.durable_version >= EVERY, "a checkpoint is written")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints") as job:
        job.start(0, script)
        job.join()
        assert job.status().term == 1
    assert_nothing_lost(job, data)


def test_a_running_job_is_changed_and_begins_so_when_its_parameter_server_is_killed(tmp_path: Path) -> None:
    """As `elastic-ps set` does it: the wish goes into the job's directory."""

    def wanted(launcher: Launcher, generation: int) -> str:
        def in_force() -> str:
            server = launcher.status().server
            return server.tuning.consistency if server and server.tuning.generation >= generation else ""

        return eventually(in_force, f"change {generation} is in force")

    def change(text: str) -> Callable[[TrainingJob], TrainingJob]:
        return lambda job: changed(job, dict(assignment(each) for each in text.split()))

    job = parse_job(
        {
            "apiVersion": "elastic-ps.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "changing"},
            "spec": {
                "entrypoint": "tests.testing.scripts.steady:main",
                "arguments": {"records": 1_000_000, "seconds": 0.02},
                "worker": {"replicas": 2},
            },
        },
        source="test",
    )

    def training(launcher: Launcher) -> dict[int, int]:
        return wait_for_workers(launcher, lambda workers: len(workers) == 2, "both workers train")

    with Launcher(job, Options(forks=forks(), root=tmp_path)) as launcher:
        launcher.start()
        before = training(launcher)
        launcher.directory.edit(change("consistency.mode=bounded consistency.maxStaleness=3"))
        assert wanted(launcher, 1) == "mode: bounded, maxStaleness: 3"
        with pytest.raises(UserError, match="deterministic stays"):
            launcher.directory.edit(change("consistency.mode=sync consistency.deterministic=true"))
        launcher.directory.edit(change("compression.codec=int8 compression.values=int8"))
        assert wanted(launcher, 2) == "mode: bounded, maxStaleness: 3"
        server_now = launcher.status().server
        assert server_now is not None
        assert server_now.tuning.compression == "codec: int8, values: int8"
        launcher.directory.edit(change("consistency.mode=async"))
        server = next(p.pid for p in launcher.status().processes if p.role == "ps")
        os.kill(server, signal.SIGKILL)
        assert wanted(launcher, 3) == "mode: async"
        assert training(launcher) == before, "the workers' processes are the same"
        launcher.stop("enough")
        launcher.wait()
        outcome = launcher.outcome()
    assert [event.text for event in outcome.record.events if event.kind == "changed"]


@pytest.mark.nightly
def test_the_server_keeps_an_objective_of_staleness_by_itself(tmp_path: Path) -> None:
    """One worker is slow as long as nobody waits for it; the parameter server dies in between."""
    desired = {"mode": "async", "maxStalenessP99": 20}
    bounded = {"mode": "bounded", "maxStaleness": 20, "maxStalenessP99": 20}
    data, restarted, over = Numbers(40_000), list[str](), list[bool]()

    def mode() -> str:
        return str(job.status().tuning.consistency).partition(",")[0]

    def slow(session: Session) -> None:
        until = session.version + 60
        eventually(lambda: job.version >= until or mode() != "mode: async" or over, "others go on")

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for x, y in session.loader(data, 4):
            if session.worker == 2:
                slow(session)
            if session.worker == 0 and not restarted and mode() == "mode: bounded":
                job.restart(0)
                restarted.append(mode())
            if session.worker == 0 and restarted and consistencies(job)[-1] == desired:
                over.append(True)
                session.stop("it has come back to what was named")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        worker={"replicas": 3},
        consistency=desired,
        data={"shardRecords": 8},
        limits=ServerLimits(window=50),
    ) as job:
        job.run(script, workers=3)
    assert restarted == ["mode: bounded"], "it comes back with what it was changed to"
    assert consistencies(job) == [desired, bounded, desired, bounded, desired], "the third one is a start's"
    assert check(read(job.history), None) == [], "among others: no step was more stale than its term allows"
    stale = {
        term: max(s["staleness"] for commit in commits for s in commit["contributions"])
        for term, commits in itertools.groupby(job.commits(), lambda c: c["term"])
    }
    assert stale[1] > 20, "or nothing had to be kept"


def test_a_function_of_ones_own_for_stale_steps_comes_while_the_job_runs(tmp_path: Path) -> None:
    """And one that cannot be imported is refused in words."""
    data = Numbers(400)
    own = "tests.integration.test_changes:halved"
    told = list[str]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for x, y in session.loader(data, 4):
            if not told and session.version >= EVERY:
                job.change(1, mode="async", stalenessScale="no_such_module:scale")
                told.append(eventually(lambda: job.status().tuning.problem, "it is refused"))
                job.change(2, mode="async", stalenessScale=own)
                eventually(lambda: job.changed(2), "the change is in force")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints", data={"shardRecords": 8}) as job:
        job.start(0, script)
        job.join()
        status = job.status()
    assert "consistency.stalenessScale no_such_module:scale cannot be imported" in told[0]
    assert status.tuning.consistency == f"mode: async, stalenessScale: {own}"
    assert_nothing_lost(job, data)


def halved(staleness: int) -> float:
    """What a user has written."""
    return 0.5**staleness
