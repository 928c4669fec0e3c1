"""A model that `torch.compile` has wrapped has the names of the model within."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import elastic_ps
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_equal_up_to_round_off, mse, replay


def test_compiled_and_plain_workers_train_one_model(tmp_path: Path) -> None:
    data, models = Numbers(60), {}

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def script(session: Session) -> None:
        plain = make_mlp()
        model: Any = torch.compile(plain, backend="eager") if session.worker else plain
        optimizer = session.optimizer(sgd(model), model)
        models[session.worker] = model
        for x, y in session.loader(data, 5):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    checkpoints = tmp_path / "checkpoints"
    with running_job(tmp_path, checkpoints=checkpoints) as job:
        job.run(script, workers=2)
        commits, spec = job.commits(), job.spec
    assert_equal_up_to_round_off(models[0], make_mlp(), lambda model: replay(commits, data, model, sgd, spec))
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for loaded in (make_mlp(seed=5), torch.compile(make_mlp(seed=5), backend="eager")):
        assert isinstance(loaded, torch.nn.Module)
        elastic_ps.load_checkpoint(checkpoints, loaded, sgd(loaded))
        for ours, theirs in zip(loaded.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(ours, theirs)
