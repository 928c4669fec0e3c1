"""A worker that meets what nobody foresaw, in one of its threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.worker.client import Client
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import mse


@pytest.mark.parametrize(
    ("call", "bucket_bytes"), [("push", 1024), ("pull", 1024), ("push_and_pull", 1 << 20)]
)
def test_the_script_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, bucket_bytes: int
) -> None:
    """Else the step would wait for the thread for ever."""
    usual = getattr(Client, call)

    def fail(client: Client, *arguments: Any, **options: Any) -> Any:
        counted.append(call)
        if len(counted) == 3:
            raise RuntimeError("nobody foresaw this")
        return usual(client, *arguments, **options)

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
    monkeypatch.setattr(Client, call, fail)
    with running_job(tmp_path, parameterServer={"bucketBytes": bucket_bytes}) as job:
        job.start(0, script)
        job.join()
    assert told == ["nobody foresaw this"]
