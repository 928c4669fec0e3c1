"""A script of Lightning Fabric trains in a job as it does alone, with another strategy."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning_fabric
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from elastic_ps.errors import UsageError
from elastic_ps.integrations import lightning_fabric as other
from elastic_ps.integrations.fabric import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once
from tests.testing.tiers import per_change

EPOCHS, RECORDS, BATCH = 3, 50, 4
IN_ORDER = {"shuffle": False}


class Trained(NamedTuple):
    losses: list[float]
    evaluations: list[float]
    model: torch.nn.Module


def script(
    fabric: Any,
    *,
    steps: int = 1,
    clip: float | None = None,
    batch: int = BATCH,
    records: int = RECORDS,
    broken: int = -1,
    dtype: torch.dtype = torch.float64,
    at_end_of_epoch: Callable[[int, Any], object] = lambda epoch, model: None,
) -> Trained:
    """As Fabric's documentation has it. `broken`: this batch of each epoch has an infinite loss."""
    model = make_mlp().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    loader, evaluation = fabric.setup_dataloaders(
        DataLoader(Numbers(records), batch), DataLoader(Numbers(records), 7)
    )
    losses, evaluations = list[float](), list[float]()
    for epoch in range(EPOCHS):
        model.train()
        for number, (x, y) in enumerate(loader, start=1):
            accumulates = number % steps != 0 and number != len(loader)
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = torch.nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))
                fabric.backward(loss / steps * (math.inf if number == broken else 1))
            if not accumulates:
                if clip:
                    fabric.clip_gradients(model, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            errors = [(model(x.to(dtype)) - y.to(dtype)).square().mean(1) for x, y in evaluation]
        evaluations.append(fabric.all_gather(torch.cat(errors)).mean().item())
        assert len(torch.cat(errors)) == records
        fabric.barrier()
        at_end_of_epoch(epoch, model)
    return Trained(losses, evaluations, model)


def of_fabric(**options: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1, **options)


def elastic(session: Session, *, plugins: Any = None, **options: Any) -> Any:
    return of_fabric(strategy=ElasticStrategy(epochs=EPOCHS, session=session, **options), plugins=plugins)


def in_job(job: Job, make: Callable[[Session], Trained], *, workers: int = 1) -> dict[int, Trained]:
    trained = dict[int, Trained]()
    job.begin_together(workers)
    job.run(lambda session: trained.update({session.worker: make(session)}), workers=workers)
    return trained


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Up to round-off."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("steps", "clip"), per_change([(1, None), (2, 0.1), (4, 0.1)], keep=[(2, 0.1)]))
def test_the_curve_is_that_of_fabric_alone(tmp_path: Path, steps: int, clip: float | None) -> None:
    """50 records in batches of 4: the last batch of an epoch is smaller, and the last step has fewer."""
    alone = script(of_fabric(), steps=steps, clip=clip)
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, lambda s: script(elastic(s, max_grad_norm=clip), steps=steps, clip=clip))[0]
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
        assert len(job.commits()) == EPOCHS * math.ceil(13 / steps)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-12)
    assert ours.evaluations == pytest.approx(alone.evaluations, rel=1e-12)
    assert_same(ours.model, alone.model)


def test_the_curve_is_that_of_the_other_package_alone(tmp_path: Path) -> None:
    """`lightning` has a copy of `lightning_fabric`, with classes of its own."""

    def of_other(strategy: Any = "auto") -> Any:
        return lightning_fabric.Fabric(accelerator="cpu", devices=1, strategy=strategy)

    def make(session: Session) -> Trained:
        strategy = other.ElasticStrategy(epochs=EPOCHS, session=session, max_grad_norm=0.1)
        return script(of_other(strategy), steps=2, clip=0.1)

    alone = script(of_other(), steps=2, clip=0.1)
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, make)[0]
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-12)
    assert_same(ours.model, alone.model)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_batches_of_fabric_alone(tmp_path: Path, workers: int) -> None:
    """The chief saves after each epoch."""
    records = 48  # the last batch of an epoch is as large as the others
    alone = script(of_fabric(), batch=2 * BATCH, records=records, clip=0.1)
    chiefs, lock = list[int](), threading.Lock()

    def make(session: Session) -> Trained:
        fabric = elastic(session, max_grad_norm=0.1)

        def save(epoch: int, model: Any) -> None:
            fabric.save(tmp_path / f"{epoch}.ckpt", {"model": model})
            if fabric.is_global_zero:
                with lock:
                    chiefs.append(epoch)

        return script(fabric, records=records, clip=0.1, at_end_of_epoch=save)

    together = {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path / "job", consistency=together, data=IN_ORDER) as job:
        trained = in_job(job, make, workers=workers)
        assert_each_record_once(job.commits(), records=records, epochs=EPOCHS)
    assert chiefs == [*range(EPOCHS)], "one worker saves in each epoch"
    assert len({ours.evaluations[-1] for ours in trained.values()}) == 1
    whole = EPOCHS if workers == 1 else 1  # of two, one may evaluate an epoch while the other trains
    for worker in range(workers):
        ours = trained[worker]
        assert ours.evaluations[-whole:] == pytest.approx(alone.evaluations[-whole:], rel=1e-12)
        assert_same(ours.model, alone.model)
    saved = make_mlp().double()
    of_fabric().load(tmp_path / f"{EPOCHS - 1}.ckpt", {"model": saved})
    assert_same(saved, alone.model)


def scaled() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    return MixedPrecision("16-mixed", "cpu", scaler)


@pytest.mark.parametrize("broken", per_change([3, 13], keep=[13]))
def test_a_step_that_overflows_in_half_precision_is_skipped(tmp_path: Path, broken: int) -> None:
    """Also the last one of an epoch."""
    options: dict[str, Any] = {"broken": broken, "dtype": torch.float32}
    alone = script(of_fabric(plugins=scaled()), **options)

    def halved(session: Session) -> Any:
        return elastic(session, plugins=scaled(), overlap=True)

    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, lambda session: script(halved(session), **options))[0]
        assert job.status().progress.records_skipped == EPOCHS * (2 if broken == 13 else BATCH)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-3)
    for a, b in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_script_skips_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """The gradient of the last step is still there, as zero_grad comes before backward."""

    def skips(fabric: Any) -> torch.nn.Module:
        model = make_mlp().double()
        model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
        loader = fabric.setup_dataloaders(DataLoader(Numbers(16), BATCH))
        for _ in range(EPOCHS):
            for number, (x, y) in enumerate(loader, start=1):
                if number == len(loader):
                    continue
                optimizer.zero_grad()
                fabric.backward(torch.nn.functional.mse_loss(model(x.double()), y.double()))
                optimizer.step()
        return model.module  # type: ignore[no-any-return]

    alone, models = skips(of_fabric()), list[torch.nn.Module]()
    with running_job(tmp_path, data=IN_ORDER) as job:
        job.run(lambda session: models.append(skips(elastic(session))), workers=1)
        assert job.status().progress.records_skipped == EPOCHS * BATCH
    assert_same(models[0], alone)


@pytest.mark.parametrize("workers", [1, 2])
def test_several_optimizers_step_in_turn(tmp_path: Path, workers: int) -> None:
    """One of them clips, as the critic of a GAN does."""

    def turns(fabric: Any, session: Session | None = None) -> torch.nn.Module:
        both = torch.nn.ModuleDict({"first": make_mlp(), "second": make_mlp(seed=1)}).double()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in both.values()]
        both, *optimizers = fabric.setup(both, *optimizers)
        batch = BATCH if session is not None else workers * BATCH
        loader = fabric.setup_dataloaders(DataLoader(Numbers(4 * workers * BATCH), batch))
        for _ in range(EPOCHS):
            for number, (x, y) in enumerate(loader):
                turn = (number if session is None else session.version) % 2
                name, optimizer = ("first", "second")[turn], optimizers[turn]
                optimizer.zero_grad()
                fabric.backward(torch.nn.functional.mse_loss(both.module[name](x.double()), y.double()))
                if name == "first":
                    fabric.clip_gradients(both, optimizer, max_norm=0.01)
                optimizer.step()
        return both.module  # type: ignore[no-any-return]

    alone, models = turns(of_fabric()), dict[int, torch.nn.Module]()

    def script(session: Session) -> None:
        models[session.worker] = turns(elastic(session, max_grad_norm=1.0), session)

    consistency = {"globalBatchSize": workers * BATCH}
    with running_job(tmp_path, consistency=consistency, data=IN_ORDER) as job:
        job.begin_together(workers)
        job.run(script, workers=workers)
        assert_each_record_once(job.commits(), records=4 * workers * BATCH, epochs=EPOCHS)
    assert sorted(models) == [*range(workers)]
    for ours in models.values():
        assert_same(ours, alone)


def test_a_break_ends_the_training_where_the_script_ends_after_it(tmp_path: Path) -> None:
    def make(session: Session) -> None:
        fabric, model = elastic(session), make_mlp()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in fabric.setup_dataloaders(DataLoader(Numbers(RECORDS), BATCH)):
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            break
        session.finish()  # as at the end of a script

    with running_job(tmp_path) as job:
        job.run(make, workers=1)
        assert "left its loop" in job.status().progress.stopped
        assert len(job.commits()) == 1


@pytest.mark.parametrize("plugins", [None, scaled])
def test_workers_that_come_after_the_end(tmp_path: Path, plugins: Callable[[], Any] | None) -> None:
    """Worker 1 has nothing to do. One that replaces the chief saves: its loops have a batch each."""
    done = dict[int, list[Trained]]()

    def make(session: Session) -> None:
        fabric = elastic(session, max_grad_norm=0.1, plugins=plugins and plugins())
        trained = script(fabric, clip=0.1, dtype=torch.float32, records=16)
        done.setdefault(session.worker, []).append(trained)
        assert fabric.is_global_zero
        if len(done[0]) == 1:
            job.declare_gone(0)

    with running_job(tmp_path) as job:
        for worker in (0, 1, 0):
            job.start(worker, make)
            job.join()
        assert_each_record_once(job.commits(), records=16, epochs=EPOCHS)
    assert done.keys() == {0}
    first, second = done[0]
    assert len(second.losses) == EPOCHS
    assert_same(second.model, first.model)


def setup(session: Session, **options: Any) -> tuple[Any, ...]:
    fabric, model = elastic(session), make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fabric, *fabric.setup(model, optimizer, **{n: make(optimizer) for n, make in options.items()})


REFUSED: dict[str, tuple[str, Callable[[Session], object]]] = {
    "devices": (
        "elastic-ps run SCRIPT --workers N",
        lambda s: Fabric(accelerator="cpu", devices=2, strategy=ElasticStrategy(epochs=1, session=s)),
    ),
    "nodes": (
        "elastic-ps run SCRIPT --workers N",
        lambda s: Fabric(accelerator="cpu", num_nodes=2, strategy=ElasticStrategy(epochs=1, session=s)),
    ),
    "scheduler": (
        r"fabric\.strategy\.session\.scheduler",
        lambda s: setup(s, scheduler=lambda optimizer: StepLR(optimizer, 1)),
    ),
    "no model": (
        r"model, optimizer = fabric\.setup",
        lambda s: elastic(s).setup_optimizers(torch.optim.SGD(make_mlp().parameters(), lr=0.1)),
    ),
    "no optimizer": (
        r"pass the optimizer, with its model, to fabric\.setup",
        lambda s: next(iter(elastic(s).setup_dataloaders(DataLoader(Numbers(8), 4)))),
    ),
    "two models": (
        "one torch.nn.ModuleDict",
        lambda s: setup(s)[0].setup(other := make_mlp(), torch.optim.SGD(other.parameters(), lr=0.1)),
    ),
    "evaluation first": (
        "set up the training DataLoader before",
        lambda s: elastic(s).setup_dataloaders(
            *(DataLoader(Numbers(8), 4, shuffle=each) for each in (False, True))
        ),
    ),
    "clipping": (r"ElasticStrategy\(max_grad_norm=0.1\)", lambda s: script(elastic(s), clip=0.1)),
    "clipping of values": (
        "Use max_norm",
        lambda s: (made := setup(s))[0].clip_gradients(*made[1:], clip_val=1.0),
    ),
    "load": ("--resume DIR", lambda s: (made := setup(s))[0].load("x.ckpt", {"model": made[1]})),
    "epochs": (
        "loop 2 over the training data begins, but epochs=1 was given.*To read the data again",
        lambda s: script(of_fabric(strategy=ElasticStrategy(epochs=1, session=s))),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_a_sentence(tmp_path: Path, case: str) -> None:
    said, refused = REFUSED[case]
    with running_job(tmp_path) as job, pytest.raises(UsageError, match=said):
        job.run(refused, workers=1)


def test_a_second_step_with_a_batch_is_refused_in_the_words_of_fabric(tmp_path: Path) -> None:
    def train(session: Session) -> None:
        fabric, layers = elastic(session), torch.nn.ModuleList([torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)])
        given = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
        model, *optimizers = fabric.setup(layers, *given)
        loader = fabric.setup_dataloaders(DataLoader(Numbers(8), BATCH))
        for x, y in loader:
            for layer, optimizer in zip(layers, optimizers, strict=True):
                fabric.backward(torch.nn.functional.mse_loss(layer(x), y))
                optimizer.step()
                model.zero_grad()

    said = r"^a second step is made.*Choose the optimizer by fabric\.strategy\.session\.version"
    with running_job(tmp_path) as job, pytest.raises(UsageError, match=said):
        job.run(train, workers=1)
