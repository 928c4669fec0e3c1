"""Who may call what, by the identity that the caller's certificate gives it. Pure decisions.

A caller without an identity may do everything: `transport.base.Incoming.peer` says when there is none. What a
call says is checked elsewhere, as for everybody.
"""

from __future__ import annotations

from elastic_ps.contract.identity import Identity
from elastic_ps.transport.calls import CALLS, By


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
