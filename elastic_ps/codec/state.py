"""Transfers a model's state, tensor by tensor, between workers, shards, standbys and checkpoints."""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch

from elastic_ps.codec.finite import require_finite
from elastic_ps.codec.memory import Body, Scratch, as_bytes, as_tensor, dtype_of, name_of
from elastic_ps.codec.optimizers import VALUE, StateEntry, kept_state, restored, wide
from elastic_ps.codec.several import Kind, Several, kinds_of, parts_of
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Layout, Rule
from elastic_ps.core.settings import CONSTRAINTS, NOT_SENT, plain_group
from elastic_ps.errors import InvalidModel, RefusalCode, Refused, StorageUnavailable

ALIGNMENT = 64
"""The alignment of tensors' copies, in bytes."""


@dataclass(frozen=True)
class Stored:
    """One tensor: elements from `start` on of the model's tensor number `tensor`.

    `key` is `VALUE` or the name of an entry of the optimizer's state. A `scalar` counts for all elements of
    the tensor; if that is not divided, it may have several elements of its own.
    """

    tensor: int
    start: int
    key: str
    value: torch.Tensor
    scalar: bool = False

    @property
    def dtype(self) -> str:
        return name_of(self.value.dtype)

    @property
    def name(self) -> str:
        what = "elements" if not self.scalar else "scalar" if self.value.numel() == 1 else "whole"
        return f"{self.tensor}/{self.start}/{self.key}/{what}"


class Source(Protocol):
    """A source of the state of a shard's buckets."""

    def value(self, tensor: int, start: int, length: int) -> torch.Tensor:
        """A copy of `length` elements from `start` on of a flattened tensor of the model."""

    def state(self, tensor: int, start: int, length: int) -> dict[str, torch.Tensor]:
        """The optimizer's state of a piece, its `MASTER` and `PULLED`, by key; {} if there is none."""


class Beside(Protocol):
    """More tensors of a shard at one version; the attributes are those of `Snapshot`."""

    @property
    def described(self) -> Sequence[Stored]: ...

    @property
    def pause(self) -> timedelta: ...

    def read(self) -> Iterator[Stored]:
        """Yield each tensor once. Blocks for copies."""


class Snapshot:
    """The tensors of a shard at one version. One thread reads them while others make the next versions.

    This is copy on write: what has not been read of a bucket is copied when the bucket is about to change,
    and nothing before. Whoever changes a bucket calls `keep` first; no two threads do so for the same bucket
    at a time. A bucket may not change while the snapshot is made.

    Args:
        buckets: the tensors of each bucket, which the shard goes on to change, in the order of the changes.
        patience: for how long changes wait for the reader altogether. While they do, the copies take no more
            than the share `SHARE` of all tensors.
        room: bytes that the copies may take in any case.
        beside: is read after the buckets.

    Attributes:
        described: all tensors, in the order in which they are read. Only dtypes and shapes stay true.
    """

    SHARE = 1 / 16

    def __init__(
        self,
        buckets: Mapping[int, Sequence[Stored]],
        *,
        patience: timedelta = timedelta(0),
        room: int = 1 << 24,
        beside: Beside | None = None,
    ) -> None:
        self.described = [stored for tensors in buckets.values() for stored in tensors]
        self._room = max(room, self.SHARE * sum(stored.value.nbytes for stored in self.described))
        self._beside = beside
        if beside is not None:
            self.described += beside.described
        self._patience = patience
        self._read = threading.Condition()  # its lock guards all below
        self._unread = {bucket: deque(tensors) for bucket, tensors in buckets.items()}
        self._copies: dict[int, int] = {}  # the bytes of the copies that are there, by bucket
        self._failure: OSError | None = None  # there was no memory for a copy
        self._pause = timedelta(0)

    @property
    def pause(self) -> timedelta:
        """How long changes have waited for the reader and for copies."""
        return self._pause + (self._beside.pause if self._beside is not None else timedelta(0))

    def keep(self, bucket: int) -> None:
        """Have the snapshot do without the tensors of a bucket, which is about to change. Blocks.

        Without memory for a copy the snapshot fails, in `read`, and not the change.
        """
        with self._read:
            unread = self._unread.get(bucket)
            if not unread or bucket in self._copies or self._failure is not None:
                return
            began, left = time.monotonic(), self._patience - self._pause
            self._read.wait_for(
                lambda: sum(self._copies.values()) + _bytes(unread) <= self._room,
                timeout=max(0.0, left.total_seconds()),
            )
            try:
                memory, at = _new_memory(max(1, _bytes(unread))), 0
            except OSError as error:
                self._failure = error
                return
            self._copies[bucket] = memory.nbytes
            for _ in range(len(unread)):
                stored = unread.popleft()
                value, end = stored.value, at + stored.value.nbytes
                copy = memory[at:end].view(value.dtype).view(value.shape).copy_(value)
                unread.append(replace(stored, value=copy))
                at += _padded(stored)
            self._pause += timedelta(seconds=time.monotonic() - began)

    def read(self, scratch: Scratch, *, most: float = math.inf) -> Iterator[Stored]:
        """Yield each tensor once, in memory that may be the next one's, too. Blocks for copies.

        Args:
            scratch: memory for tensors that were not copied.
            most: yield a longer tensor in parts of that many bytes, so that `scratch` stays in the
                processor's cache, and no change waits for the copy of more. Default: yield it as one.

        Raises:
            StorageUnavailable: there was no memory for a copy.
        """
        for bucket, unread in list(self._unread.items()):
            while True:
                with self._read:
                    self._read.notify_all()
                    if self._failure is not None:
                        text = f"no memory for a copy of the tensors that are to be written: {self._failure}"
                        raise StorageUnavailable(text) from self._failure
                    if not unread:
                        self._copies.pop(bucket, None)
                        break
                    stored = unread.popleft()
                    if stored.value.nbytes > most:
                        flat, first = stored.value.reshape(-1), int(most) // stored.value.element_size()
                        unread.appendleft(replace(stored, value=flat[first:]))
                        stored = replace(stored, value=flat[:first])
                    if bucket not in self._copies:
                        value = stored.value
                        copy = scratch.tensor(value.numel(), value.dtype).view(value.shape)
                        stored = replace(stored, value=copy.copy_(value))
                yield stored
        if self._beside is not None:
            yield from self._beside.read()


def _new_memory(nbytes: int) -> torch.Tensor:
    """Bytes that go back to the system when they are freed; those of malloc might stay. Raises OSError."""
    return as_tensor(memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))


def _padded(stored: Stored) -> int:
    return -(-stored.value.nbytes // ALIGNMENT) * ALIGNMENT


def _bytes(tensors: Iterable[Stored]) -> int:
    return sum(map(_padded, tensors))


class OptimizerState:
    """The state of an optimizer, in the form for the parameter server."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._entries: dict[int, list[tuple[str, torch.Tensor, bool]]] = {}  # by parameter id
        states = [part.state for part in parts_of(optimizer) for _ in part.param_groups]
        kinds = kinds_of(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            values = plain_group(group, number)
            for position, parameter in enumerate(group["params"]):
                if found := states[number].get(parameter):
                    what = f"parameter {position} of group {number}"
                    entries = _entries(kinds[number], values, parameter, found, what)
                    self._entries[id(parameter)] = list(entries)

    def pieces(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[Stored]]]:
        """The index and state of each piece of a bucket that has a state.

        Args:
            tensors: the model's, by the numbers of the bucket's layout.
        """
        for index, piece in enumerate(bucket.pieces if bucket.rule is Rule.GRADIENT else ()):
            own = slice(piece.start, piece.start + piece.length)
            state = [
                Stored(piece.tensor, piece.start, key, value if scalar else value[own], scalar)
                for key, value, scalar in self._entries.get(id(tensors[piece.tensor]), ())
            ]
            if state:
                yield index, state


class ImportedState(OptimizerState):
    """Take the state of an optimizer, which is empty afterwards, for the parameter server.

    Args:
        optimizer: one of torch.optim, or several. It gets the hyperparameters of `state`. The constraints of
            its parameter groups stay; those in `state` do not count.
        state: the `state_dict()` of such an optimizer, or of several by name.

    Raises:
        InvalidModel: the state does not fit the optimizer and its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        constraints = [
            {key: group[key] for key in CONSTRAINTS if key in group} for group in optimizer.param_groups
        ]
        try:
            joined = optimizer.join(state) if isinstance(optimizer, Several) else dict(state)
            optimizer.load_state_dict(joined)
            _put_back(optimizer, joined)
            for part in parts_of(optimizer):
                for group in part.param_groups:
                    if missing := part.defaults.keys() - group.keys() - NOT_SENT:
                        raise ValueError(f"its param_groups have no {min(missing)}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidModel(_not_of(optimizer, error)) from error
        for group, own in zip(optimizer.param_groups, constraints, strict=True):
            for key in CONSTRAINTS:
                group.pop(key, None)
            group.update(own)
        super().__init__(optimizer)
        for part in parts_of(optimizer):
            part.state.clear()


def _put_back(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Put back the tensors of a given state, which torch has rounded to the parameters' dtypes to load it."""
    states = {parameter: kept for part in parts_of(optimizer) for parameter, kept in part.state.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        tensors = {k: v for k, v in given["state"].get(number, {}).items() if isinstance(v, torch.Tensor)}
        if tensors:
            states[parameter].update(tensors)


def _not_of(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    """Why a state cannot be loaded into this optimizer."""
    if isinstance(optimizer, Several):
        return (
            f"state is not what these optimizers give: {error}. Pass the state_dict() of each of them by its "
            f"name, as in {{{', '.join(f'{name!r}: ...' for name in optimizer.parts)}}}"
        )
    name = type(optimizer).__name__
    return (
        f"state is not what state_dict() of this {name} gives: {error}. Pass the state_dict() of an "
        f"{name} with the same parameters in the same groups"
    )


def state_dict_of(
    entries: Iterable[Stored],
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """The state on the parameter server as a `state_dict()` of torch.

    Args:
        entries: the entries that the parameter server sends.
        tensors: the model's, by the numbers of the layout.
        optimizer: the optimizer, with its present parameter groups.
    """
    groups = optimizer.param_groups
    numbers = {id(p): i for i, p in enumerate(p for g in groups for p in g["params"])}
    state: dict[int, dict[str, Any]] = {}
    for each in entries:
        value, kept = each.value, state.setdefault(numbers[id(tensors[each.tensor])], {})
        if each.scalar:
            kept[each.key] = _scalar(value)
        else:
            shape = layout.tensors[each.tensor].shape
            whole = kept.setdefault(each.key, torch.zeros(shape, dtype=value.dtype, device="cpu"))
            whole.view(-1)[each.start : each.start + value.numel()] = value
    plain, counter = [], iter(range(len(numbers)))
    for group in groups:
        rest = {key: value for key, value in group.items() if key != "params"}
        plain.append({**rest, "params": [next(counter) for _ in group["params"]]})
    kinds = kinds_of(optimizer)
    each_one = [(kinds[i], plain_group(g, 0), p.shape) for i, g in enumerate(groups) for p in g["params"]]
    ordered = {number: restored(*each_one[number], kept) for number, kept in sorted(state.items())}
    return {"state": ordered, "param_groups": plain}


def _entries(
    kind: Kind, group: Mapping[str, Any], parameter: torch.nn.Parameter, found: Mapping[str, Any], what: str
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The entries of a parameter's state: key, flat tensor in the server's dtype, and whether a scalar."""
    for key, entry in kept_state(kind, group, wide(parameter.dtype), parameter.shape).items():
        value = found.get(key)
        if value is None and kind is torch.optim.SGD:
            continue  # its buffer is made by the first step
        value = torch.as_tensor(value if value is not None else [], device="cpu")
        if value.numel() != entry.elements:
            shape = [*entry.shape] if entry.scalar else [*parameter.shape]
            raise InvalidModel(
                f"state has no {key!r} of the shape {shape} for {what}; it has {sorted(found)}"
            )
        yield key, value.detach().to("cpu", dtype_of(entry.dtype)).reshape(-1), entry.scalar


def fits(given: tuple[str, bool], usual: tuple[str, bool]) -> bool:
    """Whether an entry, (dtype, whether it is a scalar), may stand for that of `usual_state`.

    torch makes some scalars in the default dtype, which another process may have set differently.
    """
    return given == usual or (given[1] and usual[1] and {given[0], usual[0]} == {"float32", "float64"})


def read_state(
    bucket: Bucket,
    piece: int,
    entries: Sequence[tuple[str, str, bool]],
    incoming: Body,
    *,
    usual: Mapping[str, StateEntry],
) -> dict[str, torch.Tensor]:
    """Read the optimizer's state of a piece of a bucket. Blocks.

    Args:
        entries: the entries of the body, in order: key, dtype, and whether it is a scalar.
        usual: the entries that the optimizer keeps, by key.

    Raises:
        Refused: MALFORMED: the entries do not fit `usual` (see `fits`). NOT_FINITE.
    """
    expected = {key: (each.dtype, each.scalar) for key, each in usual.items()}
    given = {key: (dtype, scalar) for key, dtype, scalar in entries}
    same = given and given.keys() == expected.keys() and len(given) == len(entries)
    fitting = same and all(fits(each, expected[key]) for key, each in given.items())
    sizes = [usual[key].elements * ITEM_SIZE[dtype] for key, dtype, _ in entries] if fitting else []
    if not fitting or incoming.size != sum(sizes):
        raise Refused(
            RefusalCode.MALFORMED,
            f"{incoming.size} bytes as the state {given} of piece {piece} of bucket {bucket.index}, whose "
            f"optimizer keeps {expected} for {bucket.pieces[piece].length if usual else 0} elements",
        )
    body = memoryview(bytearray(incoming.size))
    incoming.read_into(body)
    state, at = {}, 0
    for (key, dtype, scalar), size in zip(entries, sizes, strict=True):
        value = as_tensor(body[at : at + size], dtype_of(dtype)).to(dtype_of(usual[key].dtype), copy=True)
        require_finite(value, f"{key} of bucket {bucket.index}")
        state[key], at = _scalar(value) if scalar else value, at + size
    return state


def _scalar(value: torch.Tensor) -> torch.Tensor:
    """An entry that counts for all elements: one number has no dimensions."""
    return value.reshape(()) if value.numel() == 1 else value


@dataclass(frozen=True)
class CopiedTensor:
    """The tensor of a bucket that a call to a standby carries; see `Stored`. `last`: no more follow."""

    bucket: int
    tensor: int
    start: int
    key: str
    dtype: str
    scalar: bool
    last: bool


class Arriving:
    """The tensors of one bucket, as they arrive. A `Source`. Not thread-safe."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._lengths = {(piece.tensor, piece.start): piece.length for piece in bucket.pieces}
        self._tensors: dict[tuple[int, int, str], torch.Tensor] = {}

    def receive(self, part: CopiedTensor, incoming: Body) -> None:
        """Receive one tensor. Blocks meanwhile.

        Raises:
            Refused: MALFORMED: the bucket has no such piece, or the size is wrong.
        """
        length = self._lengths.get((part.tensor, part.start), 0)
        wrong_dtype = part.dtype not in ITEM_SIZE or (
            part.key == VALUE and (part.dtype != self.bucket.dtype or part.scalar)
        )
        item = ITEM_SIZE.get(part.dtype, 1)
        elements = max(1, incoming.size // item) if part.scalar else length
        if not length or wrong_dtype or incoming.size != elements * item:
            raise Refused(
                RefusalCode.MALFORMED,
                f"{incoming.size} bytes of {part.dtype} as {part.key} of tensor {part.tensor} from element "
                f"{part.start} on; the piece of bucket {self.bucket.index} has {length} elements of "
                f"{self.bucket.dtype}",
            )
        tensor = torch.empty(elements, dtype=dtype_of(part.dtype))
        incoming.read_into(as_bytes(tensor))
        self._tensors[part.tensor, part.start, part.key] = _scalar(tensor) if part.scalar else tensor

    def require_whole(self) -> None:
        """Raise Refused (MALFORMED) unless the values of all pieces have arrived."""
        if lacking := [place for place in self._lengths if (*place, VALUE) not in self._tensors]:
            raise Refused(
                RefusalCode.MALFORMED,
                f"bucket {self.bucket.index} is said to be complete; the values of {len(lacking)} pieces "
                "have not come",
            )

    def value(self, tensor: int, start: int, length: int) -> torch.Tensor:
        """See `Source`."""
        del length
        return self._tensors[tensor, start, VALUE]

    def state(self, tensor: int, start: int, length: int) -> dict[str, torch.Tensor]:
        """See `Source`."""
        del length
        return {
            key: value
            for (*place, key), value in self._tensors.items()
            if place == [tensor, start] and key != VALUE
        }


class Catching:
    """Tracks which buckets a standby has. Not thread-safe.

    Attributes:
        missing: the numbers of the buckets that have not arrived.
        anywhere: whether it has nothing yet, so that it may begin with any version.
    """

    def __init__(self, missing: set[int], *, anywhere: bool) -> None:
        self.missing = missing
        self.anywhere = anywhere
        self._arriving: Arriving | None = None

    @property
    def whole(self) -> bool:
        """Whether all buckets have arrived."""
        return not (self.missing or self.anywhere)

    def begin(self, bucket: Bucket) -> Arriving:
        """The arrived tensors of a bucket. Raises Refused (NOT_READY) if the bucket is not expected."""
        if self.anywhere or bucket.index not in self.missing:
            raise Refused(
                RefusalCode.NOT_READY, f"the standby does not wait for the state of bucket {bucket.index}"
            )
        if self._arriving is None or self._arriving.bucket is not bucket:
            self._arriving = Arriving(bucket)
        return self._arriving

    def end(self, bucket: Bucket) -> None:
        """Note that the bucket is complete."""
        self.missing.discard(bucket.index)
        self._arriving = None  # mutant: equal
