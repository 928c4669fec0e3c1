"""Rounds of workers that sum their gradients among themselves (`strategy: all-reduce`).

A round makes a version from one step of every worker, as in mode `sync`, but the sums are formed in a process
group of the workers, where no shard sees them. An attempt has a fixed group: if the set of workers changes, a
new attempt begins. An attempt has three barriers:

- `STATE`, if a worker lacks the version: it gets the version from another worker.
- `GRADIENTS`: all workers have computed their step. After it, nobody waits in the process group for a slow
  worker.
- The end of the step (`finish`): a worker has the sum. When all have it, the round is committed, and only
  then the workers make the step. So all make it or none does.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_ps.core.consistency import Contribution, SyncRounds
from elastic_ps.core.membership import Member
from elastic_ps.errors import RefusalCode, Refused


class Barrier(enum.IntEnum):
    """The barriers of a round."""

    STATE = 0
    """Each worker says whether it has the version. One that lacks it gets it."""
    GRADIENTS = 1
    """Each worker has computed its step."""


@dataclass
class AllReduceRounds(SyncRounds):
    """Synchronous rounds of a group of workers.

    Attributes:
        holders: the workers of the open round that are known to have its version, and do not stop.
        lacking: whether a worker of the open attempt may lack the version, so that all meet at
            `Barrier.STATE`. It is fixed within an attempt, so that the whole group does the same.
        arrived: for each barrier, the workers that have reached it, and whether they have the version.
    """

    holders: set[int] = field(default_factory=set)
    lacking: bool = True
    arrived: dict[Barrier, dict[int, bool]] = field(default_factory=dict)

    # --- who takes part

    def lose(self, worker: int) -> list[Contribution]:
        self.holders.discard(worker)
        return super().lose(worker)

    def restart(self) -> list[Contribution]:
        void = super().restart()
        self._begin_attempt()
        return void

    def _open_again(self) -> None:
        empty = not self.expected
        super()._open_again()
        if empty:  # no worker knows of the attempt yet
            self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.arrived = {}
        self.lacking = not self.expected <= self.holders

    # --- meeting

    def meet(self, worker: int, barrier: Barrier, *, holds: bool) -> bool:
        """Note that `worker`, which takes part, has reached a barrier. Returns whether that was new.

        Args:
            holds: whether it has the version.
        """
        there = self.arrived.setdefault(barrier, {})
        new = worker not in there or (holds and worker not in self.holders)
        there.setdefault(worker, holds)  # all of the group act on the same answers
        if holds:
            self.holders.add(worker)
        return new

    def together(self, barrier: Barrier) -> bool:
        """Whether the whole group has reached the barrier."""
        return self.expected <= self.arrived.get(barrier, {}).keys()

    def part(self, worker: int) -> bool:
        """Note that `worker`, which has the version, stops. Returns whether it is the last holder.

        It is no longer a holder, so of several that stop at once only the last one gets True.
        """
        self.holders.discard(worker)
        return not self.holders

    @property
    def source(self) -> int | None:
        """The worker at `Barrier.STATE` to get the version from; None if none has it."""
        return min((w for w, holds in self.arrived.get(Barrier.STATE, {}).items() if holds), default=None)

    @property
    def group(self) -> list[int]:
        """The workers of the open round, in order of their ranks."""
        return sorted(self.expected)

    @property
    def _there(self) -> set[int]:
        """The workers that wait at a barrier, or have computed their step."""
        computed = set(self.arrived.get(Barrier.GRADIENTS, {}))
        if self.together(Barrier.STATE):
            return computed
        return computed | self.arrived.get(Barrier.STATE, {}).keys()

    # --- steps and commits

    def finish(self, contribution: Contribution, *, version: int, attempt: int) -> bool:
        if (version, attempt) == (self.version, self.attempt) and not self.together(Barrier.GRADIENTS):
            reason = f"worker {contribution.worker} has a sum without the gradients of all"
            raise Refused(RefusalCode.INVALID, reason)
        return super().finish(contribution, version=version, attempt=attempt)

    @property
    def awaited(self) -> set[int]:
        return self.expected - self.done.keys() - self._there

    @property
    def held_up(self) -> set[int]:
        return ((self.done.keys() | self._there) - self.gone) | self.waiting

    def can_commit(self, *, last: bool = False) -> bool:  # noqa: ARG002
        """Whether the whole group has the sum. The end of the records makes no difference."""
        complete = self.decided or self._complete
        return bool(self.contributions) and not self.committing and complete

    @property
    def _complete(self) -> bool:
        return not self.expected - self.done.keys()

    def end_commit(self) -> None:
        holders = self.done.keys() - self.gone
        super().end_commit()
        self.holders = holders & self.expected
        self._begin_attempt()


@dataclass(frozen=True)
class Peer:
    """The data of a worker that joins, for the other workers.

    Attributes:
        address: its `host:port` for the other workers.
        torch: its version of torch.
    """

    address: str
    torch: str


@dataclass
class StateHolders:
    """Tracks which workers have the values, since the workers make the steps.

    Attributes:
        version: the version whose values the parameter server has.
        wanted: the version that a worker is to send, to be written to disk.
        holders: the incarnations that have the job's version, also those of members that were dropped.
        peers: the members' data by incarnation. Departed members may remain until the next worker joins.
    """

    version: int = 0
    wanted: int | None = None
    holders: set[int] = field(default_factory=set)
    peers: dict[int, Peer] = field(default_factory=dict)

    def introduce(self, incarnation: int, peer: Peer, members: Iterable[int]) -> None:
        """Add a worker that has joined. `members`: the present incarnations; others are forgotten."""
        there = {number: self.peers[number] for number in members if number in self.peers}
        self.peers = {**there, incarnation: peer}

    def among(self, *members: Member) -> bool:
        """Whether one of these present or former members may have the version."""
        return any(each.incarnation in self.holders for each in members)

    def refuse(self, worker: int, peer: Peer, members: dict[int, int]) -> str:
        """Why a worker cannot be in a group with the others; "" if it can.

        Args:
            members: the incarnations of all present workers.
        """
        for other, incarnation in sorted(members.items()):
            theirs = self.peers.get(incarnation, peer)
            if other != worker and theirs.torch != peer.torch:
                return (
                    f"worker {worker} has torch {peer.torch}, and worker {other} has torch {theirs.torch}. "
                    "With strategy all-reduce the workers speak to each other through torch.distributed, so "
                    "all of them need the same version of torch"
                )
        return ""
