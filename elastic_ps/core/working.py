"""The state of a worker in its job, and of its step."""

from __future__ import annotations

from elastic_ps.core.transitions import Symbol, Transitions


class State(Symbol):
    """The activity of a worker, as far as it matters to the parameter server."""

    OUT = "not in the job"
    JOINING = "on its way into the job"
    """It is a member, but its model has neither received nor sent values yet."""
    READY = "between two steps"
    PUSHING = "in a step"
    """The step has its first gradient."""
    AWAITING = "waiting for a version"
    IN_FLIGHT = "computing while an exchange goes on"
    """The exchange comes to its end before the parameter server is told anything else."""
    VOID = "after a step that it has given up"
    """The parameter server does not know that yet."""
    LEFT = "gone"


class Event(Symbol):
    """The events that change the state."""

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
"""States in which a script may do something else: it may have caught the error of a step."""

_INTERRUPTED = (State.JOINING, State.READY)
"""States in which `session.optimizer` may have failed after the join, so that it may be called again."""

_TRIED = tuple(event for event in Event if event not in (Event.JOIN, Event.ENTER, Event.LEAVE))
"""Events that a script may still cause after `session.close()`. Closed connections refuse them."""

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
        state: its activity.
        joined: whether it has been a member of the job.
    """

    def __init__(self) -> None:
        self.state, self.joined = State.OUT, False

    def note(self, event: Event) -> None:
        """Note an event. Raises ImpossibleTransition (a ValueError) if it cannot happen."""
        self.state = WORKER.after(self.state, event)
        self.joined |= event is Event.JOIN

    @property
    def in_step(self) -> bool:
        """Whether a step has begun whose end the parameter server does not know."""
        return self.state in (State.PUSHING, State.AWAITING, State.VOID)
