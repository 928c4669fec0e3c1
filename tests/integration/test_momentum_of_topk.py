"""Momentum that workers make of their gradients before `topk` chooses, beside plain torch in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from elastic_ps.codec.builtin import SignSGD, TopK
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import InvalidJob, InvalidModel
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.inside import vanish
from tests.testing.oracle import mse
from tests.testing.polling import eventually
from tests.testing.trained import await_training

RATIO, MOMENTUM, LR, BATCH, RECORDS = 0.125, 0.9, 0.05, 4, 80
OPTIONS = {"ratio": RATIO, "momentum": MOMENTUM, "dtype": "float32"}
COMPRESSION = {"codec": "topk", "options": OPTIONS}


def expected(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Algorithm 1 of Lin et al. 2018 with momentum factor masking, for one worker."""
    model = make_mlp()
    parameters = list(model.parameters())
    elements = sum(parameter.numel() for parameter in parameters)
    velocity, waiting = torch.zeros(elements), torch.zeros(elements)
    for x, y in batches:
        model.zero_grad()
        mse(model, x, y).backward()
        grads = [parameter.grad for parameter in parameters]
        velocity = MOMENTUM * velocity + torch.cat([g.flatten() for g in grads if g is not None])
        waiting += velocity
        sent = torch.zeros(elements, dtype=torch.bool)
        sent[waiting.abs().topk(-int(-RATIO * elements // 1)).indices] = True
        change = (waiting * sent).split([parameter.numel() for parameter in parameters])
        velocity[sent], waiting[sent] = 0.0, 0.0
        with torch.no_grad():
            for parameter, part in zip(parameters, change, strict=True):
                parameter.sub_(part.view_as(parameter), alpha=LR)
    return [parameter.detach() for parameter in parameters]


def test_a_job_trains_as_the_paper_says(tmp_path: Path) -> None:
    models: dict[int, torch.nn.Module] = {}
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    data = Numbers(RECORDS)

    def script(session: Session) -> None:
        model = models[session.worker] = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=LR), model)
        for x, y in session.loader(data, BATCH):
            batches.append((x.clone(), y.clone()))
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, compression=COMPRESSION) as job:
        job.run(script, workers=1)
    assert len(batches) == RECORDS // BATCH
    for got, wanted in zip(models[0].parameters(), expected(batches), strict=True):
        torch.testing.assert_close(got.detach(), wanted, atol=1e-5, rtol=1e-4)


def test_what_half_precision_cannot_hold_goes_on_waiting(tmp_path: Path) -> None:
    """The gradients are within its range, and what they add up to is not."""
    models: list[torch.nn.Linear] = []

    def script(session: Session) -> None:
        model = torch.nn.Linear(8, 1, bias=False).half()
        models.append(model)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
        for _ in session.loader(Numbers(RECORDS), BATCH):
            model.weight.grad = torch.full_like(model.weight, 20_000.0)
            optimizer.step()

    with running_job(tmp_path, compression=COMPRESSION) as job:
        job.run(script, workers=1)
    assert bool(models[0].weight.isfinite().all())


def test_each_record_counts_once_though_a_worker_dies(tmp_path: Path) -> None:
    """The one that takes its place begins with no momentum; the others keep theirs."""
    data, models = Numbers(240), dict[int, torch.nn.Module]()
    dead = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        dies = session.worker == 1 and not dead.is_set()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
        for number, (x, y) in enumerate(session.loader(data, BATCH)):
            if not number:
                await_training(job, 0, 1)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            if dies and number == 3:
                vanish(session)
                job.declare_gone(1)
                dead.set()
                return
            optimizer.step()
        models[session.worker] = model

    with running_job(
        tmp_path,
        compression=COMPRESSION,
        worker={"replicas": 2, "minReplicas": 2},
    ) as job:
        for worker in range(2):
            job.start(worker, script)
        job.until(dead.is_set, "worker 1 dies")
        job.start(1, script)
        job.join()
        assert check(read(job.history), Data(len(data), 1)) == []
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (lambda some: torch.optim.SGD(some, lr=LR, momentum=0.5), r"momentum is 0\.5 in parameter group 0"),
        (lambda some: torch.optim.AdamW(some, lr=LR), r"betas is \[0\.9, 0\.999\] in parameter group 0"),
    ],
)
def test_an_optimizer_with_momentum_of_its_own_is_refused(
    tmp_path: Path, optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer], match: str
) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(optimizer(model.parameters()), model)

    with (
        running_job(tmp_path, compression={"codec": "none", "rules": [{"match": "*", **COMPRESSION}]}) as job,
        pytest.raises(InvalidModel, match=match + r".* has momentum 0\.9 already"),
    ):
        job.run(script, workers=1)


def test_a_scheduler_that_gives_the_optimizer_a_momentum_is_refused(tmp_path: Path) -> None:
    def script(session: Session, *, cycle: bool) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=LR), model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=9, cycle_momentum=cycle)
        session.scheduler(scheduler, interval="step")

    with running_job(tmp_path, compression=COMPRESSION) as job:
        script(job.session(0), cycle=False)
        with pytest.raises(InvalidModel, match=r"momentum is 0\.95 .*no scheduler that sets one"):
            script(job.session(1), cycle=True)


def test_a_momentum_that_a_script_sets_later_is_refused(tmp_path: Path) -> None:
    steps = list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=LR), model)
        for x, y in session.loader(Numbers(RECORDS), BATCH):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.param_groups[0]["momentum"] = 0.5 * (session.version == 3)
            optimizer.step()
            steps.append(session.version)

    with (
        running_job(tmp_path, compression=COMPRESSION) as job,
        pytest.raises(InvalidModel, match=r"momentum is 0\.5 in parameter group 0 .*there cannot be two"),
    ):
        job.run(script, workers=1)
    assert steps == [1, 2, 3]


def test_a_running_job_whose_optimizer_has_momentum_gets_no_second_one(tmp_path: Path) -> None:
    data, told = Numbers(RECORDS), list[str]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5), model)
        for x, y in session.loader(data, BATCH):
            if not told:
                job.encode(1, **COMPRESSION)
                told.append(eventually(lambda: job.changed(1) or job.status().tuning.problem, "an answer"))
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints") as job:
        job.run(script, workers=1)
        assert job.status().term == 1
    assert "compression cannot change like this: momentum is 0.5 in parameter group 0" in told[0]


class Heavy(SignSGD):
    """A codec of a user's own, whose option `momentum` is its own matter."""

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__()
        self.own = momentum


def test_what_a_codec_of_ones_own_calls_momentum_is_its_own_matter(tmp_path: Path) -> None:
    compression = {"codec": f"{__name__}:Heavy", "options": {"momentum": 0.9}}
    for consistency in ({}, {"mode": "local", "steps": 2}):
        place = tmp_path / str(len(consistency))
        place.mkdir()
        with running_job(place, compression=compression, consistency=consistency) as job:
            model = make_mlp()
            job.session(0).optimizer(torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5), model)


class Inherited(TopK):
    """A codec of a user's own that has momentum without an option."""

    def __init__(self) -> None:
        super().__init__(RATIO, momentum=0.5)


@pytest.mark.parametrize(
    ("consistency", "match"),
    [({}, r"there cannot be two"), ({"mode": "local", "steps": 2}, r"in consistency\.mode local")],
)
def test_the_momentum_of_a_codec_of_ones_own_is_known_without_an_option(
    tmp_path: Path, consistency: dict[str, object], match: str
) -> None:
    with running_job(
        tmp_path, compression={"codec": f"{__name__}:Inherited"}, consistency=consistency
    ) as job:
        model = make_mlp()
        with pytest.raises(InvalidModel, match=match):
            job.session(0).optimizer(torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5), model)


def test_it_is_refused_where_workers_send_what_they_have_trained(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidJob, match=r"momentum 0\.9.*mode local"),
        running_job(tmp_path, compression=COMPRESSION, consistency={"mode": "local", "steps": 2}),
    ):
        pass
