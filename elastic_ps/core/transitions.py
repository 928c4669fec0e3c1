"""State machines as tables of transitions. Missing transitions raise an exception."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar


class Symbol(enum.Enum):
    """A state or an event. It is hashed by identity: an Enum hashes the name, in a call of Python."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=Symbol)
E = TypeVar("E", bound=Symbol)


class ImpossibleTransition(ValueError):
    """An event has happened in a state that does not allow it: a bug."""


@dataclass(frozen=True)
class Transitions(Generic[S, E]):
    """The transitions of a machine.

    Attributes:
        of: the name of the machine in a sentence.
        table: the next state for a state and an event. Events that change nothing also have a row.
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
            f"{self.of} is {state.value}, where {event.value!r} cannot happen; possible: {allowed}"
        )

    def picture(self) -> str:
        """The table as a Mermaid state diagram, which starts at the state of the first row."""
        first = next(iter(self.table))[0]
        rows = [f"    {a.name} --> {b.name}: {event.value}" for (a, event), b in self.table.items()]
        return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}", *rows, "```"])
