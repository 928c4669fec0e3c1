"""What the tests of training scripts share: scripts that are run, and plain torch on the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from elastic_ps.worker.model.schedule import Interval
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, running_job
from tests.testing.inside import is_followed
from tests.testing.oracle import (
    Loss,
    MakeOptimizer,
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    replay,
)

T = TypeVar("T")
Models = dict[int, torch.nn.Module]
MakeModel = Callable[[], torch.nn.Module]
Scheduler = Callable[[torch.optim.Optimizer], Any]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.005)


def training(job: Job, worker: int) -> bool:
    return any(m.worker == worker and m.state == "training" for m in job.status().members)


def await_training(job: Job, *workers: int) -> None:
    """Wait until all of these take part in the rounds, at least from the next one on, or have done so."""

    def there(worker: int) -> bool:
        members = [member for member in job.status().members if member.worker == worker]
        return any(member.steps or member.state not in ("joining", "idle") for member in members)

    job.until(lambda: all(map(there, workers)), f"workers {workers} take part")


def await_standbys(job: Job) -> None:
    """Wait until every standby has its shard's model, or is getting it."""
    job.until(lambda: all(is_followed(server.node) for server in job.servers), "the standbys are told")


def together(job: Job, loader: Iterable[T], workers: int) -> Iterator[T]:
    """A loader's batches. With the first one a worker waits until so many take part, so none trains alone."""
    for number, batch in enumerate(loader):
        if not number:
            await_training(job, *range(workers))
        yield batch


def asks(job: Job, *workers: int) -> bool:
    """Whether all of these have records, or have asked for some: the next version has a part for each."""
    guarded = job.coordinator.job
    with guarded.lock:
        state = guarded.state
        return {*workers} <= state.rounds.expected | state.rounds.waiting | state.starved


def alone(tmp_path: Path, script: Callable[[Session], Any], **fields: Any) -> list[dict[str, Any]]:
    """Run a script as a job's only worker; returns the commits."""
    with running_job(tmp_path, **fields) as job:
        job.start(0, script)
        job.join()
        return job.commits()


def failing(
    tmp_path: Path, script: Callable[[Session], Any], kind: type[BaseException], match: str, **fields: Any
) -> None:
    with pytest.raises(kind, match=match):
        alone(tmp_path, script, **fields)


def check_against_replay(
    tmp_path: Path,
    make_model: MakeModel,
    make: MakeOptimizer,
    *,
    loss: Loss = mse,
    scheduler: Scheduler | None = None,
    before: Callable[[int, torch.nn.Module, torch.optim.Optimizer], None] | None = None,
    set_to_none: bool = True,
    interval: Interval | None = "step",
    step_scheduler: Callable[[Any, torch.optim.Optimizer], None] = lambda s, o: s.step(),
    **fields: Any,
) -> None:
    """Two workers; at the end the model is the one of plain torch.

    Args:
        before: called before each step, with the version, in the workers and in the replay.
        interval: None: the script steps the scheduler, as the replay does.
    """
    data, models = Numbers(160), Models()

    def script(session: Session) -> None:
        model = make_model()
        optimizer = session.optimizer(make(model), model)
        schedule = session.scheduler(scheduler(optimizer), interval=interval) if scheduler else None
        for x, y in session.loader(data, 4):
            if before is not None:
                before(session.version, model, optimizer)
            optimizer.zero_grad(set_to_none)
            loss(model, x, y).backward()
            optimizer.step()
            if schedule is not None and interval is None:
                step_scheduler(schedule, optimizer)
        models[session.worker] = model

    with running_job(tmp_path, **fields) as job:
        job.run(script, workers=2)
        commits, spec = job.commits(), job.spec

    def replayed(model: torch.nn.Module) -> None:
        made: list[Any] = []

        def after(version: int, optimizer: torch.optim.Optimizer) -> None:
            if made:
                step_scheduler(made[0], optimizer)

        def with_scheduler(m: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = make(m)
            if scheduler is not None:
                made.append(scheduler(optimizer))
            return optimizer

        replay(
            commits,
            data,
            model,
            with_scheduler,
            spec,
            loss=loss,
            before=before,
            after=after,
            set_to_none=set_to_none,
        )

    assert_each_record_once(commits, records=160, epochs=1)
    assert_equal_up_to_round_off(models[0], make_model(), replayed)
