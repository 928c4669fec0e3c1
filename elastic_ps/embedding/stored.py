"""Tables in checkpoints: each column of a table is a tensor in a shard's file.

A file has the rows of one shard. Whoever reads a checkpoint takes from all files the rows that it wants, so
another number of shards may read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_ps.codec import as_bytes
from elastic_ps.codec.state import Stored
from elastic_ps.embedding.init import Constant, Ids, Init, Normal, Uniform
from elastic_ps.embedding.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowOptimizer, RowwiseAdagrad
from elastic_ps.embedding.table import State, Table, TableSpec
from elastic_ps.errors import CheckpointCorrupt, Malformed, UserError

LONGEST_SPEC = 4096
"""The longest description of a table, in characters."""

_KNOWN = ("ids", "counts", "seen")
_INITS: Mapping[str, type[Init]] = {each.__name__: each for each in (Uniform, Normal, Constant)}
_OPTIMIZERS: Mapping[str, type[RowOptimizer]] = {
    each.__name__: each for each in (SGD, Adagrad, RowwiseAdagrad, LazyAdam, FTRL)
}


class StoredRows(Stored):
    """A column of a table: `tensor` is the number of the table in the file."""

    @property
    def name(self) -> str:
        return f"rows/{self.tensor}/{self.key}"


def columns_of(tables: Iterable[Table]) -> list[Stored]:
    """Copies of all rows of some tables. Columns without elements are left out."""
    found: list[Stored] = []
    for number, table in enumerate(tables):
        columns = {"spec": torch.frombuffer(bytearray(spec_to_text(table.spec).encode()), dtype=torch.uint8)}
        for name, value in table.state().items():
            columns[name] = value if isinstance(value, torch.Tensor) else torch.tensor([value])
        found += [StoredRows(number, 0, name, value) for name, value in columns.items() if value.numel()]
    return found


def tables_in(
    parts: Iterable[dict[str, torch.Tensor]], wanted: Callable[[Ids], npt.NDArray[np.bool_]]
) -> dict[str, tuple[TableSpec, State]]:
    """The descriptions and states of the tables whose columns `columns_of` has given, by their names.

    Args:
        parts: of each file the columns of each table, flattened.
        wanted: which of some ids are to be read.

    Raises:
        CheckpointCorrupt: these are no whole tables.
    """
    found: dict[str, tuple[TableSpec, list[State]]] = {}
    for columns in parts:
        try:
            spec = spec_from_text(bytes(as_bytes(columns["spec"])).decode())
            found.setdefault(spec.name, (spec, []))[1].append(_chosen(spec, columns, wanted))
        except (Malformed, KeyError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointCorrupt(f"the checkpoint has no whole table: {error!r}") from error
    return {name: (spec, _joined(states)) for name, (spec, states) in found.items()}


def _joined(states: Sequence[State]) -> State:
    joined: State = {key: torch.cat([each[key] for each in states]) for key in states[0]}
    return joined | {key: int(joined[key].max()) for key in ("version", "steps")}


def _chosen(
    spec: TableSpec, columns: Mapping[str, torch.Tensor], wanted: Callable[[Ids], npt.NDArray[np.bool_]]
) -> State:
    """The rows of one part that are wanted."""
    chosen: State = {key: columns[key] for key in ("version", "steps")}
    widths = {"values": spec.dim, **{slot.name: slot.width or spec.dim for slot in spec.optimizer.slots}}
    for prefix, names in (("", (*_KNOWN, *widths)), ("waiting_", _KNOWN)):
        ids = columns.get(f"{prefix}ids", torch.empty(0, dtype=torch.int64))
        places = torch.from_numpy(np.flatnonzero(wanted(ids.numpy())))
        for name in names:
            dtype = spec.torch_dtype if name in widths else torch.int64
            column = columns.get(prefix + name, torch.empty(0, dtype=dtype))
            shaped = column.view(len(ids), widths[name]) if name in widths else column
            chosen[prefix + name] = shaped.index_select(0, places)
    return chosen


def spec_to_text(spec: TableSpec) -> str:
    """A table's description as JSON, the same for the same table."""
    return json.dumps(
        {**asdict(spec), "init": _named(spec.init), "optimizer": _named(spec.optimizer)}, sort_keys=True
    )


def spec_from_text(text: str) -> TableSpec:
    """Raises Malformed if it is none."""
    try:
        if len(text) > LONGEST_SPEC:
            raise ValueError(f"{len(text)} characters")
        data = json.loads(text)
        init, optimizer = _made(_INITS, data["init"]), _made(_OPTIMIZERS, data["optimizer"])
        return TableSpec(**{**data, "init": init, "optimizer": optimizer})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as error:
        raise Malformed(f"this describes no table: {text[:200]!r}: {error}") from error


def _named(part: Any) -> dict[str, Any]:
    return {"kind": type(part).__name__, **asdict(part)}


def _made(kinds: Mapping[str, type[Any]], data: dict[str, Any]) -> Any:
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return kinds[str(options.pop("kind"))](**options)
