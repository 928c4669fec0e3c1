"""What is expected around the steps of an optimizer: hooks, schedulers, and a word about what is left."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp
from tests.testing.oracle import mse
from tests.testing.trained import adam, alone, sgd


@pytest.mark.parametrize("consistency", [{}, {"mode": "local", "steps": 2}], ids=["sync", "local"])
def test_hooks_of_the_torch_optimizer_run_once_in_each_step(
    tmp_path: Path, consistency: dict[str, Any]
) -> None:
    called = []

    def drop(optimizer: torch.optim.Optimizer, *_: object) -> None:
        called.append("before")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.zero_()

    def script(session: Session) -> None:
        model = make_mlp()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped.register_step_pre_hook(drop)
        wrapped.register_step_post_hook(lambda *_: called.append("after"))
        removed = wrapped.register_step_post_hook(lambda *_: called.append("removed"))
        optimizer = session.optimizer(wrapped, model, overlap=False)
        removed.remove()
        for x, y in session.loader(Numbers(20), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before)), "each gradient was set to zero by the hook"

    alone(tmp_path, script, consistency=consistency)
    assert called == ["before", "after"] * 5


def test_hooks_of_several_optimizers(tmp_path: Path) -> None:
    called = []

    def script(session: Session) -> None:
        model = make_mlp()
        parts = {"first": sgd(model[0]), "last": adam(model[4])}
        for name, part in parts.items():
            part.register_step_post_hook(lambda *_, name=name: called.append(name))
        optimizers = session.optimizer(parts, model)
        for number, (x, y) in enumerate(session.loader(Numbers(12), 4)):
            optimizers.zero_grad()
            mse(model, x, y).backward()
            (optimizers if number == 2 else optimizers[["first", "last"][number]]).step()

    alone(tmp_path, script)
    assert called == ["first", "last", "first", "last"]


def test_a_scheduler_of_the_torch_optimizer_may_be_stepped_by_the_script(tmp_path: Path) -> None:
    """Torch warned that its optimizer had made no step."""

    def script(session: Session) -> None:
        model = make_mlp()
        wrapped = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 1)
        optimizer = session.optimizer(wrapped, model)
        for x, y in session.loader(Numbers(8), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        alone(tmp_path, script)


def test_a_script_that_makes_no_step_with_its_last_batches_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model, overlap=False)
        for number, (x, y) in enumerate(session.loader(Numbers(20), 4), start=1):
            mse(model, x, y).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    with caplog.at_level(logging.WARNING, "elastic_ps.worker.runtime.runtime"):
        assert len(alone(tmp_path, script)) == 2
    assert "without a step for the last 4 records" in caplog.text


def test_a_script_that_has_failed_is_not_told_what_it_has_left_undone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else that would be the last word, and look like the cause."""

    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model, overlap=False)
        for x, y in session.loader(Numbers(8), 4):
            mse(model, x, y).backward()
            break
        session.close(failed=True)

    alone(tmp_path, script)
    assert "has made no step" not in caplog.text
