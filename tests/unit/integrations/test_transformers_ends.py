"""How a Trainer's training ends in a job, and where it goes on."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK, MLflowCallback
from transformers.integrations.integration_utils import WandbLogModel
from transformers.trainer_utils import get_last_checkpoint

from elastic_ps.contract.env import Resume
from elastic_ps.errors import UsageError
from elastic_ps.integrations.transformers import _uploads, prepare_trainer
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, running_job
from tests.testing.oracle import assert_each_record_once
from tests.testing.polling import LIMIT
from tests.testing.trainers import (
    BATCH,
    EPOCHS,
    IN_ORDER,
    RECORDS,
    assert_same_model,
    by_itself,
    logged,
    make,
)


@pytest.mark.parametrize("steps", [1, 2], ids=["after a step", "within a step"])
def test_a_callback_that_leaves_the_last_epoch_ends_the_training(tmp_path: Path, steps: int) -> None:
    class Leaving(TrainerCallback):  # type: ignore[misc]
        """Leaves each epoch after two batches or more."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= steps == 1 and state.epoch % 1 > BATCH / RECORDS

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= state.epoch % 1 > 0

    options: dict[str, Any] = {"gradient_accumulation_steps": steps, "eval_strategy": "no"}

    def script(session: Session) -> None:
        trainer = make(tmp_path / "out", given={"callbacks": [Leaving()]}, **options)
        prepare_trainer(trainer, session=session).train()
        assert 0 < trainer.state.epoch < EPOCHS
        trainer.save_model()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)
        assert job.status().progress.stopped == "a callback of the Trainer has left the last epoch"
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("then", [0, 1])
def test_the_chief_of_the_end_saves_without_an_epoch_of_its_own(tmp_path: Path, then: int) -> None:
    """Worker 1 is it. Then comes its replacement, which is the chief, too, or a worker 0, which is not."""
    saved = list[int]()

    def script(session: Session) -> None:
        options: dict[str, Any] = {"eval_strategy": "no", "num_train_epochs": 1}
        trainer = prepare_trainer(make(tmp_path / "out", **options), session=session)
        trainer.train()
        if trainer.is_world_process_zero():
            saved.append(session.worker)
        if session.worker == 1 == then and len(saved) == 1:
            job.declare_gone(1)

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        for worker in (1, then):
            job.start(worker, script)
            job.join()
    assert saved == [1] * (1 + then)


def test_the_epoch_is_that_of_the_trainer_alone_after_max_steps(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 20, "eval_strategy": "no"}
    alone = by_itself(tmp_path / "alone", **options)

    def script(session: Session) -> None:
        trainer = prepare_trainer(make(tmp_path, **options), session=session)
        trainer.train()
        assert trainer.state.epoch == pytest.approx(alone.state.epoch)

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=1)


@pytest.mark.parametrize("every", [5, 100])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_newest_checkpoint_and_the_last_evaluation_are_those_of_the_end(
    tmp_path: Path, workers: int, every: int
) -> None:
    """Whichever worker writes it: checkpoints are numbered by the steps of the Trainer alone."""
    usual: dict[str, Any] = {"save_strategy": "steps", "save_total_limit": 2, "save_steps": every}
    usual |= {"eval_strategy": "steps", "eval_steps": every}
    alone, trainers = by_itself(tmp_path / "alone", **usual), list[Any]()

    def script(session: Session) -> None:
        trainer = prepare_trainer(make(tmp_path / "out", **usual), session=session)
        trainer.train()
        evaluated = logged(trainer, "eval_loss")
        assert evaluated[-1] == pytest.approx(trainer.evaluate()["eval_loss"])
        if workers == 1:
            assert evaluated == pytest.approx(logged(alone, "eval_loss"))
        trainers.append(trainer)

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=workers)
    newest = Path(get_last_checkpoint(tmp_path / "out"))
    assert newest.name == f"checkpoint-{alone.state.global_step}"
    for name, value in load_file(newest / "model.safetensors").items():
        torch.testing.assert_close(value, trainers[0].model.state_dict()[name], rtol=0, atol=0)


def test_a_worker_that_is_not_the_chief_removes_no_checkpoint(tmp_path: Path) -> None:
    """Worker 0 has the best checkpoint, and waits while worker 1 trains the rest, and saves the model."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    options |= {
        "save_steps": 2,
        "save_total_limit": 1,
        "num_train_epochs": 1,
        "lr_scheduler_type": "constant",
    }
    options |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    saved, ended = threading.Event(), threading.Event()

    class Waiting(TrainerCallback):  # type: ignore[misc]
        def on_save(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if not saved.is_set():
                assert state.best_model_checkpoint
                saved.set()
                trainers[0].session.pause()
                assert ended.wait(LIMIT)

    trainers = dict[int, Any]()

    def script(session: Session) -> None:
        trainer = make(tmp_path / "out", given={"callbacks": [Waiting()]}, **options)
        trainers[session.worker] = prepare_trainer(trainer, session=session)
        assert session.worker == 0 or saved.wait(LIMIT)
        trainer.train()
        ended.set()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.run(script, workers=2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-13"]


def test_a_trainer_trains_once(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        trainer = prepare_trainer(make(tmp_path, eval_strategy="no", num_train_epochs=1), session=session)
        trainer.train()
        with pytest.raises(UsageError, match="a job trains one model once"):
            trainer.train()

    with running_job(tmp_path / "job") as job:
        job.run(script, workers=1)


def test_a_worker_that_comes_late_is_not_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trained, trainers = threading.Event(), list[Any]()

    def script(session: Session) -> None:
        trainer = prepare_trainer(make(tmp_path, eval_strategy="no"), session=session)
        if session.worker:
            trained.wait()
        trainer.train()
        trainers.append(trainer)
        trained.set()

    with running_job(tmp_path / "job") as job:
        job.run(script, workers=2)
    assert trainers[1].state.global_step == 0
    assert not [each for each in caplog.messages if "sample" in each]


def test_the_chief_saves_and_uploads(tmp_path: Path) -> None:
    chiefs, uploads, zeros = list[int](), list[tuple[int, bool]](), list[int]()

    class Uploading(Trainer):  # type: ignore[misc]
        def push_to_hub(self, *_: Any, **__: Any) -> None:
            uploads.append((self.session.worker, self.is_world_process_zero()))

    def script(session: Session) -> None:
        own = tmp_path / f"worker-{session.worker}"
        trainer = make(own, kind=Uploading, eval_strategy="no", num_train_epochs=1)
        prepare_trainer(trainer, session=session).train()
        trainer.save_model()
        trainer.push_to_hub()
        if session.is_chief:
            chiefs.append(session.worker)
        if trainer.is_world_process_zero():
            zeros.append(session.worker)

    with running_job(tmp_path / "job") as job:
        for worker in (1, 2):
            job.start(worker, script)
        job.join()
    assert uploads == [(chief, True) for chief in chiefs]
    assert zeros == chiefs
    assert [*tmp_path.glob("*/model.safetensors")] == [tmp_path / f"worker-{chiefs[0]}" / "model.safetensors"]


@pytest.mark.parametrize(
    ("tracker", "given", "uploads"),
    [
        ("clearml", {}, True),
        ("flyte", {"sync_checkpoints": True}, True),
        ("tensorboard", {}, False),
        ("wandb", {"_log_model": WandbLogModel.CHECKPOINT}, True),
        ("wandb", {"_log_model": WandbLogModel.END}, False),
        ("wandb", {"_log_model": WandbLogModel.FALSE}, False),
    ],
)
def test_which_trackers_upload_each_checkpoint(tracker: str, given: dict[str, Any], uploads: bool) -> None:
    made = object.__new__(INTEGRATION_TO_CALLBACK[tracker])  # their packages are not installed
    vars(made).update(given)
    assert _uploads(made) == uploads


def test_callbacks_of_a_save_are_on_the_first_process_but_trackers_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Worker 1 is the chief, but worker 0 has the run of a tracker."""
    called = list[tuple[str, bool, int]]()

    class Copying(TrainerCallback):  # type: ignore[misc]
        def on_save(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            called.append((type(self).__name__, state.is_world_process_zero, state.global_step))

    class Tracker(Copying, MLflowCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self._log_artifacts = True

        on_train_begin = on_log = on_train_end = TrainerCallback.on_train_begin
        __del__ = object.__init__

    def script(session: Session) -> None:
        options: dict[str, Any] = {"save_strategy": "epoch", "num_train_epochs": 2, "eval_strategy": "no"}
        trainer = make(tmp_path / "out", given={"callbacks": [Copying(), Tracker()]}, **options)
        prepare_trainer(trainer, session=session).train()
        assert not trainer.state.is_world_process_zero

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.start(1, script)
        job.join()
    assert sorted(called) == [
        (name, name == "Copying", n) for name in ("Copying", "Tracker") for n in (13, 26)
    ]
    assert [each.partition(":")[0] for each in caplog.messages if "upload" in each] == [
        f"Tracker does not upload checkpoint-{number}" for number in (13, 26)
    ]


def test_a_callback_ends_the_training_of_a_worker_that_has_repeated_steps(tmp_path: Path) -> None:
    """One process makes 7 steps. This worker joins again in its third one, and has 7 before the last one."""
    job_of, trainers = list[Job](), list[Any]()

    class Losing(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2 and job_of:
                job_of.pop().declare_gone(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == state.max_steps

    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "eval_strategy": "no"}

    def script(session: Session) -> None:
        trainers.append(make(tmp_path, given={"callbacks": [Losing()]}, **options))
        prepare_trainer(trainers[0], session=session).train()

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job_of.append(job)
        job.run(script, workers=1)
        assert not job_of
        assert job.status().progress.stopped == "a callback of the Trainer has ended the training"
    assert trainers[0].state.global_step == trainers[0].state.max_steps


def test_a_resumed_job_goes_on_where_it_was(tmp_path: Path) -> None:
    """A worker is asked to leave in the second epoch. The schedule falls from the first step to the last."""
    options: dict[str, Any] = {"eval_strategy": "no", "lr_scheduler_type": "cosine"}
    alone, trainers, checkpoints = by_itself(tmp_path / "alone", **options), list[Any](), tmp_path / "kept"

    class Leaving(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if len(trainers) == 1 and state.global_step == 20:
                trainers[0].session.drain()

    def script(session: Session) -> None:
        trainers.append(make(tmp_path, given={"callbacks": [Leaving()]}, **options))
        prepare_trainer(trainers[-1], session=session).train()

    commits = list[Any]()
    for resume in ("no", "require"):
        with running_job(tmp_path / resume, data=IN_ORDER, checkpoints=checkpoints, resume=resume) as job:
            job.run(script, workers=1)
            commits += job.commits()
    assert_each_record_once(commits, records=RECORDS, epochs=EPOCHS)
    assert_same_model(trainers[1], alone)
    for name in ("learning_rate", "loss"):
        assert logged(trainers[1], name) == pytest.approx(logged(alone, name)[20:]), name


@pytest.mark.parametrize("again", ["a new process", "a process that evaluates first", "a resumed job"])
def test_patience_goes_on_where_it_was(tmp_path: Path, again: str) -> None:
    """The first evaluation is the best. The worker leaves in the second epoch, after which patience ends."""
    options: dict[str, Any] = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    options["eval_on_start"] = "evaluates" in again
    trainers, commits = list[Any](), list[Any]()
    resumes: tuple[Resume, ...] = ("no", "require") if again == "a resumed job" else ("no",)

    class Leaving(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if len(trainers) == 1 and state.global_step == 20:
                trainers[0].session.drain()

    def script(session: Session) -> None:
        given = {"callbacks": [EarlyStoppingCallback(1), Leaving()]}
        trainers.append(prepare_trainer(make(tmp_path, given=given, **options), session=session))
        trainers[-1].train()

    for resume in resumes:
        with running_job(tmp_path / resume, data=IN_ORDER, checkpoints=tmp_path, resume=resume) as job:
            for _ in range(2 // len(resumes)):
                job.run(script, workers=1)
            commits += job.commits()
    assert_each_record_once(commits, records=RECORDS, epochs=2)
    assert trainers[1].state.best_metric == trainers[0].state.best_metric
