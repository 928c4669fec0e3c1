"""Parameter groups, learning rates and their schedulers work as on one process, also for who joins late."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_ps.errors import UsageError
from elastic_ps.worker.model.schedule import Interval
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import runtime_of
from tests.testing.oracle import (
    MakeOptimizer,
    assert_equal_up_to_round_off,
    mse,
    replay,
)
from tests.testing.polling import LIMIT
from tests.testing.trained import (
    Models,
    Scheduler,
    adam,
    await_training,
    check_against_replay,
    failing,
    sgd,
    training,
)

T = TypeVar("T")


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
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, partial(pow, 0.9)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[5],
    ),
}


INTERVAL: dict[str, Interval | None] = {"ReduceLROnPlateau": None}
"""Of all others: a step for each version."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(tmp_path: Path, name: str, make: MakeOptimizer) -> None:
    def step(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
        schedule.step(1.0) if name == "ReduceLROnPlateau" else schedule.step()

    check_against_replay(
        tmp_path,
        make_mlp,
        make,
        scheduler=SCHEDULERS[name],
        interval=INTERVAL.get(name, "step"),
        step_scheduler=step,
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("after", [1, 10])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_late_joiner_goes_on_where_the_schedule_stands(tmp_path: Path, name: str, after: int) -> None:
    """Worker 0 leaves after some steps together with worker 1, whose schedule is then the one that counts."""
    data, models = Numbers(160), Models()
    rates: dict[int, list[float]] = {}
    joined = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        schedule = session.scheduler(SCHEDULERS[name](optimizer), interval=INTERVAL.get(name, "step"))
        for step, (x, y) in enumerate(session.loader(data, 4)):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if session.worker == 0 and session.version == after:
                job.start(1, script)
                job.until(lambda: training(job, 1), "worker 1 waits for the next round")
                joined.set()
            rates.setdefault(session.version, []).append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if name == "ReduceLROnPlateau":
                schedule.step(1.0)
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
        session.scheduler(SCHEDULERS["LambdaLR"](optimizer), interval="step")
        if session.worker == 0:
            joined.set()
            job.until(lambda: training(job, 1), "the other one computes")
        for x, y in session.loader(data, 4):
            if session.worker == 1 and session.version == 0:
                job.until(lambda: training(job, 0), "the first one waits for the next round")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            rates[session.version] = optimizer.param_groups[0]["lr"]
            optimizer.step()

    with running_job(tmp_path) as job:
        job.start(0, script)
        assert joined.wait(LIMIT)
        job.start(1, script)
        job.join()
        assert any(len(commit["contributions"]) == 2 for commit in job.commits())
    assert rates == {version: pytest.approx(0.02 / (1 + version)) for version in rates}


def test_a_learning_rate_set_by_hand_counts_from_the_next_step(tmp_path: Path) -> None:
    def before(version: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + version % 3)

    check_against_replay(tmp_path, make_mlp, sgd, before=before)


@pytest.mark.parametrize("lost", ["worker", "server"])
@pytest.mark.parametrize("gamma", [1.0, 0.9], ids=["by hand", "with a schedule"])
def test_what_was_not_sent_yet_stays_when_the_worker_joins_again(
    tmp_path: Path, lost: str, gamma: float
) -> None:
    found = list[tuple[int, float, float]]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        if gamma < 1:
            session.scheduler(lr_scheduler.ExponentialLR(optimizer, gamma), interval="step")
        (group,) = optimizer.param_groups
        for step, (x, y) in enumerate(session.loader(Numbers(80), 4)):
            if step == 4:
                group["weight_decay"] = 0.25
                if gamma == 1:
                    group["lr"] = 0.005
                job.declare_gone(0) if lost == "worker" else job.restart(0)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            found.append((session.version, group["lr"], group["weight_decay"]))

    checkpoint = {"checkpoint": {"everyVersions": 1}}
    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints", parameterServer=checkpoint) as job:
        job.run(script, workers=1)
    assert [decay for _, _, decay in found] == [0] * 4 + [0.25] * (len(found) - 4)
    later = 0.02 if gamma < 1 else 0.005
    rates = [(0.02 if step < 4 else later) * gamma**version for step, (version, *_) in enumerate(found)]
    assert [rate for _, rate, _ in found] == pytest.approx(rates)


def joined_later(tmp_path: Path, prepare: Callable[[Session, torch.optim.Optimizer], T]) -> T:
    """What `prepare` returns on a worker that joins at version 4; the other worker has called it at first."""
    found = list[T]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        prepared = prepare(session, optimizer)
        if session.worker == 1:
            found.append(prepared)
            return
        for x, y in session.loader(Numbers(80), 4):
            if session.version == 4:
                job.start(1, script)
                job.until(lambda: bool(found), "another worker has its scheduler")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, worker={"replicas": 2}) as job:
        job.start(0, script)
        job.join()
    [prepared] = found
    return prepared


def test_what_was_set_before_a_scheduler_in_a_job_that_has_begun_stays(tmp_path: Path) -> None:
    """The scheduler's own rate does not."""

    def prepare(session: Session, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        (group,) = optimizer.param_groups
        if session.worker == 1:
            group["weight_decay"], group["lr"] = 0.25, 0.5
        session.scheduler(lr_scheduler.ExponentialLR(optimizer, 0.9), interval="step")
        return group["weight_decay"], group["lr"] / 0.9**session.version

    assert joined_later(tmp_path, prepare) == (0.25, pytest.approx(0.02))


class Decaying(lr_scheduler.LRScheduler):
    """A schedule of the weight decay, whose constructor sets the first one."""

    def get_lr(self) -> list[float | torch.Tensor]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * (1 + self.last_epoch)
        return [*self.base_lrs]


def test_what_the_constructor_of_a_users_scheduler_sets_is_not_the_scripts(tmp_path: Path) -> None:
    def prepare(session: Session, optimizer: torch.optim.Optimizer) -> tuple[float, int]:
        session.scheduler(Decaying(optimizer), interval="step")
        return optimizer.param_groups[0]["weight_decay"], session.version

    decay, version = joined_later(tmp_path, prepare)
    assert decay == pytest.approx(0.01 * version, abs=0.011)
    assert decay > 0.02


class OfUser(lr_scheduler.ReduceLROnPlateau):
    def step(self, val_loss: Any) -> None:  # type: ignore[override]
        super().step(val_loss)


@pytest.mark.parametrize("ends", ["whole", "break"])
def test_an_evaluation_of_an_epoch_counts_once_among_workers(tmp_path: Path, ends: str) -> None:
    schedulers = list[lr_scheduler.ReduceLROnPlateau]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        scheduler = session.scheduler(OfUser(optimizer))
        schedulers.append(pickle.loads(pickle.dumps(scheduler)))
        loader = session.loader(Numbers(80), 4, epochs=5)
        for _ in loader.epochs():
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
                if ends == "break" and number == 6:
                    break
            scheduler.step(val_loss=1.0)
        schedulers.append(scheduler)

    with running_job(tmp_path, data={"shardRecords": 4}) as job:
        job.run(script, workers=2)
    assert {type(each).__name__ for each in schedulers} == {"OfUser"}
    # One that joins after the first epoch may evaluate before it knows of the other one's evaluation.
    assert 4 <= max(each.last_epoch for each in schedulers) <= 5


def test_a_job_that_is_resumed_without_a_scheduler_takes_rates_set_by_hand(tmp_path: Path) -> None:
    rates = list[float]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        scheduler = None
        if session.version:
            optimizer.param_groups[0]["lr"] = 0.005
        else:
            scheduler = session.scheduler(lr_scheduler.ReduceLROnPlateau(optimizer))
        for x, y in session.loader(Numbers(80), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if scheduler is not None:
                scheduler.step(1.0)
                if session.version == 3:
                    session.drain()

    for resume in ("no", "require"):
        with running_job(tmp_path / resume, checkpoints=tmp_path / "checkpoints", resume=resume) as job:
            job.run(script, workers=1)
    assert rates == [0.02] * 3 + [0.005] * (len(rates) - 3)


POSITIONS: dict[str, tuple[Interval, Scheduler]] = {
    "sample": ("sample", lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=2 * 120)),
    "sample, one by one": ("sample", lambda o: lr_scheduler.StepLR(o, step_size=50, gamma=0.5)),
    "epoch": ("epoch", lambda o: lr_scheduler.ExponentialLR(o, 0.5)),
    "batch": (lambda samples: samples // 8, lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.5)),
    "fraction": (lambda samples: samples / 9, lambda o: lr_scheduler.OneCycleLR(o, 0.03, total_steps=30)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("consistency", [{}, {"backupWorkers": 1}], ids=["sync", "backup workers"])
@pytest.mark.parametrize("name", POSITIONS)
def test_a_schedule_follows_the_jobs_progress(tmp_path: Path, name: str, consistency: dict[str, Any]) -> None:
    """Two workers, then three, and a lost server: a version's learning rate is that of its records."""
    data, records, epochs = Numbers(120), 120, 2
    interval, make = POSITIONS[name]
    rates: dict[tuple[int, int], set[float]] = {}

    def join_in() -> None:
        job.start(2, script)
        job.until(lambda: training(job, 2), "worker 2 trains")

    def lose_the_server() -> None:
        job.restart(0)

    todo = [(6, join_in), (12, lose_the_server)]

    def script(session: Session) -> None:
        model = make_mlp(seed=session.worker)
        optimizer = session.optimizer(sgd(model), model)
        session.scheduler(make(optimizer), interval=interval)
        for x, y in session.loader(data, 4, epochs=epochs):
            if session.version == 0:
                await_training(job, 0, 1)
            if session.worker == 0 and todo and session.version >= todo[0][0]:
                todo[0][1]()
                todo.pop(0)
            elif session.worker == 1:
                job.until(lambda: all(session.version < at for at, _ in todo[:1]), "worker 0 has come so far")
            optimizer.zero_grad()
            mse(model, x, y).backward()
            base, rate = (runtime_of(session).client.term, session.version), optimizer.param_groups[0]["lr"]
            optimizer.step()
            if session.version > base[1]:  # else the step came too late, and was not made
                rates.setdefault(base, set()).add(rate)

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "kept",
        consistency=consistency,
        parameterServer={"checkpoint": {"everyVersions": 1}},
        data={"shardRecords": 8},
    ) as job:
        job.run(script, workers=2)
        made = {c["version"]: c for c in job.commits()}  # the last ones: some versions were made twice
    assert not todo
    commits = [made[version] for version in sorted(made)]
    assert {c["term"] for c in commits} == {1, 2}
    reference = sgd(make_mlp())
    expected = make(reference)
    left, samples, done = [records] * epochs, 0, 0
    for version, commit in enumerate(commits):
        (rate,) = rates[commit["term"], version]  # one for all workers
        assert rate == pytest.approx(reference.param_groups[0]["lr"]), version
        for r in [r for c in commit["contributions"] for r in c["records"]]:
            left[r[0]] -= r[2] - r[1]
        samples = records * epochs - sum(left)
        complete = next((epoch for epoch, missing in enumerate(left) if missing), epochs)
        reference.step()
        counted = {"sample": samples, "epoch": complete}
        steps = int(interval(samples)) if callable(interval) else counted[str(interval)]
        for _ in range(steps - done):
            expected.step()
        done = steps
    assert samples == records * epochs


def test_who_steps_a_schedule_is_said_once(tmp_path: Path) -> None:
    def script(session: Session, make: Scheduler, interval: Any, *, steps: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        schedule = session.scheduler(make(optimizer), interval=interval)
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if steps:
                schedule.step()

    makers = {**SCHEDULERS, "short": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=5)}

    def refused(name: str, interval: Any, match: str, *, steps: bool = False) -> None:
        failing(
            tmp_path / match[:4],
            lambda s: script(s, makers[name], interval, steps=steps),
            UsageError,
            match,
        )

    refused("StepLR", None, "interval is None; expected 'step', 'epoch' or 'sample'")
    refused("StepLR", "batch", "interval is 'batch'; expected")
    refused("ReduceLROnPlateau", "epoch", r"leave interval out, and call scheduler.step\(value\)")
    refused("StepLR", "step", r"the script has stepped the StepLR .* remove scheduler.step\(\)", steps=True)
    refused("short", "step", r"OneCycleLR cannot make step 6: .* Use interval='sample'")


def test_a_script_with_another_learning_rate_is_told_whose_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job's goes on, as it must when a worker joins in the middle of a schedule."""

    def script(session: Session, lr: float) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=lr), model)
        session.scheduler(lr_scheduler.ExponentialLR(optimizer, 0.5), interval="step")
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**session.version
            optimizer.step()
            if session.version == 5 and not tmp_path.joinpath("2").exists():
                session.drain()

    def run(name: str, lr: float, **options: Any) -> None:
        caplog.clear()
        with running_job(tmp_path / name, checkpoints=tmp_path / "kept", **options) as job:
            job.start(0, lambda session: script(session, lr))
            job.join()

    run("1", 0.1)
    assert "lr=" not in caplog.text
    run("2", 0.3, resume="require")
    assert "param_groups[0] has lr=0.3, but the job began with 0.1" in caplog.text
