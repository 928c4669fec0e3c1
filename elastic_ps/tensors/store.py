"""A shard's slices of the tensors of `session.server`, and the calls about them.

They are independent of the model, its versions and its terms: a push is applied on arrival, and the tensors
live as long as this process. The loss of a tensor is never hidden: each call names the `life` of the process
and the `birth` of the tensor, which change when the values are not those that the caller knows.

A tensor's *home*, the shard of its first slice, decides whose values it starts with. See
docs/design/protocol.md.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import torch

from elastic_ps.codec import as_bytes
from elastic_ps.core.names import LONGEST_NAME, is_name
from elastic_ps.core.partition import ITEM_SIZE
from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.tensors.limits import USUAL, TensorLimits
from elastic_ps.tensors.spread import PUSH_RULES, Slice, Spec, home_of, spread
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.buffers import Buffers
from elastic_ps.transport.calls import answers

WAIT = timedelta(seconds=10)
"""How long a slice waits for receive memory before the worker has to send it again."""

LONGEST_INSTANCE = 100
MOST_BIRTHS = 1 << 62
MOST_DIMENSIONS = 64

Sender: TypeAlias = tuple[int, str]
"""Who pushes: the worker's index, and a unique name for the tensors of one session in one process."""


@dataclass
class _Tensor:
    """A tensor, perhaps incomplete.

    Attributes:
        slices: the slices of this shard, by their first element.
        values: the values of those that have arrived.
        holder: the sender that uploads it, which its home knows.
        until: the time at which an incomplete tensor is given up.
        last: for each sender, the number of its last push and the slice of it.
    """

    kind: Spec
    birth: pb.Birth
    slices: Mapping[int, Slice]
    holder: Sender | None
    until: float
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    last: OrderedDict[Sender, tuple[int, int]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def complete(self) -> bool:
        return len(self.values) == len(self.slices)

    @property
    def nbytes(self) -> int:
        return sum(each.length for each in self.slices.values()) * ITEM_SIZE[self.kind.dtype]


class TensorStore:
    """A shard's slices. Thread-safe; only receiving a body blocks for longer than an addition.

    A body is received before its tensor is touched, so one that is cut off changes nothing. At most
    `buffers.RECEIVE_BUFFERS` slices are received at a time.

    Args:
        shard, shards: the index of this shard, and the number of shards.
        bucket_bytes: the largest slice, in bytes.
        most_bytes: the limit of all slices together, in bytes.
        clock: a monotonic time in seconds.
        life: a unique name of this process; by default a random number.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        *,
        bucket_bytes: int,
        most_bytes: int,
        clock: Callable[[], float],
        life: int | None = None,
        limits: TensorLimits = USUAL,
    ) -> None:
        self._limits = limits
        self._shard, self._shards = shard, shards
        self._bucket_bytes, self._most_bytes = bucket_bytes, most_bytes
        self._clock = clock
        self._buffers = Buffers(bucket_bytes)
        self.life = life or secrets.randbits(62) + 1
        self._lock = threading.Lock()
        self._tensors: dict[str, _Tensor] = {}
        self._births = 0
        self._used = False

    @property
    def used(self) -> bool:
        """Whether a worker has asked for a tensor, so that workers need this shard."""
        with self._lock:
            return self._used

    @property
    def nbytes(self) -> int:
        """The bytes of all slices, also of those that have not arrived yet."""
        with self._lock:
            return self._nbytes

    @property
    def _nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    # --- the calls

    @answers(calls.DECLARE_TENSOR)
    def declare(self, request: pb.DeclareTensorRequest, _: Incoming) -> pb.DeclareTensorReply:
        """Declare a tensor that a worker needs. The first worker uploads the values; its home decides.

        Raises:
            Refused: INVALID: the tensor exists with another shape or dtype, there is no room, or it is not
                supported.
        """
        who, kind, birth = _sender(request), _kind(request.tensor), request.tensor.birth
        if max(request.above, birth.number, request.lost.number) > MOST_BIRTHS:
            raise Malformed(f"no tensor has a number above {MOST_BIRTHS}")
        with self._lock:
            self._used = True
            said = self._look(kind, birth) if birth.number else self._declare(who, kind, request)
        said.life = self.life
        return said

    @answers(calls.PUT_TENSOR)
    def put(self, request: pb.PutTensorRequest, incoming: Incoming) -> pb.PutTensorReply:
        """Receive a slice that a worker uploads. The first copy counts.

        Raises:
            Refused: see `declare`; GONE: another worker uploads the tensor now, or another tensor has
                replaced it meanwhile.
        """
        who, kind, birth = _sender(request), _kind(request.tensor), request.tensor.birth
        if birth.number > MOST_BIRTHS:
            raise Malformed(f"no tensor has a number above {MOST_BIRTHS}")
        with self._lock:
            part = self._expected(who, kind, birth, request.start)
        if part is None:
            return pb.PutTensorReply(later=True)
        with self._receive(kind, part, incoming) as values, self._lock:
            tensor = self._tensors.get(kind.name)
            if tensor is None or tensor.birth != birth or tensor.holder not in (None, who):
                raise _gone(kind.name)
            if part.start not in tensor.values:
                tensor.values[part.start] = values.clone()
            if tensor.complete:
                tensor.holder = None
        return pb.PutTensorReply()

    @answers(calls.PUSH_TENSOR)
    def push(self, request: pb.PushTensorRequest, incoming: Incoming) -> pb.Done:
        """Change a slice, once for each number.

        A sender numbers its pushes, and sends the slices of each in order, so a slice that does not come
        after the last one is a repetition.

        Raises:
            Refused: GONE: the tensor was freed, or lost with this shard.
        """
        who, rule = _sender(request), request.rule
        if rule not in PUSH_RULES:
            raise Malformed(f"unknown rule {rule[:50]!r}; known: {', '.join(PUSH_RULES)}")
        tensor = self._get(request)
        part = self._slice(tensor, request.start)
        with nullcontext() if rule == "zero" else self._receive(tensor.kind, part, incoming) as values:
            tensor, now = self._get(request), (request.number, request.start)
            with tensor.lock:
                if now <= tensor.last.get(who, (-1, -1)):
                    return pb.Done(duplicate=True)
                target = tensor.values[request.start]
                if values is None:
                    target.zero_()
                else:
                    (target.add_ if rule == "add" else target.copy_)(values)
                tensor.last[who] = now
                tensor.last.move_to_end(who)
                if len(tensor.last) > self._limits.senders:
                    tensor.last.popitem(last=False)
        return pb.Done()

    @answers(calls.PULL_TENSOR)
    def pull(self, request: pb.PullTensorRequest, _: Incoming) -> Iterator[Frame]:
        """Each of the shard's slices, in order: a copy. Raises Refused (GONE)."""
        tensor = self._get(request)
        for start in tensor.slices:
            with tensor.lock:
                values = tensor.values[start].clone()
            yield Frame(pb.PullTensorReply(start=start).SerializeToString(), as_bytes(values))
        yield Frame(pb.PullTensorReply(done=True).SerializeToString(), last=True)

    @answers(calls.FREE_TENSOR)
    def free(self, request: pb.FreeTensorRequest, _: Incoming) -> pb.Done:
        """Free a tensor, unless another one has its name by now."""
        with self._lock:
            tensor = self._tensors.get(request.name)
            there = tensor is not None and tensor.birth == request.birth
            if there:
                del self._tensors[request.name]
        return pb.Done(duplicate=not there)

    def _receive(self, kind: Spec, part: Slice, incoming: Incoming) -> AbstractContextManager[torch.Tensor]:
        what = f"elements {part.start} to {part.start + part.length} of {kind.name!r}"
        nbytes = part.length * ITEM_SIZE[kind.dtype]
        return self._buffers.values(what, kind.dtype, nbytes, incoming, timeout=WAIT)

    def _get(self, request: pb.PushTensorRequest | pb.PullTensorRequest) -> _Tensor:
        if request.life != self.life:
            raise Refused(
                RefusalCode.GONE,
                f"the tensor {request.name!r} is lost: parameter server {self._shard}, which had a part of "
                "it, was started again. Call session.server.init with the values to continue from",
            )
        with self._lock:
            tensor = self._tensors.get(request.name)
            if tensor is None or tensor.birth != request.birth or not tensor.complete:
                raise _gone(request.name)
            return tensor

    # --- the lock is held

    def _declare(self, who: Sender, kind: Spec, request: pb.DeclareTensorRequest) -> pb.DeclareTensorReply:
        """The home's answer about a tensor."""
        now = self._sweep()
        tensor = self._tensors.get(kind.name)
        if tensor is not None and tensor.birth != request.lost:
            self._require_same(tensor, kind)
            if tensor.complete:
                return pb.DeclareTensorReply(birth=tensor.birth)
            if tensor.holder != who:
                return pb.DeclareTensorReply(birth=tensor.birth, pending=True)
            tensor.until = now + self._limits.bring.total_seconds()
            if tensor.birth.number > request.above:
                return pb.DeclareTensorReply(birth=tensor.birth, bring=True)
        self._births = max(self._births, request.above) + 1
        birth = pb.Birth(number=self._births, origin=self.life)
        self._make(kind, birth, now, holder=who)
        return pb.DeclareTensorReply(birth=birth, bring=True)

    def _look(self, kind: Spec, birth: pb.Birth) -> pb.DeclareTensorReply:
        """Whether this shard, which is not the tensor's home, has all of its slices."""
        if not self._slices(kind):
            return pb.DeclareTensorReply(birth=birth)
        tensor = self._tensors.get(kind.name)
        present = tensor is not None and tensor.birth == birth and tensor.complete
        return pb.DeclareTensorReply(birth=tensor.birth if tensor is not None else None, bring=not present)

    def _expected(self, who: Sender, kind: Spec, birth: pb.Birth, start: int) -> Slice | None:
        """The slice that a worker is about to upload; None if it would replace a later tensor."""
        now = self._sweep()
        tensor = self._tensors.get(kind.name)
        if tensor is None or tensor.birth != birth:
            if home_of(kind.name, self._shards) == self._shard:
                raise _gone(kind.name)
            if tensor is not None and tensor.birth.number >= birth.number:
                return None
            tensor = self._make(kind, birth, now, holder=None)
        if tensor.holder not in (None, who):
            raise _gone(kind.name)
        self._require_same(tensor, kind)
        tensor.until = now + self._limits.bring.total_seconds()
        return self._slice(tensor, start)

    def _slices(self, kind: Spec) -> dict[int, Slice]:
        """This shard's slices of such a tensor. Raises Refused (INVALID) if it is not supported."""
        name, dtype = kind.name, kind.dtype
        if not is_name(name):
            problem = f"a tensor's name has 1 to {LONGEST_NAME} printable characters; given: {name[:300]!r}"
        elif dtype not in ITEM_SIZE:
            problem = f"the tensor {name!r} has dtype {dtype[:50]}; expected one of {', '.join(ITEM_SIZE)}"
        elif len(kind.shape) > MOST_DIMENSIONS or not kind.nbytes:
            problem = f"the tensor {name!r} has no elements, or more than {MOST_DIMENSIONS} dimensions"
        elif kind.nbytes > self._most_bytes * self._shards:  # before it is cut into its slices
            problem = self._no_room(name, kind.nbytes, self._most_bytes * self._shards)
        else:
            slices = spread(*kind, bucket_bytes=self._bucket_bytes, shards=self._shards)
            return {each.start: each for each in slices if each.shard == self._shard}
        raise Refused(RefusalCode.INVALID, problem)

    def _make(self, kind: Spec, birth: pb.Birth, now: float, *, holder: Sender | None) -> _Tensor:
        """Create a tensor without values; an earlier one of the same name is dropped."""
        name, slices = kind.name, self._slices(kind)
        if holder is not None and 0 not in slices:
            text = f"the tensor {name!r} is not at home on shard {self._shard}"
            raise Refused(RefusalCode.MALFORMED, text)
        before = self._tensors.get(name)
        tensor = _Tensor(kind, birth, slices, holder, now + self._limits.bring.total_seconds())
        free = self._most_bytes - self._nbytes + (before.nbytes if before is not None else 0)
        if tensor.nbytes > free:
            raise Refused(RefusalCode.INVALID, self._no_room(name, tensor.nbytes, free))
        if before is None and len(self._tensors) >= (most := self._limits.tensors):
            text = f"there are {most} tensors already, so there is no place for {name!r}; free some"
            raise Refused(RefusalCode.INVALID, text)
        self._tensors[name] = tensor
        return tensor

    def _no_room(self, name: str, nbytes: int, free: int) -> str:
        return (
            f"the tensor {name!r} needs {nbytes} bytes on parameter server {self._shard}, which has room for "
            f"{max(0, free)} (parameterServer.tensorBytes: {self._most_bytes}). Free others, set more "
            "tensorBytes, or more parameterServer.replicas"
        )

    def _sweep(self) -> float:
        """Drop tensors whose upload has stopped; returns the time."""
        now = self._clock()
        for name, tensor in list(self._tensors.items()):
            if not tensor.complete and now > tensor.until:
                del self._tensors[name]
        return now

    def _require_same(self, tensor: _Tensor, kind: Spec) -> None:
        if tensor.kind != kind:
            raise Refused(
                RefusalCode.INVALID,
                f"this worker has {kind.name!r} as {kind}, but it was initialised as {tensor.kind}. All "
                "workers must give the same shape and dtype, or another name",
            )

    def _slice(self, tensor: _Tensor, start: int) -> Slice:
        if start not in tensor.slices:
            text = f"no slice of {tensor.kind.name!r} on shard {self._shard} begins at element {start}"
            raise Refused(RefusalCode.MALFORMED, text)
        return tensor.slices[start]


def _gone(name: str) -> Refused:
    return Refused(
        RefusalCode.GONE,
        f"the tensor {name!r} that this worker has initialised no longer exists: it was freed, or "
        "initialised again. Call session.server.init again",
    )


def _kind(tensor: pb.Named) -> Spec:
    return Spec(tensor.name, tuple(tensor.shape), tensor.dtype)


def _sender(request: pb.DeclareTensorRequest | pb.PutTensorRequest | pb.PushTensorRequest) -> Sender:
    if not 0 < len(request.instance) <= LONGEST_INSTANCE:
        raise Malformed(f"a sender is named with 1 to {LONGEST_INSTANCE} characters")
    return request.caller.worker, request.instance
