"""Scripts that make no step with some batches: these are not trained, and counted as skipped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import ElasticPSError, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Tally, running_job
from tests.testing.polling import LIMIT
from tests.testing.trained import await_training, failing

RECORDS, BATCH = 20, 4
SKIPPED = [4, 5, 6, 7, 16, 17, 18, 19]
"""The records of the second batch and of the last one, in the order of the data."""


class Pair(torch.nn.Module):
    """Two tallies with the same loss: whatever is counted in one is counted in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tally(RECORDS), Tally(RECORDS)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.first(batch) + self.second(batch)
        return loss


Script = Callable[[Session, Pair, torch.optim.Optimizer], None]


def bad(batch: torch.Tensor) -> bool:
    return int(batch[0]) in SKIPPED


def leaves_batches_out(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    for batch in session.loader(Indexes(RECORDS), BATCH):
        optimizer.zero_grad()
        loss = model(batch)
        if bad(batch):
            continue
        loss.backward()
        optimizer.step()


def steps_without_gradients(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    for batch in session.loader(Indexes(RECORDS), BATCH):
        optimizer.zero_grad()
        loss = model(batch)
        if not bad(batch):
            loss.backward()
        optimizer.step()


def assigns_gradients(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    parameters = list(model.parameters())
    for batch in session.loader(Indexes(RECORDS), BATCH):
        gradients = torch.autograd.grad(model(batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def assigns_gradients_of_some(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    parameters = list(model.parameters())
    for batch in session.loader(Indexes(RECORDS), BATCH):
        if bad(batch):
            continue
        gradients = torch.autograd.grad(model(batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def changes_gradients_of_some(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    """In place, and zero in between."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for batch in session.loader(Indexes(RECORDS), BATCH):
        optimizer.zero_grad(set_to_none=False)
        if bad(batch):
            continue
        gradients = torch.autograd.grad(model(batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad += gradient
        optimizer.step()


def zeroes(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    for batch in session.loader(Indexes(RECORDS), BATCH):
        model(batch).backward()
        if not bad(batch):
            optimizer.step()
        optimizer.zero_grad()


def twice(loss: torch.Tensor) -> None:
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()


def leaves_batches_out_of_two(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    for batch in session.loader(Indexes(RECORDS), BATCH):
        optimizer.zero_grad()
        if bad(batch):
            continue
        twice(model(batch))
        optimizer.step()


def zeroes_two(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    for batch in session.loader(Indexes(RECORDS), BATCH):
        twice(model(batch))
        if not bad(batch):
            optimizer.step()
        optimizer.zero_grad()


def zeroes_the_model(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    for batch in session.loader(Indexes(RECORDS), BATCH):
        model.zero_grad()
        (model(batch) * (float("nan") if bad(batch) else 1)).backward()
        if not bad(batch):
            optimizer.step()


def zeroes_the_model_at_once(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    """As Hugging Face's Trainer does where a GradScaler makes no step."""
    for batch in session.loader(Indexes(RECORDS), BATCH):
        (model(batch) * (float("inf") if bad(batch) else 1)).backward()
        if not bad(batch):
            optimizer.step()
        model.zero_grad()


def scales(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    for batch in session.loader(Indexes(RECORDS), BATCH):
        optimizer.zero_grad()
        loss = model(batch) * (float("inf") if bad(batch) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def says_so(session: Session, model: Pair, optimizer: Any) -> None:
    for batch in session.loader(Indexes(RECORDS), BATCH):
        model(batch).backward()
        if bad(batch):
            optimizer.skip()
        else:
            optimizer.step()
        optimizer.zero_grad()


def goes_on_after_an_error(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    for batch in session.loader(Indexes(RECORDS), BATCH):
        optimizer.zero_grad()
        (model(batch) * (float("nan") if bad(batch) else 1)).backward()
        try:
            optimizer.step()
        except ElasticPSError as error:
            assert "NaN" in str(error)  # noqa: PT017 (it is one of five steps)


@pytest.mark.parametrize(
    ("script", "overlap"),
    [
        (leaves_batches_out, True),
        (leaves_batches_out, False),
        (steps_without_gradients, True),
        (steps_without_gradients, False),
        (assigns_gradients_of_some, True),
        (assigns_gradients_of_some, False),
        (changes_gradients_of_some, False),
        (zeroes, True),
        (zeroes, False),
        (leaves_batches_out_of_two, False),
        (zeroes_two, False),
        (zeroes_the_model, False),
        (zeroes_the_model_at_once, True),
        (zeroes_the_model_at_once, False),
        (goes_on_after_an_error, True),
        (goes_on_after_an_error, False),
        (scales, False),
        (says_so, True),
        (says_so, False),
    ],
)
def test_what_is_skipped_is_not_in_the_model(tmp_path: Path, script: Script, overlap: bool) -> None:
    counted = []

    def run(session: Session) -> None:
        model = Pair()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=overlap)
        script(session, model, optimizer)
        assert session.is_chief
        counted.append(-model.first.weight.detach())

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job.start(0, run)
        job.join()
        progress = job.status().progress
    assert counted[0].tolist() == [0.0 if record in SKIPPED else 1.0 for record in range(RECORDS)]
    assert (progress.records_applied, progress.records_skipped) == (RECORDS - len(SKIPPED), len(SKIPPED))
    assert progress.finished
    assert progress.percent == 100
    assert [c["samples"] for commit in job.commits() for c in commit["contributions"]] == [4, 4, 4]
    assert check(read(tmp_path / "history"), Data(RECORDS, 1)) == []


@pytest.mark.parametrize("script", [scales, zeroes_the_model_at_once])
@pytest.mark.parametrize("consistency", [{"backupWorkers": 1}, {"mode": "accumulate", "gradients": 1}])
def test_a_batch_without_a_step_is_not_accumulated(
    tmp_path: Path, script: Script, consistency: dict[str, Any]
) -> None:
    """Neither where a GradScaler makes no step, nor where the gradients are dropped."""

    def run(session: Session) -> None:
        model = Pair()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=False)
        script(session, model, optimizer)

    with running_job(tmp_path, data={"shuffle": False}, consistency=consistency) as job:
        job.start(0, run)
        job.join()
        progress = job.status().progress
    assert (progress.records_applied, progress.records_skipped) == (RECORDS - len(SKIPPED), len(SKIPPED))


@pytest.mark.parametrize(
    "consistency",
    [
        {},
        {"backupWorkers": 1},
        {"mode": "bounded", "maxStaleness": 1},
        {"mode": "accumulate", "gradients": 3},
        {"mode": "async"},
    ],
)
def test_a_step_that_is_skipped_holds_nobody_up(tmp_path: Path, consistency: dict[str, Any]) -> None:
    """Worker 0 leaves out every second step, when some of it has been sent already."""
    records, skips = 160, threading.Event()

    def script(session: Session) -> None:
        model = Tally(records)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for number, batch in enumerate(session.loader(Indexes(records), 4)):
            if number == 0:
                await_training(job, 0, 1)
            if session.worker and number == 2:
                assert skips.wait(LIMIT)
            optimizer.zero_grad()
            model(batch).backward()
            if session.worker == 0 and number % 2:
                optimizer.skip()
                skips.set()
                continue
            optimizer.step()

    with running_job(
        tmp_path, worker={"replicas": 2}, consistency=consistency, parameterServer={"bucketBytes": 1024}
    ) as job:
        job.run(script, workers=2)
        progress = job.status().progress
        assert progress.records_applied + progress.records_skipped == records
        assert progress.records_skipped
        most = job.spec.consistency.most_stale
    assert check(read(tmp_path / "history"), Data(records, 1), max_staleness=most) == []


def test_a_batch_that_is_computed_on_twice_counts_once(tmp_path: Path) -> None:
    """As in sharpness-aware minimization, which drops the first gradients."""

    def script(session: Session) -> None:
        model = Pair()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=False)
        for batch in session.loader(Indexes(RECORDS), BATCH):
            model(batch).backward()
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.first.weight.tolist() == [-1.0] * RECORDS

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.records_applied == RECORDS


def test_a_batch_may_be_loaded_while_the_one_before_is_trained(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Pair()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        batches = iter(session.loader(Indexes(RECORDS), BATCH))
        batch = next(batches, None)
        while batch is not None:
            optimizer.zero_grad()
            model(batch).backward()
            batch = next(batches, None)
            optimizer.step()
        assert model.first.weight.tolist() == [-1.0] * RECORDS
        assert session.is_chief

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.records_applied == RECORDS


def adds_gradients_up(session: Session, model: Pair, optimizer: torch.optim.Optimizer) -> None:
    parameters = list(model.parameters())
    for number, batch in enumerate(session.loader(Indexes(RECORDS), BATCH)):
        gradients = torch.autograd.grad(model(batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("trains", [assigns_gradients, adds_gradients_up])
def test_gradients_that_a_script_assigns_are_trained(tmp_path: Path, trains: Script) -> None:
    def script(session: Session) -> None:
        model = Pair()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        trains(session, model, optimizer)
        assert model.first.weight.tolist() == [-1.0] * RECORDS

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.records_applied == RECORDS


def test_a_local_step_without_gradients_skips_its_batch(tmp_path: Path) -> None:
    """Nothing is exchanged for it, so it is no step between two exchanges either."""

    def script(session: Session) -> None:
        model = Pair()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        steps_without_gradients(session, model, optimizer)
        assert session.is_chief

    with running_job(tmp_path, consistency={"mode": "local", "steps": 2}, data={"shuffle": False}) as job:
        job.start(0, script)
        job.join()
        progress = job.status().progress
        samples = [c["samples"] for commit in job.commits() for c in commit["contributions"]]
    assert (progress.records_applied, progress.records_skipped) == (RECORDS - len(SKIPPED), len(SKIPPED))
    assert samples == [8, 4]
    assert check(read(tmp_path / "history"), Data(RECORDS, 1)) == []


def test_a_local_step_that_drops_its_gradients_is_one(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Pair()
        wrapped = torch.optim.SGD(model.parameters(), lr=1.0)
        wrapped.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        assigns_gradients(session, model, session.optimizer(wrapped, model))

    with running_job(tmp_path, consistency={"mode": "local", "steps": 2}) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.records_applied == RECORDS


def test_a_script_without_backward_may_train_buffers(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for batch in session.loader(Indexes(RECORDS), BATCH):
            with torch.no_grad():
                model(batch.reshape(-1, 1).float())
            optimizer.step()
        assert model[1].num_batches_tracked == RECORDS // BATCH

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.records_applied == RECORDS


def test_one_of_several_optimizers_makes_no_step_without_gradients(tmp_path: Path) -> None:
    """Both have none for a batch, and each has some for the others."""

    def script(session: Session) -> None:
        model = Pair()
        optimizers = session.optimizer(
            {
                name: torch.optim.SGD(part.parameters(), lr=1.0)
                for name, part in (("first", model.first), ("second", model.second))
            },
            model,
        )
        for number, batch in enumerate(session.loader(Indexes(RECORDS), BATCH)):
            optimizers.zero_grad()
            loss = model(batch)
            if not bad(batch):
                loss.backward()
            optimizers["second" if number % 2 else "first"].step()
        assert session.is_chief

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job.start(0, script)
        job.join()
        progress = job.status().progress
    assert (progress.records_applied, progress.records_skipped) == (RECORDS - len(SKIPPED), len(SKIPPED))


@pytest.mark.parametrize("does", ["nothing", "step", "skip"])
def test_a_job_that_trains_nothing_fails(tmp_path: Path, does: str) -> None:
    def script(session: Session) -> None:
        model = Pair()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for batch in session.loader(Indexes(RECORDS), BATCH):
            loss = model(batch)
            if does == "skip":
                loss.backward()
                optimizer.skip()
            elif does == "step":
                optimizer.step()

    failing(tmp_path, script, UsageError, r"no step was made.* had no backward\(\), or the script skipped")
