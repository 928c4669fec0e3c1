"""The calls that a parameter server answers: for its `Node`, on shard 0 for a `Coordinator` and a `Desk`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.evaluation.queue import Desk
from elastic_ps.server.coordinator import Coordinator
from elastic_ps.server.dispatch import Callers, answer, methods, refuse, require_permitted
from elastic_ps.server.lead_service import LeadService
from elastic_ps.server.meeting import Meeting
from elastic_ps.server.node import Node
from elastic_ps.server.shard_service import ShardService
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.calls import At, Call, answers

HEADER = 2 * 1024 * 1024
"""Bytes of a header at most, unless it describes a model. Parsed, it takes up to forty times that."""


class Service:
    """A `transport.base.Handler` for one parameter server.

    Args:
        meeting: of the workers, with `strategy: all-reduce`.
        beside: what answers other calls, with `dispatch.answers`.

    Attributes:
        methods: what answers calls, by their names.
    """

    def __init__(
        self,
        job: str,
        node: Node,
        coordinator: Coordinator | None,
        *beside: object,
        standby: bool = False,
        meeting: Meeting | None = None,
    ) -> None:
        callers = Callers(job, node, coordinator)
        lead = LeadService(callers, node, coordinator, meeting) if coordinator is not None else None
        at = At.STANDBY if standby else At.LEAD if lead else At.OTHER
        self._node, self._lead, self._callers, self._standby = node, lead, callers, standby
        self.methods = methods([ShardService(callers, node, lead), lead, *beside], at)

    def __call__(self, method: str, incoming: Incoming) -> Iterator[Frame]:
        index = self._node.index
        require_permitted(refuse(incoming.peer, method, shard=index, standby=self._standby))
        if method not in self.methods:
            raise Refused(RefusalCode.UNKNOWN_METHOD, f"shard {index} has no method {method}")
        found = self.methods[method]
        self._check_header(found.call, len(incoming.header))
        request = found.call.parse(incoming.header)
        self._callers.check(found.call.sender, request, incoming)
        return answer(found, request, incoming)

    def _check_header(self, call: Call[Any, Any], size: int) -> None:
        """Raise Malformed for one that is longer than any of ours, before it is parsed."""
        known = self._lead.model_header if self._lead else None
        if call.describes and known is None:
            return
        limit = max(HEADER, 2 * known) if call.describes and known is not None else HEADER
        if size > limit:
            raise Malformed(f"{call.name}: a header of {size} bytes; the limit is {limit}")


class DeskService:
    """Answers for a `Service`.

    Args:
        last: the version on disk if training is over, else None.
    """

    def __init__(self, desk: Desk, last: Callable[[], int | None]) -> None:
        self._desk, self._last = desk, last

    @answers(calls.EVALUATE)
    def _evaluate(self, request: pb.EvaluateRequest, _: Incoming) -> pb.EvaluateReply:
        if request.HasField("version"):
            self._desk.finish(request.version, dict(request.metrics), request.problem)
        version, over = self._desk.begin(request.process, self._last())
        return pb.EvaluateReply(version=version, over=over)

    @answers(calls.READ_FILE)
    def _read_file(self, request: pb.ReadFileRequest, _: Incoming) -> Iterator[Frame]:
        header = pb.Done().SerializeToString()
        for piece in self._desk.read(request.version, request.file):
            yield Frame(header, piece)
        yield Frame(header)
