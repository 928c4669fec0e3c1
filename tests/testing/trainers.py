"""What tests of Hugging Face's Trainer share: data, models, and trainers of them in double precision."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import state
from transformers import Trainer, TrainingArguments

from tests.testing.harness import Numbers, make_mlp

EPOCHS, RECORDS, BATCH = 3, 50, 4
IN_ORDER = {"shuffle": False}


class Records(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, records: int) -> None:
        self._data = Numbers(records)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = self._data[index]
        return {"x": x.double(), "labels": y.double()}


class Ragged(Records):
    """Half of the batches have two labels for each record, and the others have one."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = super().__getitem__(index).values()
        return {"x": x, "labels": torch.cat([y, y if index % 8 < 4 else -100 + 0 * y])}


class Unlabelled(Records):
    """These batches have no label that counts."""

    def __init__(self, records: int, batches: set[int]) -> None:
        super().__init__(records)
        self._batches = batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = super().__getitem__(index).values()
        return {"x": x, "labels": torch.full_like(y, -100) if index // BATCH in self._batches else y}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp().double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.mlp(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class TokenNet(Net):
    """Its loss is the mean over the labels that count."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **given: Any) -> dict[str, torch.Tensor]:
        counted = labels != -100
        errors = (self.mlp(x) - labels)[counted].square().sum()
        return {"loss": errors / given.get("num_items_in_batch", counted.sum())}


def have_workers_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the state of each thread apart, as accelerate does it itself where threads are its processes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
        monkeypatch.setattr(kind, "_shared_state", state.ThreadLocalSharedDict())
    # It empties `os.environ` for a while, which the threads share, to compare options with their defaults.
    monkeypatch.setattr("accelerate.utils.environment.clear_environment", nullcontext)


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    usual = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.01,
        "warmup_steps": 3,
        "max_grad_norm": 0.1,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(directory), **(usual | options))


def make(
    directory: Path,
    *,
    records: int = RECORDS,
    ragged: bool = False,
    kind: Any = Trainer,
    given: Any = None,
    **options: Any,
) -> Any:
    return kind(
        TokenNet() if ragged else Net(),
        arguments(directory, **options),
        train_dataset=(Ragged if ragged else Records)(records),
        eval_dataset=Records(20),
        **(given or {}),
    )


def by_itself(directory: Path, **options: Any) -> Any:
    trainer = make(directory, **options)
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_model(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
