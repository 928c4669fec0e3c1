"""The calls that a parameter server answers: what each shard does, and on shard 0 what its lead does, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.server.dispatch import Callers, answer, methods, refuse, require_permitted
from elastic_ps.server.lead import Lead
from elastic_ps.server.members import MemberCalls
from elastic_ps.server.node import Node
from elastic_ps.server.shard_service import ShardService
from elastic_ps.server.steps import StepCalls
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.calls import At, Call, answers

HEADER = 2 * 1024 * 1024
"""Bytes of a header at most, unless it describes a model. Parsed, it takes up to forty times that."""


class Service:
    """A `transport.base.Handler` for one parameter server.

    Args:
        lead: on shard 0.
        beside: what answers other calls.

    Attributes:
        methods: what answers calls, by their names.
    """

    def __init__(
        self,
        job: str,
        node: Node,
        lead: Lead | None,
        *beside: object,
        standby: bool = False,
    ) -> None:
        callers = Callers(job, node, lead.job if lead is not None else None)
        at = At.STANDBY if standby else At.LEAD if lead is not None else At.OTHER
        self._node, self._callers, self._standby = node, callers, standby
        self._members = MemberCalls(callers, lead, lambda: node.shard) if lead is not None else None
        steps = StepCalls(callers, lead) if lead is not None else None
        desk = DeskService(lead) if lead is not None and lead.desk is not None else None
        self.methods = methods([ShardService(callers, node, steps), self._members, steps, desk, *beside], at)

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
        known = self._members.model_header if self._members else None
        if call.describes and known is None:
            return
        limit = max(HEADER, 2 * known) if call.describes and known is not None else HEADER
        if size > limit:
            raise Malformed(f"{call.name}: a header of {size} bytes; the limit is {limit}")


class DeskService:
    """Answers the job's evaluator, for a `Service`."""

    def __init__(self, lead: Lead) -> None:
        assert lead.desk is not None
        self._desk, self._last = lead.desk, lead.last_version

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
