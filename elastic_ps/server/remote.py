"""Another shard, or a standby, as a parameter server drives it over the transport."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from datetime import timedelta

from elastic_ps.errors import ConnectionLost, DeadlineExceeded
from elastic_ps.server.copying import Part
from elastic_ps.server.orders import (
    Advance,
    Configuration,
    OrderId,
    Report,
    advance_from_message,
    advance_to_message,
    configuration_to_message,
    report_from_message,
)
from elastic_ps.server.patience import retry
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame, unary

START_TIMEOUT = timedelta(seconds=120)
"""How long shard 0 waits for another shard to come up."""

CALL_TIMEOUT = timedelta(seconds=60)
"""Of an order, for which a shard may have to make a step and to copy all that it has."""

LOOK_TIMEOUT = timedelta(seconds=10)
"""Of a call for which a standby computes nothing."""


class RemoteShard:
    """A `ShardControl` for a shard in another process. Thread-safe.

    Args:
        start: how long `configure` waits for the process to come up.
        timeout: of each call.
    """

    def __init__(
        self,
        job: str,
        connection: Connection,
        *,
        start: timedelta = START_TIMEOUT,
        timeout: timedelta = CALL_TIMEOUT,
    ) -> None:
        self._job = job
        self._connection = connection
        self._start, self._timeout = start, timeout
        self._source, self._numbers = uuid.uuid4().hex, itertools.count(1)

    def _order(self) -> OrderId:
        return OrderId(self._source, next(self._numbers))

    def configure(self, configuration: Configuration) -> None:
        """See ShardControl. Waits until the shard is up; raises ConnectionLost if it does not come."""

        def ask() -> None:
            request = configuration_to_message(self._job, configuration, self._order())
            unary(self._connection, "Configure", request.SerializeToString(), timeout=CALL_TIMEOUT)

        retry(ask, (ConnectionLost, DeadlineExceeded), patience=self._start)

    def advance(self, advance: Advance) -> Report:
        """See ShardControl."""
        request = advance_to_message(self._job, advance, self._order())
        answer = unary(self._connection, "Advance", request.SerializeToString(), timeout=self._timeout)
        return report_from_message(pb.AdvanceReply.FromString(answer))

    def state(self, part: Part, data: memoryview, *, term: int) -> None:
        """To a standby: one tensor of a bucket, as it is before the open round's step. Blocks."""
        order = self._order()
        request = pb.StateRequest(
            job=self._job,
            term=term,
            bucket=part.bucket,
            tensor=part.tensor,
            start=part.start,
            key=part.key,
            dtype=part.dtype,
            scalar=part.scalar,
            last=part.last,
            source=order.source,
            number=order.number,
        )
        self._send("State", request.SerializeToString(), data)

    def sum(
        self,
        bucket: int,
        data: memoryview,
        present: Sequence[bool],
        *,
        term: int,
        version: int,
        attempt: int,
    ) -> None:
        """To a standby: the sum of a bucket, in the open round that it was told of. Blocks."""
        request = pb.SumRequest(
            job=self._job, term=term, bucket=bucket, version=version, attempt=attempt, present=present
        )
        self._send("Sum", request.SerializeToString(), data)

    def _send(self, method: str, header: bytes, data: memoryview) -> None:
        for _ in self._connection.call(method, Frame(header, data), timeout=self._timeout):
            pass

    def held(self, term: int) -> list[Advance]:
        """To a standby: the orders that it can carry out, oldest first. It refuses older terms from now on.

        Raises:
            Refused: STALE_TERM; a newer parameter server has asked.
            TransportError: it does not answer.
        """
        request = pb.HeldRequest(job=self._job, term=term)
        answer = unary(self._connection, "Held", request.SerializeToString(), timeout=LOOK_TIMEOUT)
        return [advance_from_message(order) for order in pb.HeldReply.FromString(answer).orders]

    def close(self) -> None:
        self._connection.close()
