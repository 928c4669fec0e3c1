"""The members of a job, with their leases and incarnations.

Each join of a worker gets a new, higher number, its incarnation. A call with another incarnation than the
worker's current one comes from a process that was declared gone, and is refused even if the process lives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from elastic_ps.errors import RefusalCode, Refused


@dataclass
class Member:
    """One incarnation of a worker.

    Attributes:
        worker: the worker's index.
        incarnation: the number of this join.
        pid, host: where the process runs, for reports.
        transport: the transport of its calls when it joined, for reports.
        instance: a unique name of the process; pid and host may be reused, above all in containers.
        call: the number of the call by which it joined.
        joined_version, left_version: the model's version when it joined and left (None: it is present).
        outcome: "" while it is present, then `left` (said goodbye), `lost` or `hung`.
        reason: why it was declared gone.
        silent: whether it was dropped because its lease had ended, and its process may live.
        ended: the time at which it ended; None for an incarnation of an earlier term.
        steps, records: the number of its steps and records in the model.
        late: the number of its late steps, which were dropped; see `BackupRounds`.
        traffic: its traffic, as reported with its last step: the fields of `status.Traffic`.
        staleness: the staleness of its last step in the model; see `BoundedRounds`.
        last_step: the worker's own number of its last step in the model; -1 for none.
        last_begun: the number of the last step that it has asked to push, in modes that ask; -1 for none.
        follows: the previous incarnation of the process, in this or an earlier term; 0 for none.
        expires: the time at which its lease ends, counted from its last call, also if it is gone.
    """

    worker: int
    incarnation: int
    pid: int
    host: str
    joined_version: int
    expires: float
    left_version: int | None = None
    outcome: str = ""
    reason: str = ""
    silent: bool = False
    ended: float | None = None
    steps: int = 0
    records: int = 0
    last_step: int = -1
    last_begun: int = -1
    instance: str = ""
    transport: str = ""
    call: int = 0
    follows: int = 0
    late: int = 0
    staleness: int = 0
    traffic: dict[str, Any] = field(default_factory=dict)


@dataclass
class Members:
    """The present and former members of a job.

    Attributes:
        lease: how long a member may be silent.
        keep_departed: the number of ended incarnations that are remembered, for reports.
    """

    lease: timedelta
    keep_departed: int = 1000
    last_incarnation: int = 0
    live: dict[int, Member] = field(default_factory=dict)
    departed: list[Member] = field(default_factory=list)

    def known(self, worker: int, instance: str, call: int) -> Member | None:
        """The member that an earlier copy of a process's call has created, if it is still present.

        Of two processes with the same worker index, the later one is the worker.

        Raises:
            Refused: SUPERSEDED: another process has replaced this one. STALE_CALL: the process has joined
                again since it made this call.
        """
        members = [member for member in reversed(self.all()) if member.worker == worker]
        if not members:
            return None
        newest = members[0]
        if newest.instance != instance:
            if any(member.instance == instance for member in members):
                text = f"worker {worker} is now another process: {newest.pid} on {newest.host}"
                raise Refused(RefusalCode.SUPERSEDED, text)
            return None
        if call < newest.call:
            text = f"this is join {call} of worker {worker}, which has sent join {newest.call} since"
            raise Refused(RefusalCode.STALE_CALL, text)
        return newest if call == newest.call and self.live.get(worker) is newest else None

    def join(self, worker: int, *, version: int, now: float, **process: Any) -> Member:
        """Admit a process as `worker`. A member with that index must have been removed before.

        Args:
            process: the fields of `Member` that are about it, such as `pid` and `host`.
        """
        if worker in self.live:
            raise ValueError(f"worker {worker} is a member already")
        self.last_incarnation += 1
        expires = now + self.lease.total_seconds()
        member = Member(worker, self.last_incarnation, joined_version=version, expires=expires, **process)
        self.live[worker] = member
        return member

    def check(self, worker: int, incarnation: int, now: float) -> Member:
        """Return the member, and renew its lease.

        Raises:
            Refused: STALE_INCARNATION: the sender is not a member (any more). HUNG: it was declared hung.
        """
        member = self.live.get(worker)
        if member is None or member.incarnation != incarnation:
            gone = next((each for each in self.departed if each.incarnation == incarnation), None)
            if gone is not None:
                if gone.outcome == "hung":
                    raise Refused(RefusalCode.HUNG, f"worker {worker} was declared hung: {gone.reason}")
                self._renew(gone, now)  # it may come to the end of its script without joining again
            current = f"its current incarnation is {member.incarnation}" if member else "it is not a member"
            raise Refused(
                RefusalCode.STALE_INCARNATION,
                f"worker {worker} with incarnation {incarnation} was declared gone; {current}",
            )
        self._renew(member, now)
        return member

    def _renew(self, member: Member, now: float) -> None:
        member.expires = max(member.expires, now + self.lease.total_seconds())

    def remove(
        self, worker: int, *, outcome: str, version: int, reason: str = "", now: float | None = None
    ) -> Member | None:
        """End a worker's incarnation as `left`, `lost` or `hung`; None if it is not a member."""
        member = self.live.pop(worker, None)
        if member is not None:
            member.outcome, member.left_version = outcome, version
            member.reason, member.ended = reason, now
            member.silent = now is not None and member.expires <= now
            self.departed = [*self.departed, member][-self.keep_departed :]
        return member

    def expired(self, now: float) -> list[int]:
        """The members whose lease has ended."""
        return [worker for worker, member in self.live.items() if member.expires <= now]

    def may_return(self, now: float) -> list[Member]:
        """Return members dropped as silent less than a lease ago, unless another process replaced them."""
        since = now - self.lease.total_seconds()
        silent = (each for each in self.departed if each.silent and (each.ended or 0.0) > since)
        return [each for each in silent if self.live.get(each.worker, each).instance == each.instance]

    def note_end(self, worker: int, instance: str) -> None:
        """Note that a process has ended: it does not return."""
        for member in self.departed:
            if (member.worker, member.instance) == (worker, instance):
                member.silent = False

    def all(self) -> list[Member]:
        """All present and former members, in order of joining."""
        return sorted([*self.departed, *self.live.values()], key=lambda member: member.incarnation)

    def copy(self) -> Members:
        """An independent copy."""
        live = {worker: copy.copy(member) for worker, member in self.live.items()}
        return replace(self, live=live, departed=[copy.copy(member) for member in self.departed])

    def find(self, worker: int, incarnation: int) -> Member | None:
        """A worker's incarnation, also if it has ended; None if it is not remembered."""
        member = self.live.get(worker)
        if member is not None and member.incarnation == incarnation:
            return member
        place = worker, incarnation
        return next((m for m in reversed(self.departed) if (m.worker, m.incarnation) == place), None)

    def last_step(self, member: Member) -> int:
        """The number of a process's last step in the model, in this incarnation or an earlier one; -1 for
        none.

        Step numbers continue from one incarnation to the next.
        """
        while member.last_step < 0 and 0 < member.follows < member.incarnation:
            before = self.find(member.worker, member.follows)
            if before is None or before.instance != member.instance:  # None: it was too long ago
                break
            member = before
        return member.last_step


def eldest(members: Iterable[Member]) -> Member:
    """The member, of `members` (not empty), with the most steps; among equals, the one that joined first.

    The one that joined first may have been overtaken before its first step.
    """
    return min(members, key=lambda member: (-member.steps, member.incarnation))
