"""A worker's script with a class of trainers of its own, for workers of several processes."""

from __future__ import annotations

import torch
from transformers import Trainer, TrainingArguments

from elastic_ps.integrations.transformers import ElasticMixin
from tests.testing.harness import Numbers, make_mlp


class Records(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As many as two workers' batches divide."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = Numbers(48)[index]
        return {"x": x, "labels": y}


class Net(torch.nn.Module):
    """Gives what a Trainer expects of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = make_mlp()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, by name."""
        return {"loss": torch.nn.functional.mse_loss(self.mlp(x), labels)}


class Own(ElasticMixin, Trainer):  # type: ignore[misc]
    """As docs/guides/huggingface.md asks for it."""


def main(directory: str) -> None:
    """Train an epoch. `directory`: for what the Trainer writes."""
    arguments = TrainingArguments(
        output_dir=directory,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    Own(Net(), arguments, train_dataset=Records()).train()
