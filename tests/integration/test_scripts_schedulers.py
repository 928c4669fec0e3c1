"""Parameter groups, learning rates and their schedulers work as on one process, also for who joins late."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ps.worker.schedule import Interval
from elastic_ps.worker.session import Session
from tests.integration.harness import Numbers, make_mlp, running_job
from tests.integration.oracle import (
    MakeOptimizer,
    assert_equal_up_to_round_off,
    mse,
    replay,
)
from tests.integration.trained import (
    Models,
    Scheduler,
    adam,
    check_against_replay,
    sgd,
    training,
)


def test_parameter_groups_keep_their_hyperparameters(tmp_path: Path) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        first, *others = [list(layer.parameters()) for layer in model.children()]
        rest = [p for layer in others for p in layer]
        groups = [{"params": first, "lr": 0.01}, {"params": rest, "momentum": 0.5, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.03, momentum=0.9)

    check_against_replay(tmp_path, make_mlp, make, parameterServer={"replicas": 2, "bucketBytes": 1024})


SCHEDULERS: dict[str, Scheduler] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=100),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(tmp_path: Path, name: str, make: MakeOptimizer) -> None:
    def step(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
        schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()

    check_against_replay(tmp_path, make_mlp, make, scheduler=SCHEDULERS[name], step_scheduler=step)


@pytest.mark.parametrize(("after", "interval"), [(10, None), (1, "step")])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_late_joiner_goes_on_where_the_schedule_stands(
    tmp_path: Path, name: str, after: int, interval: Interval | None
) -> None:
    """Worker 0 leaves after some steps together with worker 1, whose schedule is then the one that counts."""
    data, models = Numbers(160), Models()
    rates: dict[int, list[float]] = {}
    joined = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        schedule = session.scheduler(SCHEDULERS[name](optimizer), interval=interval)
        for step, (x, y) in enumerate(session.loader(data, 4)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 0 and session.version == after:
                job.start(1, script)
                job.until(lambda: training(job, 1), "worker 1 waits for the next round")
                joined.set()
            rates.setdefault(session.version, []).append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()
            if session.worker == 0 and step == 14:
                session.drain()
        models[session.worker] = model

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        commits, spec = job.commits(), job.spec
    assert {c["worker"] for c in commits[-1]["contributions"]} == {1}
    reference = sgd(make_mlp())
    expected = SCHEDULERS[name](reference)
    for version in range(len(commits)):
        assert rates[version] == pytest.approx([reference.param_groups[0]["lr"]] * len(rates[version])), (
            version
        )
        reference.step()
        expected.step(1.0) if name == "ReduceLROnPlateau" else expected.step()

    def replayed(model: torch.nn.Module) -> None:
        optimizer = sgd(model)
        schedule = SCHEDULERS[name](optimizer)

        def step(version: int, _: torch.optim.Optimizer) -> None:
            schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()

        replay(commits, data, model, lambda m: optimizer, spec, after=step)

    assert_equal_up_to_round_off(models[1], make_mlp(), replayed)


def test_who_joins_first_and_begins_last_does_not_set_the_schedule_back(tmp_path: Path) -> None:
    data, joined = Numbers(80), threading.Event()
    rates: dict[int, float] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        schedule = session.scheduler(SCHEDULERS["LambdaLR"](optimizer))
        if session.worker == 0:
            joined.set()
            job.until(lambda: training(job, 1), "the other one computes")
        for x, y in session.loader(data, 4):
            if session.worker == 1 and session.version == 0:
                job.until(lambda: training(job, 0), "the first one waits for the next round")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            rates[session.version] = optimizer.param_groups[0]["lr"]
            schedule.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        joined.wait(30)
        job.start(1, script)
        job.join()
        assert any(len(commit["contributions"]) == 2 for commit in job.commits())
    assert rates == {version: pytest.approx(0.02 / version) for version in rates}


def test_a_learning_rate_set_by_hand_counts_from_the_next_step(tmp_path: Path) -> None:
    def before(version: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + version % 3)

    check_against_replay(tmp_path, make_mlp, sgd, before=before)
