"""Rounds of workers that sum their gradients among themselves (`strategy: all-reduce`).

A round makes a version out of one step of every worker, as in mode `sync`; only, the sums are formed in a
process group of the workers, where no shard sees them. So an attempt has a fixed group: whenever another set
of workers makes the round, it is another attempt. An attempt has three barriers:

- `STATE`, if a worker lacks the version: it gets it there from one that has it.
- `GRADIENTS`: all have computed their step. From here on all of them are at hand, so that nobody waits in the
  process group for a worker that is slow.
- the end of the step (`finish`): a worker has the sum. When all have, the round is committed, and only then
  does anybody make the step. So all make it or none does.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_ps.core.consistency import Contribution, SyncRounds
from elastic_ps.errors import RefusalCode, Refused


class Barrier(enum.IntEnum):
    """Where the workers that make a round wait for each other."""

    STATE = 0
    """Each says whether it has the version. Who has not gets it."""
    GRADIENTS = 1
    """Each has computed its step."""


@dataclass
class AllReduceRounds(SyncRounds):
    """Synchronous rounds of a group of workers.

    Attributes:
        holders: the workers of the open round that have its version, as far as is known, and have not told
            that they stop.
        lacking: in the open attempt, some worker may have to get the version first, so that all meet at
            `Barrier.STATE`. It does not change within an attempt, so that all of the group do the same.
        arrived: for each barrier, the workers that have come to it, and whether they have the version.
    """

    holders: set[int] = field(default_factory=set)
    lacking: bool = True
    arrived: dict[Barrier, dict[int, bool]] = field(default_factory=dict)

    # --- who takes part

    def withdraw(self, worker: int) -> None:
        """Raises ValueError if it makes the open round: that is another attempt then; see `lose`."""
        if worker in self.expected:
            raise ValueError(f"worker {worker} is of the group that makes the open round")
        super().withdraw(worker)

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
        if empty:  # nobody has been told of the attempt
            self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.arrived = {}
        self.lacking = not self.expected <= self.holders

    # --- meeting

    def meet(self, worker: int, barrier: Barrier, *, holds: bool) -> bool:
        """`worker`, which takes part, has come to a barrier. Returns whether that was news.

        Args:
            holds: it has the version.
        """
        there = self.arrived.setdefault(barrier, {})
        if there.get(worker) == holds:
            return False
        there[worker] = holds
        if barrier is Barrier.GRADIENTS:
            self.holders.add(worker)
        return True

    def together(self, barrier: Barrier) -> bool:
        """Whether all that make the round have come to the barrier."""
        return self.expected <= self.arrived.get(barrier, {}).keys()

    def part(self, worker: int) -> bool:
        """`worker`, which has the version, stops. Returns whether no other one that stays has it.

        From then on it is none of the holders, so that of several that stop at once the last one is told.
        """
        self.holders.discard(worker)
        return not self.holders

    @property
    def source(self) -> int | None:
        """Of those that have met at `Barrier.STATE`, the one to get the version from; None if none has it."""
        return min((w for w, holds in self.arrived.get(Barrier.STATE, {}).items() if holds), default=None)

    @property
    def group(self) -> list[int]:
        """The workers that make the open round; a worker's rank is its place here."""
        return sorted(self.expected)

    @property
    def _there(self) -> set[int]:
        """Who waits at a barrier for the rest of the group, or has computed its step."""
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
        """Whether all of the group have the sum. That there are no more records changes nothing."""
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
    """What a worker tells of itself when it joins.

    Attributes:
        address: where the others find it, as host:port.
        torch: its version of torch.
    """

    address: str
    torch: str


@dataclass
class StateHolders:
    """Who has the values, where the workers make the steps: the parameter server has them now and then.

    Attributes:
        version: of the values that the parameter server has.
        wanted: the version that a worker is to send, to be written to disk.
        holders: the incarnations that have the job's version.
        peers: what the members have told of themselves, by their incarnations. Those that have gone may be
            among them until the next worker joins.
    """

    version: int = 0
    wanted: int | None = None
    holders: set[int] = field(default_factory=set)
    peers: dict[int, Peer] = field(default_factory=dict)

    def introduce(self, incarnation: int, peer: Peer, members: Iterable[int]) -> None:
        """A worker has joined. `members`: the incarnations of all that are there; others are forgotten."""
        there = {number: self.peers[number] for number in members if number in self.peers}
        self.peers = {**there, incarnation: peer}

    def refuse(self, worker: int, peer: Peer, members: dict[int, int]) -> str:
        """Why a worker cannot be of a group with the others; "" if it can.

        Args:
            members: the incarnations of all workers that are there.
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
