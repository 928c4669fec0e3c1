"""Scripts of accelerate and Fabric that load all batches of a step before they compute on them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from elastic_ps.integrations.accelerate import ElasticAccelerator
from elastic_ps.integrations.fabric import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once

pytestmark = pytest.mark.usefixtures("workers_may_be_threads")

EPOCHS, RECORDS, BATCH = 3, 50, 4
"""13 batches: groups of 2 and of 3 leave a smaller one at the end of an epoch, groups of 13 do not."""


def groups_of(loader: Any, size: int) -> Iterator[list[Any]]:
    """As the Trainer's `get_batch_samples` loads them."""
    batches = iter(loader)
    while group := list(islice(batches, size)):
        yield group


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x.double()), y.double())


def prepared(accelerator: Any) -> Any:
    model = make_mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return accelerator.prepare(model, optimizer, DataLoader(Numbers(RECORDS), batch_size=BATCH))


def by_accelerate(accelerator: Any, size: int, epochs: int = EPOCHS) -> Any:
    model: Any = make_mlp().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(Numbers(RECORDS), batch_size=BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(epochs):
        for group in groups_of(loader, size):
            for x, y in group:
                loss = loss_of(model, x, y)
                accelerator.backward(loss * size / len(group))
                assert accelerator.is_main_process == accelerator.is_local_main_process
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model


def by_fabric(fabric: Any, size: int, epochs: int = EPOCHS) -> Any:
    model: Any = make_mlp().double()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(Numbers(RECORDS), batch_size=BATCH))
    for _ in range(epochs):
        for group in groups_of(loader, size):
            for x, y in group:
                loss = loss_of(model, x, y)
                fabric.backward(loss / len(group))
                assert fabric.is_global_zero == (fabric.global_rank == 0)
            optimizer.step()
            optimizer.zero_grad()
    return model.module


def accelerator_of(session: Session | None, size: int) -> Any:
    if session is None:
        return Accelerator(cpu=True, gradient_accumulation_steps=size)
    return ElasticAccelerator(epochs=EPOCHS, session=session, cpu=True, gradient_accumulation_steps=size)


def fabric_of(session: Session | None, _: int) -> Any:
    strategy: Any = "auto" if session is None else ElasticStrategy(epochs=EPOCHS, session=session)
    return Fabric(accelerator="cpu", devices=1, strategy=strategy)


LIBRARIES = pytest.mark.parametrize(
    ("script", "make"),
    [(by_accelerate, accelerator_of), (by_fabric, fabric_of)],
    ids=["accelerate", "Fabric"],
)


@pytest.mark.parametrize("workers", [1, 2])
@LIBRARIES
def test_a_script_that_stops_between_two_epochs_ends_the_training(
    tmp_path: Path, script: Any, make: Any, workers: int
) -> None:
    def in_job(session: Session) -> None:
        script(make(session, 1), 1, epochs=1)
        session.finish()  # as at the end of a script

    with running_job(tmp_path, data={"shardRecords": BATCH}) as job:
        job.run(in_job, workers=workers)
        assert "left its loop" in job.status().progress.stopped
        assert RECORDS <= job.status().progress.records_applied < EPOCHS * RECORDS


@pytest.mark.parametrize("size", [2, 3, 13])
@LIBRARIES
@pytest.mark.parametrize("workers", [1, 2])
def test_the_last_group_of_each_epoch_is_trained(
    tmp_path: Path, script: Any, make: Any, size: int, workers: int
) -> None:
    ours = dict[int, torch.nn.Module]()

    def in_job(session: Session) -> None:
        ours[session.worker] = script(make(session, size), size)

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job.run(in_job, workers=workers)
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
        assert job.status().progress.records_skipped == 0
    if workers == 1:
        for a, b in zip(ours[0].parameters(), script(make(None, size), size).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("epoch", [0, EPOCHS - 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_last_group_of_an_epoch_is_lost(tmp_path: Path, epoch: int, workers: int) -> None:
    """The records of a lost step come again, to whom asks its iterator again."""
    job_of = list[Any]()

    def in_job(session: Session) -> None:
        accelerator = accelerator_of(session, 1)
        model, optimizer, loader = prepared(accelerator)
        for number in range(EPOCHS):
            for group in groups_of(loader, 2):
                for x, y in group:
                    accelerator.backward(loss_of(model, x, y))
                if number == epoch and not loader.looping and job_of:
                    job_of.pop().declare_gone(session.worker)
                optimizer.step()
                optimizer.zero_grad()

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job_of.append(job)
        job.run(in_job, workers=workers)
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
    assert not job_of


@pytest.mark.parametrize("drops", [pytest.param(True, id="drops it"), pytest.param(False, id="accumulates")])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_after_a_group_that_has_no_step_of_its_own_one_worker_is_the_chief(
    tmp_path: Path, drops: bool, workers: int
) -> None:
    chiefs = list[int]()

    def in_job(session: Session) -> None:
        accelerator = accelerator_of(session, 2)
        model, optimizer, loader = prepared(accelerator)
        for _ in range(EPOCHS):
            for group in groups_of(loader, 2):
                if drops and len(group) < 2:
                    break
                for x, y in group:
                    with accelerator.accumulate(model):
                        accelerator.backward(loss_of(model, x, y))
                        optimizer.step()
                        optimizer.zero_grad()
        if accelerator.is_main_process:
            chiefs.append(session.worker)
            assert drops or session.samples == EPOCHS * RECORDS

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job.run(in_job, workers=workers)
        if not drops:
            assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
    assert len(chiefs) == 1


def test_an_iterator_that_has_ended_with_a_group_is_over_when_the_next_loop_begins(tmp_path: Path) -> None:
    def in_job(session: Session) -> None:
        model, optimizer, loader = prepared(accelerator := accelerator_of(session, 1))
        before = iter(())
        for _ in range(EPOCHS):
            batches = iter(loader)
            for _ in range(7):  # of 2 batches, and the last one of 1
                for x, y in list(islice(batches, 2)):
                    accelerator.backward(loss_of(model, x, y))
                optimizer.step()
                optimizer.zero_grad()
            assert next(before, None) is None
            assert not loader.looping
            before = batches

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job.run(in_job, workers=1)
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)


def test_who_asks_for_more_batches_than_its_own_is_told_why(tmp_path: Path) -> None:
    said = list[str]()

    def in_job(session: Session) -> None:
        model, optimizer, loader = prepared(accelerator_of(session, 1))
        batches = iter(loader)
        for _ in range(len(loader)):
            x, y = next(batches)
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(StopIteration) as ended:
            next(batches)
        said.append(str(ended.value))
        for _ in range(1, EPOCHS):
            for _ in loader:
                pass

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job.run(in_job, workers=1)
    assert "no further batch of the epoch" in said[0]
