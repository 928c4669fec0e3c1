"""From a call's bytes to the handler of its request; what `transport.calls` says is checked on the way.

Who may call what is decided by the identity that the caller's certificate gives it. A caller without an
identity may do everything: `transport.base.Incoming.peer` says when there is none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from google.protobuf.message import Message

from elastic_ps.contract.identity import Identity
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.guarded import Guarded
from elastic_ps.server.node import Node
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.calls import CALLS, Answer, At, By, Call, Sender


class Method(NamedTuple):
    """A call, and what answers it."""

    call: Call[Any, Any]
    handler: Callable[[Any, Incoming], Answer[Any]]


def methods(parts: Iterable[object], at: At) -> dict[str, Method]:
    """What the handlers of these objects answer there, by the names of the calls."""
    found = (
        Method(function.answers, getattr(part, name))
        for part in parts
        for name, function in inspect.getmembers(type(part), inspect.isfunction)
        if hasattr(function, "answers")
    )
    return {each.call.name: each for each in found if each.call.at & at}


def answer(method: Method, request: Message, incoming: Incoming) -> Iterator[Frame]:
    """The frames of the answers."""
    said = method.handler(request, incoming)
    if said is None:
        kind = method.call.reply
        said = kind() if kind is pb.Done else kind(pending=True)
    if isinstance(said, Message):
        yield Frame(said.SerializeToString(), last=True)
    else:
        yield from said


def require_permitted(problem: str | None) -> None:
    """Raises Refused (FORBIDDEN) if there is a problem with a call."""
    if problem is not None:
        raise Refused(RefusalCode.FORBIDDEN, problem)


class Callers:
    """Checks what requests say of whoever has sent them.

    Args:
        job: the job's name.
        node: the shard, or its standby.
        lead: the job's state, on shard 0.
    """

    def __init__(self, job: str, node: Node, lead: Guarded | None) -> None:
        self.job, self._node, self._lead = job, node, lead

    def check(self, sender: Sender, request: Any, incoming: Incoming) -> None:
        """Raises Refused, see `Sender`."""
        if sender is Sender.JOB:
            self._require_job(request.job)
        elif sender is Sender.WORKER:
            self.require_worker(request.caller, incoming)
        else:
            self.require_present(request.caller, incoming)

    def _require_job(self, named: str) -> None:
        """Who does not know the job's name is not told it."""
        if named != self.job:
            text = f"this is the parameter server of another job than {named!r}"
            raise Refused(RefusalCode.WRONG_JOB, text)

    def require_worker(self, caller: pb.Caller, incoming: Incoming) -> None:
        """Raises Refused if a worker that calls is not who it says, or of another job."""
        require_permitted(refuse_to_speak_for(incoming.peer, caller.worker))
        self._require_job(caller.job)

    def require_present(self, caller: pb.Caller, incoming: Incoming) -> None:
        """The same; also if it is of another term, or is known to be no member before there is a model."""
        self.require_worker(caller, incoming)
        term = self._lead.term if self._lead is not None else self._node.term
        if caller.term != term:
            text = f"message of term {caller.term}; this is term {term}"
            raise Refused(RefusalCode.STALE_TERM if term else RefusalCode.NOT_READY, text)
        if not self._node.configured:
            self.require_member(caller)

    def require_member(self, caller: pb.Caller) -> None:
        """Raise Refused if shard 0 knows that the caller is no member.

        To be asked also where a message is too early. Terms are counted anew if the checkpoints are lost, so
        an earlier worker may name this one, and versions that are far away.
        """
        if self._lead is not None:
            with self._lead.lock:
                self._lead.check(caller)


def refuse(peer: Identity | None, method: str, *, shard: int, standby: bool) -> str | None:
    """Why this caller may not make this call at all; None if it may.

    Args:
        shard: the index of the shard that is called, or whose standby is.
        standby: whether it is the standby.
    """
    if peer is None or (method in CALLS and CALLS[method].by & _parts(peer, shard=shard, standby=standby)):
        return None
    return f"the certificate of {peer} does not permit it to call {method} here"


def _parts(peer: Identity, *, shard: int, standby: bool) -> By:
    """What the caller is to the process that it calls."""
    if peer.role == "server":
        lead = By.LEAD if peer.index == 0 else By(0)
        return lead | By.LEADER if standby and peer.index == shard else lead
    return By(0) if standby or peer.role == "standby" else By[peer.role.upper()]


def refuse_to_end(peer: Identity | None, worker: int) -> str | None:
    """Why this caller may not say that a process of `worker` has ended; None if it may."""
    return None if peer is not None and peer.role == "operator" else refuse_to_speak_for(peer, worker)


def refuse_to_speak_for(peer: Identity | None, worker: int) -> str | None:
    """Why this caller may not call in the name of `worker`; None if it may."""
    if peer is None or (peer.role == "worker" and peer.index == worker):
        return None
    return f"the certificate of {peer} does not permit it to speak for worker {worker}"
