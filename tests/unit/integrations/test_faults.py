"""What workers of each library train together, also while one and the server die and another comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from elastic_ps.integrations.accelerate import ElasticAccelerator
from elastic_ps.integrations.fabric import ElasticStrategy as FabricStrategy
from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.integrations.transformers import prepare_trainer
from elastic_ps.worker.session import Session
from tests.testing import trainers
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.lightning import MARKS, Net, trainer_of
from tests.testing.oracle import assert_each_record_once, of_the_end, replay
from tests.testing.polling import LIMIT
from tests.testing.trained import asks

EPOCHS, RECORDS, BATCH = 3, 48, 8
pytestmark = MARKS


class Paused:
    """Data that nobody reads on in once one of its records is asked for, until `goes_on` is set."""

    def __init__(self, data: Any, at: int = RECORDS // 2) -> None:
        self._data, self._at = data, at
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if index == self._at and not self.reached.is_set():
            self.reached.set()
            assert self.goes_on.wait(LIMIT)
        return self._data[index]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x.double()), y.double())


def by_accelerate(session: Session | None, data: Any, batch: int, steps: int = 1) -> Any:
    options: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": steps}
    accelerator: Any = (
        Accelerator(**options)
        if session is None
        else ElasticAccelerator(epochs=EPOCHS, session=session, **options)
    )
    model = make_mlp().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch))
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model) if steps > 1 else nullcontext():
                accelerator.backward(loss_of(model, x, y))
                optimizer.step()
                optimizer.zero_grad()
    return model


def by_fabric(session: Session | None, data: Any, batch: int, steps: int = 1) -> Any:
    strategy: Any = "auto" if session is None else FabricStrategy(epochs=EPOCHS, session=session)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    model: Any = make_mlp().double()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data, batch))
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader, start=1):
            accumulates = number % steps != 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(loss_of(model, x, y) / steps)
            if not accumulates:
                optimizer.step()
                optimizer.zero_grad()
    return model.module


class Constant(Net):
    """It has no schedule."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def by_lightning(
    session: Session | None, data: Any, batch: int, steps: int = 1, kind: type[Net] = Constant
) -> Any:
    module = kind()
    strategy: Any = "auto" if session is None else ElasticStrategy(session=session)
    trainer = trainer_of(strategy, max_epochs=EPOCHS, accumulate_grad_batches=steps)
    trainer.fit(module, DataLoader(data, batch), DataLoader(Numbers(20), 7))
    return module.mlp


def by_transformers(session: Session | None, data: Any, batch: int, directory: Path) -> Any:
    options: dict[str, Any] = {"per_device_train_batch_size": batch, "num_train_epochs": EPOCHS}
    options |= {"eval_strategy": "no", "lr_scheduler_type": "constant"}
    trainer = trainers.make(directory, **options)
    trainer.train_dataset = data
    if session is not None:
        prepare_trainer(trainer, session=session)
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("library", ["accelerate", "Fabric", "Lightning", "transformers"])
def test_a_worker_and_the_server_die_and_a_worker_comes(tmp_path: Path, library: str) -> None:
    scripts: dict[str, tuple[Callable[..., Any], Any]] = {
        "accelerate": (by_accelerate, Numbers(RECORDS)),
        "Fabric": (by_fabric, Numbers(RECORDS)),
        "Lightning": (partial(by_lightning, kind=Net), Numbers(RECORDS)),
        "transformers": (
            lambda session, data, batch: by_transformers(session, data, batch, tmp_path),
            trainers.Records(RECORDS),
        ),
    }
    train, data = scripts[library]
    alone, paused, ours = train(None, data, BATCH), Paused(data), dict[int, Any]()

    def script(session: Session) -> None:
        ours[session.worker] = train(session, paused, BATCH // 2)

    together = {"globalBatchSize": BATCH}
    fields: dict[str, Any] = {"consistency": together, "data": {"shuffle": False}}
    with running_job(tmp_path / "job", checkpoints=tmp_path / "checkpoints", **fields) as job:
        for worker in (0, 1):
            job.start(worker, script)
        assert paused.reached.wait(LIMIT)
        job.until(lambda: 1 in job.coordinator.job.state.members.live, "worker 1 is there")
        before = job.status().progress.version
        job.declare_gone(1)
        job.restart(0)
        job.start(2, script)
        job.until(lambda: 2 in ours or asks(job, 2), "worker 2 asks for records")
        paused.goes_on.set()
        job.join()
        assert_each_record_once(of_the_end(job.commits()), records=RECORDS, epochs=EPOCHS)
        assert 0 < before < job.status().progress.version == EPOCHS * RECORDS // BATCH
    assert set(ours) == {0, 1, 2}
    for model in ours.values():
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


class Begun:
    """Data whose first record comes when all workers ask for one."""

    def __init__(self, data: Any, all_workers: threading.Barrier) -> None:
        self._data, self._waits = data, [all_workers]

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        while self._waits:
            self._waits.pop().wait(LIMIT)
        return self._data[index]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("train", [by_accelerate, by_fabric, by_lightning])
def test_the_steps_of_two_workers_are_those_of_one_process(
    tmp_path: Path, train: Callable[..., Any], steps: int
) -> None:
    """Each trains the batches that it gets, also where a step has several.

    As alone, the step with the rest of an epoch has the gradient of its batches divided by `steps`.
    """
    records, both, ours = RECORDS + BATCH, threading.Barrier(2), list[Any]()

    def script(session: Session) -> None:
        ours.append(train(session, Begun(Numbers(records), both), BATCH, steps))

    with running_job(tmp_path, data={"shuffle": False, "shardRecords": BATCH}) as job:
        job.run(script, workers=2)
        commits = job.commits()
    assert_each_record_once(commits, records=records, epochs=EPOCHS)
    sizes = [
        [sum(stop - start for _, start, stop in c["records"]) for c in each["contributions"]]
        for each in commits
    ]
    assert [steps * BATCH] * 2 in sizes
    assert steps == 1 or {BATCH, steps * BATCH} in map(set, sizes)
    parts = iter(sizes)

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        shares = torch.cat([torch.full((size, 1), size / (steps * BATCH)) for size in next(parts)])
        return (shares.double() * (model(x) - y).square()).mean()

    alone = make_mlp().double()
    replay(
        commits,
        Numbers(records),
        alone,
        lambda model: torch.optim.AdamW(model.parameters(), 0.01),
        job.spec,
        loss=loss,
    )
    for model in ours:
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
