"""Networks for rows of a table with categories, such as clicks on advertisements.

Their embeddings have a size, and a worker holds all of them; or they are tables that grow
(`elastic_ps.Embedding`), for categories of which nobody knows how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_ps.embedding import normal
from elastic_ps.embedding.init import mixed
from elastic_ps.embedding.module import Embedding
from elastic_ps.errors import InvalidModel

_FIRST = normal(0, 0.01)


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


class _Growing(nn.Module):
    """The same, for categories that are any int64; the table grows."""

    def __init__(self, name: str, width: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.rows = Embedding(name, width, **{"init": _FIRST, **options})

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        return self.rows(ids_of_fields(categories))  # type: ignore[no-any-return]


def ids_of_fields(categories: torch.Tensor) -> torch.Tensor:
    """The ids of categories in a table that all fields share: a hash of the field and the category.

    Args:
        categories: int64 of shape (batch, fields).

    Returns:
        int64 of the same shape, on the same device. Two categories of a field have different ids.
    """
    fields = np.arange(1, categories.shape[1] + 1, dtype=np.uint64)
    ids = mixed(categories.cpu().numpy().view(np.uint64) ^ mixed(fields))
    return torch.from_numpy(ids.view(np.int64)).to(categories.device)


def ids_for(model: nn.Module, categories: torch.Tensor) -> dict[str, torch.Tensor]:
    """The ids of a batch by the names of the model's tables, for `session.loader(..., prefetch=...)`.

    Args:
        model: a `DeepFM` or `WideDeep` with tables that grow.
        categories: int64 of shape (batch, fields).
    """
    ids = ids_of_fields(categories)
    return {each.spec.name: ids for each in model.modules() if isinstance(each, Embedding)}


def _rows(
    name: str, fields: Sequence[int] | int, width: int, tables: Mapping[str, Any] | None
) -> _Fields | _Growing:
    if isinstance(fields, int) and tables is not None:
        return _Growing(name, width, tables)
    if isinstance(fields, int) or tables is not None:
        raise InvalidModel(
            f"fields is {fields}, with{'out' * (tables is None)} tables; expected the number of categories "
            "of each field; or the number of fields, and tables={'optimizer': RowwiseAdagrad(lr=0.05)} for "
            "tables that grow"
        )
    return _Fields(fields, width)


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
        fields: the number of categories of each field; with `tables` the number of fields.
        classes: to tell apart.
        width: of an embedding.
        hidden: widths of the hidden layers; the defaults are the paper's.
        tables: options of `elastic_ps.Embedding`, for tables that grow: categories are any int64. They need
            an optimizer. The tables are named `wide` and `deep`.
        wide: those of the table `wide` that differ; the paper has FTRL there.

    Raises:
        InvalidModel: `fields` is empty or has a number below 1, or does not fit `tables`.
        UsageError: see `elastic_ps.Embedding`.
    """

    def __init__(
        self,
        *,
        fields: Sequence[int] | int,
        classes: int = 2,
        width: int = 32,
        hidden: Sequence[int] = (1024, 512, 256),
        tables: Mapping[str, Any] | None = None,
        wide: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.wide = _rows("wide", fields, classes, None if tables is None else {**tables, **(wide or {})})
        self.embedding = _rows("deep", fields, width, tables)
        self.deep = _deep((fields if isinstance(fields, int) else len(fields)) * width, hidden, classes)

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        """(batch, fields) int64 to (batch, classes)."""
        return self.wide(categories).sum(1) + self.deep(self.embedding(categories).flatten(1))  # type: ignore[no-any-return]


class DeepFM(nn.Module):
    """DeepFM (Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction", 2017).

    A factorization machine (Rendle, 2010) and a feed-forward network share the embeddings. Takes (batch,
    fields) int64 categories and returns (batch, 2) logits, of no and of yes; that of no is always 0.

    Args:
        fields: the number of categories of each field; with `tables` the number of fields.
        width: of an embedding.
        hidden: widths of the hidden layers; the defaults are the paper's.
        tables: options of `elastic_ps.Embedding`, for a table that grows: categories are any int64. They need
            an optimizer. The table is named `deepfm`; a row has the linear weight and then the embedding.

    Raises:
        InvalidModel: `fields` is empty or has a number below 1, or does not fit `tables`.
        UsageError: see `elastic_ps.Embedding`.
    """

    def __init__(
        self,
        *,
        fields: Sequence[int] | int,
        width: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        tables: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if tables is None:
            self.first = _rows("first", fields, 1, None)
            self.embedding = _rows("embedding", fields, width, None)
        else:
            self.both = _rows("deepfm", fields, 1 + width, tables)
        self.width = width
        self.deep = _deep((fields if isinstance(fields, int) else len(fields)) * width, hidden, 1)

    def forward(self, categories: torch.Tensor) -> torch.Tensor:
        """(batch, fields) int64 to (batch, 2)."""
        if hasattr(self, "both"):
            first, vectors = self.both(categories).split([1, self.width], dim=2)
        else:
            first, vectors = self.first(categories), self.embedding(categories)
        linear = first.sum((1, 2))
        yes = linear + interactions(vectors) + self.deep(vectors.flatten(1)).squeeze(1)
        return torch.stack((torch.zeros_like(yes), yes), dim=1)


def interactions(vectors: torch.Tensor) -> torch.Tensor:
    """The sum of the inner products of all pairs of vectors: (batch, fields, width) to (batch,).

    It is half of the difference between the square of their sum and the sum of their squares (Rendle,
    "Factorization machines", 2010, lemma 3.1), which takes time in proportion to the number of fields.
    """
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
