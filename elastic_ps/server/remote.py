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
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame
from elastic_ps.transport.calls import Call, Q
from elastic_ps.transport.convert import to_message

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
            calls.ask(self._connection, calls.CONFIGURE, request, timeout=CALL_TIMEOUT)

        retry(ask, (ConnectionLost, DeadlineExceeded), patience=self._start)

    def advance(self, advance: Advance) -> Report:
        """See ShardControl."""
        request = advance_to_message(self._job, advance, self._order())
        reply = calls.ask(self._connection, calls.ADVANCE, request, timeout=self._timeout)
        return report_from_message(reply)

    def state(self, part: Part, data: memoryview, *, term: int) -> None:
        """To a standby: one tensor of a bucket, as it is before the open round's step. Blocks."""
        request = to_message(pb.StateRequest, part, job=self._job, term=term, **vars(self._order()))
        self._send(calls.STATE, request, data)

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
        self._send(calls.SUM, request, data)

    def _send(self, call: Call[Q, pb.Done], request: Q, data: memoryview) -> None:
        frame = Frame(request.SerializeToString(), data)
        for _ in self._connection.call(call.name, frame, timeout=self._timeout):
            pass

    def held(self, term: int) -> list[Advance]:
        """To a standby: the orders that it can carry out, oldest first. It refuses older terms from now on.

        Raises:
            Refused: STALE_TERM; a newer parameter server has asked.
            TransportError: it does not answer.
        """
        request = pb.HeldRequest(job=self._job, term=term)
        reply = calls.ask(self._connection, calls.HELD, request, timeout=LOOK_TIMEOUT)
        return [advance_from_message(order) for order in reply.orders]

    def close(self) -> None:
        self._connection.close()
