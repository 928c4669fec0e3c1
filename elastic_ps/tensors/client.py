"""`session.server`: a parameter server for tensors of a script's own.

Any worker may add to, overwrite and read named tensors at any time, as with TorchMPI's parameter
server (github.com/facebookresearch/TorchMPI), and the push and pull of ps-lite (Li et al.,
"Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch

from elastic_ps.codec import as_bytes, dtype_of, name_of
from elastic_ps.core.names import LONGEST_NAME, is_name
from elastic_ps.core.partition import ITEM_SIZE
from elastic_ps.errors import ConnectionLost, ElasticPSError, RefusalCode, Refused, UsageError
from elastic_ps.process.retrying import Pauses
from elastic_ps.tensors.handles import CLOSED, Handle, SerialExecutor, in_words
from elastic_ps.tensors.spread import PUSH_RULES, PushRule, Slice, Spec, spread
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import EMPTY, Incoming
from elastic_ps.transport.calls import A, Call, Q

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
"""Seconds between two checks for a tensor that another worker uploads."""


class Client(Protocol):
    """Makes calls, and repeats those that fail in transit; see `worker.wire.client.Client`.

    Attributes:
        shards: the number of shards.
    """

    shards: int

    def ask(self, call: Call[Q, A], request: Q, *, shard: int = 0, body: memoryview = EMPTY) -> A:
        """Make a call; returns its answer. Blocks. Raises Refused, ConnectionLost."""

    def ask_all(
        self,
        call: Call[Q, A],
        request: Q,
        read: Callable[[A, Incoming], T],
        *,
        shard: int = 0,
        body: memoryview = EMPTY,
        answer: int = 0,
    ) -> list[T]:
        """The same; returns what `read` makes of each answer. `answer`: how many bytes come back."""


@dataclass(frozen=True)
class _Known:
    """A tensor that this worker has initialised, and its place.

    Attributes:
        slices: in the order of their elements.
        lives: the process of each shard that holds slices.
    """

    kind: Spec
    birth: pb.Birth
    slices: Sequence[Slice]
    lives: dict[int, int]

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def home(self) -> int:
        return self.slices[0].shard

    def message(self) -> pb.Named:
        return pb.Named(**self.kind._asdict(), birth=self.birth)

    def by_shard(self) -> dict[int, list[Slice]]:
        ordered = sorted(self.slices, key=lambda each: (each.shard, each.start))
        return {shard: list(slices) for shard, slices in groupby(ordered, key=lambda each: each.shard)}

    def part(self, data: memoryview, part: Slice) -> memoryview:
        """The bytes of a slice, as a part of the tensor's."""
        item = ITEM_SIZE[self.kind.dtype]
        return data[part.start * item : (part.start + part.length) * item]


class Tensors:
    """Tensors on the job's parameter servers, each under a name. Use `session.server`; thread-safe.

    They are not part of the model: they have no version, no optimizer and no checkpoint. A large tensor is
    cut into slices, which are divided among the parameter servers. A push is applied slice by slice, so a
    pull may see some slices before and others after another worker's push, but never a part of a slice.
    Each slice of a push is applied exactly once, whatever is lost in transit. The calls of a process are
    carried out in order, so it sees its own pushes.

    The tensors are in the memory of the parameter servers. If a server restarts, the tensors with a slice on
    it are lost. Every use of one then raises `TensorLost`, until `init` has recreated it.
    """

    def __init__(self, client: Client, process: int, *, bucket_bytes: int, renew: timedelta) -> None:
        """Serve `Session.server` alone.

        Args:
            process: the id of the process that the client belongs to.
            bucket_bytes: the largest slice, in bytes; see `ParameterServer.slice_bytes`.
            renew: how often to tell a large tensor's home that this worker still uploads it.

        Raises UsageError in a child of the process.
        """
        self._client, self._bucket_bytes, self._renew = client, bucket_bytes, renew
        self._process, self._closed = process, False
        self._require_own_process()
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()
        self._beginning = threading.Lock()  # so that all shards get calls in the same order
        self._sender = uuid.uuid4().hex  # a worker's child may have a session, too, and its own numbers
        self._numbers = itertools.count(1)
        self._executors: dict[int, SerialExecutor] = {}
        self._pushes: deque[Handle[None]] = deque()

    # --- what a script calls

    def init(self, name: str, tensor: torch.Tensor) -> bool:
        """Create a tensor under a name, with the values of the first worker that does. Blocks.

        Every worker calls it before it uses the tensor, with the same shape and dtype. Later workers find the
        existing tensor. A lost tensor is recreated, with the values of the first worker that calls this then.

        Args:
            tensor: dense, of any shape but an empty one, on any device; one of the dtypes of
                `core.partition.ITEM_SIZE`.

        Returns whether the values were this worker's.

        Raises:
            UsageError: another worker has initialised it with another shape or dtype; there is no room for it
                (`parameterServer.tensorBytes`); the tensor is not supported; this is a child of the worker.
            ConnectionLost: a parameter server has not answered for 15 minutes.
        """
        self._require_usable(name)
        values = _copied(name, tensor)
        kind = Spec(name, tuple(values.shape), name_of(values.dtype))
        slices = spread(*kind, bucket_bytes=self._bucket_bytes, shards=self._client.shards)
        try:
            known, brought = self._find_or_bring(kind, slices, as_bytes(values))
        except Refused as refusal:
            raise in_words(refusal) from refusal
        with self._lock:
            before, self._known[name] = self._known.get(name), known
            if before is None or before.birth != known.birth:  # nobody waits for pushes to an earlier tensor
                self._pushes = deque(push for push in self._pushes if push.name != name)
        return brought

    def push(self, name: str, tensor: torch.Tensor | None = None, rule: PushRule = "add") -> Handle[None]:
        """Begin to change a tensor. Blocks only while many other calls, or large ones, are under way.

        Args:
            tensor: a tensor of the same shape and dtype, on any device. It is copied, so the script may
                change it at once. None with the rule `zero`.
            rule: `add` adds it to the values, `copy` replaces them, `zero` sets all elements to zero.

        Raises:
            UsageError: no such tensor is known; another shape or dtype; another rule.
            TensorLost, ConnectionLost: an earlier push, for which nobody has waited, has failed.
        """
        known = self._get(name)
        if rule not in PUSH_RULES:
            raise UsageError(
                f"push({name!r}): unknown rule {rule!r}; expected one of {', '.join(PUSH_RULES)}"
            )
        if (tensor is None) != (rule == "zero"):
            wanted = "no tensor" if rule == "zero" else "a tensor"
            raise UsageError(f"push({name!r}): the rule {rule!r} needs {wanted}")
        data = None
        if tensor is not None:
            values = _copied(name, tensor)
            _require_same("push", known, values)
            data = as_bytes(values)
        self._raise_failed()
        with self._beginning:
            number = next(self._numbers)
            begin = partial(self._push_slices, known, number, rule, data)
            parts = self._begin(known, begin, 0 if data is None else len(data))
            handle = Handle(name, parts, lambda: None)
            with self._lock:
                self._pushes.append(handle)
        return handle

    def pull(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """The present values of a tensor. Blocks.

        Args:
            out: a tensor of the same shape and dtype, on any device, to write them to. Default: a new tensor
                on the CPU.

        Raises:
            UsageError: no such tensor is known; another shape or dtype.
            TensorLost, ConnectionLost: see `Handle.wait`; or an earlier push, for which nobody has waited,
                has failed.
        """
        return self.prefetch(name, out).wait()

    def prefetch(self, name: str, out: torch.Tensor | None = None) -> Handle[torch.Tensor]:
        """Begin a `pull`, to go on computing meanwhile. `wait()` of the result returns the tensor.

        `wait` writes to `out`, and nothing does before.
        """
        known = self._get(name)
        if out is not None:
            _require_same("pull", known, out)
        self._raise_failed()
        values = torch.empty(known.kind.shape, dtype=dtype_of(known.kind.dtype), device="cpu")
        with self._beginning:
            parts = self._begin(known, partial(self._pull_slices, known, as_bytes(values)))

        def result() -> torch.Tensor:
            return values if out is None else out.detach().copy_(values)

        return Handle(name, parts, result)

    def free(self, name: str) -> None:
        """Forget a tensor, on all parameter servers and for all workers. Blocks.

        Other workers that use it get `TensorLost`. The name may be used again.
        """
        known = self._get(name)
        home = [known.home]
        for shards in ([shard for shard in known.by_shard() if shard not in home], home):
            with self._beginning:
                parts = [self._begin_on(shard, partial(self._free, known, shard)) for shard in shards]
            Handle(name, parts, lambda: None).wait()
        with self._lock:
            self._known.pop(name, None)

    def names(self) -> list[str]:
        """The tensors that this worker has initialised and not freed."""
        with self._lock:
            return list(self._known)

    def finish(self, stops: Callable[[], bool]) -> None:
        """Wait until every push has been applied or has failed, or `stops()`. Blocks."""
        while not stops():
            with self._lock:
                if all(push.done for push in self._pushes):
                    return
            time.sleep(FIRST_PAUSE)

    def close(self, within: timedelta) -> None:
        """Finish the calls that were begun, within a time limit, and end the threads."""
        deadline = time.monotonic() + within.total_seconds()
        with self._lock:
            self._closed = True
            executors = list(self._executors.values())
        for executor in executors:
            executor.close()
        for executor in executors:
            executor.join(max(0.0, deadline - time.monotonic()))
        pushes, self._pushes = self._pushes, deque()
        for push in pushes:
            try:
                if push.done:
                    push.raise_unseen()
                else:
                    logger.warning("a push to the tensor %r may not have been applied", push.name)
            except ElasticPSError as error:
                logger.warning("a push to the tensor %r has failed: %s", push.name, error)

    # --- bringing a tensor

    def _find_or_bring(self, kind: Spec, slices: Sequence[Slice], data: memoryview) -> tuple[_Known, bool]:
        """See docs/design/protocol.md. Raises Refused, ConnectionLost."""
        above, lost, home = 0, pb.Birth(), slices[0].shard
        pauses = Pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            said = self._declare(home, pb.Named(**kind._asdict()), above=above, lost=lost)
            if said.pending:
                time.sleep(pauses.next())
                continue
            known = _Known(kind, said.birth, slices, {home: said.life})
            others = [each for each in slices if each.shard != home]
            if said.bring and not self._put(known, others, data):
                elsewhere = known.by_shard().keys() - {home}
                above = max((self._look(known, each).birth.number for each in elsewhere), default=0)
                continue
            looks = {shard: self._look(known, shard) for shard in range(self._client.shards) if shard != home}
            if any(look.bring for look in looks.values()):  # a server has restarted meanwhile
                above = max(look.birth.number for look in looks.values())
                lost = pb.Birth() if said.bring else said.birth
                continue
            known.lives.update({shard: look.life for shard, look in looks.items()})
            if not said.bring:
                return known, False
            if self._put(known, [each for each in slices if each.shard == home], data):
                return known, True

    def _put(self, known: _Known, slices: Sequence[Slice], data: memoryview) -> bool:
        """Upload slices of a tensor. False if another worker uploads it now."""
        told = time.monotonic()
        try:
            for part in slices:
                if time.monotonic() - told > self._renew.total_seconds():
                    told = time.monotonic()
                    said = self._declare(known.home, pb.Named(**known.kind._asdict()))
                    if not (said.bring and said.birth == known.birth):
                        return False
                request = pb.PutTensorRequest(instance=self._sender, tensor=known.message(), start=part.start)
                body = known.part(data, part)
                if self._client.ask(calls.PUT_TENSOR, request, shard=part.shard, body=body).later:
                    return False
        except Refused as refusal:
            if refusal.code is RefusalCode.GONE:
                return False
            self._give_up(known)
            raise
        return True

    def _give_up(self, known: _Known) -> None:
        """Free the memory of a tensor whose upload has failed."""
        for shard in known.by_shard():
            try:
                self._free(known, shard)
            except ElasticPSError as error:
                logger.info("the tensor %r could not be freed: %s", known.name, error)

    def _look(self, known: _Known, shard: int) -> pb.DeclareTensorReply:
        """Whether a shard that is not the home has its slices."""
        return self._declare(shard, known.message())

    def _declare(self, shard: int, tensor: pb.Named, **told: Any) -> pb.DeclareTensorReply:
        request = pb.DeclareTensorRequest(instance=self._sender, tensor=tensor, **told)
        return self._client.ask(calls.DECLARE_TENSOR, request, shard=shard)

    # --- what the threads do

    def _push_slices(
        self,
        known: _Known,
        number: int,
        rule: PushRule,
        data: memoryview | None,
        shard: int,
        slices: Sequence[Slice],
    ) -> None:
        for part in slices:
            request = pb.PushTensorRequest(
                instance=self._sender,
                number=number,
                name=known.name,
                birth=known.birth,
                life=known.lives[shard],
                start=part.start,
                rule=rule,
            )
            body = memoryview(b"") if data is None else known.part(data, part)
            self._client.ask(calls.PUSH_TENSOR, request, shard=shard, body=body)

    def _pull_slices(self, known: _Known, data: memoryview, shard: int, slices: Sequence[Slice]) -> None:
        request = pb.PullTensorRequest(name=known.name, birth=known.birth, life=known.lives[shard])
        places = {part.start: known.part(data, part) for part in slices}

        def read(reply: pb.PullTensorReply, incoming: Incoming) -> int | None:
            if reply.done:
                return None
            if reply.start not in places:
                raise ConnectionLost(
                    f"shard {shard} has sent a slice of {known.name!r} that it does not have"
                )
            incoming.read_into(places[reply.start])
            return reply.start

        size = sum(place.nbytes for place in places.values())
        answers = self._client.ask_all(calls.PULL_TENSOR, request, read, shard=shard, answer=size)
        if answers != [*places, None]:
            raise ConnectionLost(f"shard {shard} has sent {len(answers)} of {len(places)} slices")

    def _free(self, known: _Known, shard: int) -> None:
        self._client.ask(
            calls.FREE_TENSOR, pb.FreeTensorRequest(name=known.name, birth=known.birth), shard=shard
        )

    # --- how

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:  # the threads are not in a child, and the sockets are its parent's
            raise UsageError(
                "session.server works only in the worker's own process, and this is a child of it, such as a "
                "process of a DataLoader. Use the tensor in the script itself, and pass its values on"
            )

    def _require_usable(self, name: str) -> None:
        """Raise UsageError if this process cannot use tensors, or the name is invalid."""
        self._require_own_process()
        if self._closed:
            raise UsageError(CLOSED)
        if not is_name(name):
            raise UsageError(
                f"a tensor's name must be a string of 1 to {LONGEST_NAME} printable characters; given: "
                f"{repr(name)[:300]}"
            )

    def _get(self, name: str) -> _Known:
        self._require_usable(name)
        with self._lock:
            known = self._known.get(name)
            names = ", ".join(map(repr, self._known)) or "none"
        if known is None:
            raise UsageError(
                f"this worker has initialised no tensor {name!r} with session.server, or has freed it. "
                f"Initialised: {names}. Call session.server.init({name!r}, tensor) first"
            )
        return known

    def _begin(
        self, known: _Known, work: Callable[[int, Sequence[Slice]], None], nbytes: int = 0
    ) -> list[Future[None]]:
        """Queue work on slices for the threads of their shards. Blocks; `_beginning` is held.

        Args:
            nbytes: what the work keeps in memory until the last of these threads is done.
        """
        shards = known.by_shard().items()
        return [self._begin_on(shard, partial(work, shard, slices), nbytes) for shard, slices in shards]

    def _begin_on(self, shard: int, work: Callable[[], None], nbytes: int = 0) -> Future[None]:
        """Like `_begin`, for one shard. `close` ends the wait."""
        with self._lock:
            if self._closed:
                raise UsageError(CLOSED)
            executor = self._executors.get(shard) or self._executors.setdefault(shard, SerialExecutor(shard))
        return executor.add(work, nbytes)

    def _raise_failed(self) -> None:
        """Raise the error of a push that nobody has waited for, which would otherwise go unnoticed."""
        while True:
            with self._lock:
                if not (self._pushes and self._pushes[0].done):
                    return
                push = self._pushes.popleft()
            push.raise_unseen()


def _copied(name: str, tensor: object) -> torch.Tensor:
    """A contiguous copy on the CPU. Raises UsageError if the tensor is not supported."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"session.server keeps tensors, but {name!r} was given a {type(tensor).__name__}")
    if tensor.is_nested or tensor.is_meta:
        what = "is nested" if tensor.is_nested else "is on the meta device, and has no values"
        raise UsageError(f"session.server cannot keep {name!r}: the tensor {what}. Expected a dense one")
    if tensor.layout is not torch.strided or name_of(tensor.dtype) not in ITEM_SIZE or not tensor.numel():
        raise UsageError(
            f"session.server cannot keep {name!r}: a {tensor.layout} tensor, {tensor.dtype}, of shape "
            f"{list(tensor.shape)}. Expected a dense one with elements, of {', '.join(ITEM_SIZE)}"
        )
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def _require_same(what: str, known: _Known, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{what}({known.name!r}): expected a tensor, given a {type(tensor).__name__}")
    given = f"{name_of(tensor.dtype)}{list(tensor.shape)}"
    if given != str(known.kind):
        text = f"the tensor is {given}, but {known.name!r} was initialised as {known.kind}"
        raise UsageError(f"{what}({known.name!r}): {text}")
