"""A library warns of nothing in a job that it does not warn of alone."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback

from elastic_ps.integrations.accelerate import ElasticAccelerator
from elastic_ps.integrations.fabric import ElasticStrategy as FabricStrategy
from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.integrations.transformers import prepare_trainer
from elastic_ps.worker.session import Session
from tests.testing import trainers
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.lightning import Net, trainer_of

EPOCHS, RECORDS, BATCH = 3, 48, 4
pytestmark = pytest.mark.usefixtures("workers_may_be_threads")


class Said(logging.Handler):
    """The texts of warnings, and of errors that are logged, without what differs from run to run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("elastic_ps"):
            self.add(record.getMessage())

    def add(self, text: str) -> None:
        self.texts.add(re.sub(r"/\S+|\d+", "...", text))


@contextlib.contextmanager
def heard() -> Iterator[Said]:
    said, names = Said(), ["", "accelerate", "transformers", "lightning", "lightning.pytorch"]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(said)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield said
        for each in found:
            said.add(str(each.message))
    finally:
        for logger in loggers:
            logger.removeHandler(said)


def by_accelerate(session: Session | None, directory: Path) -> None:
    options: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    accelerator: Any = (
        Accelerator(**options)
        if session is None
        else ElasticAccelerator(epochs=EPOCHS, session=session, max_grad_norm=1.0, **options)
    )
    model = make_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, evaluation, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Numbers(RECORDS), BATCH), DataLoader(Numbers(20), 7), schedule
    )
    for epoch in range(EPOCHS):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        for x, y in evaluation:
            accelerator.gather_for_metrics((model(x), y))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.save_state(str(directory / f"{epoch}"))
    accelerator.end_training()


def by_fabric(session: Session | None, directory: Path) -> None:
    strategy: Any = (
        "auto" if session is None else FabricStrategy(epochs=EPOCHS, session=session, max_grad_norm=1.0)
    )
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    model: Any = make_mlp()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader, evaluation = fabric.setup_dataloaders(
        DataLoader(Numbers(RECORDS), BATCH), DataLoader(Numbers(20), 7)
    )
    for epoch in range(EPOCHS):
        for number, (x, y) in enumerate(loader, start=1):
            accumulates = number % 2 != 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(torch.nn.functional.mse_loss(model(x), y) / 2)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        for x, y in evaluation:
            fabric.all_reduce(torch.nn.functional.mse_loss(model(x), y).detach())
        fabric.save(directory / f"{epoch}.ckpt", {"model": model})


def by_lightning(session: Session | None, directory: Path) -> None:
    trainer = trainer_of(
        "auto" if session is None else ElasticStrategy(session=session),
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        num_sanity_val_steps=2,
        enable_progress_bar=True,
        enable_model_summary=True,
        logger=CSVLogger(directory),
        callbacks=[
            ModelCheckpoint(directory / "checkpoints", monitor="val/loss", save_top_k=2),
            EarlyStopping("val/loss", patience=EPOCHS),
            LearningRateMonitor(),
        ],
    )
    trainer.fit(Net(), DataLoader(Numbers(RECORDS), BATCH), DataLoader(Numbers(20), 7))


def by_transformers(session: Session | None, directory: Path) -> None:
    trainer = trainers.make(
        directory,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        save_strategy="epoch",
        metric_for_best_model="loss",
        logging_strategy="steps",
        logging_steps=1,
        disable_tqdm=False,
    )
    if session is not None:
        prepare_trainer(trainer, session=session)
    trainer.add_callback(EarlyStoppingCallback(EPOCHS))
    trainer.train()
    trainer.save_model(str(directory / "model"))


@pytest.mark.parametrize("train", [by_accelerate, by_fabric, by_lightning, by_transformers])
def test_two_workers_hear_what_one_process_hears(
    tmp_path: Path, train: Callable[[Session | None, Path], None]
) -> None:
    with heard() as in_job, running_job(tmp_path / "job") as job:
        job.run(lambda session: train(session, tmp_path / "ours"), workers=2)
    with heard() as alone:
        train(None, tmp_path / "alone")
    assert sorted(in_job.texts - alone.texts) == []
