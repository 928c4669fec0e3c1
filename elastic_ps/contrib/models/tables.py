"""Networks for rows of a table with categories, such as clicks on advertisements.

Their embeddings are dense: a worker holds all of them, and the gradient of each step has all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elastic_ps.errors import InvalidModel


class _Fields(nn.Module):
    """A vector for each category of each field; all fields share one table.

    Takes (batch, fields) int64 categories, each below its field's number, and returns (batch, fields, width).
    """

    def __init__(self, fields: Sequence[int], width: int) -> None:
        super().__init__()
        if not fields or min(fields) < 1:
            raise InvalidModel(f"fields is {list(fields)}; expected the number of categories of each field")
        self.rows = nn.Embedding(sum(fields), width)
        nn.init.normal_(self.rows.weight, std=0.01)
        starts = torch.tensor([sum(fields[:number]) for number in range(len(fields))])
        self.register_buffer("starts", starts, persistent=False)

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        starts = self.get_buffer("starts")
        return self.rows(categories + starts)  # type: ignore[no-any-return]


def _deep(inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


class WideDeep(nn.Module):
    """Wide & Deep (Cheng et al., "Wide & deep learning for recommender systems", 2016).

    A linear model of the categories, and a feed-forward network on their embeddings. Give crossed categories
    as fields of their own. Takes (batch, fields) int64 categories and returns (batch, classes) logits.

    Args:
        fields: the number of categories of each field.
        classes: to tell apart.
        width: of an embedding.
        hidden: widths of the hidden layers; the defaults are the paper's.

    Raises:
        InvalidModel: `fields` is empty or has a number below 1.
    """

    def __init__(
        self,
        *,
        fields: Sequence[int],
        classes: int = 2,
        width: int = 32,
        hidden: Sequence[int] = (1024, 512, 256),
    ) -> None:
        super().__init__()
        self.wide = _Fields(fields, classes)
        self.embedding = _Fields(fields, width)
        self.deep = _deep(len(fields) * width, hidden, classes)

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        """(batch, fields) int64 to (batch, classes)."""
        return self.wide(categories).sum(1) + self.deep(self.embedding(categories).flatten(1))  # type: ignore[no-any-return]


class DeepFM(nn.Module):
    """DeepFM (Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction", 2017).

    A factorization machine (Rendle, 2010) and a feed-forward network share the embeddings. Takes (batch,
    fields) int64 categories and returns (batch, 2) logits, of no and of yes; that of no is always 0.

    Args:
        fields: the number of categories of each field.
        width: of an embedding.
        hidden: widths of the hidden layers; the defaults are the paper's.

    Raises:
        InvalidModel: `fields` is empty or has a number below 1.
    """

    def __init__(
        self, *, fields: Sequence[int], width: int = 10, hidden: Sequence[int] = (400, 400, 400)
    ) -> None:
        super().__init__()
        self.first = _Fields(fields, 1)
        self.embedding = _Fields(fields, width)
        self.deep = _deep(len(fields) * width, hidden, 1)

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        """(batch, fields) int64 to (batch, 2)."""
        vectors = self.embedding(categories)
        linear = self.first(categories).sum((1, 2))
        yes = linear + interactions(vectors) + self.deep(vectors.flatten(1)).squeeze(1)
        return torch.stack((torch.zeros_like(yes), yes), dim=1)


def interactions(vectors: torch.Tensor) -> torch.Tensor:
    """The sum of the inner products of all pairs of vectors: (batch, fields, width) to (batch,).

    It is half of the difference between the square of their sum and the sum of their squares (Rendle,
    "Factorization machines", 2010, lemma 3.1), which takes time in proportion to the number of fields.
    """
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
