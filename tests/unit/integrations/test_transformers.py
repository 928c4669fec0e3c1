"""A Trainer trains in a job as it does alone."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from accelerate.utils import DistributedType
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.integrations.transformers import ElasticMixin, prepare_trainer
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, running_job
from tests.testing.oracle import assert_each_record_once, mse, ranges_of, replay
from tests.testing.polling import LIMIT
from tests.testing.tiers import per_change
from tests.testing.trainers import (
    BATCH,
    EPOCHS,
    IN_ORDER,
    RECORDS,
    Net,
    Ragged,
    Records,
    TokenNet,
    Unlabelled,
    arguments,
    assert_same_model,
    by_itself,
    logged,
    make,
)

SCHEDULES = ["cosine", "polynomial", "cosine_with_restarts", "inverse_sqrt", "constant_with_warmup"]
CURVES = [(2, "linear"), (4, "linear"), *((1, schedule) for schedule in SCHEDULES)]


@pytest.mark.parametrize(
    ("steps", "schedule"), per_change(CURVES, keep=[(2, "linear"), (1, "cosine_with_restarts")])
)
def test_the_curve_is_that_of_the_trainer_alone(tmp_path: Path, steps: int, schedule: str) -> None:
    """50 records in batches of 4: the last batch of an epoch is smaller, and the last step has fewer."""
    options: dict[str, Any] = {"gradient_accumulation_steps": steps, "lr_scheduler_type": schedule}
    if schedule == "cosine_with_restarts":
        options["lr_scheduler_kwargs"] = {"num_cycles": 2}
    alone = by_itself(tmp_path / "alone", **options)
    trainers = list[Any]()

    def script(session: Session) -> None:
        trainer = prepare_trainer(make(tmp_path / "job", save_strategy="epoch", **options), session=session)
        trainer.train()
        trainer.save_model()
        trainers.append(trainer)

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
        assert job.status().progress.loss is not None
    ours = trainers[0]
    assert ours.state.global_step == alone.state.global_step
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch"):
        assert logged(ours, name) == pytest.approx(logged(alone, name), rel=1e-12), name
    assert_same_model(ours, alone)
    of_epoch = alone.state.global_step // EPOCHS
    assert {path.name for path in (tmp_path / "job").glob("checkpoint-*")} == {
        f"checkpoint-{of_epoch * epoch}" for epoch in (1, 2, 3)
    }
    assert (tmp_path / "job" / "model.safetensors").exists()


def test_two_workers_share_the_batches_of_the_trainer_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = 48  # the last batch of an epoch is as large as the others
    alone = by_itself(
        tmp_path / "alone", per_device_train_batch_size=2 * BATCH, records=records, warmup_steps=0
    )
    trainers, lock, saved, told = dict[int, Any](), threading.Lock(), list[int](), list[int]()
    capsys.readouterr()

    class Told(TrainerCallback):  # type: ignore[misc]
        def on_save(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            told.append(round(state.epoch))

    class Saving(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with lock:
                saved.append(round(self.state.epoch))

    def script(session: Session) -> None:
        options: dict[str, Any] = {
            "save_strategy": "epoch",
            "warmup_steps": 0,
            "given": {"callbacks": [Told()]},
        }
        trainer = make(tmp_path, records=records, kind=Saving, **options)
        trainers[session.worker] = prepare_trainer(trainer, session=session)
        trainer.train()

    together = {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path / "job", consistency=together, data=IN_ORDER) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=records, epochs=EPOCHS)
    assert_same_model(trainers[0], alone)
    assert_same_model(trainers[1], alone)
    assert saved == told == [1, 2, 3], "the chief saves"
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(trainers[0].state.log_history), "worker 0 prints"
    assert trainers[0].state.is_world_process_zero
    assert not trainers[1].state.is_world_process_zero


@pytest.mark.parametrize(("mode", "records"), [("sync", BATCH), ("async", RECORDS)])
def test_a_scheduler_heeds_one_evaluation_of_each_epoch(tmp_path: Path, mode: str, records: int) -> None:
    """Both workers evaluate all epochs, also those that the other one has trained.

    But for those before it has joined. Its evaluation of the next one may come before it knows theirs.
    """
    options: dict[str, Any] = {
        "num_train_epochs": 6,
        "records": records,
        "lr_scheduler_type": "reduce_lr_on_plateau",
    }
    with running_job(tmp_path / "job", consistency={"mode": mode}) as job:
        trainers = two_trainers(job, tmp_path, **options)
        assert_each_record_once(job.commits(), records=records, epochs=6)
    assert 5 <= max(trainer.lr_scheduler.last_epoch for trainer in trainers) <= 6


class Pairs(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same records as the oracle takes them."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        record = self._records[index]
        return record["x"], record["labels"]


def two_trainers(job: Job, directory: Path, **options: Any) -> list[Any]:
    """The trainers of two workers, which have trained with these arguments."""
    trainers = list[Any]()

    def script(session: Session) -> None:
        trainers.append(prepare_trainer(make(directory, **options), session=session))
        trainers[-1].train()

    job.run(script, workers=2)
    return trainers


@pytest.mark.parametrize("ragged", [False, True], ids=["records", "tokens"])
def test_the_steps_of_two_workers_are_those_of_one_process_with_their_records(
    tmp_path: Path, ragged: bool
) -> None:
    """With tokens, a step has two batches, whose numbers of tokens differ, but the last step of an epoch."""
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "max_grad_norm": 0, "eval_strategy": "no"}
    options |= {"ragged": ragged, "gradient_accumulation_steps": 1 + ragged}
    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        trainers = two_trainers(job, tmp_path, **options)
        commits = job.commits()
    assert_each_record_once(commits, records=RECORDS, epochs=EPOCHS)
    divisor = trainers[0].accelerator.gradient_accumulation_steps  # not 1 with older versions, also alone

    def of_tokens(model: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return (model(x) - labels)[labels != -100].square().mean() / divisor

    alone = Net()
    replay(
        commits,
        Pairs((Ragged if ragged else Records)(RECORDS)),
        alone.mlp,
        lambda model: AdamW(model.parameters(), 0.01, weight_decay=0),
        job.spec,
        loss=of_tokens if ragged else mse,
    )
    for trainer in trainers:
        for ours, theirs in zip(trainer.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


class Single(Net):
    """In single precision, so that autocast has something to cast."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x.float(), labels.float())
        self.computed = found["logits"].dtype
        return found


def test_autocast_to_bf16_is_that_of_the_trainer_alone(tmp_path: Path) -> None:
    def half(directory: Path) -> Any:
        options: dict[str, Any] = {"bf16": True, "eval_strategy": "no"}
        return make(directory, kind=lambda _, *a, **k: Trainer(Single(), *a, **k), **options)

    alone, trainers = half(tmp_path / "alone"), list[Any]()
    alone.train()

    def script(session: Session) -> None:
        trainers.append(prepare_trainer(half(tmp_path / "job"), session=session))
        trainers[0].train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
    assert trainers[0].model.computed == torch.bfloat16
    for ours, theirs in zip(trainers[0].model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_workers_weigh_a_mean_over_tokens_by_their_number(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ragged": True, "records": 48, "eval_strategy": "no", "warmup_steps": 0}
    alone = by_itself(tmp_path / "alone", per_device_train_batch_size=2 * BATCH, **options)
    trainers = list[Any]()

    def script(session: Session) -> None:
        trainers.append(prepare_trainer(make(tmp_path, **options), session=session))
        trainers[-1].train()

    together = {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path / "job", consistency=together, data=IN_ORDER) as job:
        job.run(script, workers=2)
    assert_same_model(trainers[0], alone)


def test_a_worker_that_joins_again_trains_more_batches_than_an_epoch_has(tmp_path: Path) -> None:
    """13 batches make an epoch, in steps of two. The batches of a step go back to the job."""
    trainers, job_of = list[Any](), list[Job]()

    class Losing(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, *_: Any, **given: Any) -> None:
            if trainers[0].state.global_step == 2 and job_of:
                job_of.pop().declare_gone(0)

    def script(session: Session) -> None:
        trainers.append(make(tmp_path, gradient_accumulation_steps=2, given={"callbacks": [Losing()]}))
        prepare_trainer(trainers[0], session=session).train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job_of.append(job)
        job.run(script, workers=1)
        assert not job_of
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
        assert job.status().progress.records_skipped == 0
    assert trainers[0].state.epoch == EPOCHS


def test_adapters_of_peft_are_those_of_the_trainer_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"records": 48, "eval_strategy": "no", "label_names": ["labels"]}
    options["warmup_steps"] = 0
    config = peft.LoraConfig(r=2, target_modules=["mlp.2"])
    adapted = peft.get_peft_model(Net(), config, autocast_adapter_dtype=False)

    def trainer(of: Any = Trainer, **more: Any) -> Any:
        return make(tmp_path, kind=lambda _, *a, **k: of(copy.deepcopy(adapted), *a, **k), **options, **more)

    alone, trainers = trainer(per_device_train_batch_size=2 * BATCH), list[Any]()
    alone.train()

    class Own(ElasticMixin, Trainer):  # type: ignore[misc]
        pass

    def script(session: Session) -> None:
        joins: dict[str, Any] = {"session": session, "base": "external"}
        made = prepare_trainer(trainer(), **joins) if session.worker else trainer(of=Own, given=joins)
        trainers.append(made)
        made.train()

    together = {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path / "job", consistency=together, data=IN_ORDER) as job:
        job.run(script, workers=2)
        model = job.coordinator.job.state.model
        assert model is not None
        assert [spec.name for spec in model.layout.tensors] == [
            f"base_model.model.mlp.2.lora_{part}.default.weight" for part in "AB"
        ]
    assert_same_model(trainers[0], alone)


class FrozenNormNet(Net):
    """As `from_pretrained` returns it: not in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64).requires_grad_(False)
        self.eval()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(self.norm(x), labels)


def test_statistics_of_a_frozen_base_belong_to_the_job(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        given = arguments(tmp_path, eval_strategy="no", num_train_epochs=1)
        trainer = Trainer(FrozenNormNet(), given, train_dataset=Records(RECORDS))
        prepare_trainer(trainer, session=session, base="external").train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
        model = job.coordinator.job.state.model
        assert model is not None
        assert "norm.running_mean" in {spec.name for spec in model.layout.tensors}


class Overflowing(Net):
    """The last batch of each epoch, of 13, has an infinite loss."""

    batches = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        self.batches += self.training
        return found | {"loss": found["loss"] * (1 if self.batches % 13 else math.inf)}


def test_a_step_that_overflows_in_half_precision_is_skipped(tmp_path: Path) -> None:
    def half(directory: Path) -> Any:
        options: dict[str, Any] = {"lr_scheduler_type": "constant", "max_grad_norm": 0, "eval_strategy": "no"}
        trainer = make(directory, kind=lambda _, *a, **k: Trainer(Overflowing(), *a, **k), **options)
        # As fp16=True makes one on a GPU.
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        return trainer

    alone, trainers = half(tmp_path / "alone"), list[Any]()
    alone.train()

    def script(session: Session) -> None:
        trainers.append(prepare_trainer(half(tmp_path / "job"), session=session))
        trainers[-1].train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
        assert job.status().progress.records_skipped == EPOCHS * 2
    assert_same_model(trainers[0], alone)


STOPS = [("max_steps", 1), ("early stopping", 1), ("early stopping", 2)]


@pytest.mark.parametrize(("how", "workers"), per_change(STOPS, keep=STOPS[1:]))
def test_a_stop_of_the_trainer_ends_the_job(tmp_path: Path, how: str, workers: int) -> None:
    """The first epoch makes the best model. Its checkpoint is numbered by steps of one worker's batch."""
    options: dict[str, Any] = {"max_steps": 5, "eval_strategy": "no", "records": 48, "warmup_steps": 0}
    if how == "early stopping":
        options |= {"max_steps": -1, "eval_strategy": "epoch", "save_strategy": "epoch"}
        options |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    whole, all_begin = workers * BATCH, threading.Barrier(workers)

    class Together(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            all_begin.wait(LIMIT)

    def trainer(name: str, *callbacks: Any, batch: int) -> Any:
        stopping = [EarlyStoppingCallback(1)] if how == "early stopping" else []
        given = {"callbacks": [*stopping, *callbacks]}
        return make(tmp_path / name, given=given, per_device_train_batch_size=batch, **options)

    alone, trainers = trainer("alone", batch=whole), list[Any]()
    alone.train()

    def script(session: Session) -> None:
        trainers.append(trainer("out", Together(), batch=BATCH))
        prepare_trainer(trainers[-1], session=session).train()

    with running_job(tmp_path / "job", data=IN_ORDER, consistency={"globalBatchSize": whole}) as job:
        job.run(script, workers=workers)
        assert job.status().progress.stopped
        assert len(job.commits()) == alone.state.global_step < EPOCHS * 48 // whole
    for ours in trainers:
        assert_same_model(ours, alone)
        assert ours.state.best_metric == pytest.approx(alone.state.best_metric)
    best = tmp_path / "out" / f"checkpoint-{48 // BATCH}"
    known = {ours.state.best_model_checkpoint for ours in trainers} - {None}  # to those who have saved it
    assert known == ({str(best)} if how == "early stopping" else set())


def test_max_steps_end_with_the_schedule_whatever_the_number_of_workers(tmp_path: Path) -> None:
    """One process makes 20 steps: 13 with the 50 records of an epoch, and 7 of 4 records.

    The last one counts from its first record on: a part may end with a batch of two.
    """
    options: dict[str, Any] = {"max_steps": 20, "eval_strategy": "no", "lr_scheduler_type": "linear"}
    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        trainers = two_trainers(job, tmp_path, **options)
        assert "max_steps=20" in job.status().progress.stopped
        assert 74 < job.status().progress.records_applied <= 78 + 2 * 2 * BATCH
    for trainer in trainers:
        assert {*trainer.lr_scheduler.get_last_lr()} == {0.0}


class Overriding(Trainer):  # type: ignore[misc]
    """Its methods do not call those of `Trainer`."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> None:
        """Returns nothing: the Trainer takes `lr_scheduler`."""
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 1 - step / num_training_steps)

    def training_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        loss = self.compute_loss(model.train(), inputs)
        self.accelerator.backward(loss)
        return loss.detach()  # type: ignore[no-any-return]


class OverridingInJob(ElasticMixin, Trainer):  # type: ignore[misc]
    create_scheduler, training_step = Overriding.create_scheduler, Overriding.training_step

    def train(self) -> Any:
        """Takes no arguments."""
        return super().train()


class Resuming(ElasticMixin, Trainer):  # type: ignore[misc]
    def train(self) -> Any:
        """Resumes by itself."""
        return super().train(resume_from_checkpoint=self.args.output_dir)


def test_a_trainer_of_the_script_that_resumes_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        trainer = make(tmp_path, kind=Resuming, eval_strategy="no", given={"session": session})
        trainer.save_model(str(tmp_path))
        trainer.state.save_to_json(str(tmp_path / "trainer_state.json"))
        trainer.train()

    with running_job(tmp_path / "job") as job, pytest.raises(UsageError, match="--resume"):
        job.run(script, workers=1)


@pytest.mark.parametrize("kind", [Overriding, OverridingInJob])
def test_the_methods_of_a_script_are_those_of_a_trainer_in_a_job(tmp_path: Path, kind: type[Any]) -> None:
    trainers = list[Any]()

    def script(session: Session) -> None:
        if kind is Overriding:
            trainer = prepare_trainer(make(tmp_path, kind=kind, eval_strategy="no"), session=session)
        else:
            trainer = make(tmp_path, kind=kind, eval_strategy="no", given={"session": session})
        trainer.train()
        trainers.append(trainer)

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=2)
        assert job.status().progress.loss is not None
    for trainer in trainers:
        assert isinstance(trainer, kind)
        assert max(trainer.lr_scheduler.get_last_lr()) < 0.1 * trainer.args.learning_rate


def test_a_share_of_the_training_is_one_of_the_workers_own_steps(tmp_path: Path) -> None:
    """One process makes 36 steps, and evaluates after 27 and at the end. A worker of two makes some 18."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 0.75, "save_strategy": "steps"}
    two, together = {"replicas": 2}, {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path / "job", worker=two, consistency=together, data=IN_ORDER) as job:
        job.begin_together(2)
        trainers = two_trainers(job, tmp_path, records=48, **options)
    assert [len(logged(trainer, "eval_loss")) for trainer in trainers] == [2, 2]
    assert len([*tmp_path.glob("checkpoint-*")]) == 1, "the chief saves what was trained"


def test_the_first_evaluation_is_that_of_the_epoch_that_was_asked_for(tmp_path: Path) -> None:
    two, together = {"replicas": 2}, {"globalBatchSize": 2 * BATCH}
    with running_job(tmp_path / "job", worker=two, consistency=together, data=IN_ORDER) as job:
        trainers = two_trainers(job, tmp_path, records=48, eval_delay=EPOCHS - 1)
    assert [len(logged(trainer, "eval_loss")) for trainer in trainers] == [2, 2]


def test_a_step_may_want_more_batches_than_there_are(tmp_path: Path) -> None:
    options: dict[str, Any] = {"records": 18, "gradient_accumulation_steps": 8, "eval_strategy": "no"}
    alone = by_itself(tmp_path / "alone", **options)
    trainers = list[Any]()

    def script(session: Session) -> None:
        trainers.append(prepare_trainer(make(tmp_path, **options), session=session))
        trainers[-1].train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
        assert_each_record_once(job.commits(), records=18, epochs=EPOCHS)
        assert job.status().progress.records_skipped == 0
    assert_same_model(trainers[0], alone)


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(Records(RECORDS).__getitem__, range(RECORDS))


def test_a_stream_trains_as_it_does_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 20, "eval_strategy": "no", "train_sampling_strategy": "random"}

    def streaming(directory: Path) -> Any:
        return Trainer(Net(), arguments(directory, **options), train_dataset=Stream())

    alone = streaming(tmp_path / "alone")
    alone.train()
    trainers = list[Any]()

    def script(session: Session) -> None:
        trainers.append(prepare_trainer(streaming(tmp_path), session=session, records=RECORDS))
        trainers[-1].train()

    with running_job(tmp_path / "job") as job:
        job.run(script, workers=1)
        assert len(job.commits()) == 20
    assert_same_model(trainers[0], alone)


def test_a_stream_whose_length_is_not_known_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        trainer = Trainer(Net(), arguments(tmp_path, max_steps=5, eval_strategy="no"), train_dataset=Stream())
        with pytest.raises(InvalidModel, match=r"records=N"):
            prepare_trainer(trainer, session=session).train()

    with running_job(tmp_path / "job") as job:
        job.run(script, workers=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"consistency": {"mode": "local", "steps": 2}},
        {"parameterServer": {"optimizers": ["transformers.optimization:Adafactor"], "replicas": 2}},
    ],
    ids=["local", "on the parameter server"],
)
def test_adafactor_of_transformers_makes_the_steps(tmp_path: Path, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"optim": "adafactor", "eval_strategy": "no", "max_grad_norm": 0}

    def script(session: Session) -> None:
        trainer = prepare_trainer(make(tmp_path, **options), session=session)
        trainer.train()
        for ours, theirs in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
            if "consistency" in fields:  # an exchange has a rule of its own
                continue
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-11)

    alone = make(tmp_path, **options)
    alone.train()
    with running_job(tmp_path / "job", data=IN_ORDER, **fields) as job:
        job.run(script, workers=1)
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)


@pytest.mark.parametrize("half", [False, True])
def test_a_batch_without_labels_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, half: bool
) -> None:
    def script(session: Session) -> None:
        given = arguments(tmp_path, eval_strategy="no")
        trainer = Trainer(TokenNet(), given, train_dataset=Unlabelled(RECORDS, {1}))
        if half:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        prepare_trainer(trainer, session=session).train()
        assert not any(p.isnan().any() for p in trainer.model.parameters())

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
        assert job.status().progress.records_skipped == EPOCHS * BATCH
    assert len([each for each in caplog.messages if "without any labelled token" in each]) == 1


def test_the_trainer_logs_the_epochs_and_steps_of_one_process(tmp_path: Path) -> None:
    logged: list[str] = []

    def script(session: Session) -> None:
        trainer = prepare_trainer(make(tmp_path), session=session)
        epochs, steps, *_ = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
        logged.extend((f"{epochs:,}", f"{steps:,}"))
        trainer.train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
    assert logged == [str(EPOCHS), str(-(-RECORDS // BATCH))]


@pytest.mark.parametrize(
    ("batches", "skipped", "workers"),
    [({6, 7}, {6, 7}, 1), ({2, 3}, {2, 3}, 1), ({2, 5}, set(), 1), ({2, 3, 6, 7}, {2, 3, 6, 7}, 2)],
)
def test_a_step_of_several_batches_without_labels_is_skipped(
    tmp_path: Path, batches: set[int], skipped: set[int], workers: int
) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "eval_strategy": "no"}

    def script(session: Session) -> None:
        data = Unlabelled(8 * BATCH, batches)
        trainer = Trainer(TokenNet(), arguments(tmp_path, **options), train_dataset=data)
        prepare_trainer(trainer, session=session).train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=workers)
        ranges = [each for commit in job.commits() for each in ranges_of(commit)]
        trained = [(each.epoch, index) for each in ranges for index in range(each.start, each.stop)]
        expected = {(e, i) for e in range(2) for i in range(8 * BATCH) if i // BATCH not in skipped}
        assert len(trained) == len(set(trained))
        assert set(trained) >= expected, "each record with a label"
        if workers == 1:  # two may share the batches so that a step has one with labels
            assert set(trained) == expected
            assert job.status().progress.records_skipped == 2 * len(skipped) * BATCH


class NormNet(TokenNet):
    """It has buffers, of which alone a step may be."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **given: Any) -> dict[str, torch.Tensor]:
        return super().forward(self.norm(x), labels, **given)


def test_the_first_batch_without_labels_makes_no_step_of_buffers(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        given = arguments(tmp_path, eval_strategy="no", num_train_epochs=1)
        trainer = Trainer(NormNet(), given, train_dataset=Unlabelled(4 * BATCH, {0}))
        prepare_trainer(trainer, session=session).train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
        assert len(job.commits()) == 3
        assert job.status().progress.records_skipped == BATCH


def test_a_callback_changes_gradients_without_overlap(tmp_path: Path) -> None:
    class Halving(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= 0.5

    given = {"callbacks": [Halving()]}
    options: dict[str, Any] = {"eval_strategy": "no", "max_grad_norm": 0.0, "given": given}
    alone = by_itself(tmp_path / "alone", **options)
    trainers = list[Any]()

    def script(session: Session) -> None:
        trainers.append(prepare_trainer(make(tmp_path, **options), session=session, overlap=False))
        trainers[-1].train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
    assert_same_model(trainers[0], alone)


class OwnLoader(Trainer):  # type: ignore[misc]
    """As TRL's GRPOTrainer."""

    def get_train_dataloader(self) -> Any:
        return []


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "group_by_length": (
        "'group_by_length', which chooses records itself.* by length and set 'sequential'",
        {"train_sampling_strategy": "group_by_length"},
    ),
    "auto_find_batch_size": ("set per_device_train_batch_size", {"auto_find_batch_size": True}),
    "half an epoch": ("a job counts whole epochs", {"num_train_epochs": 1.5}),
    "best model": (
        "let an evaluator keep the best",
        {"load_best_model_at_end": True, "save_strategy": "epoch"},
    ),
    "greedy": ("Use another schedule", {"lr_scheduler_type": "greedy"}),
    "own loader": ("OwnLoader has a get_train_dataloader of its own", {"kind": OwnLoader}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_training(tmp_path: Path, case: str) -> None:
    said, options = REFUSED[case]
    with pytest.raises(UsageError, match=said):
        prepare_trainer(make(tmp_path, **options))


def test_the_limit_of_gradients_that_is_usual_is_refused_with_a_standby(tmp_path: Path) -> None:
    with running_job(tmp_path / "job", parameterServer={"durability": "standby"}) as job:
        prepare_trainer(make(tmp_path, max_grad_norm=0), session=job.session(0))
        with pytest.raises(UsageError, match=r"TrainingArguments\(max_grad_norm=0\)"):
            prepare_trainer(make(tmp_path), session=job.session(1))


# What a test cannot give to the constructors: an upload asks the hub at once, the reference model is TRL's,
# and the others need packages, GPUs or other processes.
SET_LATER: dict[str, tuple[str, object]] = {
    "args.push_to_hub": (r"call trainer\.push_to_hub\(\) after", True),
    "args.enable_jit_checkpoint": ("a job goes on without that worker", True),
    "args.sync_ref_model": ("sync_ref_model .* workers would have different ones", True),
    "args._n_gpu": ("divide a batch among 2 GPUs .* worker.processes", 2),
    "args.distributed_state": (
        "elastic-ps run SCRIPT --workers N",
        SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, num_processes=1),
    ),
    "is_deepspeed_enabled": ("Leave out deepspeed and fsdp", True),
    "is_fsdp_enabled": ("Leave out deepspeed and fsdp", True),
}


@pytest.mark.parametrize("name", SET_LATER)
def test_what_a_trainer_is_set_up_for_is_refused(tmp_path: Path, name: str) -> None:
    said, value = SET_LATER[name]
    trainer = make(tmp_path)
    setattr(trainer.args if name.startswith("args.") else trainer, name.removeprefix("args."), value)
    with pytest.raises(UsageError, match=said):
        prepare_trainer(trainer)


def test_a_class_of_ones_own_resumes_through_the_job(tmp_path: Path) -> None:
    class Own(ElasticMixin, Trainer):  # type: ignore[misc]
        pass

    with running_job(tmp_path / "job", consistency={"globalBatchSize": 8}) as job:
        trainer = make(tmp_path, kind=Own, given={"session": job.session(0)})
        refused: list[tuple[str, Callable[[], object]]] = [
            ("--resume DIR", lambda: trainer.train(resume_from_checkpoint=True)),
            ("examples/sweep", trainer.hyperparameter_search),
            (
                "leave gradient_accumulation_steps out",
                lambda: make(
                    tmp_path, kind=Own, given={"session": job.session(1)}, gradient_accumulation_steps=2
                ),
            ),
        ]
        for said, call in refused:
            with pytest.raises(UsageError, match=said):
                call()
