"""The scores of a classifier on a test set."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from elastic_ps.contrib.zoo.scores import evaluate

LOGITS = torch.tensor(
    [
        [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0],
        [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0],
    ]
)
LABELS = torch.tensor([0, 2, 1, 4, 6])
"""The first is the best; the second and the fourth are the fifth best; the others are worse."""


@pytest.mark.parametrize("batch_size", [2, 100])
def test_scores_are_means_over_all_images(batch_size: int) -> None:
    scores = evaluate(torch.nn.Identity(), TensorDataset(LOGITS, LABELS), batch_size=batch_size)
    assert (scores.prec1, scores.prec5) == pytest.approx((20, 60))
    assert scores.loss == pytest.approx(float(torch.nn.functional.cross_entropy(LOGITS, LABELS)), rel=1e-6)
    assert str(scores).endswith("prec@1 20.00, prec@5 60.00")


def test_each_token_of_a_text_counts() -> None:
    text = TensorDataset(LOGITS[1:].view(2, 2, 7), LABELS[1:].view(2, 2))
    assert evaluate(torch.nn.Identity(), text, batch_size=1).prec5 == 50


def test_with_fewer_than_five_classes_one_of_them_is_right() -> None:
    few = TensorDataset(LOGITS[:, :3], torch.tensor([0, 1, 2, 0, 1]))
    assert evaluate(torch.nn.Identity(), few, batch_size=3).prec5 == 100


def test_a_model_is_evaluated_as_such_and_trains_on_afterwards() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.9), torch.nn.Identity())
    assert evaluate(model, TensorDataset(LOGITS, LABELS), batch_size=5).prec1 == pytest.approx(20)
    assert model.training
