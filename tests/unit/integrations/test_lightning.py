"""Lightning's Trainer trains in a job as it does alone."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from elastic_ps.errors import UsageError
from elastic_ps.integrations import pytorch_lightning as other
from elastic_ps.integrations.fabric import ElasticStrategy as FabricStrategy
from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, running_job
from tests.testing.lightning import (
    BATCH,
    EPOCHS,
    IN_ORDER,
    MARKS,
    PACKAGES,
    RECORDS,
    InTurn,
    Net,
    Package,
    assert_same_model,
    fit,
    in_job,
    trainer_of,
)
from tests.testing.oracle import assert_each_record_once
from tests.testing.tiers import per_change

pytestmark = MARKS


in_both_packages = pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.library.__name__)


@in_both_packages
@pytest.mark.parametrize(
    ("steps", "interval", "frequency"),
    per_change(
        [(1, "step", 1), (2, "step", 1), (4, "epoch", 1), (2, "step", 3), (3, "epoch", 2)],
        keep=[(2, "step", 1)],
    ),
)
def test_the_curve_is_that_of_lightning_alone(
    tmp_path: Path, steps: int, interval: str, frequency: int, package: Package
) -> None:
    """50 records in batches of 4: the last batch of an epoch is smaller, and the last step has fewer."""
    options: dict[str, Any] = {
        "accumulate_grad_batches": steps,
        "gradient_clip_val": 0.1,
        "package": package.library,
    }
    alone = fit("auto", package.net(interval, frequency), **options)
    with running_job(tmp_path, data=IN_ORDER) as job:
        make = functools.partial(package.net, interval, frequency)
        ours = in_job(job, make, kind=package.strategy, options=options)[0]
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
        assert len(job.commits()) == EPOCHS * math.ceil(13 / steps)
        progress = job.status().progress
    assert progress.metrics["val_loss"] == pytest.approx(ours.evaluations[-1])
    assert ours.losses == pytest.approx(alone.losses, rel=1e-12)
    assert ours.rates == alone.rates
    assert ours.evaluations == pytest.approx(alone.evaluations, rel=1e-12)
    assert ours.trainer.global_step == alone.trainer.global_step
    assert ours.trainer.current_epoch == alone.trainer.current_epoch
    assert_same_model(ours, alone)


def test_each_process_clips_its_gradient_in_bfloat16_where_workers_make_the_steps(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 0.1}

    def script(session: Session, _: int) -> None:
        fit(ElasticStrategy(session=session), Net(), **options)

    local = {"mode": "local", "steps": 4}
    with running_job(tmp_path, data=IN_ORDER, consistency=local, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        assert job.status().progress.records_applied == EPOCHS * RECORDS


@pytest.mark.parametrize("interval", per_change(["epoch", "step"], keep=["epoch"]))
def test_schedules_count_the_records_that_drop_last_leaves(tmp_path: Path, interval: str) -> None:
    rates = list[list[float]]()

    def train(strategy: Any) -> None:
        module = Net(interval)
        training = DataLoader(Numbers(7), BATCH, drop_last=True)
        trainer_of(strategy).fit(module, training, DataLoader(Numbers(20), 7))
        rates.append(module.rates)

    train("auto")
    with running_job(tmp_path, data=IN_ORDER) as job:
        job.run(lambda session: train(ElasticStrategy(session=session)), workers=1)
    assert len(rates[0]) == EPOCHS
    assert rates[1] == rates[0]


@in_both_packages
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_batches_of_lightning_alone(tmp_path: Path, workers: int, package: Package) -> None:
    records = 48  # the last batch of an epoch is as large as the others
    options: dict[str, Any] = {"records": records, "gradient_clip_val": 0.1, "package": package.library}
    alone = fit("auto", package.net(), batch=2 * BATCH, **options)
    trained, lock = dict[int, Any](), threading.Lock()

    def script(session: Session) -> None:
        checkpoints = package.library.callbacks.ModelCheckpoint
        saving = checkpoints(tmp_path / f"of-{session.worker}", "{epoch}", save_top_k=-1)
        module = fit(package.strategy(session=session), package.net(), callbacks=[saving], **options)
        with lock:
            trained[session.worker] = module

    together = {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path / "job", consistency=together, data=IN_ORDER) as job:
        job.begin_together(workers)
        job.run(script, workers=workers)
        assert_each_record_once(job.commits(), records=records, epochs=EPOCHS)
    for worker in range(workers):
        assert_same_model(trained[worker], alone)
    if workers == 1:
        assert trained[0].evaluations == pytest.approx(alone.evaluations, rel=1e-12)
    saved = {path.name: path for path in tmp_path.glob("of-*/*.ckpt")}
    assert sorted(saved) == [f"epoch={epoch}.ckpt" for epoch in range(EPOCHS)], "the chief saves"
    last = torch.load(saved["epoch=2.ckpt"], weights_only=False)
    module = package.net()
    module.load_state_dict(last["state_dict"])
    assert_same_model(module, alone)
    adam = torch.optim.AdamW(module.parameters())
    adam.load_state_dict(last["optimizer_states"][0])
    assert float(adam.state[next(module.parameters())]["step"]) == len(job.commits())
    assert sum(module.trainer.is_global_zero for module in trained.values()) == 1, "the chief"


class Uploading(CSVLogger):  # type: ignore[misc]
    """As those that upload checkpoints, such as WandbLogger."""

    _log_model = "all"


def test_after_the_training_a_script_saves_where_is_global_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Worker 1 is the chief, and worker 0 comes when the training is over."""
    zeros, path = list[int](), tmp_path / "last.ckpt"

    class Ranked(Net):
        def on_fit_start(self) -> None:
            assert (self.global_rank, self.trainer.world_size) == (0, 1), "as scripts divide data"

    def script(session: Session) -> None:
        logs = Uploading(tmp_path, version=session.worker)
        trainer = fit(ElasticStrategy(session=session), Ranked(), logger=logs).trainer
        assert trainer.is_global_zero == (rank_zero_only.rank == 0)
        if trainer.is_global_zero:
            zeros.append(session.worker)
            trainer.save_checkpoint(path)

    with running_job(tmp_path / "job", data=IN_ORDER, worker={"replicas": 2}) as job:
        for worker in (1, 0):
            job.start(worker, script)
            job.join()
    assert zeros == [1]
    assert path.exists()
    assert caplog.text.count("Uploading uploads from worker 0 those that it finds") == 1


def test_a_frozen_base_stays_the_workers_own(tmp_path: Path) -> None:
    class Adapted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mlp[0].requires_grad_(False)

    alone, trained = fit("auto", Adapted()), list[Any]()

    def script(session: Session) -> None:
        trained.append(fit(ElasticStrategy(session=session, base="external"), Adapted()))

    with running_job(tmp_path, data=IN_ORDER) as job:
        job.run(script, workers=1)
        model = job.coordinator.job.state.model
        assert model is not None
        assert [spec.name for spec in model.layout.base] == ["mlp.0.weight", "mlp.0.bias"]
    assert_same_model(trained[0], alone)


@pytest.mark.parametrize("broken", per_change([2, 12], keep=[12]))
def test_a_step_that_overflows_in_half_precision_is_skipped(tmp_path: Path, broken: int) -> None:
    """Also the last one of an epoch. The model is of float64, which autocast leaves as it is."""

    class Overflowing(Net):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx == broken else 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def half() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}

    alone = fit("auto", Overflowing(), **half())
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, Overflowing, options=half())[0]
        assert job.status().progress.records_skipped == EPOCHS * (2 if broken == 12 else BATCH)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-12)
    assert_same_model(ours, alone)


STOPS = ["max_steps", "early stopping", "within an epoch", "fast_dev_run"]


@pytest.mark.parametrize("how", per_change(STOPS, keep=["max_steps"]))
def test_a_stop_of_the_trainer_ends_the_job(tmp_path: Path, how: str) -> None:
    def options() -> dict[str, Any]:
        if how == "max_steps":
            return {"max_steps": 16, "max_epochs": None}
        if how == "fast_dev_run":
            return {"fast_dev_run": 2}
        if how == "early stopping":
            return {"callbacks": [EarlyStopping("val/loss", mode="max", patience=1)]}
        return {"callbacks": [EarlyStopping("val/loss", mode="max", patience=1)], "val_check_interval": 3}

    alone = fit("auto", Net(), **options())
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, options=options())[0]
        assert job.status().progress.stopped
        assert len(job.commits()) == alone.trainer.global_step < EPOCHS * 13
    assert ours.evaluations == pytest.approx(alone.evaluations, rel=1e-12)
    assert_same_model(ours, alone)


def test_max_steps_end_with_the_schedule_whatever_the_number_of_workers(tmp_path: Path) -> None:
    """One process makes 16 steps: 13 with the 50 records of an epoch, and 3 of 4 records.

    The last one counts from its first record on: a part may end with a batch of two.
    """
    with running_job(tmp_path, worker={"replicas": 2}, data=IN_ORDER) as job:
        trained = in_job(job, workers=2, options={"max_steps": 16, "max_epochs": None})
        assert 58 < job.status().progress.records_applied <= 62 + 2 * 2 * BATCH
    for module in trained.values():
        assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.0


def test_a_share_of_an_epoch_is_one_of_what_a_worker_has_of_it(tmp_path: Path) -> None:
    """Of 12 batches of an epoch, each of two workers has about six."""
    together = {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path, worker={"replicas": 2}, consistency=together, data=IN_ORDER) as job:
        options = {"val_check_interval": 0.75, "records": 48}
        trained = in_job(job, workers=2, options=options)
    assert sum(len(module.evaluations) for module in trained.values()) >= EPOCHS


TOGETHER = {"globalBatchSize": 2 * BATCH}


class Asking(Net):
    """It reads what scripts divide by, for a schedule of their own or a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.batches = set[tuple[int, int, int]](), list[int]()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        trainer = self.trainer
        limits = trainer.num_training_batches, trainer.estimated_stepping_batches, trainer.max_steps
        self.asked.add(limits)
        assert trainer.max_steps == -1 or trainer.global_step < trainer.max_steps
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.batches.append(self.trainer.num_training_batches)


class Last(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        is_last_batch = batch_idx + 1 == self.trainer.num_training_batches
        self.last += [batch_idx] if is_last_batch else []


def test_a_worker_that_gets_more_batches_than_its_share_has_few_last_ones(tmp_path: Path) -> None:
    """It trains all 13 of an epoch, since the other one does not come."""
    with running_job(tmp_path, worker={"replicas": 2}) as job:
        assert in_job(job, Last, options={"max_epochs": 1})[0].last == [6, 12]


@pytest.mark.parametrize(
    "options",
    [{"val_check_interval": 8}, {"max_steps": 24}],
    ids=["more batches than a worker has", "the last step is an epoch's last"],
)
def test_each_worker_validates_at_an_epochs_end(tmp_path: Path, options: dict[str, Any]) -> None:
    """One process has 12 batches of an epoch, and each of two workers has 6."""
    with running_job(tmp_path, worker={"replicas": 2}, consistency=TOGETHER, data=IN_ORDER) as job:
        trained = in_job(job, Asking, workers=2, options={"records": 48, **options})
    for module in trained.values():
        assert len(module.evaluations) == len(module.batches) > 0, "as many as epochs"


@pytest.mark.parametrize("options", [{}, {"max_steps": 16, "max_epochs": -1}], ids=["epochs", "steps"])
def test_the_trainer_says_how_many_batches_and_steps_there_are(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    alone = fit("auto", Asking(), **options)
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, Asking, options=options)[0]
    assert ours.asked == alone.asked
    assert ours.batches[0] == alone.batches[0] == 13


def test_the_trainer_says_how_many_batches_a_worker_has(tmp_path: Path) -> None:
    with running_job(tmp_path, worker={"replicas": 2}, consistency=TOGETHER, data=IN_ORDER) as job:
        trained = in_job(job, Asking, workers=2, options={"records": 48})
    for module in trained.values():
        assert (6, 6 * EPOCHS, -1) in module.asked, "when it knows of the other one"
        assert sum(module.batches) == len(module.losses)


@pytest.mark.parametrize("interval", [0.25, 3, timedelta(milliseconds=1)], ids=str)
def test_the_job_reports_a_validation_within_an_epoch(tmp_path: Path, interval: Any) -> None:
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, options={"val_check_interval": interval})[0]
        assert job.status().progress.metrics["val_loss"] == pytest.approx(ours.evaluations[-1])


class Leaving(Net):
    """It asks for the end of an epoch at its `last` batch."""

    def __init__(self, last: int = 8) -> None:
        super().__init__()
        self.last = last

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.last else None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    "options",
    per_change(
        [
            {},
            {"accumulate_grad_batches": 3},
            {"max_steps": 20, "max_epochs": None},
            {"val_check_interval": 4},
        ],
        keep=[{}, {"accumulate_grad_batches": 3}],
    ),
    ids=str,
)
def test_a_module_may_end_its_epoch_early(tmp_path: Path, options: dict[str, Any]) -> None:
    """The records come in its next epoch. So a first epoch of eight batches is that of Lightning alone."""
    alone = fit("auto", Leaving(), **options)
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, Leaving, options=options)[0]
        assert job.status().progress.stopped
        trained = [each for commit in job.commits() for each in commit["contributions"]]
    records = [
        (epoch, i) for each in trained for epoch, start, stop in each["records"] for i in range(start, stop)
    ]
    assert len(set(records)) == len(records), "each record once"
    assert len(ours.losses) == len(alone.losses)
    assert ours.losses[:8] == pytest.approx(alone.losses[:8], rel=1e-12)
    assert ours.trainer.global_step == alone.trainer.global_step
    assert ours.trainer.current_epoch == alone.trainer.current_epoch
    assert len(ours.evaluations) == len(alone.evaluations)


def test_an_epoch_may_end_at_its_first_batch(tmp_path: Path) -> None:
    with running_job(tmp_path) as job:
        assert not in_job(job, lambda: Leaving(0))[0].losses


@pytest.mark.parametrize("leaving", [{0}, {0, 1}], ids=["one", "both"])
def test_others_train_what_a_worker_leaves_of_an_epoch(tmp_path: Path, leaving: set[int]) -> None:
    trained = dict[int, Any]()

    def script(session: Session) -> None:
        module = Leaving() if session.worker in leaving else Leaving(-1)
        trained[session.worker] = fit(ElasticStrategy(session=session), module, batch=1)

    with running_job(tmp_path, worker={"replicas": 2}) as job:
        job.begin_together(2)
        job.run(script, workers=2)
        assert job.status().progress.stopped
    assert len(trained[0].losses) <= EPOCHS * 8
    assert_same_model(trained[0], trained[1])


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


@pytest.mark.parametrize(("mode", "records"), [("sync", BATCH), ("async", RECORDS)])
def test_a_scheduler_heeds_one_evaluation_of_each_epoch(tmp_path: Path, mode: str, records: int) -> None:
    """Both workers evaluate all epochs, also those that the other one has trained.

    But for those before it has joined. Its evaluation of the next one may come before it knows theirs.
    """
    options: dict[str, Any] = {"max_epochs": 6, "records": records}
    with running_job(tmp_path, consistency={"mode": mode}) as job:
        trained = in_job(job, Plateau, workers=2, options=options)
        assert_each_record_once(job.commits(), records=records, epochs=6)
    assert 5 <= max(module.lr_schedulers().last_epoch for module in trained.values()) <= 6


class Limited(InTurn):
    """One of the two clips, as the critic of a GAN does."""

    limit = 0.01


@pytest.mark.parametrize(("kind", "limit"), [(Plateau, None), (InTurn, None), (Limited, 0.01)])
def test_other_modules(tmp_path: Path, kind: type[Net], limit: float | None) -> None:
    alone = fit("auto", kind())
    with running_job(tmp_path, data=IN_ORDER) as job:
        ours = in_job(job, kind, max_grad_norm=limit)[0]
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-12)
    assert ours.rates == alone.rates
    assert_same_model(ours, alone)


@pytest.mark.filterwarnings("ignore:.*Missing logger folder")
@pytest.mark.parametrize("kind", [Net, Plateau, InTurn])
def test_rates_are_logged_under_the_names_of_lightning_alone(tmp_path: Path, kind: type[Net]) -> None:
    def rates(strategy: Any) -> list[str]:
        monitor = LearningRateMonitor("step")
        fit(strategy, kind(), callbacks=[monitor], max_epochs=1, logger=CSVLogger(tmp_path))
        return sorted(monitor.lrs)

    logged = list[list[str]]()
    with running_job(tmp_path / "job") as job:
        job.run(lambda session: logged.append(rates(ElasticStrategy(session=session))), workers=1)
    assert logged == [rates("auto")]


class WithTest(Net):
    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))


@pytest.mark.filterwarnings("ignore:.*was called without a model")  # where the chief is worker 0
@pytest.mark.parametrize("given", [{}, {"ckpt_path": "best"}], ids=["by itself", "best"])
def test_the_chief_tests_its_best_checkpoint_and_the_others_end(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    tested, ended = dict[int, float](), list[Any]()

    def script(session: Session) -> None:
        saving = ModelCheckpoint(tmp_path / f"of-{session.worker}", monitor="val/loss")
        trainer = trainer_of(ElasticStrategy(session=session), callbacks=[saving])
        trainer.fit(WithTest(), DataLoader(Numbers(RECORDS), BATCH), DataLoader(Numbers(20), 7))
        try:
            [result] = trainer.test(dataloaders=DataLoader(Numbers(20), 7), **given)
        except SystemExit as end:
            ended.append((session.worker, end.code, session.is_chief))
            return
        assert session.is_chief
        assert result["test/loss"] == pytest.approx(float(saving.best_model_score))
        assert trainer.is_global_zero
        tested[session.worker] = result["test/loss"]

    with running_job(tmp_path / "job", data=IN_ORDER, worker={"replicas": 2}) as job:
        job.begin_together(2)
        job.run(script, workers=2)
        [(chief, loss)] = tested.items()
        assert ended == [(1 - chief, 0, False)]
        assert job.status().progress.metrics["test_loss"] == pytest.approx(loss)


def test_a_worker_that_replaces_the_chief_after_the_training_tests_the_last_weights(tmp_path: Path) -> None:
    ended = list[bool]()

    def script(session: Session) -> None:
        saving = ModelCheckpoint(tmp_path / f"of-{len(ended)}")
        trainer = trainer_of(ElasticStrategy(session=session), callbacks=[saving])
        trainer.fit(WithTest(), DataLoader(Numbers(RECORDS), BATCH), DataLoader(Numbers(20), 7))
        if session.generation == 0 and not ended:
            ended.append(False)
            job.declare_gone(0)
            return
        assert session.is_chief
        [result] = trainer.test(dataloaders=DataLoader(Numbers(20), 7))
        [same] = trainer.test(trainer.lightning_module, dataloaders=DataLoader(Numbers(20), 7))
        assert result == same
        ended.append(True)

    with running_job(tmp_path / "job") as job:
        job.start(0, script)
        job.join()
        job.start(0, script)
        job.join()
    assert ended == [False, True]


@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.parametrize("given", [{"every_n_train_steps": 4}, {}], ids=["steps", "validation"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_chief_other_than_worker_0_validates_after_checkpoints_within_an_epoch(
    tmp_path: Path, epochs: int, given: dict[str, Any]
) -> None:
    """It finds the newest checkpoint before the last epoch. With one epoch it takes the last weights."""
    validated = list[float]()

    def script(session: Session) -> None:
        saving = ModelCheckpoint(tmp_path / "saved", **given)
        strategy = ElasticStrategy(session=session)
        trainer = trainer_of(strategy, callbacks=[saving], max_epochs=epochs, val_check_interval=4)
        trainer.fit(Net(), DataLoader(Numbers(RECORDS), BATCH), DataLoader(Numbers(20), 7))
        assert session.is_chief
        assert Path(saving.best_model_path).exists() == (epochs == 2)
        [result] = trainer.validate(dataloaders=DataLoader(Numbers(20), 7))
        validated.append(result["val/loss"])

    with running_job(tmp_path / "job", worker={"replicas": 2}) as job:
        job.start(1, script)
        job.join()
        assert job.status().progress.metrics["val_loss"] == pytest.approx(validated[0])


def test_the_strategy_has_a_name_in_both_packages() -> None:
    """By its name, the strategy takes the session of its process, which here is a job of its own."""
    data, seen = Numbers(RECORDS), list[torch.Tensor]()

    class Other(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            seen.extend(batch[1])
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert isinstance(trainer_of("elastic_ps").strategy, ElasticStrategy)
    trainer = trainer_of("elastic_ps", package=pytorch_lightning)
    strategy = trainer.strategy
    assert isinstance(strategy, other.ElasticStrategy)
    with contextlib.closing(strategy.session) as session:
        trainer.fit(Other(), DataLoader(data, BATCH))
        assert session.version == EPOCHS * math.ceil(RECORDS / BATCH)
    assert torch.equal(torch.cat(seen).sort().values, data.y.repeat(EPOCHS, 1).flatten().sort().values)


class Clipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class Stepping(Net):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class InheritsSteps(Stepping):
    pass


class WithoutOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class AsksForLast(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        assert not self.trainer.is_last_batch


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "devices": ("start more workers: `elastic-ps run SCRIPT --workers N`", {"devices": 2}),
    "sync_batchnorm": ("averages the statistics of BatchNorm", {"sync_batchnorm": True}),
    "limit_train_batches": (r"torch\.utils\.data\.Subset", {"limit_train_batches": 0.5}),
    "one batch": (r"torch\.utils\.data\.Subset", {"limit_train_batches": 1}),
    "overfit_batches": (r"torch\.utils\.data\.Subset", {"overfit_batches": 1}),
    "reload": ("a job counts the records of one data set", {"reload_dataloaders_every_n_epochs": 1}),
    "no end": ("Set max_epochs or max_steps", {"max_epochs": -1}),
    "clipping by value": (
        "Use 'norm'",
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    ),
    "accumulation": (
        "changes what a step is made of",
        {"callbacks": [GradientAccumulationScheduler({0: 2})]},
    ),
    "own clipping": (r"Set Trainer\(gradient_clip_val=0.5", {"kind": Clipping}),
    "clipping by hand": (r"Set ElasticStrategy\(max_grad_norm=0.01", {"kind": Limited}),
    "own steps of a scheduler": ("the job steps schedulers", {"kind": Stepping}),
    "inherited steps of a scheduler": ("the job steps schedulers", {"kind": InheritsSteps}),
    "finetuning": ("BaseFinetuning", {"callbacks": [BackboneFinetuning()]}),
    "pruning": ("ModelPruning", {"callbacks": [ModelPruning("l1_unstructured", amount=0.2)]}),
    "averages": ("cannot use WeightAveraging", {"callbacks": [EMAWeightAveraging()]}),
    "no optimizer": ("configure_optimizers returns None", {"kind": WithoutOptimizer}),
    "last batch": ("Use on_train_epoch_end", {"kind": AsksForLast}),
    "two loaders": ("training takes one torch", {"loaders": 2}),
    "ckpt_path": ("--resume DIR", {"ckpt_path": "last.ckpt"}),
}


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_a_sentence(tmp_path: Path, case: str) -> None:
    said, options = REFUSED[case]
    options = dict(options)
    module, path = options.pop("kind", Net)(), options.pop("ckpt_path", None)
    loaders = [DataLoader(Numbers(8), BATCH) for _ in range(options.pop("loaders", 1))]

    def script(session: Session) -> None:
        trainer = trainer_of(ElasticStrategy(session=session), **options)
        trainer.fit(module, loaders if len(loaders) > 1 else loaders[0], loaders[0], ckpt_path=path)

    with running_job(tmp_path) as job:
        with pytest.raises(UsageError, match=said):
            job.run(script, workers=1)
        assert not job.commits()


def test_the_job_accumulates_where_it_has_a_global_batch_size(tmp_path: Path) -> None:
    said = "leave accumulate_grad_batches out"
    together = {"globalBatchSize": 8}
    with running_job(tmp_path, consistency=together) as job, pytest.raises(UsageError, match=said):
        in_job(job, options={"accumulate_grad_batches": 2})


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
@pytest.mark.parametrize("make", [ElasticStrategy, lambda: FabricStrategy(epochs=1)])
def test_ranks_of_another_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], object], name: str
) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(UsageError, match="elastic-ps run SCRIPT --workers N"):
        make()
