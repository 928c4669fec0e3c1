"""State machines as tables: which event takes a state to which. What a table lacks is refused in words."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class ImpossibleTransition(ValueError):
    """Something has happened in a state in which it cannot happen: a mistake in the program."""


@dataclass(frozen=True)
class Transitions(Generic[S, E]):
    """The transitions of a machine.

    Attributes:
        of: the machine, as it is called in a sentence.
        table: for a state and an event, the state after it. An event that changes nothing has a row, too.
    """

    of: str
    table: Mapping[tuple[S, E], S]

    def after(self, state: S, event: E) -> S:
        """The state after an event.

        Raises:
            ImpossibleTransition: the table does not have it.
        """
        if (found := self.table.get((state, event))) is not None:
            return found
        allowed = ", ".join(repr(event.value) for start, event in self.table if start is state) or "nothing"
        raise ImpossibleTransition(
            f"{self.of} is {state.value}, where {event.value!r} cannot happen; what can is {allowed}"
        )

    def picture(self) -> str:
        """The table as a Mermaid state diagram; the first row's state is the first one."""
        first = next(iter(self.table))[0]
        rows = [f"    {a.name} --> {b.name}: {event.value}" for (a, event), b in self.table.items()]
        return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}", *rows, "```"])
