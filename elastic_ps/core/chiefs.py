"""Chooses the chief of each epoch: the worker that evaluates and saves at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.membership import Member
from elastic_ps.errors import RefusalCode, Refused


@dataclass
class Chiefs:
    """The chiefs of a job's epochs.

    Attributes:
        now: the present chief, as long as it is a member and its script is in its loop; None before one is
            needed.
        of: the chief of each epoch. That of the last epoch is the chief of the job's end, also if a script
            has stopped the job earlier.
        notified: for each epoch, the member that was last told that it is the chief; None if that may have
            happened in an earlier term.
        early: workers that wait for records and whose scripts have not begun the last epoch. They will not
            reach its end if training ends now.
        loops: the epoch of each script's loop, for members that have reported it.
    """

    now: int | None = None
    of: dict[int, int] = field(default_factory=dict)
    notified: dict[int, Member | None] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)
    loops: dict[int, int] = field(default_factory=dict)

    def choose(
        self,
        member: Member,
        epoch: int,
        *,
        live: Mapping[int, Member],
        ledger: Ledger | FixedSchedule | None,
        stopped: bool,
    ) -> bool:
        """Choose a chief of the epoch for a member that asks. Returns whether there was none.

        The chief stays as long as it is a member and has not passed the epoch. Otherwise the member that asks
        becomes the chief, unless another one has yet to reach the end of an earlier epoch. A member that will
        not reach the end of the last epoch is chosen only if no other one will.

        Args:
            live: the members.
            ledger: None before the data set is known.
            stopped: whether a script has ended the training.
        """
        if epoch in self.of:
            return False
        if self.now not in live:
            last = ledger is not None and epoch == ledger.epochs - 1
            if member.worker in self.early and last and not stopped and live.keys() - self.early:
                return False
            self.now = self._first_to_come(member, epoch, live, ledger)
        assert self.now is not None
        passed = any(notified > epoch and self.of.get(notified) == self.now for notified in self.notified)
        self.of[epoch] = member.worker if passed else self.now
        return True

    def _first_to_come(
        self, member: Member, epoch: int, live: Mapping[int, Member], ledger: Ledger | FixedSchedule | None
    ) -> int:
        """The worker that is expected to reach the end of an epoch without a chief first.

        The member that asks is at the end of `epoch`. Others may still be in an earlier one.
        """
        if ledger is None or epoch >= ledger.epochs - 1:
            return member.worker
        before: dict[int, int] = {}
        for worker, other in live.items():
            held = ledger.held(other.incarnation)
            at = self.loops.get(worker, held[0].epoch if held else epoch)
            if at < epoch and at not in self.of:
                before[worker] = at
        return min(before, key=lambda worker: (before[worker], worker), default=member.worker)

    def awaits(self, member: Member, last_epoch: int, live: Mapping[int, Member]) -> bool:
        """Whether another member is the chief of the job's end and has not reached it yet.

        Nobody else is told of the end meanwhile: if that member leaves, another one must become the chief.
        """
        chief = self.of.get(last_epoch)
        return chief in live and chief != member.worker and last_epoch not in self.notified

    def saves(self, last_epoch: int) -> int | None:
        """The chief of the job's end; None if it has said goodbye, or there is none yet."""
        told = self.notified.get(last_epoch)
        return None if told is not None and told.outcome == "left" else self.of.get(last_epoch)

    def tell(self, member: Member, epoch: int) -> bool:
        """Whether the member evaluates and saves at the end of the epoch.

        A process that replaces the chief's is the chief, too, unless the previous one has said goodbye.
        """
        before = self.notified.get(epoch)
        said_goodbye = before is not None and before is not member and before.outcome == "left"
        if self.of.get(epoch) != member.worker or said_goodbye:
            return False
        self.notified[epoch] = member
        return True

    def require(self, member: Member, *, again: bool) -> None:
        """Raise Refused (INVALID) if the member may not write `session.state`.

        It may if it is the chief, or was told that it is the chief of any epoch.

        Args:
            again: an earlier incarnation of the member wrote it as the chief. If the job has gone back to a
                checkpoint from before any chief was chosen, the member becomes the chief again.
        """
        if again and self.now is None and not self.of:
            self.now = member.worker
        if member.worker != self.now and not any(notified is member for notified in self.notified.values()):
            chief = "there is none yet" if self.now is None else f"that is worker {self.now}"
            raise Refused(
                RefusalCode.INVALID,
                f"worker {member.worker} writes session.state, but only the chief may, and {chief}. "
                "Write it under `if session.is_chief:`, after the loop over an epoch or at the end",
            )

    def resign(self, member: Member) -> None:
        """Note that the member's script has left its loop, and will reach the end of no other epoch.

        Another member becomes the chief of the epochs for which this one was not notified.
        """
        if self.now == member.worker:
            self.now = None
        self.of = {e: w for e, w in self.of.items() if w != member.worker or e in self.notified}
        self.loops.pop(member.worker, None)

    def gone(self, member: Member) -> None:
        """Forget a member that is gone."""
        self.early.discard(member.worker)
        self.loops.pop(member.worker, None)
        if member.outcome == "left":
            self.resign(member)
