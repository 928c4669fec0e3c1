"""Elastic PyTorch training through a fault-tolerant parameter server.

A training script needs three lines::

    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for x, y in session.loader(dataset, batch_size=64, epochs=10):
        ...

Importing this package loads neither torch nor grpc; the names below load what they need when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic_ps.version import __version__ as __version__

if TYPE_CHECKING:
    from elastic_ps.api.job import TrainingJob, load_job
    from elastic_ps.checkpoint.plain import load_checkpoint
    from elastic_ps.contrib.engine import Engine
    from elastic_ps.embedding.module import Embedding, EmbeddingBag
    from elastic_ps.errors import (
        ConnectionLost,
        ElasticPSError,
        InvalidJob,
        InvalidModel,
        ModelMismatch,
        Refused,
        TensorLost,
        UsageError,
        UserError,
    )
    from elastic_ps.evaluation.checkpoints import checkpoints
    from elastic_ps.evaluation.source import Checkpoint
    from elastic_ps.standalone import connect
    from elastic_ps.worker.optimizer import ElasticOptimizer
    from elastic_ps.worker.session import Session
    from elastic_ps.worker.wire.local_world import Drained

_PLACES = {
    "connect": "elastic_ps.standalone",
    "Session": "elastic_ps.worker.session",
    "Drained": "elastic_ps.worker.wire.local_world",
    "ElasticOptimizer": "elastic_ps.worker.optimizer",
    "load_checkpoint": "elastic_ps.checkpoint.plain",
    "Engine": "elastic_ps.contrib.engine",
    "Embedding": "elastic_ps.embedding.module",
    "EmbeddingBag": "elastic_ps.embedding.module",
    "checkpoints": "elastic_ps.evaluation.checkpoints",
    "Checkpoint": "elastic_ps.evaluation.source",
    "TrainingJob": "elastic_ps.api.job",
    "load_job": "elastic_ps.api.job",
    "ElasticPSError": "elastic_ps.errors",
    "UserError": "elastic_ps.errors",
    "InvalidJob": "elastic_ps.errors",
    "InvalidModel": "elastic_ps.errors",
    "ModelMismatch": "elastic_ps.errors",
    "UsageError": "elastic_ps.errors",
    "ConnectionLost": "elastic_ps.errors",
    "Refused": "elastic_ps.errors",
    "TensorLost": "elastic_ps.errors",
}

__all__ = [
    "Checkpoint",
    "ConnectionLost",
    "Drained",
    "ElasticOptimizer",
    "ElasticPSError",
    "Embedding",
    "EmbeddingBag",
    "Engine",
    "InvalidJob",
    "InvalidModel",
    "ModelMismatch",
    "Refused",
    "Session",
    "TensorLost",
    "TrainingJob",
    "UsageError",
    "UserError",
    "checkpoints",
    "connect",
    "load_checkpoint",
    "load_job",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'elastic_ps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
