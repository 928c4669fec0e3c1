"""The calls that change what a worker holds: one that arrives twice, or late, changes nothing again.

A worker makes these calls one after the other and numbers them. It repeats a call that was not answered,
and the network may deliver a copy long after: when the worker has made other calls, or is in the middle of a
step. To number a client's requests and to keep the last answer is the idea of Birrell and Nelson,
"Implementing Remote Procedure Calls" (1984).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from elastic_ps.errors import RefusalCode, Refused

A = TypeVar("A")


@dataclass
class Calls(Generic[A]):
    """For each member, the number of its last call and the answer, once there is one."""

    _last: dict[int, int] = field(default_factory=dict)
    _answers: dict[int, A] = field(default_factory=dict)

    def begin(self, incarnation: int, number: int) -> bool:
        """A call has arrived. Returns whether it is new; if not, it is the last one, once more.

        Raises:
            Refused: STALE_CALL; the member has made a later one.
        """
        self.require_last(incarnation, number)
        new = number > self._last.get(incarnation, 0)
        if new:
            self._last[incarnation] = number
            self._answers.pop(incarnation, None)
        return new

    def require_last(self, incarnation: int, number: int) -> None:
        """Raise Refused (STALE_CALL) if the member has made a later call."""
        last = self._last.get(incarnation, 0)
        if number < last:
            raise Refused(
                RefusalCode.STALE_CALL,
                f"call {number} of incarnation {incarnation} comes after its call {last}",
            )

    def answer(self, incarnation: int) -> A | None:
        """What the member's last call was answered."""
        return self._answers.get(incarnation)

    def answered(self, incarnation: int, answer: A) -> A:
        """The incarnation's last call is answered by this, also when it is repeated; returns it."""
        self._answers[incarnation] = answer
        return answer

    def forget(self, incarnation: int) -> None:
        """The incarnation has ended."""
        self._last.pop(incarnation, None)
        self._answers.pop(incarnation, None)
