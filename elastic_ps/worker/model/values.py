"""Receives the model's values, encoded or as deltas, and drafts of the next ones.

In mode `sync`, a shard on another host is asked for the new version when the step begins. It then sends
*drafts*: the next values of those buckets that have the gradients of all workers. So values arrive while
other gradients leave. Drafts are kept beside the model, and become its values when the shard says that they
stand. Those of a script that changes hyperparameters between backward and `optimizer.step()` never do, so
after some steps it is sent none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from elastic_ps.codec import NONE, as_bytes, dtype_of
from elastic_ps.codec.base import Codec, Packed, Sparse, few, unpack
from elastic_ps.codec.changes import FewChanges, follow
from elastic_ps.codec.memory import Scratch
from elastic_ps.codec.plan import Plan
from elastic_ps.codec.rows import ROWS, Rows
from elastic_ps.core.partition import Bucket
from elastic_ps.errors import Malformed
from elastic_ps.process.telemetry import Trace
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.convert import from_message
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.wire.measuring import Traffic

VOID_STEPS = 3
"""After so many steps in a row whose drafts did not stand, none are taken any more."""


class Drafts:
    """A worker's drafts: the next values of buckets, received before their round was decided.

    When the version is there, the shard says whether a draft stands. Where a draft changes few elements of
    the values that the worker has, only these are kept. Several threads may use it, each for other buckets.
    The memory for a bucket's draft is allocated with the first one.
    """

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}
        self._changes: dict[int, FewChanges | None] = {}  # of drafts; None: it is in its memory
        self._numbers: dict[int, int] = {}
        self._void: set[int] = set()  # versions since the last one whose drafts stood

    @property
    def pay(self) -> bool:
        """Whether drafts tend to stand. They do not if a script sets hyperparameters after backward."""
        return len(self._void) < VOID_STEPS

    def numbers(self, buckets: Iterable[int]) -> dict[int, int]:
        """The numbers of the drafts that are there of these buckets."""
        return {bucket: self._numbers[bucket] for bucket in buckets if bucket in self._numbers}

    def forget(self, buckets: Iterable[int] | None = None) -> None:
        """The drafts of these buckets are void; None: of all."""
        for bucket in list(self._numbers) if buckets is None else buckets:
            self._numbers.pop(bucket, None)

    def memory(self, bucket: Bucket) -> torch.Tensor:
        """The memory that a draft of the bucket is received in: flat, of its dtype."""
        if bucket.index not in self._memory:
            self._memory[bucket.index] = torch.empty(bucket.elements, dtype=dtype_of(bucket.dtype))
        return self._memory[bucket.index]

    def keep(self, bucket: int, changes: FewChanges | None) -> None:
        """The bucket's draft is what the values become with these changes; None: what is in its memory."""
        self._changes[bucket] = changes

    def note(self, bucket: int, number: int) -> None:
        """The draft of this number is there. If it was sent without values, they are those of the model."""
        self._numbers[bucket] = number

    def take(self, bucket: Bucket, values: torch.Tensor) -> None:
        """Copy a draft that stands to `values`, for which it was received. Once for each draft."""
        if (changes := self._changes.pop(bucket.index, None)) is not None:
            changes.make(values)
        else:
            values.copy_(self._memory[bucket.index])
        self._void.clear()

    def superseded(self, bucket: int, version: int) -> None:
        """The bucket has come with other values than those of a draft, if there was one."""
        if self._numbers.pop(bucket, None) is not None:
            self._void.add(version)


class Values:
    """Receives the model's values. `receive` may be called by one thread for each shard."""

    def __init__(self, flat: Flat, plan: Plan, *, traffic: Traffic, trace: Trace) -> None:
        self.drafts = Drafts()
        self._flat, self._traffic, self._trace = flat, traffic, trace
        shards = range(flat.layout.shards)
        self._encoded, self._decoded = ([Scratch() for _ in shards] for _ in range(2))
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Values are encoded as `plan` says from now on; all of them are fetched anew."""
        buckets, layout = self._flat.layout.buckets, self._flat.layout
        self._plan = plan
        self._codecs = {b.index: plan.of_values(layout, b) for b in buckets}
        self._deltas = {b.index: plan.of_deltas(layout, b) for b in buckets}
        self._versions: dict[int, int] = {}  # of the values that are there

    def take_draft(self, bucket: Bucket, reply: pb.PullReply, incoming: Incoming) -> None:
        """Receive a draft; it is there when it is noted. Blocks. Raises as `receive`."""
        self.drafts.forget([bucket.index])
        if not reply.unchanged:
            memory = self.drafts.memory(bucket)
            self.drafts.keep(bucket.index, self.receive(bucket, reply, incoming, into=memory))

    def take(self, bucket: Bucket, reply: pb.PullReply, incoming: Incoming, *, counts: bool) -> None:
        """A bucket has reached a version: its values come, or are those of its draft. Blocks.

        Args:
            counts: if values come, a draft of the bucket counts as one that did not stand.

        Raises as `receive`.
        """
        if reply.stands:
            if not self.has(bucket, reply.version):  # else a call before this one has brought that
                self.drafts.take(bucket, self._flat.value_of(bucket))
            self.arrived(bucket, reply.version)
        elif not reply.unchanged:
            self.receive(bucket, reply, incoming)
            if counts:
                self.drafts.superseded(bucket.index, reply.version)

    def receive(
        self, bucket: Bucket, reply: pb.PullReply, incoming: Incoming, *, into: torch.Tensor | None = None
    ) -> FewChanges | None:
        """Write a bucket's values into the model's memory. Blocks until they are there.

        Args:
            into: write them there instead; flat, of the bucket's dtype. See `arrived`. If few elements of the
                values that are there change, nothing is written, but what changes is returned.

        Raises:
            Malformed: they are encoded in another way than this job's, or do not fit the bucket.
            ConnectionLost, DeadlineExceeded: the rest does not come; the values are undefined.
        """
        delta = reply.HasField("delta")
        if reply.encoded.codec == ROWS:
            self._receive_rows(bucket, reply, incoming)
            return None
        codec = (self._deltas if delta else self._codecs)[bucket.index]
        name = self._plan.deltas if delta else self._plan.values
        theirs, ours = reply.encoded.codec or NONE, NONE if codec is None else name
        if theirs != ours or (delta and codec is None):
            raise Malformed(
                f"shard {bucket.shard} sends the values of bucket {bucket.index} as {theirs!r}; this worker "
                f"expects {ours!r}. All processes of a job need the same spec.compression"
            )
        target = self._flat.value_of(bucket) if into is None else into
        seconds, changes = 0.0, None
        if codec is None:
            incoming.read_into(self._flat.value_bytes(bucket) if into is None else as_bytes(into))
        else:
            if (body := incoming.view()) is None:
                incoming.read_into(body := self._encoded[bucket.shard].bytes(incoming.size))
            started = time.monotonic_ns()
            if delta:
                changes = self._change(codec, bucket, reply, body, into)
            else:
                with self._decoding(bucket):
                    (encoded,) = unpack([from_message(Packed, reply.encoded)], body)
                    codec.decode(encoded, target)
            ended = time.monotonic_ns()
            self._trace.complete("decode", started, ended, bucket=bucket.index, bytes=len(body))
            seconds = (ended - started) / 1e9
        if into is None:
            self._flat.take_rows(bucket, None)
            self.arrived(bucket, reply.version)
        self._traffic.add(
            pulled_bytes=incoming.size, pulled_plain_bytes=bucket.nbytes, decode_seconds=seconds
        )
        return changes

    def _receive_rows(self, bucket: Bucket, reply: pb.PullReply, incoming: Incoming) -> None:
        """Write the rows of a table that have changed since the present values. Raises as `receive`."""
        width, dtype = self._flat.layout.width(bucket), dtype_of(bucket.dtype)
        if not width:
            raise Malformed(
                f"shard {bucket.shard} sends rows of bucket {bucket.index}, which belongs to no table"
            )
        incoming.read_into(body := memoryview(bytearray(incoming.size)))
        with self._decoding(bucket):
            rows = Rows.unpacked(body, rows=bucket.elements // width, width=width, dtype=dtype)
        if not self.has(bucket, reply.delta):
            self._flat.take_rows(bucket, rows)
        self.arrived(bucket, reply.version)
        self._traffic.add(pulled_bytes=incoming.size, pulled_plain_bytes=incoming.size)

    def has(self, bucket: Bucket, version: int) -> bool:
        """Whether the values that are there are of the version, or of a newer one."""
        return self._versions.get(bucket.index, -1) >= version

    def arrived(self, bucket: Bucket, version: int) -> None:
        """The values that are there are those of the version."""
        self._versions[bucket.index] = version

    def _change(
        self, codec: Codec, bucket: Bucket, reply: pb.PullReply, body: memoryview, into: torch.Tensor | None
    ) -> FewChanges | None:
        """Change the values that are there by a delta, once. `into`, and what is returned: see `receive`."""
        values, held = self._flat.value_of(bucket), self._versions.get(bucket.index)
        if held is None:
            raise Malformed(
                f"shard {bucket.shard} sends what has changed in bucket {bucket.index}, of which this worker "
                "has no values"
            )
        if held >= reply.delta:
            if into is not None:
                into.copy_(values)
            return None
        with self._decoding(bucket):
            (encoded,) = unpack([from_message(Packed, reply.encoded)], body)
            if (sent := few(codec, encoded, bucket.elements)) is None:
                decoded = self._decoded[bucket.shard].tensor(bucket.elements, torch.float32)
                codec.decode(encoded, decoded)
        if sent is None:
            follow(codec, values, decoded, values if into is None else into)
        elif into is None:
            FewChanges(codec, sent).make(values)
        else:  # `body` is memory for what comes next, too
            return FewChanges(codec, Sparse(sent.places.clone(), sent.values.clone()))
        return None

    @contextmanager
    def _decoding(self, bucket: Bucket) -> Iterator[None]:
        """The block decodes what the shard has sent. Raises Malformed if that fails."""
        try:
            yield
        except Exception as error:
            what = f"the values of bucket {bucket.index} from shard {bucket.shard} cannot be decoded"
            raise Malformed(f"{what}: {type(error).__name__}: {error}") from error
