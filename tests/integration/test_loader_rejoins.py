"""A parameter server that is lost while a worker asks for the rest of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.worker.session import Session
from tests.integration.harness import Numbers, make_mlp, running_job
from tests.integration.oracle import mse
from tests.integration.trained import sgd


@pytest.mark.parametrize("ahead", [0, 2], ids=["half a batch in hand", "batches fetched ahead"])
def test_what_was_handed_out_before_is_dropped(tmp_path: Path, ahead: int) -> None:
    """Hand-outs of 8 records make one batch of 5 and a part of the next, which needs another hand-out."""
    data, lost = Numbers(60), list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        take, calls = session._engine.client.take, [0]

        def taken(**request: Any) -> Any:
            calls[0] += not request["wait"]
            if calls[0] == 2 and not lost:
                lost.append(session.version)
                job.restart(0)
            return take(**request)

        session._engine.client.take = taken  # type: ignore[method-assign]
        source = torch.utils.data.DataLoader(data, batch_size=5, num_workers=ahead)
        for x, y in session.loader(source):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        consistency={"deterministic": True},
        data={"shardRecords": 8},
    ) as job:
        job.start(0, script)
        job.join()
    assert lost
    histories = read(tmp_path / "history")
    assert check(histories, Data(len(data), 1)) == []
    assert len(histories.joined) == 2, "a step on what was dropped would be refused, and it would join again"
