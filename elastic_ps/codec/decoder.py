"""Decodes pushed gradients for a shard."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch

from elastic_ps.codec import NONE
from elastic_ps.codec.base import FEW, Codec, Encoded, Payload, Sparse, unpack
from elastic_ps.codec.lossless import MORE
from elastic_ps.codec.memory import Body, Scratch, dtype_of
from elastic_ps.codec.plan import Plan, Run
from elastic_ps.codec.rows import ROWS, Rows
from elastic_ps.core.partition import Bucket, Layout
from elastic_ps.errors import Malformed, RefusalCode, Refused

AT_A_TIME = 4
"""The number of gradients that are decoded at the same time. Others wait, so memory stays bounded."""


class Decoder:
    """Decodes the buckets of a layout by `spec.compression`. Thread-safe.

    Args:
        patience: how long a push waits for its turn before the worker has to push again.
    """

    def __init__(self, plan: Plan, layout: Layout, *, patience: timedelta = timedelta(seconds=10)) -> None:
        self._name, self._patience = plan.name, patience
        self._runs = {bucket.index: plan.runs(layout, bucket) for bucket in layout.pushed}
        self._widths = {bucket.index: layout.width(bucket) for bucket in layout.pushed}
        # Not a SimpleQueue: see `process.lifecycle.Alarm`.
        self._places: queue.Queue[tuple[Scratch, Scratch]] = queue.Queue()
        for _ in range(AT_A_TIME):
            self._places.put((Scratch(), Scratch()))

    def open(
        self, bucket: Bucket, sent: Payload, incoming: Body, *, worker: int
    ) -> AbstractContextManager[torch.Tensor | Sparse | Rows] | None:
        """A context manager that gives the received elements: flat, of the bucket's dtype, or sparse.

        Rows of a table have memory of their own, which nobody changes.

        None: they are sent unchanged, like values that a script assigns and gradients that are not finite. A
        push without a codec that does not say so comes from a worker whose codec differs from the job's.

        Entering it blocks until everything has arrived, then takes one of the places until its end. So a push
        that waits for its turn takes no place from others. Pieces without a gradient are removed: `signsgd`
        turns their zeros into the magnitude of their block.

        Args:
            sent: the worker's description of the push, without a body.

        Raises (here or when it is entered):
            Refused: MALFORMED: the codec is not the job's, or the data does not fit it. NOT_READY: all places
                are taken.
        """
        who, runs = f"push of worker {worker} for bucket {bucket.index}", self._runs.get(bucket.index, [])
        if sent.codec == ROWS:
            return self._rows(bucket, incoming, who)
        as_it_is = sent.plain or not runs or not incoming.size
        if sent.codec == NONE and not sent.runs and as_it_is:
            return None
        theirs, ours = [run.codec for run in sent.runs], [run.name for run in runs]
        if sent.codec != self._name or theirs != ours:
            raise Refused(
                RefusalCode.MALFORMED,
                f"{who} has codec {sent.codec!r} ({', '.join(theirs) or NONE}), but this job uses "
                f"{self._name!r} ({', '.join(ours) or NONE}) here. All "
                "processes of a job need the same spec.compression",
            )
        if incoming.size > 2 * max(bucket.nbytes, 4 * bucket.elements) + MORE:
            text = f"{who} has {incoming.size} bytes, but the plain gradient has {bucket.nbytes}"
            raise Refused(RefusalCode.MALFORMED, text)
        return self._decoded(bucket, sent, runs, incoming, who) if incoming.size else None

    @contextmanager
    def _rows(self, bucket: Bucket, incoming: Body, who: str) -> Iterator[Rows]:
        width, dtype = self._widths.get(bucket.index, 0), dtype_of(bucket.dtype)
        if not width or incoming.size > bucket.nbytes + 8 * (bucket.elements // width):
            text = f"{who}: {incoming.size} bytes as rows; the bucket has {bucket.elements} elements"
            raise Refused(RefusalCode.MALFORMED, f"{text}, in rows of {width or 'no'} elements")
        incoming.read_into(body := memoryview(bytearray(incoming.size)))
        try:
            made = Rows.unpacked(body, rows=bucket.elements // width, width=width, dtype=dtype)
        except ValueError as error:
            raise Refused(RefusalCode.MALFORMED, f"{who}: {error}") from error
        yield made

    @contextmanager
    def _decoded(
        self, bucket: Bucket, sent: Payload, runs: list[Run], incoming: Body, who: str
    ) -> Iterator[torch.Tensor | Sparse]:
        body = incoming.view()
        try:
            place = encoded, decoded = self._places.get(timeout=self._patience.total_seconds())
        except queue.Empty:
            text = "too many gradients are being decoded; push again"
            raise Refused(RefusalCode.NOT_READY, text) from None
        try:
            if body is None:
                incoming.read_into(body := encoded.bytes(incoming.size))
            try:
                arrived, absent = _unpacked(runs, sent, body), bucket.absent(sent.present)
                made = _few(bucket, arrived, absent) or _whole(bucket, arrived, absent, decoded)
            except Exception as error:
                text = f"{who}: cannot be decoded: {type(error).__name__}: {error}"
                raise Refused(RefusalCode.MALFORMED, text) from error
            yield made
        finally:
            self._places.put(place)


class _Arrived(NamedTuple):
    """A run of a gradient, and its innermost codec; None: it is sent unchanged."""

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


def _unpacked(runs: list[Run], sent: Payload, body: memoryview) -> list[_Arrived]:
    arrived = []
    for run, encoded in zip(runs, unpack(sent.runs, body), strict=True):
        inner = (None, encoded) if run.codec is None else run.codec.within(encoded, run.length)
        arrived.append(_Arrived(run, *inner))
    return arrived


def _few(bucket: Bucket, arrived: list[_Arrived], absent: list[slice]) -> Sparse | None:
    """The elements that are not zero; None if there are many. Raises any exception of the codecs."""
    parts: list[Sparse] = []
    left, dtype = bucket.elements // FEW, dtype_of(bucket.dtype)
    for each in arrived:
        run, codec = each.run, each.codec
        part = codec.sparse(each.encoded, run.length) if codec is not None else None
        if part is None and run.length <= left:
            part = Sparse(torch.arange(run.length), torch.empty(run.length, dtype=dtype))
            each.decode(part.values)
        left -= 0 if part is None else part.values.numel()
        if part is None or left < 0:
            return None
        places, values = part.within(run.length)
        parts.append(Sparse(places + run.elements.start, values.to(dtype)))
    return Sparse(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))).without(absent)


def _whole(bucket: Bucket, arrived: list[_Arrived], absent: list[slice], memory: Scratch) -> torch.Tensor:
    result = memory.tensor(bucket.elements, dtype_of(bucket.dtype))
    for each in arrived:
        each.decode(result[each.run.elements])
    for piece in absent:
        result[piece] = 0
    return result
