"""Receives pulled values into the model's memory: as they are, decoded, or as what has changed in them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic_ps.codec import NONE, as_bytes
from elastic_ps.codec.base import Codec, Encoded, Sparse, few, unpack
from elastic_ps.codec.changes import FewChanges, follow
from elastic_ps.codec.plan import Plan
from elastic_ps.core.partition import Bucket
from elastic_ps.errors import Malformed
from elastic_ps.process.telemetry import Trace
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.convert import parts_from_message
from elastic_ps.worker.model import Flat
from elastic_ps.worker.traffic import Traffic


class Values:
    """The model's values on their way in. `receive` may be called by one thread for each shard.

    Args:
        traffic: counts what is received.
    """

    def __init__(
        self, flat: Flat, plan: Plan, *, traffic: Traffic | None = None, trace: Trace | None = None
    ) -> None:
        self._flat = flat
        self._traffic = traffic or Traffic()
        self._trace = trace or Trace(None, "")
        self._memory: dict[int, bytearray] = {}  # of each shard, for what is encoded
        self._changes: dict[int, torch.Tensor] = {}  # of each shard, for a delta
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Values are encoded as `plan` says from now on; all of them are fetched anew."""
        buckets, layout = self._flat.layout.buckets, self._flat.layout
        self._plan = plan
        self._codecs = {b.index: plan.of_values(layout, b) for b in buckets}
        self._deltas = {b.index: plan.of_deltas(layout, b) for b in buckets}
        self._versions: dict[int, int] = {}  # of the values that are there

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
            body = incoming.view()
            if body is None:
                body = self._place(bucket.shard, incoming.size)
                incoming.read_into(body)
            started = time.monotonic_ns()
            if delta:
                changes = self._change(codec, bucket, reply, body, into)
            else:
                with self._decoding(bucket):
                    codec.decode(_unpacked(reply.encoded, body), target)
            ended = time.monotonic_ns()
            self._trace.complete("decode", started, ended, bucket=bucket.index, bytes=len(body))
            seconds = (ended - started) / 1e9
        if into is None:
            self.arrived(bucket, reply.version)
        self._traffic.pulled(incoming.size, plain=bucket.nbytes, seconds=seconds)
        return changes

    def has(self, bucket: Bucket, version: int) -> bool:
        """Whether the values that are there are of the version, or of a newer one."""
        held = self._versions.get(bucket.index)
        return held is not None and held >= version

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
            encoded = _unpacked(reply.encoded, body)
            sent = few(codec, encoded, bucket.elements)
            if sent is None:
                codec.decode(encoded, decoded := self._decoded(bucket))
        if sent is None:
            follow(codec, values, decoded, values if into is None else into)
        elif into is None:
            FewChanges(codec, sent).make(values)
        else:  # `body` is memory for what comes next, too
            return FewChanges(codec, Sparse(sent.places.clone(), sent.values.clone()))
        return None

    def _decoded(self, bucket: Bucket) -> torch.Tensor:
        """Memory to decode a delta in."""
        if bucket.elements > len(self._changes.get(bucket.shard, ())):
            self._changes[bucket.shard] = torch.empty(bucket.elements, dtype=torch.float32, device="cpu")
        return self._changes[bucket.shard][: bucket.elements]

    @contextmanager
    def _decoding(self, bucket: Bucket) -> Iterator[None]:
        """The block looks at what the shard has sent. Raises Malformed if something is wrong with that."""
        try:
            yield
        except Exception as error:
            what = f"the values of bucket {bucket.index} from shard {bucket.shard} cannot be decoded"
            raise Malformed(f"{what}: {type(error).__name__}: {error}") from error

    def _place(self, shard: int, nbytes: int) -> memoryview:
        if len(self._memory.get(shard, b"")) < nbytes:
            self._memory[shard] = bytearray(nbytes)
        return memoryview(self._memory[shard])[:nbytes]


def _unpacked(run: pb.Run, body: memoryview) -> Encoded:
    """Raises Malformed: the parts do not fit the body."""
    encoded, used = unpack(parts_from_message(run.parts), run.values, body)
    if used != len(body):
        raise Malformed(f"{len(body) - used} bytes more than the parts have")
    return encoded
