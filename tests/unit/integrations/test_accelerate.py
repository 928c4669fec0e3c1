"""A script of accelerate trains in a job as it does alone, with one changed line."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader

from elastic_ps.errors import UsageError
from elastic_ps.integrations.accelerate import ElasticAccelerator
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once
from tests.testing.polling import LIMIT
from tests.testing.tiers import per_change

EPOCHS, RECORDS, BATCH = 3, 50, 4
IN_ORDER = {"shuffle": False}


class Trained(NamedTuple):
    losses: list[float]
    rates: list[float]
    evaluations: list[float]
    model: torch.nn.Module


def script(
    accelerator: Any,
    *,
    clip: float | None = None,
    batch: int = BATCH,
    records: int = RECORDS,
    max_steps: int | None = None,
    broken: int = -1,
    at_end_of_epoch: Callable[[int], object] = lambda epoch: None,
) -> Trained:
    """Hugging Face's `*_no_trainer` scripts have this shape. `broken`: a batch with an infinite loss."""
    data, dtype = Numbers(records), torch.float64
    model = make_mlp().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, evaluation = DataLoader(data, batch_size=batch), DataLoader(data, batch_size=7)
    of_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    total = max_steps or EPOCHS * of_epoch
    falls = 1 if broken < 0 else 0  # alone, a step that is skipped does not count for the schedule
    schedule = LambdaLR(optimizer, lambda step: 1 - falls * step / (EPOCHS * of_epoch))
    model, optimizer, loader, evaluation, schedule = accelerator.prepare(
        model, optimizer, loader, evaluation, schedule
    )
    losses, rates, evaluations, completed = list[float](), list[float](), list[float](), 0
    for epoch in range(EPOCHS):
        model.train()
        for number, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))
                accelerator.backward(loss * (math.inf if number == broken else 1))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                rates += schedule.get_last_lr()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            completed += accelerator.sync_gradients
            if completed >= total:
                break
        model.eval()
        errors = []
        for x, y in evaluation:
            with torch.no_grad():
                error = (model(x.to(dtype)) - y.to(dtype)).square().mean(1)
            errors.append(accelerator.gather_for_metrics(error))
        evaluations.append(torch.cat(errors).mean().item())
        assert len(torch.cat(errors)) == records
        accelerator.wait_for_everyone()
        at_end_of_epoch(epoch)
    return Trained(losses, rates, evaluations, model)


def by_itself(*, steps: int = 1, **options: Any) -> Trained:
    return script(Accelerator(cpu=True, gradient_accumulation_steps=steps), **options)


def elastic(session: Session, **options: Any) -> ElasticAccelerator:
    return ElasticAccelerator(epochs=EPOCHS, session=session, cpu=True, **options)


def in_job(job: Job, make: Callable[[Session], Trained], *, workers: int = 1) -> dict[int, Trained]:
    trained = dict[int, Trained]()
    job.begin_together(workers)
    job.run(lambda session: trained.update({session.worker: make(session)}), workers=workers)
    return trained


def assert_same(ours: Trained, theirs: Trained) -> None:
    """Up to round-off."""
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-12)
    assert ours.evaluations == pytest.approx(theirs.evaluations, rel=1e-12)
    assert ours.rates == theirs.rates
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("steps", "clip"), per_change([(1, None), (2, 0.1), (4, 0.1)], keep=[(2, 0.1)]))
def test_the_curve_is_that_of_accelerate_alone(tmp_path: Path, steps: int, clip: float | None) -> None:
    """50 records in batches of 4: the last batch of an epoch is smaller, and the last step has fewer."""
    alone = by_itself(steps=steps, clip=clip)
    options = {"gradient_accumulation_steps": steps, "max_grad_norm": clip}
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, lambda session: script(elastic(session, **options), clip=clip))[0]
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
        assert len(job.commits()) == EPOCHS * math.ceil(13 / steps)
    assert_same(ours, alone)


def scaled(accelerator: Any) -> Any:
    """As `mixed_precision="fp16"` makes one on a GPU."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    return accelerator


@pytest.mark.parametrize("broken", per_change([2, 12], keep=[12]))
def test_a_step_that_overflows_in_half_precision_is_skipped(tmp_path: Path, broken: int) -> None:
    """Also the last one of an epoch."""
    alone = script(scaled(Accelerator(cpu=True)), broken=broken, max_steps=1000)
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, lambda session: script(scaled(elastic(session)), broken=broken, max_steps=1000))[0]
        assert job.status().progress.records_skipped == EPOCHS * (2 if broken == 12 else BATCH)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-12)
    for a, b in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def skips(accelerator: Any) -> torch.nn.Module:
    """The gradient of the last step is still there, as zero_grad comes before backward."""
    model = make_mlp().double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(16), BATCH))
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader, start=1):
            if number < len(loader):
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.mse_loss(model(x.double()), y.double()))
                optimizer.step()
    return model  # type: ignore[no-any-return]


def test_a_script_skips_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    alone, models = skips(Accelerator(cpu=True)), list[torch.nn.Module]()
    with running_job(tmp_path, data=IN_ORDER) as job:
        job.run(lambda session: models.append(skips(elastic(session))), workers=1)
        assert job.status().progress.records_skipped == EPOCHS * BATCH
    for a, b in zip(models[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_script_clips_some_steps(tmp_path: Path) -> None:
    """Those of the second epoch. In the third it only asks for the norm."""

    def clips(accelerator: Any) -> torch.nn.Module:
        model = make_mlp().double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(16), BATCH))
        for epoch in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.mse_loss(model(x.double()), y.double()))
                if epoch:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05 if epoch == 1 else math.inf)
                optimizer.step()
        return model  # type: ignore[no-any-return]

    alone, models = clips(Accelerator(cpu=True)), list[torch.nn.Module]()
    with running_job(tmp_path, data=IN_ORDER) as job:
        job.run(lambda session: models.append(clips(elastic(session, max_grad_norm=0.05))), workers=1)
    for a, b in zip(models[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_batches_of_accelerate_alone(tmp_path: Path, workers: int) -> None:
    records = 48  # the last batch of an epoch is as large as the others
    alone = by_itself(batch=2 * BATCH, records=records, clip=0.1)
    chiefs, lock = list[int](), threading.Lock()

    def make(session: Session) -> Trained:
        accelerator = elastic(session, max_grad_norm=0.1)

        def note(epoch: int) -> None:
            if accelerator.is_main_process:
                with lock:
                    chiefs.append(epoch)

        return script(accelerator, records=records, clip=0.1, at_end_of_epoch=note)

    together = {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path, consistency=together, data=IN_ORDER) as job:
        trained = in_job(job, make, workers=workers)
        commits = job.commits()
    assert_each_record_once(commits, records=records, epochs=EPOCHS)
    assert chiefs == [*range(EPOCHS)], "one worker saves in each epoch"
    assert len({ours.evaluations[-1] for ours in trained.values()}) == 1
    whole = EPOCHS if workers == 1 else 1  # of two, one may evaluate an epoch while the other trains
    for worker in range(workers):
        ours = trained[worker]
        assert ours.evaluations[-whole:] == pytest.approx(alone.evaluations[-whole:], rel=1e-12)
        for a, b in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_break_ends_the_training(tmp_path: Path) -> None:
    alone = by_itself(max_steps=5)
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, lambda session: script(elastic(session), max_steps=5))[0]
        assert "left its loop" in job.status().progress.stopped
        assert len(job.commits()) == 5
    assert ours.losses[:5] == alone.losses[:5]
    assert len(ours.losses) == len(alone.losses), "alone, each further epoch has a batch, too"


@pytest.mark.parametrize("steps", [5, -(-RECORDS // BATCH)], ids=["in an epoch", "at the end of an epoch"])
def test_a_break_ends_the_training_where_the_script_ends_after_it(tmp_path: Path, steps: int) -> None:
    """As with `while step < 5: for batch in data: ...; if step == 5: break`."""

    def make(session: Session) -> None:
        accelerator, model = elastic(session), make_mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(RECORDS), BATCH))
        for step, (x, y) in enumerate(loader, start=1):
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            if step == steps:
                break
        assert accelerator.is_main_process  # as it saves
        session.finish()  # as at the end of a script

    with running_job(tmp_path) as job:
        job.run(make, workers=1)
        assert "left its loop" in job.status().progress.stopped
        assert len(job.commits()) == steps


def test_held_out_data_that_are_left_at_their_last_batch_change_no_step(tmp_path: Path) -> None:
    left = list[Any]()

    def train(accelerator: Any) -> Trained:
        def leave(_: int) -> None:
            left.append(accelerator.prepare(DataLoader(Numbers(8), batch_size=8)))
            left.append(iter(left[-1]))
            next(left[-1])

        trained = script(accelerator, at_end_of_epoch=leave)
        assert [next(each, None) for each in left if isinstance(each, Iterator)] == [None] * EPOCHS
        left.clear()
        return trained

    alone = train(Accelerator(cpu=True, gradient_accumulation_steps=2))
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, lambda session: train(elastic(session, gradient_accumulation_steps=2)))[0]
        assert len(job.commits()) == EPOCHS * math.ceil(13 / 2)
    assert_same(ours, alone)


@pytest.mark.parametrize(("steps", "at"), [(1, 0), (1, 5), (2, 5)])
def test_a_script_does_not_count_a_step_that_is_lost(tmp_path: Path, steps: int, at: int) -> None:
    """It ends at as many steps as its epochs have."""
    alone, lost = by_itself(steps=steps), list[int]()

    class Losing(ElasticAccelerator):
        def backward(self, loss: torch.Tensor, **options: Any) -> None:
            super().backward(loss, **options)
            if self.sync_gradients and self.session.version == at and not lost:
                lost.append(self.session.generation)
                job.declare_gone(0)

    with running_job(tmp_path, data=IN_ORDER) as job:
        options: dict[str, Any] = {"epochs": EPOCHS, "gradient_accumulation_steps": steps, "cpu": True}
        ours = in_job(job, lambda session: script(Losing(session=session, **options)))[0]
        assert lost
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
        assert len(job.commits()) == EPOCHS * math.ceil(13 / steps)
    assert len(ours.losses) == len(alone.losses) + steps
    for a, b in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_job_that_is_continued_trains_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Its first part ends within an epoch. In the second, the loop over an earlier epoch has one batch."""
    alone = by_itself()
    kept: dict[str, Any] = {"checkpoints": tmp_path / "checkpoints", "data": IN_ORDER}

    class Draining(ElasticAccelerator):
        def backward(self, loss: torch.Tensor, **options: Any) -> None:
            super().backward(loss, **options)
            if self.session.version == 19:
                self.session.drain()

    def interrupted(session: Session) -> Trained:
        return script(Draining(epochs=EPOCHS, session=session, cpu=True))

    with running_job(tmp_path / "1", **kept) as job:
        assert not in_job(job, interrupted), "its script ends there"
        before = job.commits()
    with running_job(tmp_path / "2", resume="require", **kept) as job:
        ours = in_job(job, lambda session: script(elastic(session), max_steps=1000))[0]
        assert_each_record_once(before + job.commits(), records=RECORDS, epochs=EPOCHS)
    assert len(before) == 20
    left = EPOCHS * 13 - len(before)
    assert ours.losses[-left:] == pytest.approx(alone.losses[-left:], rel=1e-11)
    assert ours.rates[-left:] == alone.rates[-left:]
    assert ours.evaluations[-1] == pytest.approx(alone.evaluations[-1], rel=1e-11)


def test_a_batch_that_is_not_trained_reports_nothing(tmp_path: Path) -> None:
    """As a chief that is replaced after the training gets it, for the last lines of its script."""
    runs = list[int]()

    def make(session: Session) -> None:
        accelerator, model = elastic(session), make_mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(RECORDS), BATCH))
        for _ in range(EPOCHS):
            for x, y in loader:
                session.report(mark=len(runs))
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
        runs.append(session.version)
        if len(runs) == 1:
            job.declare_gone(0)

    with running_job(tmp_path) as job:
        for _ in range(2):
            job.start(0, make)
            job.join()
        progress = job.status().progress
    assert len(runs) == 2
    assert progress.metrics["mark"] == 0.0


class Sums(NamedTuple):
    """A script that sums up the losses of an epoch, as Hugging Face's examples do."""

    totals: list[float]
    chief: bool
    model: dict[str, torch.Tensor]


def sums(
    session: Session,
    *,
    at_end_of_epoch: Callable[[int], object] = lambda epoch: None,
    epochs: Callable[[ElasticAccelerator], Iterable[int]] = lambda accelerator: range(EPOCHS),
) -> Sums:
    accelerator = elastic(session)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(16), BATCH))
    totals = []
    for epoch in epochs(accelerator):
        total: Any = 0
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            total += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        totals.append(total.item())
        at_end_of_epoch(epoch)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return Sums(totals, accelerator.is_main_process, values)


def test_a_worker_that_comes_after_the_end_ends_its_script(tmp_path: Path) -> None:
    done = dict[int, Sums]()
    with running_job(tmp_path) as job:
        for worker in range(2):
            job.start(worker, lambda session: done.update({session.worker: sums(session)}))
            job.join()
    assert done.keys() == {0}
    assert done[0].chief


def test_a_worker_that_replaces_the_chief_after_the_end_comes_to_save(tmp_path: Path) -> None:
    """Each of its loops has a batch, which changes neither the job's model nor its own."""
    done = list[Sums]()

    def script(session: Session) -> None:
        done.append(sums(session))
        if len(done) == 1:
            job.declare_gone(0)

    with running_job(tmp_path) as job:
        for _ in range(2):
            job.start(0, script)
            job.join()
        assert_each_record_once(job.commits(), records=16, epochs=EPOCHS)
    first, second = done
    assert first.chief
    assert second.chief
    assert all(total > 0 for total in second.totals)
    assert all(torch.equal(value, second.model[name]) for name, value in first.model.items())


def test_a_worker_that_replaces_the_chief_without_an_epoch_of_its_own_saves(tmp_path: Path) -> None:
    """Worker 1 is the chief of the end, and dies before it has saved."""
    chiefs = list[bool]()

    def script(session: Session) -> None:
        chiefs.append(sums(session, epochs=ElasticAccelerator.epochs).chief)
        if len(chiefs) == 1:
            job.declare_gone(1)

    with running_job(tmp_path) as job:
        for _ in range(2):
            job.start(1, script)
            job.join()
    assert chiefs == [True, True]


def test_one_worker_is_the_last_process(tmp_path: Path) -> None:
    called = list[int]()

    def script(session: Session) -> None:
        elastic(session).on_last_process(lambda: called.append(session.worker))()

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
    assert called == [0]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_worker_that_replaces_the_chief_may_scale_clip_and_accumulate(tmp_path: Path, steps: int) -> None:
    options = {"gradient_accumulation_steps": steps, "max_grad_norm": 0.1}
    done = list[Trained]()

    def make(session: Session) -> None:
        accelerator = scaled(elastic(session, **options))
        done.append(script(accelerator, clip=0.1))
        assert accelerator.is_main_process
        if len(done) == 1:
            job.declare_gone(0)

    with running_job(tmp_path) as job:
        for _ in range(2):
            job.start(0, make)
            job.join()
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
    assert len(done[1].losses) == EPOCHS
    assert done[1].evaluations[-1] == done[0].evaluations[-1]


def test_a_worker_that_joins_in_a_later_epoch_has_a_batch_in_each_loop(tmp_path: Path) -> None:
    done, joined = dict[int, Sums](), threading.Event()

    def script(session: Session) -> None:
        def meet(epoch: int) -> None:
            if epoch == 0 and session.worker == 0:
                session.pause()
                job.start(1, script)
                assert joined.wait(LIMIT)
            elif epoch == 0:
                joined.set()

        done[session.worker] = sums(session, at_end_of_epoch=meet)

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.until(lambda: len(done) == 2, "both workers have ended")
        job.join()
        assert_each_record_once(job.commits(), records=16, epochs=EPOCHS)
    assert all(total > 0 for each in done.values() for total in each.totals)
    assert done[0].chief != done[1].chief


def test_a_script_that_counts_steps_ends_after_another_has_stopped(tmp_path: Path) -> None:
    """As with `while step < 12: for batch in data: ...`: it has more loops than the job has epochs."""

    def make(session: Session) -> None:
        accelerator, model, step = elastic(session), make_mlp(), 0
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(RECORDS), BATCH))
        while step < 12:
            for x, y in loader:
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                step += 1
                if step == 5:
                    session.stop("another worker has made its steps")
        assert accelerator.is_main_process

    with running_job(tmp_path) as job:
        job.run(make, workers=1)
        assert len(job.commits()) == 5


def test_the_chief_saves_what_accelerate_loads(tmp_path: Path) -> None:
    def make(session: Session) -> Trained:
        accelerator = elastic(session)
        done = script(
            accelerator, at_end_of_epoch=lambda epoch: accelerator.save_state(str(tmp_path / str(epoch)))
        )
        with pytest.raises(UsageError, match="--resume DIR"):
            accelerator.load_state(str(tmp_path / "2"))
        return done

    with running_job(tmp_path / "job") as job:
        trained = in_job(job, make, workers=2)
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1", "2"}
    model = make_mlp().to(torch.float64)
    plain = Accelerator(cpu=True)
    model, optimizer, _ = plain.prepare(
        model, adam := torch.optim.AdamW(model.parameters()), LambdaLR(adam, float)
    )
    plain.load_state(str(tmp_path / "2"))
    for a, b in zip(model.parameters(), trained[0].model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(float(state["step"]) > 0 for state in optimizer.state.values())


def test_a_chief_goes_on_with_the_numbers_of_checkpoints(tmp_path: Path) -> None:
    """Each worker counts those that it has saved itself."""
    named = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    runs = list[Trained]()

    def make(session: Session) -> None:
        accelerator = elastic(session, project_config=copy.deepcopy(named))
        runs.append(script(accelerator, at_end_of_epoch=lambda epoch: accelerator.save_state()))
        if len(runs) == 1:
            job.declare_gone(0)

    with running_job(tmp_path / "job") as job:
        for _ in range(2):
            job.start(0, make)
            job.join()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"checkpoint_2", "checkpoint_3"}


def in_groups(accelerator: Any) -> None:
    """The batches of a step are loaded before the first backward(), and a schedule counts the steps."""
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Numbers(RECORDS), BATCH), schedule
    )
    batches = iter(loader)
    for x, y in [next(batches), next(batches)]:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()


class Tracker(GeneralTracker):  # type: ignore[misc]
    name = "own"
    requires_logging_directory = False
    tracker = None

    def log(self, values: dict[str, Any], *_: Any, **__: Any) -> None:
        raise AssertionError("only worker 0 has a tracker")


def test_a_chief_that_has_no_tracker_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(session: Session) -> None:
        accelerator = elastic(session, log_with=Tracker())
        accelerator.init_trackers("project")
        script(accelerator)
        assert accelerator.is_main_process
        accelerator.log({"loss": 1.0})

    with running_job(tmp_path) as job:
        job.start(1, make)
        job.join()
    assert [each for each in caplog.messages if "worker 0 has the trackers" in each]


def looks(accelerator: Any, *, at: int = 1) -> None:
    """Takes batches for their shapes, and prints the last one."""
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(RECORDS), BATCH))
    for number, (x, _) in enumerate(loader, start=1):  # noqa: B007
        if number == at:
            break
    if accelerator.is_main_process:
        accelerator.print(x.shape)


def test_an_error_before_the_first_backward_stays_the_script_s(tmp_path: Path) -> None:
    def failing(session: Session) -> None:
        accelerator = elastic(session)
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(RECORDS), BATCH))
        try:
            for _ in loader:
                raise MemoryError("of the forward")
        finally:
            accelerator.print(accelerator.is_main_process)

    with running_job(tmp_path) as job, pytest.raises(MemoryError, match="of the forward"):
        job.run(failing, workers=1)


def by_hand(accelerator: Any, *, steps: int = 1, clip: bool = False, schedule: bool = True) -> None:
    """As scripts accumulate and clip without accelerate. The second batch is skipped after its backward."""
    model = make_mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(RECORDS), BATCH))
    if schedule:
        scheduler = accelerator.prepare(scheduler)
    for number, (x, y) in enumerate(loader):
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y) / steps)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number == 1:
            optimizer.zero_grad()
        elif number % steps == 0:
            optimizer.step()
            if schedule:
                scheduler.step()
            optimizer.zero_grad()


Refused = Callable[[Session], object]
REFUSED: dict[str, tuple[str, Refused]] = {
    "sharding": ("holds the whole model", lambda s: elastic(s, fsdp_plugin=object())),
    "split_batches": (
        "consistency.globalBatchSize",
        lambda s: elastic(s, dataloader_config=DataLoaderConfiguration(split_batches=True)),
    ),
    "load_state": ("--resume DIR", lambda s: elastic(s).load_state("out")),
    "skip_first_batches": ("--resume DIR", lambda s: elastic(s).skip_first_batches(None, 3)),
    "no model": (
        "takes one optimizer, together with its model",
        lambda s: elastic(s).prepare(torch.optim.SGD(make_mlp().parameters(), lr=0.1)),
    ),
    "two models": (
        "one torch.nn.ModuleDict, and prepare that",
        lambda s: elastic(s).prepare(
            first := make_mlp(),
            second := make_mlp(),
            torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1),
        ),
    ),
    "schedule first": (
        "needs the optimizer and the training DataLoader before a scheduler",
        lambda s: elastic(s).prepare(StepLR(torch.optim.SGD(make_mlp().parameters(), lr=0.1), 3)),
    ),
    "evaluation first": (
        "prepare the training DataLoader before",
        lambda s: elastic(s).prepare(*(DataLoader(Numbers(8), 4, shuffle=each) for each in (False, True))),
    ),
    "clipping": (
        r"ElasticAccelerator\(max_grad_norm=0.1\)",
        lambda s: script(elastic(s), clip=0.1),
    ),
    "clipping by torch": ("accelerator.clip_grad_norm_ and use", lambda s: by_hand(elastic(s), clip=True)),
    "accumulation by hand": (
        r"makes a step of 2 batches.*gradient_accumulation_steps=2",
        lambda s: by_hand(elastic(s), steps=2),
    ),
    "groups": (
        r"makes a step of 2 batches.*gradient_accumulation_steps=2",
        lambda s: in_groups(elastic(s)),
    ),
    "a look": (r"with next\(iter\(loader\)\).*before it is prepared", lambda s: looks(elastic(s))),
    "two looks": (r"with next\(iter\(loader\)\).*before it is prepared", lambda s: looks(elastic(s), at=2)),
    "epochs": (
        "loop 2 over the training data begins, but epochs=1 was given.*To read the data again",
        lambda s: script(ElasticAccelerator(epochs=1, session=s, cpu=True)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_a_sentence(tmp_path: Path, case: str) -> None:
    said, refused = REFUSED[case]
    with running_job(tmp_path) as job, pytest.raises(UsageError, match=said):
        job.run(refused, workers=1)


def test_the_training_data_have_no_sampler(tmp_path: Path) -> None:
    """Scripts ask for one with `hasattr`, and accelerate does without."""

    def script(session: Session) -> None:
        loader = elastic(session).prepare(DataLoader(Numbers(8), 4))
        assert not hasattr(loader, "sampler")
        skip_first_batches(loader, 1)

    with running_job(tmp_path) as job, pytest.raises(AttributeError, match=r"no 'sampler': .*--resume DIR"):
        job.run(script, workers=1)


def test_a_script_may_change_its_own_gradients_and_accumulate_by_hand(tmp_path: Path) -> None:
    def make(session: Session) -> None:
        accelerator = ElasticAccelerator(epochs=1, session=session, cpu=True, overlap=False)
        by_hand(accelerator, steps=3, clip=True, schedule=False)

    with running_job(tmp_path) as job:
        job.run(make, workers=1)
        assert job.version == 5
        assert job.status().progress.records_skipped == BATCH


def test_the_job_accumulates_where_it_has_a_global_batch_size(tmp_path: Path) -> None:
    said = "leave gradient_accumulation_steps out"
    batch = {"globalBatchSize": 8}
    with running_job(tmp_path, consistency=batch) as job, pytest.raises(UsageError, match=said):
        elastic(job.session(0), gradient_accumulation_steps=2)


def test_a_scheduler_of_epochs_is_not_one_to_prepare(tmp_path: Path) -> None:
    def make(session: Session) -> None:
        accelerator = elastic(session)
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, DataLoader(Numbers(8), 4), StepLR(optimizer, 1)
        )
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
        schedule.step()

    with running_job(tmp_path) as job, pytest.raises(UsageError, match="interval='epoch'"):
        job.run(make, workers=1)


@pytest.mark.parametrize(
    ("made", "warned"),
    [("after prepare", True), ("before prepare", True), ("for the session", False), ("to prepare", False)],
)
def test_a_scheduler_that_counts_a_workers_steps_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, made: str, warned: bool
) -> None:
    """As each of two workers makes half of the steps, it comes only half way down."""
    rates = list[float]()

    def make(session: Session) -> None:
        accelerator, model, loader = elastic(session), make_mlp(), DataLoader(Numbers(RECORDS), BATCH)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = EPOCHS * len(loader)
        schedule: Any = None
        if made == "before prepare":
            schedule = LambdaLR(optimizer, lambda step: 1 - step / steps)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
        schedule = schedule or LambdaLR(optimizer, lambda step: 1 - step / steps)
        if made == "to prepare":
            schedule = accelerator.prepare(schedule)
        elif made == "for the session":
            session.scheduler(schedule, interval=lambda samples: -(-samples // BATCH))
        for _ in range(EPOCHS):
            for x, y in batches:
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                if made != "for the session":
                    schedule.step()
                optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])

    with running_job(tmp_path) as job:
        job.begin_together(2)
        job.run(make, workers=2)
    assert len([each for each in caplog.messages if "it is not prepared" in each]) == 2 * warned
    assert (min(rates) > 0.01) == warned


def test_ranks_of_another_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="elastic-ps run SCRIPT --workers N"):
        ElasticAccelerator(epochs=1)
