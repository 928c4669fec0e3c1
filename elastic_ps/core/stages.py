"""How a job comes to have a model: the first worker brings it, and it can be trained when it is kept."""

from __future__ import annotations

import enum

from elastic_ps.core.transitions import Transitions


class Stage(enum.Enum):
    """How far a job is on its way to a model that can be trained."""

    EMPTY = "empty"
    """No worker brings one."""
    LOADING = "being loaded"
    """The first worker sends its values."""
    ARRIVED = "there"
    """All of them have come, so that it does not matter any more what becomes of that worker."""
    TRAINING = "being trained"
    """They are kept. A job that continues from a checkpoint begins here."""


class Event(enum.Enum):
    """What changes the stage of a model."""

    BRING = "bring"
    LOSE = "lose"
    ARRIVE = "arrive"
    KEEP = "keep"


STAGES = Transitions(
    "the model",
    {
        (Stage.EMPTY, Event.BRING): Stage.LOADING,
        (Stage.LOADING, Event.LOSE): Stage.EMPTY,
        (Stage.LOADING, Event.ARRIVE): Stage.ARRIVED,
        (Stage.ARRIVED, Event.KEEP): Stage.TRAINING,
    },
)
