"""The scores of a model on a test set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Scores:
    """Means over all predictions of a test set: one for each image, one for each token of a text.

    Attributes:
        loss: the cross-entropy, in nats.
        prec1: how often the class with the highest logit is right, in per cent.
        prec5: how often the right class is among the five highest logits, in per cent.
    """

    loss: float
    prec1: float
    prec5: float

    def __str__(self) -> str:
        return f"test loss {self.loss:.4f}, prec@1 {self.prec1:.2f}, prec@5 {self.prec5:.2f}"


def evaluate(
    model: torch.nn.Module, dataset: Dataset[Any], *, batch_size: int, device: torch.device | str = "cpu"
) -> Scores:
    """The scores of a classifier. Blocks for a pass over the data set.

    Args:
        model: on `device`; returns (batch, ..., classes) logits. It is in training mode afterwards.
        dataset: map-style, of (input, targets); targets are int64, one for each row of logits.
        batch_size: records in a batch.
    """
    loss = first = five = 0.0
    predictions = 0
    model.eval()
    with torch.no_grad():
        for inputs, targets in DataLoader(dataset, batch_size=batch_size):
            logits = model(inputs.to(device)).flatten(0, -2)
            wanted = targets.to(device).flatten()
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == wanted.unsqueeze(1)
            loss += float(functional.cross_entropy(logits, wanted, reduction="sum"))
            first += int(best[:, 0].sum())
            five += int(best.sum())
            predictions += len(wanted)
    model.train()
    return Scores(loss / predictions, 100 * first / predictions, 100 * five / predictions)
