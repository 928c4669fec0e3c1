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
class Stay:
    """One worker's stay in the job, from its joining on.

    Attributes:
        worker: the worker's index.
        incarnation: the number of this joining.
        pid, host: where the process runs, for reports.
        transport: how its calls came when it joined, for reports.
        instance: names the process for all time; pid and host come again, in containers above all.
        call: the number of the process's call that began the stay.
        joined_version, left_version: the model's version when it joined, and when it left (None: it is here).
        outcome: "" while it is here, then `left` (said goodbye), `lost` or `hung`.
        reason: why it was declared gone, in words.
        ended: time at which it was; None for a stay of an earlier term.
        steps, records: what it contributed to the model.
        late: how many steps of it came too late, so that they were made without it; see `BackupRounds`.
        traffic: what it has sent and received, as it told with its last step: the fields of `status.Traffic`.
        staleness: of its last step that is in the model; see `BoundedRounds`.
        last_step: the worker's own number of the last step of it that is in the model; -1 for none.
        last_begun: of the last step that it has asked to push, where that is asked; -1 for none.
        follows: the stay that the process has had before, in this or in an earlier term; 0 for none.
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
class Membership:
    """The present and former members of a job.

    Attributes:
        lease: how long a member may be silent.
        keep_departed: how many stays that have ended are remembered, for reports.
    """

    lease: timedelta
    keep_departed: int = 1000
    last_incarnation: int = 0
    live: dict[int, Stay] = field(default_factory=dict)
    departed: list[Stay] = field(default_factory=list)

    def known(self, worker: int, instance: str, call: int) -> Stay | None:
        """The stay that a process's call has begun, if the call is a repeated one and the stay goes on.

        Of two processes with a worker's index, the one that came later is the worker.

        Raises:
            Refused: SUPERSEDED; another process has taken this one's place since it first came.
                STALE_CALL; it has joined again since it made this call.
        """
        stays = [stay for stay in reversed(self.stays()) if stay.worker == worker]
        if not stays:
            return None
        newest = stays[0]
        if newest.instance != instance:
            if any(stay.instance == instance for stay in stays):
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
    ) -> Stay:
        """Admit a process as `worker`. A member with that index must have been removed before.

        Args:
            follows: see `Stay`.
        """
        if worker in self.live:
            raise ValueError(f"worker {worker} is a member already")
        self.last_incarnation += 1
        expires = now + self.lease.total_seconds()
        stay = Stay(worker, self.last_incarnation, pid, host, version, expires)
        stay.instance, stay.transport, stay.call, stay.follows = instance, transport, call, follows
        self.live[worker] = stay
        return stay

    def check(self, worker: int, incarnation: int, now: float) -> Stay:
        """The member's stay, its lease renewed.

        Raises:
            Refused: STALE_INCARNATION; the sender is not a member (any more). HUNG: it was declared hung.
        """
        stay = self.live.get(worker)
        if stay is None or stay.incarnation != incarnation:
            for gone in reversed(self.departed):
                if gone.incarnation == incarnation and gone.outcome == "hung":
                    raise Refused(RefusalCode.HUNG, f"worker {worker} was declared hung: {gone.reason}")
            current = f"its current incarnation is {stay.incarnation}" if stay else "it is not a member"
            raise Refused(
                RefusalCode.STALE_INCARNATION,
                f"worker {worker} with incarnation {incarnation} was declared gone; {current}",
            )
        stay.expires = max(stay.expires, now + self.lease.total_seconds())
        return stay

    def remove(
        self, worker: int, *, outcome: str, version: int, reason: str = "", now: float | None = None
    ) -> Stay | None:
        """End a worker's stay as `left`, `lost` or `hung`; None if it is not a member."""
        stay = self.live.pop(worker, None)
        if stay is not None:
            stay.outcome, stay.left_version = outcome, version
            stay.reason, stay.ended = reason, now
            self.departed = [*self.departed, stay][-self.keep_departed :]
        return stay

    def expired(self, now: float) -> list[int]:
        """The members whose lease has ended."""
        return [worker for worker, stay in self.live.items() if stay.expires <= now]

    def stays(self) -> list[Stay]:
        """All present and former members, in order of joining."""
        return sorted([*self.departed, *self.live.values()], key=lambda stay: stay.incarnation)

    def copy(self) -> Membership:
        """The same members; what is done to the one is not done to the other."""
        live = {worker: copy.copy(stay) for worker, stay in self.live.items()}
        return replace(self, live=live, departed=[copy.copy(stay) for stay in self.departed])

    def stay(self, worker: int, incarnation: int) -> Stay:
        """A worker's stay with this number, also if it has ended. Raises KeyError if it is not remembered."""
        stay = self.live.get(worker)
        if stay is not None and stay.incarnation == incarnation:
            return stay
        for gone in reversed(self.departed):
            if (gone.worker, gone.incarnation) == (worker, incarnation):
                return gone
        raise KeyError(incarnation)

    def last_step(self, stay: Stay) -> int:
        """The process's own number of its last step that is in the model, in this stay or those before it.

        -1 for none. It numbers its steps on from stay to stay.
        """
        while stay.last_step < 0 and 0 < stay.follows < stay.incarnation:
            try:
                before = self.stay(stay.worker, stay.follows)
            except KeyError:  # it was too long ago
                break
            if before.instance != stay.instance:
                break
            stay = before
        return stay.last_step


def eldest(stays: Iterable[Stay]) -> Stay:
    """Of `stays` (not empty), the one that has made most steps; of equals, who joined first.

    Not simply who joined first: that one may have been overtaken before its first step.
    """
    return min(stays, key=lambda stay: (-stay.steps, stay.incarnation))
