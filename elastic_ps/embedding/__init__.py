"""Embeddings in tables that grow: rows are made when they are first trained.

The layers are `elastic_ps.Embedding` and `elastic_ps.EmbeddingBag`; here are the optimizers of rows and their
first values. See docs/guides/embeddings.md.
"""

from __future__ import annotations

from elastic_ps.embedding.init import constant, hashed, normal, uniform
from elastic_ps.embedding.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowwiseAdagrad
from elastic_ps.embedding.table import Table, TableSpec

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "LazyAdam",
    "RowwiseAdagrad",
    "Table",
    "TableSpec",
    "constant",
    "hashed",
    "normal",
    "uniform",
]
