"""Decodes pushed gradients, so that a shard gets them as if they had been sent as they are."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch

from elastic_ps.codec import NONE
from elastic_ps.codec.base import FEW, Codec, Encoded, Sparse, outside, unpack
from elastic_ps.codec.memory import as_bytes, dtype_of
from elastic_ps.codec.plan import Plan, Run
from elastic_ps.core.partition import Bucket, Layout
from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.convert import parts_from_message

AT_A_TIME = 4
"""Gradients that are decoded at the same time; the others wait, so memory does not grow with the workers."""

PATIENCE = timedelta(seconds=10)
"""How long one waits for its turn before the worker is asked to push again."""

MORE = 4096
"""An encoded bucket has at most so many bytes more than twice those of its elements, in float32 or wider."""


class Decoder:
    """Decodes as `spec.compression` says. Thread-safe."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: tuple[Layout | None, dict[int, list[Run]]] = (None, {})  # the runs of a layout's buckets
        self._places: queue.SimpleQueue[_Memory] = queue.SimpleQueue()
        for _ in range(AT_A_TIME):
            self._places.put(_Memory())

    @contextmanager
    def open(
        self, request: pb.PushRequest, layout: Layout, bucket: Bucket, incoming: Incoming
    ) -> Iterator[Incoming]:
        """The pushed body as that of a plain push; it is read and decoded when somebody looks at it.

        Only then it takes one of the places: a push that waits for its turn keeps none from others. Values
        that a script assigns are sent as they are, whatever the job's codec is; so is a gradient that is not
        finite. A push that does not say so comes from a worker that has no codec where the job has one.

        Raises:
            Refused: MALFORMED: another codec than the job's, or what was sent does not fit it.
        """
        runs = self._runs(layout, bucket)
        as_it_is = request.plain or not runs or not incoming.size
        if request.codec == NONE and not request.runs and as_it_is:
            yield incoming
            return
        theirs, ours = [run.codec for run in request.runs], [run.name for run in runs]
        if request.codec != self._plan.name or theirs != ours:
            raise _refused(
                request,
                f"codec {request.codec!r} ({', '.join(theirs) or NONE}); this job uses {self._plan.name!r} "
                f"({', '.join(ours) or NONE}) here. All processes of a job need the same spec.compression",
            )
        if incoming.size > 2 * max(bucket.nbytes, 4 * bucket.elements) + MORE:
            raise _refused(request, f"{incoming.size} bytes; the plain gradient has {bucket.nbytes}")
        if not incoming.size:  # no piece has a gradient
            yield incoming
            return
        decoded = Decoded(request, bucket, runs, incoming, self._places)
        try:
            yield decoded
        finally:
            decoded.close()

    def _runs(self, layout: Layout, bucket: Bucket) -> list[Run]:
        known, runs = self._known
        if known is not layout:  # the shard has been configured anew
            self._known = layout, (runs := {})
        if bucket.index not in runs:
            runs[bucket.index] = self._plan.runs(layout, bucket)
        return runs[bucket.index]


class _Memory:
    """For one gradient, encoded and decoded. Memory that has been written to is had faster than new one."""

    def __init__(self) -> None:
        self._encoded = bytearray()
        self._decoded = torch.empty(0, dtype=torch.uint8)  # mutant: equal

    def encoded(self, nbytes: int) -> memoryview:
        """That many bytes."""
        if len(self._encoded) < nbytes:
            self._encoded = bytearray(nbytes)
        return memoryview(self._encoded)[:nbytes]

    def decoded(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """That many elements."""
        nbytes = elements * dtype.itemsize
        if len(self._decoded) < nbytes:
            self._decoded = torch.empty(nbytes, dtype=torch.uint8)
        return self._decoded[:nbytes].view(dtype)


class _Arrived(NamedTuple):
    """A run of a gradient, and the innermost codec that has made it; None: it is sent as it is."""

    run: Run
    codec: Codec | None
    encoded: Encoded

    def decode(self, own: torch.Tensor) -> None:
        """Write it there. Raises whatever the codec does."""
        if self.codec is None:
            (plain,) = self.encoded.tensors.values()
            if plain.numel() != self.run.length:
                raise Malformed(f"{plain.numel()} elements; expected {self.run.length}")
            own.copy_(plain)
            return
        out = own if own.dtype is torch.float32 else torch.empty(self.run.length, dtype=torch.float32)
        self.codec.decode(self.encoded, out)
        if out is not own:
            own.copy_(out)


class Decoded:
    """An `Incoming` whose body is the decoded one, in a place that it has until it is closed.

    Where few elements are sent, `sparse` has those, and nothing is decoded. Of a piece without a gradient
    nothing is left, whatever a codec makes of its zeros: `signsgd` gives each element a sign, and a magnitude
    that others of its block have, too.
    """

    def __init__(
        self,
        request: pb.PushRequest,
        bucket: Bucket,
        runs: list[Run],
        incoming: Incoming,
        places: queue.SimpleQueue[_Memory],
    ) -> None:
        self.header, self.transport, self.peer = incoming.header, incoming.transport, incoming.peer
        self.size = bucket.nbytes
        self._request, self._bucket, self._runs, self._incoming = request, bucket, runs, incoming
        self._absent = bucket.absent(request.present)
        self._places = places
        self._memory: _Memory | None = None
        self._arrived: list[_Arrived] | None = None

    def close(self) -> None:
        """Give the place back; the body must not be used any more."""
        self._arrived = None  # it looks at the memory
        if self._memory is not None:
            self._places.put(self._memory)
            self._memory = None

    def _place(self) -> _Memory:
        if self._memory is None:
            try:
                self._memory = self._places.get(timeout=PATIENCE.total_seconds())
            except queue.Empty:
                text = "too many gradients are being decoded; push again"
                raise Refused(RefusalCode.NOT_READY, text) from None
        return self._memory

    def view(self) -> memoryview | None:
        """The decoded body. Blocks until the encoded one is there. See `Incoming.view`."""
        arrived = self._arrived_runs()
        with self._refusing():
            return as_bytes(self._decode(arrived))

    def sparse(self) -> Sparse | None:
        """The elements that are not zero, of the bucket's dtype; None if there are many. Blocks as `view`.

        Raises as `view`.
        """
        arrived = self._arrived_runs()
        with self._refusing():
            parts: list[Sparse] = []
            left, dtype = self._bucket.elements // FEW, dtype_of(self._bucket.dtype)
            for each in arrived:
                run, codec = each.run, each.codec
                part = codec.sparse(each.encoded, run.length) if codec is not None else None
                if part is None and run.length <= left:
                    part = Sparse(torch.arange(run.length), torch.empty(run.length, dtype=dtype))
                    each.decode(part.values)
                left -= 0 if part is None else part.values.numel()
                if part is None or left < 0:
                    return None
                parts.append(Sparse(_places(part, run) + run.elements.start, part.values.to(dtype)))
            return self._without_absent(Sparse(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))))

    def _without_absent(self, sparse: Sparse) -> Sparse:
        """But for the elements of pieces without a gradient."""
        for piece in self._absent:
            kept = (sparse.places < piece.start) | (sparse.places >= piece.stop)
            sparse = Sparse(sparse.places[kept], sparse.values[kept])
        return sparse

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """The block looks at what the worker has sent: an error in it refuses the push."""
        try:
            yield
        except Exception as error:
            problem = f"cannot be decoded: {type(error).__name__}: {error}"
            raise _refused(self._request, problem) from error

    def _arrived_runs(self) -> list[_Arrived]:
        """Blocks until all of them are there."""
        if self._arrived is None:
            body, memory = self._incoming.view(), self._place()
            if body is None:
                body = memory.encoded(self._incoming.size)
                self._incoming.read_into(body)
            with self._refusing():
                self._arrived = self._unpacked(body)
        return self._arrived

    def _unpacked(self, body: memoryview) -> list[_Arrived]:
        arrived = []
        for run, message in zip(self._runs, self._request.runs, strict=True):
            encoded, used = unpack(parts_from_message(message.parts), message.values, body)
            body, codec = body[used:], run.codec
            if codec is not None:
                codec, encoded = codec.within(encoded, run.length)
            arrived.append(_Arrived(run, codec, encoded))
        if len(body):
            raise Malformed(f"{len(body)} bytes more than the parts have")
        return arrived

    def _decode(self, arrived: list[_Arrived]) -> torch.Tensor:
        result = self._place().decoded(self._bucket.elements, dtype_of(self._bucket.dtype))
        for each in arrived:
            each.decode(result[each.run.elements])
        for piece in self._absent:
            result[piece] = 0
        return result

    def read_into(self, target: memoryview) -> None:
        """See `Incoming.read_into`."""
        view = self.view()
        assert view is not None
        target[:] = view


def _places(part: Sparse, run: Run) -> torch.Tensor:
    """Raises Malformed unless each place is one of the run, and has a value."""
    places = part.places
    if places.dtype is not torch.int64 or places.dim() != 1 or places.shape != part.values.shape:
        said = f"{tuple(places.shape)} places of {places.dtype} for {tuple(part.values.shape)} values"
        raise Malformed(f"{said}; expected as many of {torch.int64}, flat")
    if problem := outside(places, run.length):
        raise Malformed(problem)
    return places


def _refused(request: pb.PushRequest, problem: str) -> Refused:
    text = f"push of worker {request.caller.worker} for bucket {request.bucket}: {problem}"
    return Refused(RefusalCode.MALFORMED, text)
