"""Decodes pushed gradients, so that a shard gets them as if they had been sent as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic_ps.codec import NONE
from elastic_ps.codec.base import Part, unpack
from elastic_ps.codec.memory import as_bytes, dtype_of
from elastic_ps.codec.plan import Plan, Run
from elastic_ps.core.partition import Bucket, Layout
from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming

AT_A_TIME = 4
"""Gradients that are decoded at the same time; the others wait, so memory does not grow with the workers."""

MORE = 4096
"""An encoded bucket has at most so many bytes more than twice its plain ones."""


class Decoder:
    """Decodes as `spec.compression` says. Thread-safe."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._places = threading.BoundedSemaphore(AT_A_TIME)

    @contextmanager
    def open(
        self, request: pb.PushRequest, layout: Layout, bucket: Bucket, incoming: Incoming
    ) -> Iterator[Incoming]:
        """The pushed body as that of a plain push; it is read and decoded when somebody looks at it.

        Values that a script assigns are sent as they are, whatever the job's codec is.

        Raises:
            Refused: MALFORMED: another codec than the job's, or what was sent does not fit it.
        """
        if request.codec == NONE and not request.runs:
            yield incoming
            return
        runs = self._plan.runs(layout, bucket)
        theirs, ours = [run.codec for run in request.runs], [run.name for run in runs]
        if request.codec != self._plan.name or theirs != ours:
            raise _refused(
                request,
                f"codec {request.codec!r} ({', '.join(theirs)}); this job uses {self._plan.name!r} "
                f"({', '.join(ours) or NONE}) here. All processes of a job need the same spec.compression",
            )
        if incoming.size > 2 * bucket.nbytes + MORE:
            raise _refused(request, f"{incoming.size} bytes; the plain gradient has {bucket.nbytes}")
        if not incoming.size:  # no piece has a gradient
            yield incoming
            return
        with self._places:
            yield _Decoded(request, bucket, runs, incoming)


class _Decoded:
    """An `Incoming` whose body is the decoded one."""

    def __init__(self, request: pb.PushRequest, bucket: Bucket, runs: list[Run], incoming: Incoming) -> None:
        self.header, self.transport = incoming.header, incoming.transport
        self.size = bucket.nbytes
        self._request, self._bucket, self._runs, self._incoming = request, bucket, runs, incoming

    def view(self) -> memoryview | None:
        """The decoded body. Blocks until the encoded one is there. See `Incoming.view`."""
        body = self._incoming.view()
        if body is None:
            body = memoryview(bytearray(self._incoming.size))
            self._incoming.read_into(body)
        try:
            return as_bytes(self._decode(body))
        except (Malformed, ValueError, KeyError, RuntimeError, TypeError) as error:
            raise _refused(self._request, f"cannot be decoded: {error}") from error

    def _decode(self, body: memoryview) -> torch.Tensor:
        result = torch.empty(self._bucket.elements, dtype=dtype_of(self._bucket.dtype))
        for run, message in zip(self._runs, self._request.runs, strict=True):
            parts = [Part(part.name, part.dtype, part.elements) for part in message.parts]
            encoded, used = unpack(parts, message.values, body)
            body = body[used:]
            if run.codec is None:
                (plain,) = encoded.tensors.values()
                result[run.elements] = _require_length(plain, run.length)
                continue
            out = torch.empty(run.length, dtype=torch.float32)
            run.codec.decode(encoded, out)
            result[run.elements] = out
        if len(body):
            raise Malformed(f"{len(body)} bytes more than the parts have")
        return result

    def read_into(self, target: memoryview) -> None:
        """See `Incoming.read_into`."""
        view = self.view()
        assert view is not None
        target[:] = view


def _require_length(tensor: torch.Tensor, length: int) -> torch.Tensor:
    if tensor.numel() != length:
        raise Malformed(f"{tensor.numel()} elements; expected {length}")
    return tensor


def _refused(request: pb.PushRequest, problem: str) -> Refused:
    text = f"push of worker {request.caller.worker} for bucket {request.bucket}: {problem}"
    return Refused(RefusalCode.MALFORMED, text)
