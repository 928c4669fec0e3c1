"""A table of rows by ids, which grows as ids are trained.

A look-up creates nothing: an id without a row has its first values. A row is made in the first version in
which its id has occurred in training `admit_after` times. Everything is decided by what was trained, and for
`expire_after="7d"` by the times of versions, which are given. So the same steps make the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from elastic_ps.codec import dtype_of, name_of
from elastic_ps.core.names import LONGEST_NAME, is_name
from elastic_ps.embedding.ages import Ages, lasting
from elastic_ps.embedding.columns import NEVER, Column, Rows
from elastic_ps.embedding.copies import RowsAt
from elastic_ps.embedding.init import Constant, Ids, Init, Normal, Uniform, key_of
from elastic_ps.embedding.optimizers import RowOptimizer, Touched, check_optimizer
from elastic_ps.errors import InvalidModel, ModelMismatch, UsageError

WhenFull: TypeAlias = Literal["refuse", "expire"]
State: TypeAlias = dict[str, Any]

OVERHEAD = 24
"""The bytes that a row takes beside its values and those of its optimizer, at most."""

_KNOWN = ("ids", "counts", "seen")
_SWEEPS = 8
_SWEPT = 1024
_EVICTED = 32


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What a table is.

    Args:
        name: the table's own; layers with the same name share one.
        dim: the number of values in a row.
        init: the first values of a row.
        optimizer: that of its rows.
        seed: another seed gives other first values.
        dtype: "float32" or "float64".
        padding_idx: an id whose row is 0 and is never trained.
        admit_after: how often an id has to occur in training before it gets a row.
        expire_after: after how many versions without its id a row is dropped; None: never. Or the time, such
            as "7d", "12h", "30m" or "90s"; see `embedding.ages`.
        table_bytes: the most bytes of all rows with their overhead, on each parameter server; None: no
            limit.
        when_full: what happens at that limit: "refuse" makes no more rows, and "expire" drops those whose ids
            have not occurred for the longest time. With `admit_after`, a 32nd of the bytes is for ids that
            wait.

    Raises:
        UsageError: an argument is out of its range.
    """

    name: str
    dim: int
    init: Init
    optimizer: RowOptimizer
    seed: int = 0
    dtype: str = "float32"
    padding_idx: int | None = None
    admit_after: int = 1
    expire_after: int | str | None = None
    table_bytes: int | None = None
    when_full: WhenFull = "refuse"

    def __post_init__(self) -> None:
        self._require("name", is_name(self.name), f"1 to {LONGEST_NAME} printable characters")
        self._require("dim", _is_count(self.dim), "a whole number above 0")
        known = isinstance(self.init, Uniform | Normal | Constant)
        self._require("init", known, "uniform(...), normal(...) or constant(...)")
        check_optimizer(self.optimizer)
        self._require("seed", isinstance(self.seed, int), "a whole number")
        self._require("dtype", self.dtype in ("float32", "float64"), "torch.float32 or torch.float64")
        padding = self.padding_idx
        is_id = padding is None or (isinstance(padding, int) and -(2**63) <= padding < 2**63)
        self._require("padding_idx", is_id, "an id of int64, or None")
        self._require("admit_after", _is_count(self.admit_after), "a whole number above 0")
        expires = self.expire_after is None or self.expire_time is not None or _is_count(self.expire_after)
        self._require("expire_after", expires, 'a number of versions above 0, a time such as "7d", or None')
        enough = self.table_bytes is None or (_is_count(self.table_bytes) and self.rows_in_budget > 0)
        least = self.row_bytes + (OVERHEAD if self._bytes_to_wait else 0)
        self._require("table_bytes", enough, f"None, or at least {least}, the bytes of one row")
        self._require("when_full", self.when_full in get_args(WhenFull), '"refuse" or "expire"')

    def _require(self, option: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UsageError(
                f"the table {str(self.name)[:LONGEST_NAME]!r} has {option}={getattr(self, option)!r}; "
                f"expected {expected}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)

    @property
    def expire_time(self) -> timedelta | None:
        """`expire_after`, if it is a time."""
        return lasting(self.expire_after) if isinstance(self.expire_after, str) else None

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, with its optimizer's and the overhead."""
        values = self.dim + sum(slot.width or self.dim for slot in self.optimizer.slots)
        return values * self.torch_dtype.itemsize + OVERHEAD

    @property
    def _bytes_to_wait(self) -> int:
        """The bytes that rows leave to ids that wait."""
        if self.table_bytes is None or self.when_full == "refuse" or self.admit_after == 1:
            return 0
        return max(OVERHEAD, self.table_bytes // _EVICTED)

    @property
    def rows_in_budget(self) -> int:
        """The most rows."""
        if self.table_bytes is None:
            return np.iinfo(np.int32).max
        return (self.table_bytes - self._bytes_to_wait) // self.row_bytes

    @property
    def most_waiting(self) -> int | None:
        """The most ids that wait; None if that depends on the rows, or there is no limit."""
        return self._bytes_to_wait // OVERHEAD or None

    def require_same(self, other: TableSpec, *, here: str = "one layer", there: str = "another") -> None:
        """Raise ModelMismatch if the table is described differently `there`."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                raise ModelMismatch(
                    f"the table {self.name!r} has {field.name}={mine} in {here} and {theirs} in {there}. A "
                    "table is described the same by all layers with its name, in all workers, and when a job "
                    "goes on"
                )


@dataclass
class Counts:
    """Counts events of a table since it was created.

    `used` and `used_ahead` are counted in jobs; see `api.tables.TableStatus`.
    """

    admitted: int = 0
    expired: int = 0
    refused: int = 0
    looked_up: int = 0
    hits: int = 0
    used: int = 0
    used_ahead: int = 0


class Table:
    """The rows of one table, in this process. Not thread-safe.

    Attributes:
        version: the last version that it has.
        steps: the number of versions in which it had a gradient.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.version = 0
        self.steps = 0
        self.counts = Counts()
        self._key = key_of(spec.seed, spec.name)
        dtype = np.dtype(spec.dtype)
        self._values = Column(dtype, spec.dim)
        self._slots = [Column(dtype, slot.width or spec.dim) for slot in spec.optimizer.slots]
        self._rows = Rows([self._values, *self._slots])
        self._waiting = Rows()  # ids that are not admitted yet
        self._swept = [0, 0]
        time = spec.expire_time
        self._ages = None if time is None else Ages(time)

    def __len__(self) -> int:
        """The number of rows, with those that have expired and are not swept yet."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """The number of ids that have occurred, but not often enough to be admitted."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """The memory of the table, in bytes."""
        return self._rows.nbytes + self._waiting.nbytes

    def lookup(self, ids: Ids) -> torch.Tensor:
        """The values of the rows of these ids, a new tensor of shape (ids, dim) on the CPU.

        Ids may be repeated. Creates nothing.
        """
        rows = self._rows.find(ids)
        if self.spec.expire_after is not None:
            rows[self._expired(self._rows, rows)] = -1
        missing = np.flatnonzero(rows < 0)
        self.counts.looked_up += len(ids)
        self.counts.hits += len(ids) - len(missing)
        if len(missing):
            rows[missing] = 0
        values = self._values.tensor.index_select(0, torch.from_numpy(rows))
        if len(missing):
            values[torch.from_numpy(missing)] = self._first_values(ids[missing])
        return values

    def changed(self, ids: Ids, version: int) -> Ids:
        """The places of those ids for which `lookup` may give other values than at an earlier version."""
        rows = self._rows.find(ids)
        rows[self._expired(self._rows, rows)] = -1
        there = rows >= 0
        changed = there & (np.take(self._rows.seen.array, rows, mode="clip") > version)
        if self.spec.expire_after is not None or self.spec.when_full == "expire":
            changed |= ~there  # it may have had a row
        return np.flatnonzero(changed)

    def update(
        self,
        ids: Ids,
        gradient: torch.Tensor,
        counts: Ids,
        version: int,
        *,
        stepped: bool = False,
        rate: float = 1.0,
        now: float = 0.0,
    ) -> None:
        """Make the optimizer's step of a version, and create the rows of new ids.

        Args:
            ids: each once.
            gradient: the sum of each id's gradients, of shape (ids, dim) and the table's dtype. It may be
                overwritten.
            counts: how often each id has occurred.
            version: the one that this makes; at least the last one.
            stepped: whether it counts as a step without ids, because other shards have rows that it changes.
            rate: by what the learning rate is multiplied.
            now: when the version is made, in seconds; see `Ages.advance`.
        """
        self.steps += bool(len(ids)) or stepped
        self._rows.now = self._waiting.now = version
        if len(ids):
            rows = self._rows_of(ids, counts, version)
            known = np.flatnonzero(rows >= 0)
            if len(known) < len(ids):
                rows, gradient = rows[known], gradient[torch.from_numpy(known)]
            self._step(rows, gradient, rate)
        self.version = version
        # Where a look-up made the table, a standby has none; after all rows were dropped, it has one.
        if self._ages is not None and (self.extent or self._ages.begun):
            self._ages.advance(version, now)
        for place, rows_ in enumerate((self._rows, self._waiting)):
            self._sweep(place, rows_)

    def _step(self, rows: Ids, gradient: torch.Tensor, rate: float) -> None:
        columns, where = (self._values, *self._slots), torch.from_numpy(rows)
        values, *slots = (column.tensor.index_select(0, where) for column in columns)
        self.spec.optimizer.step(Touched(values, slots, gradient, self.steps, rate))
        for column, changed in zip(columns, (values, *slots), strict=True):
            column.put(rows, changed)

    def _rows_of(self, ids: Ids, counts: Ids, version: int) -> Ids:
        """The row of each id, after new ones are made; -1 for those that are not admitted.

        A row has expired if it had at the version before, whose look-ups the gradients are of.
        """
        rows = self._rows.find(ids)
        gone = self._expired(self._rows, rows)
        self._drop(rows[gone])
        rows[gone] = -1
        there = rows >= 0
        self._rows.touch(rows[there], counts[there], version)
        missing = np.flatnonzero(~there)
        if len(missing):
            total = self._admit(ids[missing], counts[missing], version)
            admitted = missing[total >= self.spec.admit_after]
            total = total[total >= self.spec.admit_after]
            room = self._make_room(len(admitted), version)
            self.counts.refused += len(admitted) - room
            admitted = admitted[:room]
            rows[admitted] = self._create(ids[admitted], total[:room], version)
        return rows

    def _create(self, ids: Ids, counts: Ids, version: int) -> Ids:
        rows = self._rows.add(ids, counts, version)
        self.counts.admitted += len(ids)
        where = torch.from_numpy(rows)
        self._values.tensor.index_copy_(0, where, self._first_values(ids))
        for column, slot in zip(self._slots, self.spec.optimizer.slots, strict=True):
            column.tensor.index_fill_(0, where, slot.first)
        return rows

    def _first_values(self, ids: Ids) -> torch.Tensor:
        drawn = self.spec.init.first_values(self._key, ids, self.spec.dim)
        if self.spec.padding_idx is not None:
            drawn[ids == self.spec.padding_idx] = 0
        return torch.from_numpy(drawn.astype(self.spec.dtype, copy=False))

    def _admit(self, ids: Ids, counts: Ids, version: int) -> Ids:
        """How often each id has occurred, now included; remember those that are not admitted."""
        need, waiting = self.spec.admit_after, self._waiting
        if need == 1:
            return counts
        rows = waiting.find(ids)
        gone = self._expired(waiting, rows)
        waiting.remove(rows[gone])
        rows[gone] = -1
        there = rows >= 0
        total = counts.copy()
        total[there] += waiting.counts.array[rows[there]]
        admitted = total >= need
        waiting.remove(rows[there & admitted])
        stay = there & ~admitted
        waiting.touch(rows[stay], counts[stay], version)
        new = np.flatnonzero(~there & ~admitted)
        if (most := self.spec.most_waiting) is not None:
            if len(waiting) + len(new) > most:
                self._drop_expired()
            missing = len(waiting) + len(new) - most
            if missing > 0:
                waiting.remove(_least_recent(waiting, version, max(missing, most // _EVICTED)))
            new = new[: most - len(waiting)]
        elif self.spec.table_bytes is not None:
            if self._free_to_wait < len(new):
                self._drop_expired()
            new = new[: self._free_to_wait]
        waiting.add(ids[new], counts[new], version)
        return total

    def _make_room(self, wanted: int, version: int) -> int:
        """How many of so many new rows there is room for, perhaps after others were dropped."""
        most = self.spec.rows_in_budget
        if wanted > most - len(self._rows):
            self._drop_expired()
        room = most - len(self._rows)
        if wanted > room and self.spec.when_full == "expire":
            # More than are needed, because finding them takes a look at all.
            self._drop(_least_recent(self._rows, version, max(wanted - room, most // _EVICTED)))
            room = most - len(self._rows)
        return min(wanted, max(room, 0))

    @property
    def _free_to_wait(self) -> int:
        """How many more ids may wait, if that depends on the rows."""
        used = len(self._rows) * self.spec.row_bytes + len(self._waiting) * OVERHEAD
        return max(0, (self.spec.table_bytes or 0) - used) // OVERHEAD

    def _drop_expired(self) -> None:
        """Drop everything that has expired: what there is room for must not depend on sweeps.

        A standby has other row numbers, so it has swept others.
        """
        if self.spec.expire_after is not None:
            self._drop(self._rows.seen_before(self._oldest))
            self._waiting.remove(self._waiting.seen_before(self._oldest))

    def _expired(self, rows: Rows, numbers: Ids) -> Ids:
        """A mask of the row numbers whose rows have expired. The number -1 has not expired."""
        if self.spec.expire_after is None:
            return np.empty(0, dtype=np.int64)
        seen = np.take(rows.seen.array, numbers, mode="clip")
        expired: Ids = np.flatnonzero((numbers >= 0) & (seen < self._oldest))
        return expired

    @property
    def _oldest(self) -> int:
        """Rows with an earlier last version have expired."""
        if self._ages is not None:
            return self._ages.oldest
        after = self.spec.expire_after
        return self.version - after if isinstance(after, int) else 0

    def _sweep(self, place: int, rows: Rows) -> None:
        """Drop some of the rows that have expired: all are looked at `_SWEEPS` times in `expire_after`.

        If that is a time, in `_SWEPT` versions.
        """
        after = _SWEPT if self._ages is not None else self.spec.expire_after
        if not isinstance(after, int) or not rows.extent:
            return
        start = self._swept[place] if self._swept[place] < rows.extent else 0
        stop = start + max(1 << 12, -(-rows.extent * _SWEEPS // after))
        old = rows.seen_before(self._oldest, start, stop)
        if place == 0:
            self._drop(old)
        else:
            rows.remove(old)
        self._swept[place] = stop

    def _drop(self, rows: Ids) -> None:
        self._rows.remove(rows)
        self.counts.expired += len(rows)

    @property
    def extent(self) -> int:
        """Rows, and ids that wait, have numbers below it; see `changes`."""
        return max(self._rows.extent, self._waiting.extent)

    def state(self) -> State:
        """Copies of all rows, as tensors by names, in order of the ids; rows that have expired are left out.

        `ids`, `counts` and `seen` (the last version) have the shape (rows,), `values` and the optimizer's
        slots (rows, width); `waiting_ids` and so on are of the ids that are not admitted yet.
        """
        state = self.header()
        for prefix, rows in self._both():
            numbers = rows.seen_since(self._first_since(NEVER))
            state |= self._columns(prefix, rows, numbers[np.argsort(rows.ids.array[numbers])])
        return state

    def changes(self, since: int = NEVER, start: int = 0, stop: int | None = None) -> State | None:
        """Like `state`, in any order, of rows `start` to `stop`, those that a step has changed.

        Args:
            since: the changes after this version; `NEVER`: all rows. After a version, `removed` and
                `waiting_removed` have the ids, of any number, that were removed; see `merge`.

        Returns:
            None if it is not known any more what was removed.
        """
        state = self.header()
        removed = {} if since == NEVER else self.removed_since(since)
        if removed is None:
            return None
        for prefix, rows in self._both():
            numbers = rows.seen_since(self._first_since(since), start, stop)
            state |= self._columns(prefix, rows, numbers)
        return state | removed

    def header(self) -> State:
        """What `state` has of the table, not of its rows."""
        times = {} if self._ages is None else {"times": self._ages.to_tensor()}
        return {"version": self.version, "steps": self.steps, **times}

    def removed_since(self, version: int) -> dict[str, torch.Tensor] | None:
        """`removed` and `waiting_removed`; see `changes`."""
        found = {f"{prefix}removed": rows.removed_since(version) for prefix, rows in self._both()}
        known = {name: torch.from_numpy(ids) for name, ids in found.items() if ids is not None}
        return known if len(known) == len(found) else None

    def changed_since(self, version: int) -> int:
        """How many rows, and ids that wait, `changes` would give."""
        first = self._first_since(version)
        return sum(len(rows.seen_since(first)) for _, rows in self._both())

    def rows_now(self, since: int, *, size: int) -> list[RowsAt]:
        """The rows and the ids that wait, as they are now, in blocks of this size; see `changes`."""
        return [
            RowsAt(
                rows,
                {prefix + name: getattr(rows, name) for name in _KNOWN} | dict(self._named(prefix)),
                seen=f"{prefix}seen",
                since=self._first_since(since),
                size=size,
            )
            for prefix, rows in self._both()
        ]

    def _first_since(self, version: int) -> int:
        """The least last version of the rows that changed after a version, and have not expired."""
        return max(version + 1, self._oldest)

    def _columns(self, prefix: str, rows: Rows, numbers: Ids) -> State:
        columns: State = {}
        for name in _KNOWN:
            column: Column = getattr(rows, name)
            columns[prefix + name] = torch.from_numpy(column.array[numbers].astype(np.int64))
        for name, column in self._named(prefix):
            columns[name] = column.tensor.index_select(0, torch.from_numpy(numbers))
        return columns

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace everything by what `state` has given.

        Raises:
            ModelMismatch: it is of a table with another dim, dtype or optimizer.
        """
        new = Table(self.spec)
        new.merge(state)
        self.replace(new)

    def replace(self, other: Table) -> None:
        """Become the other table, which must not be used any more."""
        self.__dict__.update(other.__dict__)

    def merge(self, part: Mapping[str, Any]) -> None:
        """Take rows over that another table has given, in place of those with the same ids.

        Args:
            part: what `state` or `changes` has given. This table becomes equal to the other one by all its
                rows, in any number of parts, and by its changes after the version that this one is equal to.

        Raises:
            ModelMismatch: see `load_state`. Nothing has changed.
        """
        count = len(part.get("ids", ()))
        for name, column in self._named():
            given, shape = part.get(name), (count, column.tensor.shape[1])
            if given is None or tuple(given.shape) != shape or name_of(given.dtype) != self.spec.dtype:
                what = "nothing" if given is None else f"{tuple(given.shape)} of {given.dtype}"
                raise ModelMismatch(
                    f"the rows are not of the table {self.spec.name!r}, or not of its optimizer "
                    f"{type(self.spec.optimizer).__name__}: {name} should be {shape} of {self.spec.dtype}, "
                    f"but is {what}"
                )
        for prefix, rows in self._both():
            for name, of in (("removed", (rows,)), ("ids", (self._rows, self._waiting))):
                gone = part[prefix + name].numpy() if prefix + name in part else np.empty(0, dtype=np.int64)
                for each in of:
                    found = each.find(gone)
                    each.remove(found[found >= 0])
        for prefix, rows in self._both():
            ids, counts, seen = (part[prefix + name].numpy() for name in _KNOWN)
            numbers = torch.from_numpy(rows.add(np.ascontiguousarray(ids), counts, seen))
            for name, column in self._named(prefix):
                column.tensor.index_copy_(0, numbers, part[name])
        self.version, self.steps = int(part["version"]), int(part["steps"])
        if self._ages is not None and "times" in part:
            self._ages.learn(part["times"])
        for _, rows in self._both():
            rows.forget_removed(self.version)

    def shrink(self) -> None:
        """Drop the rows above the budget: checkpoints of several parameter servers were merged.

        Raises:
            InvalidModel: there are too many rows, and `when_full` is "refuse".
        """
        if self.spec.table_bytes is None:
            return
        most, waiting = self.spec.rows_in_budget, self._waiting
        if (excess := len(self._rows) - most) > 0:
            if self.spec.when_full == "refuse":
                raise InvalidModel(
                    f"the checkpoint has {len(self._rows)} rows or more of the table {self.spec.name!r} for "
                    f"one parameter server, but table_bytes={self.spec.table_bytes} is enough for {most}. "
                    "Resume with as many parameterServer.replicas as before"
                )
            self._drop(_least_recent(self._rows, self.version + 1, excess))
        if self.spec.most_waiting and (excess := len(waiting) - self.spec.most_waiting) > 0:
            waiting.remove(_least_recent(waiting, self.version + 1, excess))

    def _both(self) -> tuple[tuple[str, Rows], tuple[str, Rows]]:
        """The rows and the ids that wait, with the prefixes of their columns' names."""
        return ("", self._rows), ("waiting_", self._waiting)

    def _named(self, prefix: str = "") -> list[tuple[str, Column]]:
        """The columns with the names that only this table has."""
        if prefix:
            return []
        names = ("values", *(slot.name for slot in self.spec.optimizer.slots))
        return list(zip(names, (self._values, *self._slots), strict=True))

    def __reduce__(self) -> Any:
        """Serve `copy.deepcopy` and pickle."""
        return _restored, (self.spec, self.state())


def _least_recent(rows: Rows, version: int, count: int) -> Ids:
    """The numbers of the `count` rows seen least recently, before `version`; all if there are fewer."""
    old = rows.seen_before(version)
    order = np.lexsort((rows.ids.array[old], rows.seen.array[old]))
    return np.sort(old[order[:count]])


def _restored(spec: TableSpec, state: State) -> Table:
    table = Table(spec)
    table.load_state(state)
    return table


def default_init(dim: int) -> Init:
    """Uniform, with the standard deviation 1 / sqrt(dim), so that a row has a norm of about 1."""
    bound = float(np.sqrt(3 / dim)) if _is_count(dim) else 1.0  # TableSpec refuses other dims
    return Uniform(-bound, bound)


def _is_count(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given > 0
