"""The non-blocking operations of a communicator on tensors and objects, with handles."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args

import torch

from elastic_ps.collectives.backend import Backend, Both, Pending, Reduction
from elastic_ps.errors import CollectiveFailed, UsageError

T = TypeVar("T")

Op = Literal["sum", "mean", "min", "max", "product"]
"""The reductions of elements over processes."""

TAGS = 4096
"""The limit of messages' tags. Those of objects are above; MPI guarantees 32,767."""

_PAYLOADS = 8192
"""The first of as many tags for the contents of objects."""

_HOST = torch.device("cpu")
"""The device of objects."""


class Handle(Generic[T]):
    """An operation that has begun. Do not change its tensors until it is over."""

    def __init__(self, what: str, pending: Pending, finish: Callable[[], T]) -> None:
        self._what = what
        self._pending: Pending | None = pending
        self._finish = finish
        self._result: T

    def done(self) -> bool:
        """Whether `wait` would return at once. Does not block.

        Over gloo, a message is done only after `wait` (https://github.com/pytorch/pytorch/issues/30723).
        """
        return self._pending is None or self._pending.done()

    def wait(self) -> T:
        """The operation's result. Blocks until there is one.

        Raises:
            CollectiveFailed: another process ended, was late, or gave a tensor of another size.
        """
        if self._pending is not None:
            with _naming(self._what):
                self._pending.wait()
            self._result = self._finish()
            self._pending = None
        return self._result


class _After:
    """An operation that begins when another one is over, in a call of `done` or `wait`."""

    def __init__(self, first: Pending, second: Callable[[], Pending]) -> None:
        self._first, self._begin = first, second
        self._second: Pending | None = None

    def wait(self) -> None:
        if self._second is None:
            self._first.wait()
            self._second = self._begin()
        self._second.wait()

    def done(self) -> bool:
        if self._second is None and self._first.done():
            self._first.wait()
            self._second = self._begin()
        return self._second is not None and self._second.done()


class Operations:
    """The operations of a communicator that return a `Handle`; see `Communicator` for what each does.

    All processes must begin the collective ones in the same order. For one thread at a time.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._numbers = itertools.count()
        self._under_way: list[Handle[Any]] = []

    # --- tensors

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Handle[torch.Tensor]:
        """See `Communicator.broadcast`."""
        self._check_rank(source)
        there = self._there(tensor)
        return self._begin("broadcast", lambda: self._backend.broadcast(_bytes(there), source), tensor, there)

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> Handle[torch.Tensor]:
        """See `Communicator.all_reduce`."""
        there, reduction = self._reducible(tensor, op)
        return self._begin(
            "all_reduce",
            lambda: self._backend.all_reduce(there.view(-1), reduction),
            tensor,
            there,
            divide=op == "mean",
        )

    def reduce(self, tensor: torch.Tensor, op: Op = "sum", to: int = 0) -> Handle[torch.Tensor]:
        """See `Communicator.reduce`."""
        self._check_rank(to)
        there, reduction = self._reducible(tensor, op)
        receives = self._backend.rank == to
        if not receives and _same(there, tensor):
            there = there.clone()
        return self._begin(
            "reduce",
            lambda: self._backend.reduce(there.view(-1), reduction, to),
            tensor,
            there if receives else tensor.detach(),
            divide=op == "mean" and receives,
        )

    def reduce_scatter(self, parts: torch.Tensor, op: Op = "sum") -> Handle[torch.Tensor]:
        """See `Communicator.reduce_scatter`."""
        self._check_parts(parts)
        there, reduction = self._reducible(parts, op)
        out = torch.empty_like(there[0])
        own = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
        return self._begin(
            "reduce_scatter",
            lambda: self._backend.reduce_scatter(there.view(-1), out.view(-1), reduction),
            own,
            out,
            divide=op == "mean",
        )

    def all_gather(self, tensor: torch.Tensor) -> Handle[torch.Tensor]:
        """See `Communicator.all_gather`."""
        there = self._there(tensor)
        out = self._places(there)
        return self._note(
            "all_gather",
            lambda: self._backend.all_gather(_bytes(there), _bytes(out)),
            lambda: out.to(tensor.device),
        )

    def gather(self, tensor: torch.Tensor, to: int = 0) -> Handle[torch.Tensor | None]:
        """See `Communicator.gather`."""
        self._check_rank(to)
        there = self._there(tensor)
        out = self._places(there) if self._backend.rank == to else None
        return self._note(
            "gather",
            lambda: self._backend.gather(_bytes(there), None if out is None else _bytes(out), to),
            lambda: None if out is None else out.to(tensor.device),
        )

    def scatter(self, parts: torch.Tensor | None, out: torch.Tensor, source: int = 0) -> Handle[torch.Tensor]:
        """See `Communicator.scatter`."""
        self._check_rank(source)
        there, given = self._there(out), None
        if self._backend.rank == source:
            if parts is None:
                raise UsageError(f"scatter: rank {source} is the source, but gave None; expected the parts")
            self._check_parts(parts)
            if parts.shape[1:] != out.shape or parts.dtype != out.dtype:
                raise UsageError(
                    f"scatter: a part has shape {tuple(parts.shape[1:])} and dtype {parts.dtype}, but is to "
                    f"be written to a tensor of shape {tuple(out.shape)} and dtype {out.dtype}"
                )
            given = self._there(parts)
        return self._begin(
            "scatter",
            lambda: self._backend.scatter(None if given is None else _bytes(given), _bytes(there), source),
            out,
            there,
        )

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Handle[None]:
        """See `Communicator.send`."""
        self._check_other(to, tag, tensor.device)
        there = self._there(tensor)
        return self._note("send", lambda: self._backend.send(_bytes(there), to, tag), lambda: None)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Handle[torch.Tensor]:
        """See `Communicator.receive`."""
        self._check_other(source, tag, tensor.device)
        there = self._there(tensor)
        return self._begin(
            "receive", lambda: self._backend.receive(_bytes(there), source, tag), tensor, there
        )

    def send_receive(
        self, tensor: torch.Tensor, *, to: int, source: int, into: torch.Tensor | None = None, tag: int = 0
    ) -> Handle[torch.Tensor]:
        """See `Communicator.send_receive`."""
        for rank in (to, source):
            self._check_other(rank, tag, tensor.device)
        given = self._there(tensor)
        replaced = into is None or into.data_ptr() == tensor.data_ptr()
        taken = torch.empty_like(given) if into is None or replaced else self._there(into)
        return self._begin(
            "send_receive",
            lambda: self._backend.send_receive(_bytes(given), to, _bytes(taken), source, tag),
            tensor if into is None else into,
            taken,
        )

    def barrier(self) -> Handle[None]:
        """See `Communicator.barrier`."""
        return self._note("barrier", self._backend.barrier, lambda: None)

    # --- objects

    def broadcast_object(self, item: Any = None, source: int = 0) -> Handle[Any]:
        """See `Communicator.broadcast_object`. Blocks until all processes know its size."""
        mine = self._backend.rank == source
        content = self._pickled(item) if mine else self._room(0)
        size = int(self.broadcast(torch.tensor(content.numel(), device=_HOST), source).wait())
        if not mine:
            content = self._room(size)
        handle = self.broadcast(content, source)
        return Handle("", handle, lambda: item if mine else _unpickled(content))

    def all_gather_objects(self, item: Any) -> Handle[list[Any]]:
        """See `Communicator.all_gather_objects`. Blocks until all processes know all sizes."""
        content, sizes = self._sized(item)
        handle = self.all_gather(content)
        return Handle("", handle, lambda: _unpickled_each(handle.wait(), sizes))

    def gather_objects(self, item: Any, to: int = 0) -> Handle[list[Any] | None]:
        """See `Communicator.gather_objects`. Blocks until all processes know all sizes."""
        self._check_rank(to)
        content, sizes = self._sized(item)
        handle = self.gather(content, to)

        def result() -> list[Any] | None:
            gathered = handle.wait()
            return None if gathered is None else _unpickled_each(gathered, sizes)

        return Handle("", handle, result)

    def send_object(self, item: Any, to: int, tag: int = 0) -> Handle[None]:
        """See `Communicator.send_object`."""
        self._check_other(to, tag, _HOST)
        content = self._pickled(item)
        place = _PAYLOADS + next(self._numbers) % _PAYLOADS
        header = self._there(torch.tensor([content.numel(), place], device=_HOST))

        def begin() -> Pending:
            return Both(
                self._backend.send(_bytes(header), to, TAGS + tag), self._backend.send(content, to, place)
            )

        return self._note("send_object", begin, lambda: None)

    def receive_object(self, source: int, tag: int = 0) -> Handle[Any]:
        """See `Communicator.receive_object`. It makes progress in `wait` and `done`."""
        self._check_other(source, tag, _HOST)
        header = self._there(torch.tensor([0, 0], device=_HOST))
        contents: list[torch.Tensor] = []

        def content() -> Pending:
            size, place = header.tolist()
            contents.append(self._room(size))
            return self._backend.receive(contents[0], source, place)

        return self._note(
            "receive_object",
            lambda: _After(self._backend.receive(_bytes(header), source, TAGS + tag), content),
            lambda: _unpickled(contents[0]),
        )

    # --- what they have in common

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, contiguous and on a supported device; without a copy if it is already."""
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"a communicator takes dense tensors, but this one has the layout {tensor.layout}; "
                "call to_dense() first"
            )
        return tensor.detach().to(self._backend.device(tensor.device)).contiguous()

    def _places(self, part: torch.Tensor) -> torch.Tensor:
        return torch.empty((self._backend.size, *part.shape), dtype=part.dtype, device=part.device)

    def _reducible(self, tensor: torch.Tensor, op: Op) -> tuple[torch.Tensor, Reduction]:
        if op not in get_args(Op):
            raise UsageError(f"op is {op!r}; expected one of {', '.join(get_args(Op))}")
        if op == "mean" and not tensor.is_floating_point():
            raise UsageError(f"the mean of {tensor.dtype} is not an integer; convert the tensor to a float")
        there = self._there(tensor)
        if there.dtype not in self._backend.reducible:
            if not there.is_floating_point():
                known = ", ".join(sorted(str(dtype) for dtype in self._backend.reducible))
                raise UsageError(
                    f"{self._backend.name} cannot reduce {tensor.dtype}; convert it to one of {known}"
                )
            there = there.float()
        return there, "sum" if op == "mean" else op

    def _begin(
        self,
        what: str,
        begin: Callable[[], Pending],
        tensor: torch.Tensor,
        there: torch.Tensor,
        *,
        divide: bool = False,
    ) -> Handle[torch.Tensor]:
        """An operation whose result is copied from `there` to `tensor` at the end."""

        def finish() -> torch.Tensor:
            if divide:
                there.div_(self._backend.size)
            if not _same(there, tensor):
                tensor.detach().copy_(there)
            return tensor

        return self._note(what, begin, finish)

    def _note(self, what: str, begin: Callable[[], Pending], finish: Callable[[], T]) -> Handle[T]:
        """Begin an operation, and keep it even if the caller drops the handle, since memory is being read."""
        self._under_way = [handle for handle in self._under_way if not handle.done()]
        name = f"{what} on rank {self._backend.rank} of {self._backend.size}"
        with _naming(name):
            handle = Handle(name, begin(), finish)
        self._under_way.append(handle)
        return handle

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._backend.device(_HOST))

    def _pickled(self, item: Any) -> torch.Tensor:
        content = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        return content.to(self._backend.device(content.device))

    def _sized(self, item: Any) -> tuple[torch.Tensor, Sequence[int]]:
        """The object's bytes, padded to the size of the longest object, and the sizes of all. Blocks."""
        content = self._pickled(item)
        own = torch.tensor(content.numel(), device=_HOST)
        sizes = [int(size) for size in self.all_gather(own).wait()]
        filled = self._room(max(sizes))
        filled[: content.numel()] = content
        return filled, sizes

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._backend.size:
            raise UsageError(f"rank is {rank}; expected one from 0 to {self._backend.size - 1}")

    def _check_other(self, rank: int, tag: int, device: torch.device) -> None:
        self._check_rank(rank)
        if rank == self._backend.rank:
            raise UsageError(f"rank {rank} sends to, or receives from, itself; expected another rank")
        if not 0 <= tag < TAGS:
            raise UsageError(f"tag is {tag}; expected one from 0 to {TAGS - 1}")
        if tag and not self._backend.has_tags(self._backend.device(device)):
            raise UsageError(
                f"tag is {tag}, but nccl, which sends GPU tensors, has no tags: it delivers messages in "
                "order. Leave the tag out, or send CPU tensors in a group with gloo"
            )

    def _check_parts(self, parts: torch.Tensor) -> None:
        if parts.dim() == 0 or parts.shape[0] != self._backend.size:
            raise UsageError(
                f"the parts have shape {tuple(parts.shape)}; expected ({self._backend.size}, ...): "
                "one part for each rank"
            )


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn a library's exceptions into a CollectiveFailed that names the operation."""
    try:
        yield
    except RuntimeError as error:  # the exceptions of torch and mpi4py
        raise CollectiveFailed(
            f"{what} has failed: {error}. Another process ended, came too late, called another operation or "
            "gave a tensor of another size. The processes of a communicator are fixed: start all of them "
            "again"
        ) from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor uses the given memory."""
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.device == other.device


def _unpickled(content: torch.Tensor) -> Any:
    return pickle.loads(content.cpu().numpy().tobytes())


def _unpickled_each(gathered: torch.Tensor, sizes: Sequence[int]) -> list[Any]:
    return [_unpickled(content[:size]) for content, size in zip(gathered, sizes, strict=True)]
