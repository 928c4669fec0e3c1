"""Where a worker is in its job, from its start to its end, and with the step that it makes."""

from __future__ import annotations

import enum

from elastic_ps.core.transitions import Transitions


class State(enum.Enum):
    """What a worker is doing, as far as the parameter server is to know."""

    OUT = "not in the job"
    JOINING = "on its way into the job"
    """It is a member; its model has not got the job's values, or given it its own."""
    READY = "between two steps"
    PUSHING = "in a step"
    """The step's first gradient is there."""
    AWAITING = "waiting for a version"
    IN_FLIGHT = "computing while an exchange goes on"
    """The exchange comes to its end before the parameter server is told anything else."""
    VOID = "after a step that it has given up"
    """The parameter server does not know that yet."""
    LEFT = "gone"


class Event(enum.Enum):
    """What changes it."""

    JOIN = "join"
    ENTER = "enter"
    BEGIN = "begin a step"
    END = "end a step"
    START = "start an exchange"
    GET = "get a version"
    GIVE_UP = "give up a step"
    TELL = "tell"
    DROP = "drop a step"
    LEAVE = "leave"


_BETWEEN = (State.READY, State.VOID, State.PUSHING, State.AWAITING)
"""Where a script may do something else: a step may have failed with an error that the script has caught."""

_INTERRUPTED = (State.JOINING, State.READY)
"""Where `session.optimizer` may have failed after the worker had joined; a script may call it again."""

_TRIED = tuple(event for event in Event if event not in (Event.JOIN, Event.ENTER, Event.LEAVE))
"""What a script may still try after `session.close()`. The closed connections refuse it, with a reason."""

WORKER = Transitions(
    "the worker",
    {
        **{(state, Event.JOIN): State.JOINING for state in (State.OUT, *_INTERRUPTED)},
        (State.JOINING, Event.ENTER): State.READY,
        **{(state, Event.BEGIN): State.PUSHING for state in _BETWEEN},
        (State.PUSHING, Event.END): State.AWAITING,
        (State.PUSHING, Event.START): State.IN_FLIGHT,
        (State.IN_FLIGHT, Event.END): State.AWAITING,
        (State.AWAITING, Event.GET): State.READY,
        **{(state, Event.GIVE_UP): State.VOID for state in (*_BETWEEN, State.IN_FLIGHT)},
        **{(state, Event.TELL): State.READY for state in _BETWEEN},
        **{(state, Event.DROP): State.READY for state in (*_BETWEEN, State.IN_FLIGHT)},
        **{(state, Event.LEAVE): State.LEFT for state in State if state is not State.LEFT},
        **{(State.LEFT, event): State.LEFT for event in _TRIED},
    },
)


class Working:
    """One worker's state.

    Attributes:
        state: what it is doing.
        joined: whether it has been a member of the job.
    """

    def __init__(self) -> None:
        self.state, self.joined = State.OUT, False

    def note(self, event: Event) -> None:
        """Something happens. Raises ImpossibleTransition, which is a ValueError: it cannot."""
        self.state = WORKER.after(self.state, event)
        self.joined |= event is Event.JOIN

    @property
    def in_step(self) -> bool:
        """Whether a step has begun that has not ended, as far as the parameter server knows."""
        return self.state in (State.PUSHING, State.AWAITING, State.VOID)
