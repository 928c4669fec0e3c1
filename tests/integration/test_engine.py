"""The engine with hooks: the order of its calls, and the result of a loop that is written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import elastic_ps
from elastic_ps.contrib.engine import Engine, State
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.trained import sgd

RECORDS, BATCH, EPOCHS = 20, 5, 2
STEP = ["on_sample", "on_forward", "on_backward", "on_update"]


def recorded(engine: Engine) -> list[str]:
    """The hooks that are called from now on, in order."""
    called: list[str] = []

    def recorder(name: str) -> None:
        def record(state: State) -> None:
            called.append(name)

        record.__name__ = name
        engine.hook(record)

    for name in ("on_start", "on_start_epoch", *STEP, "on_end_epoch", "on_end"):
        recorder(name)
    return called


def test_it_trains_as_a_loop_does_and_calls_the_hooks(tmp_path: Path) -> None:
    criterion = torch.nn.MSELoss()
    by_hand, by_engine, called = make_mlp(), make_mlp(), list[str]()

    def written(session: Session) -> None:
        optimizer = session.optimizer(sgd(by_hand), by_hand)
        loader = session.loader(Numbers(RECORDS), BATCH, epochs=EPOCHS)
        for x, y in loader:
            optimizer.zero_grad()
            criterion(by_hand(x), y).backward()
            optimizer.step()

    def hooked(session: Session) -> None:
        engine = Engine()
        record = recorded(engine)
        state = engine.train(
            by_engine, criterion, sgd(by_engine), Numbers(RECORDS), BATCH, epochs=EPOCHS, session=session
        )
        called.extend(record)
        assert (state.epoch, state.step) == (EPOCHS - 1, EPOCHS * RECORDS // BATCH)
        assert session.is_chief

    for name, script in (("hand", written), ("engine", hooked)):
        with running_job(tmp_path / name) as job:
            job.start(0, script)
            job.join()
            loss = job.status().progress.loss
    for one, other in zip(by_hand.parameters(), by_engine.parameters(), strict=True):
        assert torch.equal(one, other)
    epoch = ["on_start_epoch", *STEP * (RECORDS // BATCH), "on_end_epoch"]
    assert called == ["on_start", *epoch * EPOCHS, "on_end"]
    assert loss is not None, "it is reported"


def test_a_test_changes_nothing() -> None:
    engine, model = Engine(), make_mlp()
    before = [parameter.clone() for parameter in model.parameters()]
    called = recorded(engine)
    total = 0.0

    @engine.hook
    def on_forward(state: State) -> None:
        nonlocal total
        assert not state.model.training
        assert not state.output.requires_grad
        total += float(state.loss or 0.0) * len(state.sample[1])

    data = Numbers(RECORDS)
    state = engine.test(model, torch.nn.MSELoss(), data, batch_size=BATCH)
    with torch.no_grad():
        expected = float(torch.nn.functional.mse_loss(model(data.x), data.y))
    assert total / RECORDS == pytest.approx(expected)
    assert called == [
        *["on_start", "on_start_epoch"],
        *["on_sample", "on_forward"] * state.step,
        *["on_end_epoch", "on_end"],
    ]
    assert model.training
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_test_leaves_each_module_in_its_mode() -> None:
    """As of a BatchNorm whose statistics are not to change any more."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model[1].eval()
    Engine().test(model, torch.nn.MSELoss(), Numbers(4), batch_size=4)
    assert [module.training for module in model] == [True, False, True]


def test_a_hook_changes_the_sample_and_the_loss() -> None:
    engine, model = Engine(), make_mlp()

    @engine.hook
    def on_sample(state: State) -> None:
        x, y = state.sample
        state.sample = (0 * x, y)

    @engine.hook
    def on_forward(state: State) -> None:
        assert state.loss is not None
        state.loss = 0 * state.loss

    state = engine.test(model, torch.nn.MSELoss(), Numbers(4), batch_size=4)
    assert torch.equal(state.output, model(torch.zeros(4, 6)))
    assert state.loss == 0


def test_a_hook_that_there_is_not_is_refused() -> None:
    def on_end_epochs(state: State) -> None:
        """Its name has an s too many."""

    with pytest.raises(elastic_ps.UsageError, match="no hook 'on_end_epochs'; did you mean 'on_end_epoch'"):
        elastic_ps.Engine().hook(on_end_epochs)
