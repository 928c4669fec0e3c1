"""Parses the bytes of a call, checks it against `transport.calls`, and calls its handler.

The identity in a caller's certificate decides which calls it may make. A caller without an identity may make
all: see `transport.base.Incoming.peer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from google.protobuf.message import Message

from elastic_ps.contract.identity import Identity
from elastic_ps.errors import Malformed, RefusalCode, Refused
from elastic_ps.server.calls.node import Node
from elastic_ps.server.calls.shard_zero import ShardZero
from elastic_ps.server.job.guarded import Guarded
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.calls import CALLS, Answer, At, By, Call, Sender, answers

HEADER = 2 * 1024 * 1024
"""Bytes of a header, at most, unless the call `describes`. When parsed, it takes up to 40 times as many."""


def require_permitted(problem: str | None) -> None:
    """Raises Refused (FORBIDDEN) if there is a problem with a call."""
    if problem is not None:
        raise Refused(RefusalCode.FORBIDDEN, problem)


class Callers:
    """Checks what requests say of their callers.

    Args:
        job: the job's name.
        node: the shard, or its standby.
        guarded: the job's state, on shard 0.

    Attributes:
        model_header: the length of the longest header of a Join so far; None while any model may join.
    """

    def __init__(self, job: str, node: Node, guarded: Guarded | None) -> None:
        self.job, self.node, self._guarded = job, node, guarded
        self.model_header: int | None = None

    def check(self, sender: Sender, request: Any, incoming: Incoming) -> None:
        """Raises Refused, see `Sender`; before there is a model, for a caller that is not a member, too."""
        caller = request if sender is Sender.JOB else request.caller
        if sender is not Sender.JOB:
            require_permitted(refuse_to_speak_for(incoming.peer, caller.worker))
        if caller.job != self.job:  # a caller that does not know the job's name must not learn it
            text = f"this is the parameter server of another job than {caller.job!r}"
            raise Refused(RefusalCode.WRONG_JOB, text)
        if sender is not Sender.MEMBER:
            return
        term = self._guarded.term if self._guarded is not None else self.node.term
        if caller.term != term:
            text = f"the worker speaks to term {caller.term} of the parameter server; this is term {term}"
            raise Refused(RefusalCode.STALE_TERM if term else RefusalCode.NOT_READY, text)
        if not self.node.configured:
            self.require_member(caller)

    def require_member(self, caller: pb.Caller) -> None:
        """Raise Refused if shard 0 knows that the caller is not a member.

        Check messages that are too early, too. If the checkpoints are lost, terms begin with 1 again, so an
        earlier worker may name the present term, and much later versions.
        """
        if self._guarded is not None:
            with self._guarded.lock:
                self._guarded.check(caller)


def refuse(peer: Identity | None, method: str, *, shard: int, standby: bool) -> str | None:
    """Why this caller may not make this call at all; None if it may.

    Args:
        shard: the index of the called shard, or of the shard of the called standby.
        standby: whether a standby is called.
    """
    if peer is None or (method in CALLS and CALLS[method].by & _parts(peer, shard=shard, standby=standby)):
        return None
    return f"the certificate of {peer} does not permit it to call {method} here"


def _parts(peer: Identity, *, shard: int, standby: bool) -> By:
    """The roles of the caller towards the called process."""
    if peer.role == "server":
        allowed = By.SHARD_ZERO if peer.index == 0 else By(0)
        return allowed | By.LEADER if standby and peer.index == shard else allowed
    return By(0) if standby or peer.role == "standby" else By[peer.role.upper()]


def refuse_to_end(peer: Identity | None, worker: int) -> str | None:
    """Why this caller may not say that a process of `worker` has ended; None if it may."""
    return None if peer is not None and peer.role == "operator" else refuse_to_speak_for(peer, worker)


def refuse_to_speak_for(peer: Identity | None, worker: int) -> str | None:
    """Why this caller may not call in the name of `worker`; None if it may."""
    if peer is None or (peer.role == "worker" and peer.index == worker):
        return None
    return f"the certificate of {peer} does not permit it to speak for worker {worker}"


class Service:
    """A `transport.base.Handler` for one parameter server.

    Args:
        parts: objects with the handlers; see `transport.calls.answers`.
        at: chooses the calls that it answers.

    Attributes:
        methods: the calls and their handlers, by the names of the calls.
    """

    def __init__(self, callers: Callers, parts: Iterable[object], at: At) -> None:
        self._callers, self._index, self._standby = callers, callers.node.index, at is At.STANDBY
        self.methods: dict[str, tuple[Call[Any, Any], Callable[[Any, Incoming], Answer[Any]]]] = {}
        for part in parts:
            for name, function in inspect.getmembers(type(part), inspect.isfunction):
                call: Call[Any, Any] | None = getattr(function, "answers", None)
                if call is not None and call.at & at:
                    self.methods[call.name] = call, getattr(part, name)

    def __call__(self, method: str, incoming: Incoming) -> Iterator[Frame]:
        require_permitted(refuse(incoming.peer, method, shard=self._index, standby=self._standby))
        if method not in self.methods:
            raise Refused(RefusalCode.UNKNOWN_METHOD, f"shard {self._index} has no method {method}")
        call, handler = self.methods[method]
        self._check_header(call, len(incoming.header))
        request = call.parse(incoming.header)
        self._callers.check(call.sender, request, incoming)
        return self._frames(call, partial(handler, request, incoming))

    def _frames(self, call: Call[Any, Any], handler: Callable[[], Answer[Any]]) -> Iterator[Frame]:
        if (said := handler()) is None:
            said = call.reply() if call.reply is pb.Done else call.reply(pending=True)
        if isinstance(said, Message):
            yield Frame(said.SerializeToString(), last=True)
        else:
            yield from said

    def _check_header(self, call: Call[Any, Any], size: int) -> None:
        """Raise Malformed if a header is longer than any valid one, before it is parsed."""
        known = self._callers.model_header if call.describes else 0
        if known is not None and size > (limit := max(HEADER, 2 * known)):
            raise Malformed(f"{call.name}: a header of {size} bytes; the limit is {limit}")


class EvaluatorCalls:
    """Answers the job's evaluator, for a `Service`."""

    def __init__(self, shard_zero: ShardZero) -> None:
        assert shard_zero.evaluation_queue is not None
        self._evaluations, self._last = shard_zero.evaluation_queue, shard_zero.last_version

    @answers(calls.EVALUATE)
    def _evaluate(self, request: pb.EvaluateRequest, _: Incoming) -> pb.EvaluateReply:
        if request.HasField("version"):
            self._evaluations.finish(request.version, dict(request.metrics), request.problem)
        version, over = self._evaluations.begin(request.process, self._last())
        return pb.EvaluateReply(version=version, over=over)

    @answers(calls.READ_FILE)
    def _read_file(self, request: pb.ReadFileRequest, _: Incoming) -> Iterator[Frame]:
        header = pb.Done().SerializeToString()
        for piece in self._evaluations.read(request.version, request.file):
            yield Frame(header, piece)
        yield Frame(header)
