"""The best checkpoint and early stopping: the chief stays, and the job keeps what it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.errors import UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Tally, running_job

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "accumulate": {"mode": "accumulate", "gradients": 2},
    "async": {"mode": "async"},
    "local": {"mode": "local", "steps": 2},
}


@pytest.mark.parametrize("consistency", MODES.values(), ids=MODES)
def test_one_worker_is_the_chief_of_all_epochs(tmp_path: Path, consistency: dict[str, Any]) -> None:
    """Also of those that the others have trained while it evaluated."""
    epochs, chiefs = 5, list[tuple[int, int]]()

    def script(session: Session) -> None:
        model = Tally(16)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for epoch in (loader := session.loader(Indexes(16), 4, epochs=epochs)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            if session.is_chief:
                chiefs.append((epoch, session.worker))
                if epoch == 1:
                    session.pause()
                    job.until(lambda: job.status().progress.epoch >= 4, "the other one trains on")

    with running_job(tmp_path, consistency=consistency) as job:
        job.run(script, workers=2)
    assert [epoch for epoch, _ in chiefs] == list(range(epochs))
    assert len({worker for _, worker in chiefs}) == 1


def test_what_the_chief_has_written_outlives_the_parameter_server(tmp_path: Path) -> None:
    """It goes on from a checkpoint of the same version that was made before."""

    def script(session: Session) -> None:
        assert dict(session.state) == {}
        model = Tally(8)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        with pytest.raises(UsageError, match=r"written by the chief, .* `if session\.is_chief:`"):
            session.state["best"] = 0.1
        for epoch in (loader := session.loader(Indexes(8), 8, epochs=3)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            if session.is_chief and epoch == 0:
                job.until(lambda: job.status().progress.durable_version == session.version, "it is on disk")
                session.state.update(best=0.9, scores=[0.9])
                job.restart(0)
            assert dict(session.state) == {"best": 0.9, "scores": (0.9,)} or not epoch
        job.restart(0)
        session.state["best"] = 0.95
        del session.state["scores"]
        assert dict(session.state) == {"best": 0.95}

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 1}},
    ) as job:
        job.start(0, script)
        job.join()
