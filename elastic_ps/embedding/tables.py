"""The tables of a model, whose steps are made with the model's step."""

from __future__ import annotations

import abc
from collections.abc import Mapping

import torch

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.embedding.module import Embedding, Gradient, LocalSource, Source
from elastic_ps.errors import InvalidModel, UsageError


class Tables(abc.ABC):
    """All tables of a model.

    Args:
        sources: where each table's rows are, by its name.
    """

    def __init__(self, sources: dict[str, Source]) -> None:
        self._sources = sources
        self._taken: dict[str, Gradient] = {}

    def clear(self) -> None:
        """Forget the gradients of the next step."""
        self._taken = {}
        for source in self._sources.values():
            source.pending.clear()

    def prepare(self) -> None:
        """Take the gradients of the step that is to be made.

        Raises:
            InvalidModel: one is not finite. All are dropped.
        """
        self._taken = {name: source.pending.take() for name, source in self._sources.items()}
        for name, gradient in self._taken.items():
            if not bool(torch.isfinite(gradient.values).all()):
                self.clear()
                raise InvalidModel(
                    f"the gradient of the table {name!r} holds NaN or Inf. Look at the loss: the learning "
                    "rate may be too high. To make no step with a batch, call optimizer.skip()"
                )

    @abc.abstractmethod
    def applied(self, version: int) -> None:
        """The step is in this version."""


class LocalTables(Tables):
    """The tables of a model that trains alone, in this process.

    Layers whose tables have the same name get the same table.

    Raises:
        ModelMismatch: two layers describe a table differently.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        sources: dict[str, LocalSource] = {}
        for layer in layers_of(model):
            source = layer.source
            assert isinstance(source, LocalSource)
            first = sources.setdefault(layer.spec.name, source)
            first.table.spec.require_same(layer.spec)
            if source is not first and len(source.table):
                raise UsageError(
                    f"two layers share the table {layer.spec.name!r}, but the second one has rows of its "
                    "own. Call load_state_dict after session.optimizer(...)"
                )
            layer.source = first
        super().__init__(dict(sources))
        self._tables = {name: source.table for name, source in sources.items()}

    def applied(self, version: int) -> None:
        """Make the tables' steps."""
        for name, (ids, values, counts) in self._taken.items():
            self._tables[name].update(ids, values, counts, version)
        self._taken = {}


def tables_alone(model: torch.nn.Module, spec: TrainingJobSpec) -> LocalTables | None:
    """The tables of a model that trains alone; None if it has none.

    Raises:
        InvalidModel: the job makes no step of them.
        ModelMismatch: see `Tables`.
    """
    if not layers_of(model):
        return None
    require_trainable(
        {"strategy: all-reduce": spec.all_reduce, "consistency.mode: local": spec.consistency.mode == "local"}
    )
    return LocalTables(model)


def require_trainable(problems: Mapping[str, bool]) -> None:
    """Raise InvalidModel if a job has one of these settings, with which tables that grow are not trained."""
    if wrong := [name for name, there in problems.items() if there]:
        raise InvalidModel(
            f"the model has tables that grow, which are not trained with {', '.join(wrong)}. Leave that out, "
            "or use torch.nn.Embedding with a size (docs/guides/embeddings.md)"
        )


def layers_of(model: torch.nn.Module) -> list[Embedding]:
    """The layers of a model whose rows are in a table that grows."""
    return [module for module in model.modules() if isinstance(module, Embedding)]
