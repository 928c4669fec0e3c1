"""What codecs have not sent of steps: of those that are in the model it arrives, of void ones it does not.

In each test a step's gradient is one in each element. So what has arrived in the model, and what waits in the
workers, add up to the number of steps that are in the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, events, running_job
from tests.testing.inside import push_pull_of
from tests.testing.oracle import assert_each_record_once
from tests.testing.polling import eventually
from tests.testing.trained import asks, await_training

ELEMENTS, BATCH = 512, 4
TOPK = {"codec": "topk", "options": {"ratio": 0.125}}


class Counting:
    """A training script; `before` is called before each step, and may raise `Gone`."""

    def __init__(self, data: Numbers) -> None:
        self.data = data
        self.left: dict[int, torch.Tensor] = {}
        self.weight = torch.zeros(0)
        self.job: Job

    def before(self, session: Session, step: int) -> None:
        pass

    def pushed(self, session: Session, step: int) -> bool:
        """After backward: whether the worker goes on."""
        return True

    def __call__(self, session: Session) -> None:
        model = torch.nn.Linear(ELEMENTS, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for step, _ in enumerate(session.loader(self.data, BATCH)):
            self.before(session, step)
            optimizer.zero_grad()
            model.weight.sum().backward()
            if not self.pushed(session, step):
                return
            optimizer.step()
        self.weight = model.weight.detach().flatten().clone()
        exchange = push_pull_of(session)
        left = torch.zeros(ELEMENTS)
        for bucket, rest in exchange.encoder.left_over.items():
            start = 0
            for piece in exchange.flat.layout.buckets[bucket].pieces:
                left[piece.start : piece.start + piece.length] += rest[start : start + piece.length]
                start += piece.length
        self.left[session.worker] = left


def assert_all_arrives(job: Job, script: Counting, gradients: int) -> None:
    """Each version is the mean of so many steps."""
    commits, steps = job.commits(), len(script.data) // BATCH
    assert {len(commit["contributions"]) for commit in commits} == {gradients}
    assert_each_record_once(commits, records=len(script.data), epochs=1)
    arrived = -gradients * script.weight
    total = arrived + sum(script.left.values(), torch.zeros(ELEMENTS))
    torch.testing.assert_close(total, torch.full((ELEMENTS,), float(steps)), atol=0.02, rtol=0)


@pytest.mark.parametrize("mode", ["accumulate", "globalBatchSize"])
def test_what_void_steps_of_a_version_left_over_is_taken_back(tmp_path: Path, mode: str) -> None:
    """Worker 1 dies while it pushes. Of several steps of worker 0 for the version only the last is left."""
    script = Dying(Numbers(480))
    constant: dict[str, Any] = {"globalBatchSize": 12 * BATCH}
    consistency = constant if mode == "globalBatchSize" else {"mode": "accumulate", "gradients": 12}
    with running_job(
        tmp_path, consistency=consistency, compression=TOPK, parameterServer={"bucketBytes": 1024}
    ) as job:
        script.job = job
        job.start(0, script)
        if mode == "globalBatchSize":  # else worker 1 might have all records of the first version
            job.until(lambda: job.version >= 1, "a version")
        job.start(1, script)
        job.join()
        assert check(read(job.history), Data(480, 1)) == []
        assert_all_arrives(job, script, 12)
        sent = {(e["step"], e["version"]) for e in pushes(job, 0)}
        commits = job.commits()
    counted = {(c["step"], commit["version"] - 1) for commit in commits for c in commit["contributions"]}
    assert len(sent - counted) >= 2, "some steps of worker 0 became void"


def pushes(job: Job, worker: int) -> list[dict[str, Any]]:
    return [e for e in events(job.history, f"worker-{worker}") if e["event"] == "push"]


class Dying(Counting):
    """Worker 1 dies in its first step, when some of it is pushed, and worker 0 has made three."""

    dying = False

    def before(self, session: Session, step: int) -> None:
        def some() -> bool:
            mine = [c for c in self.job.coordinator.job.state.rounds.contributions if c.worker == 0]
            return len(mine) >= 3

        if session.worker == 1:
            eventually(some, "worker 0 makes steps for this version")
        elif step >= 3 and self.job.spec.consistency.gradients:  # else the version might be made by worker 0
            eventually(lambda: self.dying, "worker 1 pushes")
        elif session.version == 1:
            eventually(lambda: self.dying or asks(self.job, 1), "worker 1 asks for records")
        elif session.version >= 2 and not self.dying:
            await_training(self.job, 1)

    def pushed(self, session: Session, step: int) -> bool:
        if session.worker == 0:
            return True
        eventually(lambda: pushes(self.job, 1), "worker 1 pushes")
        self.dying = True
        return False


EVERY = 6
"""Versions between two changes."""


class Encoding(Counting):
    """Worker 0 has the compression changed now and then, and waits until it is."""

    def __init__(self, data: Numbers, plan: list[dict[str, Any]]) -> None:
        super().__init__(data)
        self.plan = list(enumerate(plan, 1))
        self.next = EVERY
        self.waited: list[bool] = []

    def coded(self, worker: int) -> bool:
        """Whether a worker knows of the last change."""
        known = [e["term"] for e in events(self.job.history, f"worker-{worker}") if e["event"] == "coding"]
        return self.job.status().term in known

    def before(self, session: Session, step: int) -> None:
        if not step:
            await_training(self.job, 0, 1)
        if session.worker == 0 and step and self.plan and session.version >= self.next:
            exchange = push_pull_of(session)
            self.waited.append(bool(exchange.encoder.left_over))
            self.job.encode(self.plan[0][0], **self.plan[0][1])
            eventually(lambda: self.job.changed(self.plan[0][0]), "the change is in force")
            self.next = self.job.version + EVERY
            self.plan.pop(0)
            eventually(lambda: self.coded(1), "worker 1 joins again")
        elif session.worker and self.plan:  # else no records might be left for the last change
            eventually(lambda: not self.plan or session.version < self.next + EVERY, "the job is changed")


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "mode", [{"mode": "accumulate", "gradients": 4}, {"mode": "async", "stalenessScale": "none"}]
)
@pytest.mark.parametrize("shards", [1, 2])
def test_what_waits_is_sent_with_whatever_codec_comes_next(
    tmp_path: Path, mode: dict[str, Any], shards: int
) -> None:
    """Also of a worker that has not seen yet that its step is in the model when the job is changed."""
    signs: dict[str, Any] = {"codec": "signsgd", "rules": [{"match": "nothing", "codec": "none"}]}
    plan = [signs, {"codec": "topk", "options": {"ratio": 0.5}, "lossless": "zstd"}, {"codec": "none"}]
    script = Encoding(Numbers(640), plan)
    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        consistency=mode,
        compression=TOPK,
        data={"shardRecords": 8},
        parameterServer={"replicas": shards, "bucketBytes": 1024},
    ) as job:
        script.job = job
        job.run(script, workers=2)
        histories = read(job.history)
        assert check(histories, Data(640, 1), max_staleness=1000) == []
        assert_all_arrives(job, script, mode.get("gradients", 1))
        assert job.status().tuning.compression == "codec: none"
    assert script.waited == [True] * 3
    assert not any(left.any() for left in script.left.values()), "all of it has arrived"
    coded = {each.term: each.compression.codec for each in histories.codings}
    assert coded == {1: "topk", 2: "signsgd", 3: "topk", 4: "none"}
    for term in coded:
        processes = {each.process for each in histories.codings if each.term == term}
        assert {"ps-0", "worker-0", "worker-1"} <= processes
