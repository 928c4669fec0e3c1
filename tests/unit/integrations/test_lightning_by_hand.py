"""Modules with manual optimization: their schedules, and their steps with one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from elastic_ps.errors import UsageError
from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.lightning import (
    BATCH,
    EPOCHS,
    IN_ORDER,
    MARKS,
    RECORDS,
    InTurn,
    Net,
    assert_same_model,
    fit,
    in_job,
)
from tests.testing.oracle import assert_each_record_once

pytestmark = MARKS


class ByHand(Net):
    """`steps`: whether it steps its schedule. It is kept, or returned to Lightning."""

    returns, steps = True, True
    by_hand: Any

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        if self.returns and self.steps and not isinstance(self.lr_schedulers(), ReduceLROnPlateau):
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.by_hand = self.make(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": self.by_hand} if self.returns else optimizer

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Kept(ByHand):
    returns = False

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ElasticStrategy):
            strategy.session.scheduler(self.by_hand, interval="epoch")

    def on_train_epoch_end(self) -> None:
        if not isinstance(self.trainer.strategy, ElasticStrategy):
            self.by_hand.step()


class Unstepped(ByHand):
    steps = False


class OnPlateau(ByHand):
    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        return ReduceLROnPlateau(optimizer, mode="max", patience=0)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.by_hand.step(self.trainer.callback_metrics["val/loss"])


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_that_a_worker_would_count_are_refused(tmp_path: Path, workers: int) -> None:
    said = r"interval='epoch'\), or with another interval; and remove step\(\)"
    with running_job(tmp_path, worker={"replicas": workers}) as job:
        with pytest.raises(UsageError, match=f"the module steps the LambdaLR .*{said}"):
            in_job(job, ByHand, workers=workers)
        assert job.status().progress.version <= workers


@pytest.mark.parametrize("kind", [Kept, Unstepped, OnPlateau])
def test_other_schedules_are_as_alone(tmp_path: Path, kind: type[ByHand]) -> None:
    alone = fit("auto", kind())
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, kind)[0]
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
        stored = job.coordinator.job.state.settings.schedulers
    assert ours.rates == alone.rates
    assert len(set(ours.rates)) == {Kept: EPOCHS, Unstepped: 1, OnPlateau: 2}[kind]
    assert len(stored) == (0 if kind is Unstepped else 1), "a worker that joins gets its state"
    assert_same_model(ours, alone)


class ByVersion(InTurn):
    """Chooses as the cookbook has it."""

    limit = 0.01

    def number_of(self, batch_idx: int) -> int:
        strategy = self.trainer.strategy
        return strategy.session.version if isinstance(strategy, ElasticStrategy) else batch_idx


def test_two_workers_choose_the_same_of_several_optimizers(tmp_path: Path) -> None:
    records = 6 * 2 * BATCH
    alone = fit("auto", ByVersion(), records=records, batch=2 * BATCH)
    with running_job(tmp_path, consistency={"globalBatchSize": 2 * BATCH}, data=IN_ORDER) as job:
        job.begin_together(2)
        trained = in_job(job, ByVersion, workers=2, options={"records": records}, max_grad_norm=0.01)
        assert_each_record_once(job.commits(), records=records, epochs=EPOCHS)
    for worker in range(2):
        assert_same_model(trained[worker], alone)


class Gan(Net):
    """As Lightning's example has it: both optimizers make a step with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        first, *rest = self.mlp
        others = torch.nn.ModuleList(rest).parameters()
        return torch.optim.Adam(first.parameters(), 0.01), torch.optim.SGD(others, 0.1)


def test_a_second_step_with_a_batch_is_refused_in_the_words_of_lightning(tmp_path: Path) -> None:
    said = r"^a second step is made.*Choose the optimizer by self\.trainer\.strategy\.session\.version"

    def script(session: Session) -> None:
        fit(ElasticStrategy(session=session), Gan())

    with running_job(tmp_path) as job:
        with pytest.raises(UsageError, match=said):
            job.run(script, workers=1)
        assert len(job.commits()) == 1, "its first batch is refused"
