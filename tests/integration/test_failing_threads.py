"""A worker that meets what nobody foresaw, in one of its threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_ps.transport.base import Frame
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.watched import Watched


@pytest.mark.parametrize(("call", "bucket_bytes"), [("Push", 1024), ("Pull", 1024), ("Push", 1 << 20)])
def test_the_script_is_told(tmp_path: Path, call: str, bucket_bytes: int) -> None:
    """Else the step would wait for the thread for ever."""

    def fail(method: str, _: Frame) -> None:
        if method == call:
            counted.append(call)
            if len(counted) == 3:
                raise RuntimeError("nobody foresaw this")

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        try:
            for x, y in session.loader(Numbers(100), 4):
                mse(model, x, y).backward()
                optimizer.step()
        except RuntimeError as error:
            told.append(str(error))

    counted: list[str] = []
    told: list[str] = []
    with running_job(tmp_path, parameterServer={"bucketBytes": bucket_bytes}) as job:
        job.through = lambda _, inner: Watched(inner, fail)
        job.start(0, script)
        job.join()
    assert told == ["nobody foresaw this"]
