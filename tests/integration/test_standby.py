"""With a standby nothing is trained again when a parameter server is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.drill import history
from elastic_ps.drill.recorded import read
from elastic_ps.worker.session import Session
from tests.integration.harness import Job, Numbers, events, make_mlp, running_job
from tests.integration.oracle import mse

RECORDS, EPOCHS, BATCH = 96, 8, 4


def script(session: Session) -> None:
    model = make_mlp()
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for x, y in session.loader(Numbers(RECORDS), BATCH, epochs=EPOCHS):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()


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


def lose(job: Job, shard: int) -> None:
    """Lose a shard some rounds from now, and wait until nothing more can be lost."""
    reached, epoch = job.version, job.status().epoch
    job.until(lambda: job.version > reached + 5, "the job goes on")
    job.restart(shard)
    job.until(lambda: bool(job.status().epoch > epoch), "a new epoch begins")
    job.until(lambda: job.followed, "the standbys follow again")


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
@pytest.mark.parametrize(("shards", "lost"), [(1, 0), (2, 0), (2, 1)])
def test_no_round_is_lost(tmp_path: Path, shards: int, lost: int, transport: str) -> None:
    with standby_job(tmp_path, shards=shards, transport=transport) as job:
        for worker in range(2):
            job.start(worker, script)
        job.until(lambda: job.followed, "the standbys follow")
        lose(job, lost)
        lose(job, lost)
        job.join()
        check(job)
        assert [e["event"] for e in events(job.history, "ps-0")].count("restore") == 2
