"""Tables in checkpoints: each column of a table is a tensor in a shard's file.

A file has the rows of one shard. A reader of a checkpoint takes the rows that it wants from all files, so
another number of shards may read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from elastic_ps.codec import as_bytes
from elastic_ps.codec.state import Stored
from elastic_ps.embedding.ages import Ages
from elastic_ps.embedding.init import Constant, Ids, Init, Normal, Uniform
from elastic_ps.embedding.optimizers import KINDS, RowOptimizer
from elastic_ps.embedding.table import State, Table, TableSpec
from elastic_ps.errors import CheckpointCorrupt, Malformed, UserError

LONGEST_SPEC = 4096
"""The longest description of a table, in characters."""

DENSE_BYTES = 64 * 2**20
"""The largest table that an export has as one dense tensor, too, in bytes."""

Wanted: TypeAlias = Callable[[Ids], npt.NDArray[np.bool_]]

_NOT_WHOLE = "a table in the checkpoint is incomplete: {!r}"
_KNOWN = ("ids", "counts", "seen")
_INITS: Mapping[str, type[Init]] = {each.__name__: each for each in (Uniform, Normal, Constant)}
_OPTIMIZERS: Mapping[str, type[RowOptimizer]] = {each.__name__: each for each in KINDS}


def _all(ids: Ids) -> npt.NDArray[np.bool_]:
    return np.ones(len(ids), dtype=np.bool_)


class StoredRows(Stored):
    """A column of a table: `tensor` is the number of the table in the file."""

    @property
    def name(self) -> str:
        return f"rows/{self.tensor}/{self.key}"


def columns_to_part(spec: TableSpec, state: State) -> dict[str, torch.Tensor]:
    """Some rows of a table, as `Table.changes` gives them, as tensors with the table's description."""
    columns = {"spec": torch.frombuffer(bytearray(spec_to_text(spec).encode()), dtype=torch.uint8)}
    for name, value in state.items():
        columns[name] = value if isinstance(value, torch.Tensor) else torch.tensor([value])
    return columns


def parts_in(
    parts: Iterable[Mapping[str, torch.Tensor]], wanted: Wanted = _all
) -> Iterator[tuple[TableSpec, State]]:
    """The descriptions of tables, each with some of its rows for `Table.merge`, in this order.

    Args:
        parts: what `columns_to_part` has given, flattened; columns without elements may be missing.
        wanted: which of some ids are to be read.

    Raises:
        CheckpointCorrupt: these are no rows of tables.
    """
    for columns in parts:
        yield part_of(columns, wanted)


COLUMNS = ("ids", "values", "weight")
"""What an exported table has, after its name and a dot."""


def exported(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows of all tables in a checkpoint, for plain torch: `NAME.ids`, `NAME.values`, `NAME.weight`.

    Args:
        parts: what `Reader.rows` gives.

    Returns:
        The ids in ascending order, of shape (rows,), and the values of shape (rows, dim). If no id is
        negative, and it has at most DENSE_BYTES, also the weight of a `torch.nn.Embedding`, of shape
        (last id + 1, dim), in which ids without a row have their first values.

    Raises:
        CheckpointCorrupt: see `parts_in`.
    """
    tables: dict[str, Table] = {}
    for spec, part in parts_in(parts):
        tables.setdefault(spec.name, Table(spec)).merge(part)
    tensors: dict[str, torch.Tensor] = {}
    for name, table in sorted(tables.items()):
        state = table.state()
        ids, values = state["ids"], state["values"]
        tensors |= {f"{name}.ids": ids, f"{name}.values": values}
        size = int(ids[-1]) + 1 if len(ids) else 0
        row = table.spec.dim * values.element_size()
        if size and ids[0] >= 0 and size * row <= DENSE_BYTES:
            tensors[f"{name}.weight"] = table.lookup(np.arange(size))
    return tensors


def part_of(columns: Mapping[str, torch.Tensor], wanted: Wanted = _all) -> tuple[TableSpec, State]:
    """One of `parts_in`."""
    try:
        spec = spec_from_text(bytes(as_bytes(columns["spec"])).decode())
        return spec, _chosen(spec, columns, wanted)
    except (Malformed, KeyError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointCorrupt(_NOT_WHOLE.format(error)) from error


def _chosen(spec: TableSpec, columns: Mapping[str, torch.Tensor], wanted: Wanted) -> State:
    """The rows of one part that are wanted."""
    chosen: State = {key: int(columns[key]) for key in ("version", "steps")}
    if spec.expire_time is not None:
        chosen["times"] = columns["times"]
        Ages(spec.expire_time).learn(chosen["times"])
    widths = {"values": spec.dim, **{slot.name: slot.width or spec.dim for slot in spec.optimizer.slots}}
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    for prefix, names in (("", (*_KNOWN, *widths)), ("waiting_", _KNOWN)):
        ids, removed = columns.get(f"{prefix}ids", none), columns.get(f"{prefix}removed", none)
        chosen[f"{prefix}removed"] = removed[torch.from_numpy(wanted(removed.numpy()))]
        places = np.flatnonzero(wanted(ids.numpy()))
        for name in names:
            width = (widths[name],) if name in widths else ()
            if not len(places):  # such as the rows of another shard, which need not be read
                dtype = spec.torch_dtype if width else torch.int64
                chosen[prefix + name] = torch.empty(0, *width, dtype=dtype, device="cpu")
                continue
            column = columns[prefix + name].view(len(ids), *width)
            some = len(places) < len(ids)
            chosen[prefix + name] = column[torch.from_numpy(places)] if some else column
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
    numbers = {each.name: float(getattr(part, each.name)) for each in fields(part) if each.type == "float"}
    return {"kind": type(part).__name__, **asdict(part), **numbers}


def _made(kinds: Mapping[str, type[Any]], data: dict[str, Any]) -> Any:
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return kinds[str(options.pop("kind"))](**options)
