"""With a standby nothing is trained again when a parameter server is lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.drill import history
from elastic_ps.drill.recorded import read
from elastic_ps.server.calls.node import Node
from elastic_ps.server.job.standby import Follower
from elastic_ps.server.orders import Advance, OrderId, RemoteShard, Report
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.polling import eventually
from tests.testing.tiers import per_change

RECORDS, EPOCHS, BATCH = 96, 8, 4


class Script:
    """A training script that goes on while a standby does not follow, and otherwise as far as the test says.

    Attributes:
        most: nobody makes a step on this version or a later one then.
    """

    def __init__(self, job: Job) -> None:
        self.most, self._job = 0.0, job

    def __call__(self, session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
        for x, y in session.loader(Numbers(RECORDS), BATCH, epochs=EPOCHS):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if not self._job.followed:
                time.sleep(0.1)  # there are not so many rounds
            eventually(lambda: session.version < self.most or not self._job.followed, "the test goes on")
            optimizer.step()

    def makes(self, versions: int) -> None:
        """Wait for so many versions, and allow some more."""
        reached = self._job.version
        self.most = reached + versions + 2
        self._job.until(lambda: self._job.version > reached + versions, "the job goes on")


def standby_job(tmp_path: Path, *, shards: int = 1, interval: str = "1h", **options: Any) -> Any:
    """A job that writes no checkpoint on its own but the first."""
    return running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={
            "replicas": shards,
            "bucketBytes": 1024,
            "durability": "standby",
            "checkpoint": {"interval": interval},
        },
        **options,
    )


def check(job: Job) -> None:
    """Every record is in the model once, and no version that was reached was made again."""
    assert job.status().progress.records_applied == RECORDS * EPOCHS
    histories = read(job.history)
    assert history.check(histories, history.Data(RECORDS, EPOCHS)) == []
    for undone in history.fate(histories).undone.values():
        assert undone == []


def train(tmp_path: Path, disturb: Callable[[Job, Script], None], **options: Any) -> None:
    """A whole job, disturbed once its standbys follow; checks that nothing was lost."""
    with standby_job(tmp_path, **options) as job:
        script = Script(job)
        for worker in range(2):
            job.start(worker, script)
        job.until(lambda: job.followed, "the standbys follow")
        disturb(job, script)
        script.most = math.inf
        job.join()
        check(job)


def lose(job: Job, script: Script, shard: int) -> None:
    """Lose a shard some rounds from now, and wait until nothing more can be lost."""
    term = job.status().term
    script.makes(5)
    job.restart(shard)
    job.until(lambda: bool(job.status().term > term), "a new term begins")
    job.until(lambda: job.followed, "the standbys follow again")


@pytest.mark.parametrize(
    ("shards", "lost", "transport"),
    per_change(
        [(1, 0, "inproc"), (2, 1, "inproc"), (2, 0, "grpc"), (2, 0, "tcp"), (2, 0, "shm")],
        keep=[(1, 0, "inproc"), (2, 0, "tcp")],
    ),
)
def test_no_round_is_lost(tmp_path: Path, shards: int, lost: int, transport: str) -> None:
    def disturb(job: Job, script: Script) -> None:
        lose(job, script, lost)
        lose(job, script, lost)
        assert len(read(job.history).restored) == 2

    train(tmp_path, disturb, shards=shards, transport=transport)


def test_another_standby_catches_up(tmp_path: Path) -> None:
    def disturb(job: Job, script: Script) -> None:
        job.restart_standby(0)
        script.makes(1)  # of two rounds one has begun since, so it is known that the standby is left behind
        job.until(lambda: job.followed, "another one follows")
        lose(job, script, 0)

    train(tmp_path, disturb)


def test_without_standby_and_parameter_server_the_checkpoint_is_left(tmp_path: Path) -> None:
    with standby_job(tmp_path) as job:
        script = Script(job)
        for worker in range(2):
            job.start(worker, script)
        job.until(lambda: job.followed, "the standby follows")
        script.makes(5)
        job.restart_standby(0)
        job.restart(0)
        script.most = math.inf
        job.join()
        assert job.status().progress.records_applied == RECORDS * EPOCHS
        assert history.check(read(job.history), history.Data(RECORDS, EPOCHS)) == []


def test_a_parameter_server_that_was_replaced_applies_nothing(tmp_path: Path) -> None:
    """Its standby refuses it from the moment on that the new one asks for its rounds."""
    with standby_job(tmp_path) as job:
        script = Script(job)
        job.start(0, script)
        job.until(lambda: job.followed, "the standby follows")
        with job.rival() as rival:
            script.most = math.inf
            assert rival.term == 2
            base = rival.status().progress.version
            job.until(lambda: job.servers[0].fenced, "the first one sees it")
            assert job.version <= base, "it has gone on alone"
        job.restart(0)
        job.join()
        check(job)


class Crash:
    """A shard's parameter server does nothing any more from a moment on, though its threads live.

    It replaces methods, because a process cannot be killed between two sums on purpose.
    """

    def __init__(self, patch: pytest.MonkeyPatch, shard: int, moment: str, after: int) -> None:
        self.struck = threading.Event()
        self._shard, self._moment, self._left = shard, moment, after
        self._dead: Node | None = None
        self._here = threading.local()
        stage, send, advance = Follower.stage, RemoteShard.sum, Node.advance

        def staged(*arguments: Any) -> None:
            self._reached("before it is staged")
            stage(*arguments)
            self._reached("after it was staged")

        def sent(*arguments: Any, **named: Any) -> None:
            self._reached("between two sums")
            send(*arguments, **named)

        def advanced(node: Node, order: Advance, number: OrderId | None = None) -> Report:
            if node is self._dead:
                raise RuntimeError("this parameter server has crashed")
            if node._follower is None:  # noqa: SLF001  a standby's node
                return advance(node, order, number)
            self._here.node = node
            try:
                report = advance(node, order, number)
                if order.apply is not None and not order.prepare:
                    self._reached("after it was applied")
                return report
            finally:
                self._here.node = None

        patch.setattr(Follower, "stage", staged)
        patch.setattr(RemoteShard, "sum", sent)
        patch.setattr(Node, "advance", advanced)

    def _reached(self, moment: str) -> None:
        node: Node | None = getattr(self._here, "node", None)
        if node is None or node.index != self._shard or moment != self._moment or self._dead is not None:
            return
        self._left -= 1
        if self._left == 0:
            self._dead = node
            self.struck.set()
            raise RuntimeError(f"crashed {moment}")


@pytest.mark.parametrize(
    ("moment", "lost"),
    per_change(
        [
            ("before it is staged", 1),
            ("between two sums", 0),
            ("between two sums", 1),
            ("after it was staged", 0),
            ("after it was applied", 1),
        ],
        keep=[("between two sums", 1)],
    ),
)
def test_it_may_crash_at_any_moment_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, lost: int
) -> None:
    def disturb(job: Job, script: Script) -> None:
        crash = Crash(monkeypatch, lost, moment, 5)
        script.most = math.inf
        job.until(crash.struck.is_set, moment)
        job.restart(lost)

    train(tmp_path, disturb, shards=2)
