"""A bucket's state as a list of tensors: so a checkpoint holds it, and so a standby gets it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from elastic_ps.checkpoint.tensors import MASTER, PULLED, VALUE, Stored
from elastic_ps.codec import as_bytes, dtype_of
from elastic_ps.core.partition import ITEM_SIZE, Bucket
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.values import BucketValues
from elastic_ps.transport.base import Incoming


def stored(values: BucketValues) -> Iterator[Stored]:
    """The tensors of a bucket. They are live: the next `apply` changes them."""
    kept = {VALUE: values.values}
    if values.lags:
        kept = {VALUE: values.master, PULLED: values.values}
    elif values.master.dtype is not values.values.dtype:
        kept[MASTER] = values.master
    for key, flat in kept.items():
        start = 0
        for piece in values.bucket.pieces:
            yield Stored(piece.tensor, piece.start, key, flat[start : start + piece.length])
            start += piece.length
    for entry in values.state():
        yield Stored(entry.tensor, entry.start, entry.key, entry.value, entry.scalar)


@dataclass(frozen=True)
class Part:
    """Which of a bucket's tensors a call to a standby carries; see `Stored`. `last`: there are no more."""

    bucket: int
    tensor: int
    start: int
    key: str
    dtype: str
    scalar: bool
    last: bool


class Arriving:
    """The tensors of one bucket, as they arrive. A `checkpoint.tensors.Source`. Not thread-safe."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._lengths = {(piece.tensor, piece.start): piece.length for piece in bucket.pieces}
        self._tensors: dict[tuple[int, int, str], torch.Tensor] = {}

    def receive(self, part: Part, incoming: Incoming) -> None:
        """Take one tensor. Blocks while it is received.

        Raises:
            Refused: MALFORMED; the bucket has no such piece, or the size is not the piece's.
        """
        length = self._lengths.get((part.tensor, part.start), 0)
        elements = 1 if part.scalar else length
        wrong_dtype = part.dtype not in ITEM_SIZE or (
            part.key == VALUE and (part.dtype != self.bucket.dtype or part.scalar)
        )
        if not length or wrong_dtype or incoming.size != elements * ITEM_SIZE[part.dtype]:
            raise Refused(
                RefusalCode.MALFORMED,
                f"{incoming.size} bytes of {part.dtype} as {part.key} of tensor {part.tensor} from element "
                f"{part.start} on; the piece of bucket {self.bucket.index} has {length} elements of "
                f"{self.bucket.dtype}",
            )
        tensor = torch.empty(elements, dtype=dtype_of(part.dtype))
        incoming.read_into(as_bytes(tensor))
        self._tensors[part.tensor, part.start, part.key] = tensor.reshape(()) if part.scalar else tensor

    def require_whole(self) -> None:
        """Raise Refused (MALFORMED) unless the values of all pieces have come."""
        if lacking := [place for place in self._lengths if (*place, VALUE) not in self._tensors]:
            raise Refused(
                RefusalCode.MALFORMED,
                f"bucket {self.bucket.index} is said to be complete; the values of {len(lacking)} pieces "
                "have not come",
            )

    def value(self, tensor: int, start: int, length: int) -> torch.Tensor:
        """See Source."""
        del length
        return self._tensors[tensor, start, VALUE]

    def state(self, tensor: int, start: int, length: int) -> dict[str, torch.Tensor]:
        """See Source."""
        del length
        return {
            key: value
            for (*place, key), value in self._tensors.items()
            if place == [tensor, start] and key != VALUE
        }


class Catching:
    """How far a standby has come with taking its buckets over. Not thread-safe.

    Attributes:
        missing: the numbers of the buckets that have not come.
        anywhere: it has nothing yet, so it may begin with any version.
    """

    def __init__(self, missing: set[int], *, anywhere: bool) -> None:
        self.missing = missing
        self.anywhere = anywhere
        self._arriving: Arriving | None = None

    @property
    def whole(self) -> bool:
        """Whether all buckets are there."""
        return not (self.missing or self.anywhere)

    def begin(self, bucket: Bucket) -> Arriving:
        """The tensors of a bucket that have come. Raises Refused (NOT_READY) if it is not waited for."""
        if self.anywhere or bucket.index not in self.missing:
            raise Refused(
                RefusalCode.NOT_READY, f"the standby does not wait for the state of bucket {bucket.index}"
            )
        if self._arriving is None or self._arriving.bucket is not bucket:
            self._arriving = Arriving(bucket)
        return self._arriving

    def end(self, bucket: Bucket) -> None:
        """The bucket has been taken over."""
        self.missing.discard(bucket.index)
        self._arriving = None  # mutant: equal
