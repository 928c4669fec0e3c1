"""The tables of a model, whose steps are made with the model's step."""

from __future__ import annotations

import abc
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.core.partition import TABLE, Rule, TensorSpec
from elastic_ps.embedding.init import Ids
from elastic_ps.embedding.module import (
    Embedding,
    Given,
    Gradient,
    LocalSource,
    Source,
    as_ids,
    mean_of,
)
from elastic_ps.embedding.stored import COLUMNS, spec_to_text
from elastic_ps.errors import InvalidModel, RefusalCode, Refused, UsageError
from elastic_ps.transport import messages_pb2 as pb

Groups: TypeAlias = Sequence[Mapping[str, Any]]


class Tables(abc.ABC):
    """All tables of a model.

    Args:
        sources: where each table's rows are, by its name.
    """

    def __init__(self, sources: dict[str, Source]) -> None:
        self._sources = sources
        self._taken: dict[str, Gradient] = {}
        self._first: Groups = ()

    def prefetch(self, wanted: Mapping[str, Given], staleness: Callable[[], int]) -> dict[str, Ids]:  # noqa: ARG002
        """Begin to fetch the rows of the next batch. Rows in this process need no fetching.

        Args:
            wanted: ids by the names of tables; empty: there is no next batch.
            staleness: see `Ahead`.

        Returns the ids as flat arrays.

        Raises:
            UsageError: the model has no such table, or these are no ids.
        """
        if not isinstance(wanted, Mapping):
            raise UsageError(
                f"prefetch has returned {type(wanted).__name__}; expected a mapping from tables to ids"
            )
        if unknown := [name for name in wanted if name not in self._sources]:
            raise UsageError(
                f"prefetch names the table {unknown[0]!r}, but the tables of the model are "
                f"{', '.join(map(repr, self._sources))}"
            )
        flat = {name: as_ids(given, name, torch.device("cpu"))[0] for name, given in wanted.items()}
        return {name: ids for name, ids in flat.items() if len(ids)}

    def clear(self) -> None:
        """Forget the gradients of the next step."""
        self._taken = {}
        for source in self._sources.values():
            source.pending.clear()

    def prepare(self, groups: Groups) -> None:
        """Take the gradients of the step that is to be made. `groups`: what it is made with."""
        del groups  # in a job, the parameter server gets them with the end of the step
        self._taken = {name: source.pending.take() for name, source in self._sources.items()}

    def require_finite(self) -> None:
        """Raise Refused (NOT_FINITE), as a shard would, if a gradient is not finite."""
        for name, gradient in self._taken.items():
            if not bool(torch.isfinite(gradient.values).all()):
                raise Refused(
                    RefusalCode.NOT_FINITE,
                    f"the gradient of the table {name!r} holds NaN or Inf. Look at the loss: the learning "
                    "rate may be too high. To skip a batch, call optimizer.skip()",
                )

    def begin(self, groups: Groups, counts: Callable[[], bool]) -> None:
        """Training begins with these parameter groups of the model's optimizer; `counts`: see `Pending`."""
        self._first = [dict(group) for group in groups]
        for source in self._sources.values():
            source.pending.counts = counts

    @abc.abstractmethod
    def send(self, caller: pb.Caller, step: int, weight: float) -> None:
        """Before the step is ended: it has this number and weight in the mean. See `RemoteTables`."""

    @abc.abstractmethod
    def ended(self, made: bool, version: int) -> None:
        """The step has ended. If it was made, `version` is the newest one, in which it is, or will be."""


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
        self._steps: list[tuple[dict[str, Gradient], float]] = []  # that are in no version
        self._version, self._weight = 0, 1.0
        self._rates: dict[str, float] = {}

    def prepare(self, groups: Groups) -> None:
        """See `Tables`. Once the step has ended, a scheduler may have stepped."""
        super().prepare(groups)
        tables = self._tables.items()
        self._rates = {name: t.spec.optimizer.rate_of(groups, self._first) for name, t in tables}

    def send(self, caller: pb.Caller, step: int, weight: float) -> None:
        """See `Tables`. Raises Refused (NOT_FINITE)."""
        del caller, step
        self.require_finite()
        self._weight = weight

    def ended(self, made: bool, version: int) -> None:
        """Make the tables' steps, if there is a new version."""
        if made:
            self._steps.append((self._taken, self._weight))
        self._taken = {}
        if version == self._version:
            return
        self._version, steps, self._steps = version, self._steps, []
        weight = math.fsum(own for _, own in steps) if len(steps) > 1 else None
        for name, table in self._tables.items():
            ids, values, counts = mean_of([(taken[name], own) for taken, own in steps], weight, table.spec)
            # One that was loaded may have more versions than the session.
            next_version = table.version + 1
            table.update(ids, values, counts, next_version, rate=self._rates[name], now=time.monotonic())


def tables_alone(model: torch.nn.Module, spec: TrainingJobSpec) -> LocalTables | None:
    """The tables of a model that trains alone; None if it has none.

    Raises:
        InvalidModel: the job makes no step of them.
        ModelMismatch: see `Tables`.
    """
    if not (layers := layers_of(model)):
        return None
    require_trainable(spec, layers)
    return LocalTables(model)


def require_trainable(spec: TrainingJobSpec, layers: Sequence[Embedding]) -> None:
    """Raise InvalidModel if the job has a setting with which these tables are not trained."""
    wrong = ["strategy: all-reduce"] if spec.all_reduce else []
    wrong += ["consistency.mode: local"] if spec.consistency.mode == "local" else []
    timed = [layer.spec for layer in layers if layer.spec.expire_time is not None]
    if spec.consistency.deterministic and timed:
        raise InvalidModel(
            f"the table {timed[0].name!r} has expire_after={timed[0].expire_after!r}, but with "
            "consistency.deterministic no row may depend on time. Use a number of versions"
        )
    if wrong:
        raise InvalidModel(
            f"the model has tables that grow, which are not trained with {', '.join(wrong)}. Leave that out, "
            "or use torch.nn.Embedding with a size (docs/guides/embeddings.md)"
        )


def described_tables(model: torch.nn.Module) -> list[TensorSpec]:
    """The descriptions of a model's tables that grow, which are the same in all workers, by name.

    Raises:
        InvalidModel: an exported table could not be told from a layer of the same name.
    """
    texts = {layer.spec.name: spec_to_text(layer.spec) for layer in layers_of(model)}
    tensors = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} if texts else set()
    for name, column in itertools.product(sorted(texts), COLUMNS):
        if f"{name}.{column}" in tensors:
            raise InvalidModel(
                f"the table {name!r} and a layer have the same name, so an export would have two tensors "
                f"{name}.{column}. Give the table another name"
            )
    return [
        TensorSpec(f"the table {name!r}", (), TABLE, Rule.EXTERNAL, content=text)
        for name, text in sorted(texts.items())
    ]


def layers_of(model: torch.nn.Module) -> list[Embedding]:
    """The layers of a model whose rows are in a table that grows."""
    return [module for module in model.modules() if isinstance(module, Embedding)]
