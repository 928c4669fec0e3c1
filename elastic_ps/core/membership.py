"""Who is in the job: leases and incarnations.

Each joining of a worker gets a number of its own, the incarnation, which only grows. Whatever carries
another incarnation than the worker's current one comes from a process that was declared gone, however
alive it may feel; it is refused.
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
    """One worker from one of its joins on.

    Attributes:
        worker: the worker's index.
        incarnation: the number of this joining.
        pid, host: where the process runs, for reports.
        transport: how its calls came when it joined, for reports.
        instance: names the process for all time; pid and host come again, in containers above all.
        call: the number of the process's call that it began with.
        joined_version, left_version: the model's version when it joined, and when it left (None: it is here).
        outcome: "" while it is here, then `left` (said goodbye), `lost` or `hung`.
        reason: why it was declared gone, in words.
        ended: time at which it was; None for an incarnation of an earlier term.
        steps, records: what it contributed to the model.
        late: how many steps of it came too late, so that they were made without it; see `BackupRounds`.
        traffic: what it has sent and received, as it told with its last step: the fields of `status.Traffic`.
        staleness: of its last step that is in the model; see `BoundedRounds`.
        last_step: the worker's own number of the last step of it that is in the model; -1 for none.
        last_begun: of the last step that it has asked to push, where that is asked; -1 for none.
        follows: the incarnation that the process has had before, in this or in an earlier term; 0 for none.
        expires: time at which its lease ends.
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
        keep_departed: how many incarnations that have ended are remembered, for reports.
    """

    lease: timedelta
    keep_departed: int = 1000
    last_incarnation: int = 0
    live: dict[int, Member] = field(default_factory=dict)
    departed: list[Member] = field(default_factory=list)

    def known(self, worker: int, instance: str, call: int) -> Member | None:
        """The member that a process's call has made, if the call is repeated and the member is still here.

        Of two processes with a worker's index, the one that came later is the worker.

        Raises:
            Refused: SUPERSEDED; another process has taken this one's place since it first came.
                STALE_CALL; it has joined again since it made this call.
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

    def join(
        self,
        worker: int,
        *,
        pid: int,
        host: str,
        version: int,
        now: float,
        instance: str = "",
        transport: str = "",
        call: int = 0,
        follows: int = 0,
    ) -> Member:
        """Admit a process as `worker`. A member with that index must have been removed before.

        Args:
            follows: see `Member`.
        """
        if worker in self.live:
            raise ValueError(f"worker {worker} is a member already")
        self.last_incarnation += 1
        expires = now + self.lease.total_seconds()
        member = Member(worker, self.last_incarnation, pid, host, version, expires)
        member.instance, member.transport, member.call, member.follows = instance, transport, call, follows
        self.live[worker] = member
        return member

    def check(self, worker: int, incarnation: int, now: float) -> Member:
        """The member, its lease renewed.

        Raises:
            Refused: STALE_INCARNATION; the sender is not a member (any more). HUNG: it was declared hung.
        """
        member = self.live.get(worker)
        if member is None or member.incarnation != incarnation:
            for gone in reversed(self.departed):
                if gone.incarnation == incarnation and gone.outcome == "hung":
                    raise Refused(RefusalCode.HUNG, f"worker {worker} was declared hung: {gone.reason}")
            current = f"its current incarnation is {member.incarnation}" if member else "it is not a member"
            raise Refused(
                RefusalCode.STALE_INCARNATION,
                f"worker {worker} with incarnation {incarnation} was declared gone; {current}",
            )
        member.expires = max(member.expires, now + self.lease.total_seconds())
        return member

    def remove(
        self, worker: int, *, outcome: str, version: int, reason: str = "", now: float | None = None
    ) -> Member | None:
        """End a worker's incarnation as `left`, `lost` or `hung`; None if it is not a member."""
        member = self.live.pop(worker, None)
        if member is not None:
            member.outcome, member.left_version = outcome, version
            member.reason, member.ended = reason, now
            self.departed = [*self.departed, member][-self.keep_departed :]
        return member

    def expired(self, now: float) -> list[int]:
        """The members whose lease has ended."""
        return [worker for worker, member in self.live.items() if member.expires <= now]

    def all(self) -> list[Member]:
        """All present and former members, in order of joining."""
        return sorted([*self.departed, *self.live.values()], key=lambda member: member.incarnation)

    def copy(self) -> Members:
        """The same members; what is done to the one is not done to the other."""
        live = {worker: copy.copy(member) for worker, member in self.live.items()}
        return replace(self, live=live, departed=[copy.copy(member) for member in self.departed])

    def find(self, worker: int, incarnation: int) -> Member:
        """A worker's incarnation, also if it has ended. Raises KeyError if it is not remembered."""
        member = self.live.get(worker)
        if member is not None and member.incarnation == incarnation:
            return member
        for gone in reversed(self.departed):
            if (gone.worker, gone.incarnation) == (worker, incarnation):
                return gone
        raise KeyError(incarnation)

    def last_step(self, member: Member) -> int:
        """The process's number of its last step that is in the model, in this incarnation or one before it.

        -1 for none. It numbers its steps on from one incarnation to the next.
        """
        while member.last_step < 0 and 0 < member.follows < member.incarnation:
            try:
                before = self.find(member.worker, member.follows)
            except KeyError:  # it was too long ago
                break
            if before.instance != member.instance:
                break
            member = before
        return member.last_step


def eldest(members: Iterable[Member]) -> Member:
    """Of `members` (not empty), the one that has made most steps; of equals, who joined first.

    Not simply who joined first: that one may have been overtaken before its first step.
    """
    return min(members, key=lambda member: (-member.steps, member.incarnation))
