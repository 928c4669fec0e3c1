"""Who may call what, by the identity that the caller's certificate gives it. Pure decisions.

A caller without an identity may do everything: `transport.base.Incoming.peer` says when there is none. What a
call says is checked elsewhere, as for everybody.
"""

from __future__ import annotations

from elastic_ps.contract.identity import Identity

OF_WORKERS = frozenset(
    {
        "Assign",
        "Await",
        "Begin",
        "Chief",
        "DeclareTensor",
        "Finish",
        "FreeTensor",
        "Gone",
        "Heartbeat",
        "Init",
        "InitDone",
        "InitState",
        "Join",
        "Leave",
        "Meet",
        "OptimizerState",
        "Probe",
        "Pull",
        "PullTensor",
        "Push",
        "PushTensor",
        "PutTensor",
        "ReadState",
        "Release",
        "Report",
        "Stop",
        "Take",
        "WriteState",
    }
)
OF_EVALUATORS = frozenset({"Evaluate", "ReadFile"})
OF_OPERATORS = frozenset({"Gone"})
OF_THE_LEAD = frozenset({"Configure", "Advance", "Held"})
"""What shard 0 asks shards, and all standbys."""
OF_ITS_SHARD = frozenset({"Configure", "Advance", "State", "Sum"})
"""What a shard asks its own standby."""


def refuse(peer: Identity | None, method: str, *, shard: int, standby: bool) -> str | None:
    """Why this caller may not make this call at all; None if it may.

    Args:
        shard: the index of the shard that is called, or whose standby is.
        standby: whether it is the standby.
    """
    if peer is None or _may_call(peer, method, shard=shard, standby=standby):
        return None
    return f"the certificate of {peer} does not permit it to call {method} here"


def _may_call(peer: Identity, method: str, *, shard: int, standby: bool) -> bool:
    match peer.role:
        case "worker":
            return method in OF_WORKERS and not standby
        case "evaluator":
            return method in OF_EVALUATORS and not standby
        case "operator":
            return method in OF_OPERATORS and not standby
        case "server":
            leads = peer.index == 0 and method in OF_THE_LEAD
            return leads or (standby and peer.index == shard and method in OF_ITS_SHARD)
        case "standby":
            return False


def refuse_to_end(peer: Identity | None, worker: int) -> str | None:
    """Why this caller may not say that a process of `worker` has ended; None if it may."""
    return None if peer is not None and peer.role == "operator" else refuse_to_speak_for(peer, worker)


def refuse_to_speak_for(peer: Identity | None, worker: int) -> str | None:
    """Why this caller may not call in the name of `worker`; None if it may."""
    if peer is None or (peer.role == "worker" and peer.index == worker):
        return None
    return f"the certificate of {peer} does not permit it to speak for worker {worker}"
