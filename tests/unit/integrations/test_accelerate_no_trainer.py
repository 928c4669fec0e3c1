"""A script in the shape of Hugging Face's `run_glue_no_trainer.py` trains in a job, with one changed line."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    SchedulerType,
    default_data_collator,
    get_scheduler,
)

from elastic_ps.integrations.accelerate import ElasticAccelerator
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.oracle import assert_each_record_once
from tests.testing.polling import LIMIT

EPOCHS, RECORDS, BATCH, EVERY = 2, 48, 4, 2


class Sentences(torch.utils.data.Dataset[dict[str, list[int] | int]]):
    """The first word says the label. The first record that is asked for comes when `ready` returns."""

    def __init__(self, records: int, ready: Callable[[], object] = lambda: None) -> None:
        self._records, self._ready = records, [ready]

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> dict[str, list[int] | int]:
        while self._ready:
            self._ready.pop()()
        return {"input_ids": [2 + index % 2, 4 + index % 5], "attention_mask": [1, 1], "labels": index % 2}


class Noting(GeneralTracker):  # type: ignore[misc]
    """Keeps what it is told."""

    name, requires_logging_directory = "noting", False

    def __init__(self) -> None:
        self.tracker = list[Any]()
        super().__init__()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.append(values)

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self.tracker.append(values | {"step": step})

    def finish(self) -> None:
        self.tracker.append("finished")


def script(accelerator: Any, directory: Path, training: Sentences) -> Any:
    """As that script has it, but for the download of a model and of data, and for messages."""
    if accelerator.is_main_process:
        directory.mkdir()
    accelerator.wait_for_everyone()
    widths = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8}
    config = BertConfig(**widths, num_hidden_layers=1, num_attention_heads=2, num_labels=2)
    model: Any = BertForSequenceClassification(config)
    with accelerator.main_process_first():
        evaluated = Sentences(10)
    train_dataloader: Any = DataLoader(
        training, shuffle=True, collate_fn=default_data_collator, batch_size=BATCH
    )
    eval_dataloader: Any = DataLoader(evaluated, collate_fn=default_data_collator, batch_size=BATCH)
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(each in n for each in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(each in n for each in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    max_train_steps = EPOCHS * math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        SchedulerType.LINEAR, optimizer, num_warmup_steps=1, num_training_steps=max_train_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accelerator.init_trackers("glue_no_trainer", {"lr_scheduler_type": SchedulerType.LINEAR.value})
    completed_steps, accuracy = 0, 0.0
    for epoch in range(EPOCHS):
        model.train()
        total_loss: Any = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                if completed_steps % EVERY == 0:
                    accelerator.save_state(directory / f"step_{completed_steps}")
            if completed_steps >= max_train_steps:
                break
        model.eval()
        right = []
        for batch in eval_dataloader:
            with torch.no_grad():
                found = model(**batch).logits.argmax(dim=-1)
            found, labels = accelerator.gather_for_metrics((found, batch["labels"]))
            right.append(found == labels)
        accuracy = torch.cat(right).float().mean().item()
        assert len(torch.cat(right)) == 10
        train_loss = total_loss.item() / len(train_dataloader)
        accelerator.log(
            {"accuracy": accuracy, "train_loss": train_loss, "epoch": epoch}, step=completed_steps
        )
        accelerator.save_state(directory / f"epoch_{epoch}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        directory, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        with (directory / "all_results.json").open("x") as file:
            json.dump({"eval_accuracy": accuracy}, file)
    accelerator.end_training()
    return unwrapped


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_script_of_hugging_face_logs_and_saves_once(tmp_path: Path) -> None:
    alone, notes, trained, both = Noting(), dict[int, Noting](), list[Any](), threading.Barrier(2)
    options: dict[str, Any] = {"cpu": True, "project_dir": tmp_path}
    script(Accelerator(log_with=alone, **options), tmp_path / "alone", Sentences(RECORDS))

    def in_job(session: Session) -> None:
        note = notes[session.worker] = Noting()
        accelerator = ElasticAccelerator(epochs=EPOCHS, session=session, log_with=note, **options)
        training = Sentences(RECORDS, ready=lambda: both.wait(LIMIT))
        trained.append(script(accelerator, tmp_path / "out", training))

    with running_job(tmp_path / "job") as job:
        job.run(in_job, workers=2)
        assert_each_record_once(job.commits(), records=RECORDS, epochs=EPOCHS)
    assert [set(each) for each in notes[0].tracker] == [set(each) for each in alone.tracker]
    assert not notes[1].tracker
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    for model in trained:
        assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
    assert files(tmp_path / "out") >= {f for f in files(tmp_path / "alone") if not f.startswith("step_")}
    within = tmp_path / "out" / f"step_{EVERY}"
    assert files(within) == files(tmp_path / "alone" / within.name)
    state = torch.load(within / "optimizer.bin", weights_only=False)["state"]
    assert 0 < float(state[0]["step"]) <= RECORDS // BATCH, "a checkpoint within the first epoch"
