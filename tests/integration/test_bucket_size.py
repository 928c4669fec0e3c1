"""Buckets whose size is chosen when the job begins: it stays, whatever is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.core.sizing import CROWDED, LARGEST
from elastic_ps.errors import ConnectionLost
from elastic_ps.transport.base import Connection, Frame
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import (
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    of_the_end,
    replay,
)
from tests.testing.polling import LIMIT
from tests.testing.trained import Models, sgd
from tests.testing.watched import Watched

WIDTHS = (6, 200, 200, 1)
"""A model of 168 kB."""
RATE = 1e6
"""Bytes a second of a slow network."""
TIMES = {"everyVersions": 4, "interval": "1h"}


def never(method: str, _: Frame) -> None:
    assert method != "Probe", "no worker has to measure"


def slow(method: str, frame: Frame) -> None:
    if method == "Probe":
        time.sleep(len(frame.body) / RATE)


def slowly(_: int, inner: Connection) -> Connection:
    return Watched(inner, slow)


def buckets(job: Job) -> int:
    model = job.coordinator.job.state.model
    assert model is not None
    return len(model.layout.buckets)


@pytest.mark.parametrize(
    ("transport", "durability"),
    [("inproc", "checkpoint"), ("grpc", "checkpoint"), ("tcp", "checkpoint"), ("inproc", "standby")],
)
def test_a_job_keeps_the_size_that_was_chosen_also_if_the_server_is_lost(
    tmp_path: Path, transport: str, durability: str
) -> None:
    data, models = Numbers(240), Models()

    def script(session: Session) -> None:
        model = make_mlp(WIDTHS)
        optimizer = session.optimizer(sgd(model), model)
        models[session.worker] = model
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    checkpoints = tmp_path / "checkpoints"
    server = {"bucketBytes": 0, "durability": durability, "checkpoint": TIMES}
    with running_job(tmp_path, transport=transport, checkpoints=checkpoints, parameterServer=server) as job:
        job.through = slowly
        job.start(0, script)
        job.until(lambda: (job.status().progress.durable_version or 0) >= 4, "a checkpoint")
        job.through = lambda _, inner: Watched(inner, never)
        job.start(1, script)
        before = buckets(job)
        job.restart(0)
        job.join()
        assert job.status().term == 2
        assert (job.status().bucket_bytes, buckets(job)) == (64 * 1024, before)
        commits = of_the_end(job.commits())
    assert before == 4
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert_equal_up_to_round_off(
        models[0], make_mlp(WIDTHS), lambda m: replay(commits, data, m, sgd, job.spec)
    )


def test_a_worker_ends_whose_model_was_cut_in_other_places(tmp_path: Path) -> None:
    """Without a checkpoint a lost job begins anew, and another worker may be the first then.

    The worker is started again: with a `UserError` the job would fail, and no user has made a mistake.
    """
    data, entered, begun = Numbers(240), threading.Event(), threading.Event()

    def first(session: Session) -> None:
        model = make_mlp(WIDTHS)
        optimizer = session.optimizer(sgd(model), model)
        entered.set()
        assert begun.wait(LIMIT)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    def second(session: Session) -> None:
        model = make_mlp(WIDTHS)
        session.optimizer(sgd(model), model)
        begun.set()

    with running_job(tmp_path, parameterServer={"bucketBytes": 0}) as job:
        job.through = slowly
        job.start(0, first)
        job.until(entered.is_set, "the first worker brings the model")
        job.through = lambda _, inner: inner
        job.restart(0)
        job.start(1, second)
        with pytest.raises(ConnectionLost, match="has used another bucket size since its restart"):
            job.join()


def test_a_worker_with_shared_memory_measures_nothing(tmp_path: Path) -> None:

    def script(session: Session) -> None:
        model = make_mlp(WIDTHS)
        session.optimizer(sgd(model), model)

    with running_job(tmp_path, transport="shm", parameterServer={"bucketBytes": 0}) as job:
        job.through = lambda _, inner: Watched(inner, never)
        job.start(0, script)
        job.join()
        assert job.status().bucket_bytes == LARGEST


@pytest.mark.parametrize(
    ("first", "second", "then"),
    [
        (False, {}, 64 * 1024),
        (False, {"compression": {"codec": "powersgd"}}, 0),
        (False, {"consistency": {"deterministic": True}}, 0),
        (True, {}, 0),
        (True, {"crowded": True}, CROWDED),
    ],
)
def test_another_run_keeps_the_size_that_was_chosen_if_it_may(
    tmp_path: Path, first: bool, second: dict[str, Any], then: int
) -> None:
    checkpoints, transport = tmp_path / "checkpoints", "shm" if first else "inproc"

    def script(session: Session) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
        session.optimizer(sgd(model), model)

    kept: dict[str, Any] = {"checkpoints": checkpoints, "transport": transport}
    with running_job(tmp_path, **kept, run="a", crowded=first) as job:
        job.through = slowly
        job.run(script, workers=1)
        chosen = job.status().bucket_bytes
    with running_job(tmp_path, **kept, resume="require", run="b", **second) as job:
        job.run(script, workers=1)
        assert (chosen, job.status().bucket_bytes) == (CROWDED if first else 64 * 1024, then)


def test_another_run_has_the_usual_size_if_the_kept_one_leaves_too_few_fragments(tmp_path: Path) -> None:
    """A part is made of whole buckets: with large ones, the tensors of 2.4 MB are together in threes."""
    kept: dict[str, Any] = {"checkpoints": tmp_path / "checkpoints", "transport": "shm", "crowded": True}

    def script(session: Session) -> None:
        large, small = torch.nn.Linear(1024, 10 * 1024), [torch.nn.Linear(1024, 600) for _ in range(10)]
        model = torch.nn.ModuleList([large, *small])
        session.optimizer(sgd(model), model)

    local = {"mode": "local", "steps": 8}
    with running_job(tmp_path, **kept, run="a", consistency=local) as job:
        job.run(script, workers=1)
        assert job.status().bucket_bytes == CROWDED
    fragments = {**local, "fragments": 8}
    with running_job(tmp_path, **kept, resume="require", run="b", consistency=fragments) as job:
        job.run(script, workers=1)
        assert job.status().bucket_bytes == 0


def test_a_job_that_names_a_size_does_not_report_the_one_that_an_earlier_job_has_chosen(
    tmp_path: Path,
) -> None:
    checkpoints = tmp_path / "checkpoints"

    def script(session: Session) -> None:
        model = make_mlp(WIDTHS)
        session.optimizer(sgd(model), model)

    with running_job(tmp_path, checkpoints=checkpoints, parameterServer={"bucketBytes": 0}) as job:
        job.through = slowly
        job.run(script, workers=1)
        assert job.status().bucket_bytes == 64 * 1024
    named = {"bucketBytes": 32 * 1024}
    with running_job(tmp_path, checkpoints=checkpoints, resume="require", parameterServer=named) as job:
        job.run(script, workers=1)
        assert (job.status().bucket_bytes, buckets(job)) == (0, 7)
