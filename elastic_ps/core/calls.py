"""Recognises repeated and late copies of the calls that change what a worker holds.

A worker makes these calls in sequence, and numbers them. It repeats a call that was not answered, and the
network may deliver a copy much later, when the worker has made other calls or is in the middle of a step.
Numbered requests with a stored last answer are the idea of Birrell and Nelson, "Implementing Remote Procedure
Calls" (1984).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from elastic_ps.errors import RefusalCode, Refused

A = TypeVar("A")


@dataclass
class Calls(Generic[A]):
    """The number of each member's last call, and the answer once there is one."""

    _last: dict[int, int] = field(default_factory=dict)
    _answers: dict[int, A] = field(default_factory=dict)

    def begin(self, incarnation: int, number: int) -> bool:
        """Note a call. Returns whether it is new; if not, it repeats the last one.

        Raises:
            Refused: STALE_CALL: the member has made a later one.
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
                f"call {number} of incarnation {incarnation} arrives after its call {last}",
            )

    def answer(self, incarnation: int) -> A | None:
        """The answer to the member's last call."""
        return self._answers.get(incarnation)

    def answered(self, incarnation: int, answer: A) -> A:
        """Store and return the answer to the incarnation's last call, for repetitions."""
        self._answers[incarnation] = answer
        return answer

    def forget(self, incarnation: int) -> None:
        """Forget an incarnation that has ended."""
        self._last.pop(incarnation, None)
        self._answers.pop(incarnation, None)
