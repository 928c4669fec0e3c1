"""The tensors of a bucket: flat memory, the optimizer that steps it, and the state for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from elastic_ps.codec import as_bytes, as_tensor, dtype_of
from elastic_ps.codec.base import Codec, Sparse
from elastic_ps.codec.changes import Delta, make_delta
from elastic_ps.codec.limits import limited
from elastic_ps.codec.optimizers import (
    MASTER,
    PULLED,
    VALUE,
    StateEntry,
    kept_state,
    steps_whole_tensors,
    wide,
)
from elastic_ps.codec.reductions import REDUCTIONS
from elastic_ps.codec.rows import RowChanges, Rows, RowSum
from elastic_ps.codec.several import Kind
from elastic_ps.codec.state import Source, Stored
from elastic_ps.codec.stepper import Groups, Stepper
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Rule, TensorSpec
from elastic_ps.core.settings import LIMITS
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.memory import Allocate, plain


class BucketValues:
    """One bucket: its values, the sum of the open round, and its optimizer. Not thread-safe.

    Args:
        stale: contributions may have been computed on an older version, so a maximum must not decrease.
        allocate: gives the memory of the values.
        deltas: encodes the change to a new version; None: workers get all values. Only for float32.

    Attributes:
        may_be_drafted: whether a step may be made on a copy of the bucket, before its round is decided.
        bucket: its place in the layout.
        values: the values that workers pull, flat, of the bucket's dtype.
        memory: the bytes of `values`.
        master: the values that the optimizer steps. This is `values`, unless these have half precision, or
            `deltas` is given.
        version: the number of steps taken.
        changed: the first version with the present values.
        delta: the change from the previous values to these; None: it is not known.
        draft: the number with which the values were sent before their round was decided; 0: they were not.
        weight: the weight of all contributions to the open round's sum.
        present: for each piece, whether a contribution has a gradient for it. The list is never changed.
    """

    may_be_drafted = True

    def __init__(
        self,
        bucket: Bucket,
        *,
        stale: bool = False,
        allocate: Allocate = plain,
        deltas: Codec | None = None,
    ) -> None:
        self.bucket, self._deltas, self._stale = bucket, deltas, stale
        self.delta: Delta | None = None
        self.memory = allocate(bucket.nbytes)
        self.values = as_tensor(self.memory, dtype_of(bucket.dtype))
        self.master = self.values
        self.version = self.changed = self.draft = 0
        self.weight = 0.0
        self._sum: torch.Tensor | None = None
        self._sums: list[torch.Tensor] = []  # of each piece
        self._bound = 0.0  # no element of the open round's sum has a larger magnitude
        self._blank = False  # nothing was added to the open round's sum, whose memory is not set
        self._lowest = 0
        self.present: Sequence[bool] = []
        self._bounds = [0]
        for piece in bucket.pieces:
            self._bounds.append(self._bounds[-1] + piece.length)
        self._parameters: list[torch.nn.Parameter] = []
        self._stepper: Stepper | None = None
        self._row: dict[int, int] = {}  # the elements of a row, by the id of the parameter
        if bucket.rule is Rule.GRADIENT:
            self.master = self.values.to(wide(self.values.dtype), copy=deltas is not None)
            self._parameters = [
                torch.nn.Parameter(self._piece(self.master, i)) for i in range(len(bucket.pieces))
            ]

    def _piece(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        return flat[self._bounds[index] : self._bounds[index + 1]]

    def initialise(self, values: torch.Tensor, *, version: int | None = None) -> None:
        """Take the first values from a worker, or the values of a version that the workers have made."""
        self.values.copy_(values)
        self.master.copy_(values)
        self._replaced(self.version if version is None else version)

    def _replaced(self, version: int) -> None:
        """All values are new, and of this version."""
        self.version = self.changed = version
        self.draft, self.delta = 0, None

    def build_optimizer(self, kinds: Sequence[Kind], groups: Groups, tensors: Sequence[TensorSpec]) -> None:
        """Create the optimizer, or several; see `Stepper`. `tensors`: all tensors of the model."""
        if self.bucket.rule is not Rule.GRADIENT:
            return
        group_of = [tensors[piece.tensor].group for piece in self.bucket.pieces]
        for index, piece in enumerate(self.bucket.pieces):
            if steps_whole_tensors(kinds[group_of[index]]):
                whole = self._piece(self.master, index).view(tensors[piece.tensor].shape)
                self._parameters[index] = torch.nn.Parameter(whole)
        pieces = zip(self._parameters, self.bucket.pieces, strict=True)
        self._row = {id(parameter): tensors[piece.tensor].row for parameter, piece in pieces}
        self._stepper = Stepper(kinds, groups, self._parameters, group_of)

    @property
    def lags(self) -> bool:
        """Whether deltas are lossy, so that workers may have other values than `master`."""
        return self._deltas is not None and not self._deltas.lossless

    @property
    def sum(self) -> torch.Tensor:
        """The sum of the open round's contributions so far: flat, of the dtype of sums.

        For gradients it is their weighted mean. The mean takes one pass over memory for each
        contribution, as a sum does, and the step need not divide.
        """
        total = self._memory()
        if self._blank:
            total.zero_()
            self._blank = False
        return total

    def _memory(self) -> torch.Tensor:
        if self._sum is None:
            self._sum = torch.empty(self.bucket.elements, dtype=wide(self.values.dtype))
            self._sums = [self._piece(self._sum, i).view(p.shape) for i, p in enumerate(self._parameters)]
        return self._sum

    def add_nothing(self, weight: float, *, first: bool) -> None:
        """Add a worker's step without any gradient. `first` begins a new sum."""
        self.weight = weight if first else self.weight + weight
        if first:
            self._blank, self._bound = True, 0.0
            self.present = [False] * len(self.bucket.pieces)
        elif self.bucket.rule is Rule.GRADIENT and not self._blank:
            self._memory().mul_((self.weight - weight) / self.weight)

    def add(
        self,
        contribution: torch.Tensor | Sparse | Rows,
        weight: float,
        present: Sequence[bool],
        *,
        first: bool,
        worker: int = 0,
        largest: float = math.inf,
    ) -> None:
        """Add a worker's values to the round's sum. `first` begins a new sum. Sparse values are gradients.

        Args:
            worker: index of the worker. For a BROADCAST the values of the lowest index count.
            largest: a bound of the values' magnitudes.
        """
        assert not isinstance(contribution, Rows), "only tables have rows"
        present = present or [True] * len(self.bucket.pieces)
        rule, total, begins = self.bucket.rule, self._memory(), first or self._blank
        self.weight = weight if first else self.weight + weight
        share, rest = weight / self.weight, (self.weight - weight) / self.weight
        self._bound = largest if begins else max(self._bound, largest)
        if isinstance(contribution, Sparse):
            total.zero_() if begins else total.mul_(rest)
            total.index_add_(0, contribution.places, contribution.values.to(total.dtype), alpha=share)
        elif begins or (rule is Rule.BROADCAST and worker <= self._lowest):
            self._lowest = worker  # of several steps of one worker, the last counts
            total.copy_(contribution)
            if rule is Rule.GRADIENT and share != 1:  # others have added nothing
                total.mul_(share)
        else:
            REDUCTIONS[rule].add(total, contribution, share, rest, self._bound)
        self._blank = False
        self.present = (
            list(present) if begins else [a or b for a, b in zip(self.present, present, strict=True)]
        )

    @property
    def sum_bytes(self) -> memoryview:
        """The sum, for a standby."""
        return as_bytes(self.sum)

    def take_sum(self, incoming: Incoming, present: Sequence[bool]) -> None:
        """On a standby, receive the result of `sum_bytes`. Blocks. Raises Refused (MALFORMED)."""
        if incoming.size != self.sum.nbytes or len(present) != len(self.bucket.pieces):
            raise Refused(
                RefusalCode.MALFORMED,
                f"sum of {incoming.size} bytes and {len(present)} flags for bucket {self.bucket.index}, "
                f"which has {self.sum.nbytes} bytes and {len(self.bucket.pieces)} pieces",
            )
        incoming.read_into(as_bytes(self.sum))
        self.present = list(present)

    def norm(self) -> float:
        """The 2-norm of the round's mean gradient, in float64."""
        if self.bucket.rule is not Rule.GRADIENT or not any(self.present):
            return 0.0
        return float(torch.linalg.vector_norm(self.sum, dtype=torch.float64))

    def apply(self, groups: Groups, version: int, *, divisor: float = 1.0) -> None:
        """Make `version` from the round's sum, which is not valid after that.

        Args:
            divisor: the mean gradient is divided by it.
        """
        self.draft = 0
        if self.bucket.rule is Rule.MAXIMUM:
            self.values.copy_(torch.maximum(self.sum, self.values) if self._stale else self.sum)
        elif self.bucket.rule in (Rule.MEAN, Rule.BROADCAST):
            self.values.copy_(self.sum)
        elif self.bucket.rule is Rule.SUM:
            self.values.add_(self.sum)
        elif any(self.present) or self._is_limited(groups):
            self._step(groups, divisor)
            self._publish(version)
        else:
            self.version = version
            return
        self.version = self.changed = version

    def _is_limited(self, groups: Groups) -> bool:
        assert self._stepper is not None
        return any(groups[number].get(key) for number in self._stepper.groups for key in LIMITS)

    def assign(self, version: int) -> None:
        """Make `version` of one worker's values, which are the sum. The optimizer's state stays."""
        self.master.copy_(self.sum)
        self.values.copy_(self.sum)
        self._replaced(version)

    def mirror(self, other: BucketValues) -> None:
        """Copy the values, the optimizer's state and the sum of `other`, which is of the same bucket."""
        self.values.copy_(other.values)
        if self.master is not self.values:
            self.master.copy_(other.master)
        if self._stepper is not None:
            for index, state in enumerate(other.states):
                self._stepper.mirror(index, state)
        self.version, self.changed, self.draft = other.version, other.changed, other.draft
        self.delta = other.delta
        self._memory().copy_(other.sum)
        self.present, self.weight = other.present, other.weight

    @property
    def states(self) -> list[Mapping[str, Any]]:
        """The optimizer's state of each piece, live; {} for a piece that was never stepped."""
        if self._stepper is None:
            return []
        return [self._stepper.state_of(index) for index in range(len(self._parameters))]

    def _step(self, groups: Groups, divisor: float) -> None:
        assert self._stepper is not None
        total = self.sum
        if divisor != 1:
            total.div_(divisor)
        self._stepper.prepare(groups)
        with limited(self._stepper.param_groups, lambda each: each.detach().view(-1, self._row[id(each)])):
            self._stepper.step([index for index, present in enumerate(self.present) if present], self._sums)

    def _publish(self, version: int) -> None:
        """Update the values that workers pull from those that the optimizer has stepped."""
        if self._deltas is not None:
            index, since = self.bucket.index, self.changed
            self.delta = make_delta(
                self._deltas, self.values, self.master, bucket=index, since=since, version=version
            )
        elif self.master is not self.values:
            self.values.copy_(self.master)

    def delta_for(self, held: int | None) -> Delta | None:
        """The change since version `held`, for a worker that has that; None: it needs all values."""
        return None if held is None or self.delta is None or held < self.delta.since else self.delta

    def state(self) -> Iterator[Stored]:
        """The optimizer's state. The tensors are live: the next `apply` changes them."""
        if self._stepper is None:
            return
        pieces = zip(self.bucket.pieces, self._parameters, self.states, strict=True)
        for piece, parameter, state in pieces:
            for key, value in state.items():
                tensor = (
                    value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                )
                scalar = tensor.shape != parameter.shape
                yield Stored(piece.tensor, piece.start, key, tensor.reshape(-1), scalar)

    def stored(self) -> Iterator[Stored]:
        """All tensors of the bucket. They are live: the next `apply` changes them."""
        kept = {VALUE: self.values}
        if self.lags:
            kept = {VALUE: self.master, PULLED: self.values}
        elif self.master.dtype is not self.values.dtype:
            kept[MASTER] = self.master
        for key, flat in kept.items():
            for index, piece in enumerate(self.bucket.pieces):
                yield Stored(piece.tensor, piece.start, key, self._piece(flat, index))
        yield from self.state()

    def take_state(self, index: int, state: dict[str, torch.Tensor]) -> None:
        """Take the optimizer's saved state of a piece; see `restored`."""
        assert self._stepper is not None
        self._stepper.take(index, state)

    def usual_state(self, index: int) -> dict[str, StateEntry]:
        """The entries of the optimizer's state of a piece after a step."""
        if self._stepper is None or index >= len(self._parameters):
            return {}
        return self._stepper.usual_state(index)

    def load(self, stored: Source, version: int) -> None:
        """Take values and optimizer state of `version` over. Reads nothing else."""
        for index, piece in enumerate(self.bucket.pieces):
            where = (piece.tensor, piece.start, piece.length)
            values, state = stored.value(*where), stored.state(*where)
            pulled, master = state.pop(PULLED, values), state.pop(MASTER, values)
            self._piece(self.values, index).copy_(pulled if self.lags else values)
            if self.master is not self.values:
                self._piece(self.master, index).copy_(master)
            if self._stepper is not None and state:
                self.take_state(index, state)
        self._replaced(version)


class TableValues(BucketValues):
    """One bucket of a table, with one piece. Optimizers get it as a matrix, and a sparse gradient.

    Args:
        width: the elements of a row.
    """

    may_be_drafted = False

    def __init__(self, bucket: Bucket, *, width: int, allocate: Allocate = plain) -> None:
        super().__init__(bucket, allocate=allocate)
        self._shape = (bucket.elements // width, width)
        self._matrix = self.master.view(self._shape)
        self._parameters = [torch.nn.Parameter(self._matrix)]
        self._mean = RowSum(width, self.master.dtype)
        self._history = RowChanges(self._shape[0])
        self._made: dict[int, Delta | None] = {}  # the changes since versions

    @property
    def sum(self) -> torch.Tensor:
        """See `BucketValues`: a copy, as large as the table."""
        return self._mean.dense(self._shape[0]).view(-1)

    def add_nothing(self, weight: float, *, first: bool) -> None:
        """See `BucketValues`."""
        self._begin(weight, first, [False])
        self._mean.add(None, weight)

    def add(
        self,
        contribution: torch.Tensor | Sparse | Rows,
        weight: float,
        present: Sequence[bool],
        *,
        first: bool,
        worker: int = 0,
        largest: float = math.inf,
    ) -> None:
        """See `BucketValues`. Rows are kept, everything else is copied."""
        del worker, largest
        assert not isinstance(contribution, Sparse), "no codec is for tables"
        self._begin(weight, first, present or [True])
        if isinstance(contribution, torch.Tensor):  # assigned, or the gradient was dense
            contribution = Rows.of(contribution.view(self._shape).clone())
        self._mean.add(contribution, weight)

    def _begin(self, weight: float, first: bool, present: Sequence[bool]) -> None:
        if first:
            self._mean.begin()
            self.weight, self.present = 0.0, [False]
        self.weight += weight
        self.present = [self.present[0] or present[0]]

    @property
    def sum_bytes(self) -> memoryview:
        """See `BucketValues`."""
        return self._mean.mean().packed(self._shape[0]).body[0]

    def take_sum(self, incoming: Incoming, present: Sequence[bool]) -> None:
        """See `BucketValues`."""
        rows, width = self._shape
        try:
            if len(present) != 1 or incoming.size > self.master.nbytes + 8 * rows:
                raise ValueError(f"{len(present)} flags for one piece, {incoming.size} bytes for {rows} rows")
            incoming.read_into(body := memoryview(bytearray(incoming.size)))
            mean = Rows.unpacked(body, rows=rows, width=width, dtype=self.master.dtype)
        except ValueError as error:
            raise Refused(RefusalCode.MALFORMED, f"sum for bucket {self.bucket.index}: {error}") from error
        self._mean.set(mean)
        self.present = list(present)

    def norm(self) -> float:
        """See `BucketValues`."""
        return float(torch.linalg.vector_norm(self._mean.mean().values, dtype=torch.float64))

    def _replaced(self, version: int) -> None:
        super()._replaced(version)
        self._history.begin(version)
        self._made.clear()

    def _step(self, groups: Groups, divisor: float) -> None:
        assert self._stepper is not None
        mean = self._mean.mean()
        if divisor != 1:
            mean.values.div_(divisor)
        self._stepper.prepare(groups)
        self._stepper.step_rows(mean)

    def _publish(self, version: int) -> None:
        numbers = self._mean.mean().numbers
        if self.master is not self.values:
            self.values.view(self._shape)[numbers] = self._matrix[numbers].to(self.values.dtype)
        self._history.note(version, numbers)
        self._made.clear()

    def delta_for(self, held: int | None) -> Delta | None:
        """The rows that have changed since version `held`; None: the worker needs the table."""
        if held is None:
            return None
        if held not in self._made:
            numbers, (rows, _) = self._history.since(held), self._shape
            if numbers is None or 2 * len(numbers) > rows:
                self._made[held] = None
            else:
                values = self.values.view(self._shape).index_select(0, numbers)
                changed = Rows(numbers, values).packed(rows)
                self._made[held] = Delta(held, self.version, changed)
        return self._made[held]


def bytes_of(
    buckets: Sequence[BucketValues], kinds: Sequence[Kind], groups: Groups, tensors: Sequence[TensorSpec]
) -> int:
    """The bytes that these buckets take with sums and optimizer's state, once they were stepped.

    The other arguments are those of `BucketValues.build_optimizer`. Raises what `kept_state` raises.
    """
    total = state_bytes((values.bucket for values in buckets), kinds, groups, tensors)
    for values in buckets:
        copies = 1 if values.master is values.values else 2  # of the sum's dtype
        total += values.bucket.nbytes + copies * values.bucket.elements * wide(values.values.dtype).itemsize
    return total


def state_bytes(
    buckets: Iterable[Bucket], kinds: Sequence[Kind], groups: Groups, tensors: Sequence[TensorSpec]
) -> int:
    """The bytes of the optimizer's state of these buckets. Arguments and exceptions: see `bytes_of`."""

    @cache
    def state_of(group: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[tuple[int, StateEntry]]:
        kept = kept_state(kinds[group], groups[group], dtype, shape)
        return [(ITEM_SIZE[each.dtype], each) for each in kept.values()]

    total = 0
    for bucket in buckets:
        for piece in bucket.pieces if bucket.rule is Rule.GRADIENT else ():
            tensor = tensors[piece.tensor]
            shape = tensor.shape if steps_whole_tensors(kinds[tensor.group]) else ()
            state = state_of(tensor.group, wide(dtype_of(bucket.dtype)), shape)
            total += sum(size * (each.elements if each.scalar else piece.length) for size, each in state)
    return total
