"""What a job of Lightning's trains is what one process would, also after `--resume`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping

from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.lightning import EPOCHS, IN_ORDER, MARKS, RECORDS, Net, assert_same_model, fit, in_job
from tests.testing.oracle import assert_each_record_once, replay
from tests.testing.polling import LIMIT

pytestmark = MARKS

UNTIL = 20
"""The version at which a job ends that is continued, in the middle of an epoch."""


class Draining(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        session = self.trainer.strategy.session
        if session.version == UNTIL:
            session.drain()


def test_a_job_that_is_continued_trains_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [EarlyStopping("val/loss", mode="max", patience=2)], "max_epochs": 10}

    alone, first = fit("auto", Net(), **options()), Draining()
    kept: dict[str, Any] = {"checkpoints": tmp_path / "checkpoints", "data": IN_ORDER}
    with running_job(tmp_path / "1", **kept) as job:
        in_job(job, lambda: first, options=options())
        before = job.commits()
    with running_job(tmp_path / "2", resume="require", **kept) as job:
        second = in_job(job, options=options())[0]
        assert_each_record_once(before + job.commits(), records=RECORDS, epochs=EPOCHS)
    assert len(first.losses) == UNTIL
    torch.testing.assert_close(first.losses + second.losses, alone.losses, rtol=1e-11, atol=0)
    assert first.rates + second.rates == alone.rates
    torch.testing.assert_close(first.evaluations + second.evaluations, alone.evaluations, rtol=1e-11, atol=0)
    assert_same_model(second, alone)


class Plain(Net):
    """It begins when the other worker does."""

    def __init__(self, both: threading.Barrier) -> None:
        super().__init__()
        self.both = [both]

    def on_train_start(self) -> None:
        self.both[0].wait(LIMIT)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_two_workers_train_as_one_process_does_with_their_records(tmp_path: Path) -> None:
    """They come when they come: the parameter server says which records made a version."""
    trained, both, lock = list[Any](), threading.Barrier(2), threading.Lock()

    def script(session: Session) -> None:
        module = fit(ElasticStrategy(session=session), Plain(both))
        with lock:
            trained.append(module)

    with running_job(tmp_path, worker={"replicas": 2}, data=IN_ORDER) as job:
        job.run(script, workers=2)
        commits = job.commits()
    assert_each_record_once(commits, records=RECORDS, epochs=EPOCHS)
    assert any(len(commit["contributions"]) == 2 for commit in commits)
    expected = make_mlp().double()
    replay(
        commits,
        Numbers(RECORDS),
        expected,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        job.spec,
    )
    for module in trained:
        assert_same_model(module.mlp, expected)
