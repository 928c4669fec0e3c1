"""The states of shard 0 and of a standby, as tables.

On shard 0 three things are independent of each other: how the job comes to have a model (`Stage`), whether it
may make versions (`Course`), and whether the shards know what they have to (`OrderState`).
"""

from __future__ import annotations

import enum

from elastic_ps.core.transitions import Transitions


class Stage(enum.Enum):
    """How far a job is on its way to a model that can be trained."""

    EMPTY = "empty"
    """No worker brings one."""
    CONFIGURING = "being laid out"
    """The first worker's model is being laid out over the shards."""
    LAID_OUT = "laid out"
    """The shards know what it is like. The next worker to join sends its values."""
    LOADING = "being loaded"
    """A worker sends its values."""
    ARRIVED = "there"
    """All of them have come, so that it does not matter any more what becomes of that worker."""
    RESUMED = "resumed"
    """It comes from a checkpoint, and nobody has taken records since."""
    TRAINING = "being trained"
    """They are kept."""


class StageEvent(enum.Enum):
    """What changes the stage of a model."""

    CONFIGURE = "configure"
    FAIL = "fail"
    LAY_OUT = "lay out"
    BRING = "bring"
    LOSE = "lose"
    ARRIVE = "arrive"
    KEEP = "keep"
    RESUME = "resume"
    TAKE = "take"


STAGES = Transitions(
    "the model",
    {
        (Stage.EMPTY, StageEvent.CONFIGURE): Stage.CONFIGURING,
        (Stage.EMPTY, StageEvent.RESUME): Stage.RESUMED,
        (Stage.CONFIGURING, StageEvent.FAIL): Stage.EMPTY,
        (Stage.CONFIGURING, StageEvent.LAY_OUT): Stage.LAID_OUT,
        (Stage.LAID_OUT, StageEvent.BRING): Stage.LOADING,
        (Stage.LOADING, StageEvent.LOSE): Stage.EMPTY,
        (Stage.LOADING, StageEvent.ARRIVE): Stage.ARRIVED,
        (Stage.ARRIVED, StageEvent.KEEP): Stage.TRAINING,
        (Stage.RESUMED, StageEvent.TAKE): Stage.TRAINING,
    },
)


class Course(enum.Enum):
    """Whether shard 0 makes versions and answers calls."""

    RUNNING = "running"
    PAUSED = "paused"
    """No round is committed, and calls of workers wait: the version is being kept, to continue from."""
    ROLLING_BACK = "rolling back"
    """All shards go back to the newest checkpoint, in a new term: one has lost the model, or other
    mutable fields take effect."""
    CLOSING = "closing"
    """The parameter server ends, and answers no calls."""
    CLOSING_LOST = "closing without the model"
    """It ends when it should have gone back, so that there is nothing to keep."""


class CourseEvent(enum.Enum):
    """What changes the course of shard 0."""

    PAUSE = "pause"
    RESUME = "resume"
    ROLL_BACK = "roll back"
    RESTORE = "restore"
    CLOSE = "close"


COURSES = Transitions(
    "shard 0",
    {
        (Course.RUNNING, CourseEvent.PAUSE): Course.PAUSED,
        (Course.RUNNING, CourseEvent.RESUME): Course.RUNNING,
        (Course.RUNNING, CourseEvent.ROLL_BACK): Course.ROLLING_BACK,
        (Course.RUNNING, CourseEvent.RESTORE): Course.RUNNING,
        (Course.RUNNING, CourseEvent.CLOSE): Course.CLOSING,
        (Course.PAUSED, CourseEvent.RESUME): Course.RUNNING,
        (Course.PAUSED, CourseEvent.ROLL_BACK): Course.ROLLING_BACK,
        (Course.PAUSED, CourseEvent.RESTORE): Course.PAUSED,
        (Course.PAUSED, CourseEvent.CLOSE): Course.CLOSING,
        (Course.ROLLING_BACK, CourseEvent.RESUME): Course.ROLLING_BACK,
        (Course.ROLLING_BACK, CourseEvent.ROLL_BACK): Course.ROLLING_BACK,
        (Course.ROLLING_BACK, CourseEvent.RESTORE): Course.RUNNING,
        (Course.ROLLING_BACK, CourseEvent.CLOSE): Course.CLOSING_LOST,
        (Course.CLOSING, CourseEvent.RESUME): Course.CLOSING,
        (Course.CLOSING, CourseEvent.ROLL_BACK): Course.CLOSING_LOST,
        (Course.CLOSING, CourseEvent.RESTORE): Course.CLOSING,
        (Course.CLOSING, CourseEvent.CLOSE): Course.CLOSING,
        (Course.CLOSING_LOST, CourseEvent.RESUME): Course.CLOSING_LOST,
        (Course.CLOSING_LOST, CourseEvent.ROLL_BACK): Course.CLOSING_LOST,
        (Course.CLOSING_LOST, CourseEvent.RESTORE): Course.CLOSING,
        (Course.CLOSING_LOST, CourseEvent.CLOSE): Course.CLOSING_LOST,
    },
)


class OrderState(enum.Enum):
    """Whether the shards know who takes part in the open round. One thread at a time sends them orders."""

    SENT = "sent"
    UNSENT = "unsent"
    """They do not know of the last change."""
    SENDING = "being sent"
    """A thread sends them an order."""
    OUTDATED = "outdated"
    """The same, but something has changed that the order does not say."""


class OrderEvent(enum.Enum):
    """What changes what the shards know."""

    CHANGE = "change"
    SEND = "send"
    """A thread sends the order that says all that there is to say."""
    SEND_OTHER = "send another"
    """A thread sends an order of its own, which need not say what has changed."""
    END = "end"


ORDER_STATES = Transitions(
    "an order to the shards",
    {
        (OrderState.SENT, OrderEvent.CHANGE): OrderState.UNSENT,
        (OrderState.SENT, OrderEvent.SEND): OrderState.SENDING,
        (OrderState.SENT, OrderEvent.SEND_OTHER): OrderState.SENDING,
        (OrderState.UNSENT, OrderEvent.CHANGE): OrderState.UNSENT,
        (OrderState.UNSENT, OrderEvent.SEND): OrderState.SENDING,
        (OrderState.UNSENT, OrderEvent.SEND_OTHER): OrderState.OUTDATED,
        (OrderState.SENDING, OrderEvent.CHANGE): OrderState.OUTDATED,
        (OrderState.SENDING, OrderEvent.END): OrderState.SENT,
        (OrderState.OUTDATED, OrderEvent.CHANGE): OrderState.OUTDATED,
        (OrderState.OUTDATED, OrderEvent.END): OrderState.UNSENT,
    },
)


class StandbyState(enum.Enum):
    """How far a shard's standby is with the model that the shard has."""

    AWAY = "away"
    """It does not answer, or has not been told of the model yet."""
    READY = "ready"
    """It was told of the model, and has nothing of it."""
    CATCHING_UP = "catching up"
    """It gets the shard's buckets, some with each round."""
    WHOLE = "whole"
    """It has every round before the shard applies it."""


class StandbyEvent(enum.Enum):
    """What changes how far a standby is."""

    TELL = "tell"
    ROUND = "round"
    COMPLETE = "complete"
    LOSE = "lose"


STANDBY_STATES = Transitions(
    "the standby",
    {
        (StandbyState.AWAY, StandbyEvent.TELL): StandbyState.READY,
        (StandbyState.READY, StandbyEvent.ROUND): StandbyState.CATCHING_UP,
        (StandbyState.READY, StandbyEvent.LOSE): StandbyState.AWAY,
        (StandbyState.CATCHING_UP, StandbyEvent.ROUND): StandbyState.CATCHING_UP,
        (StandbyState.CATCHING_UP, StandbyEvent.COMPLETE): StandbyState.WHOLE,
        (StandbyState.CATCHING_UP, StandbyEvent.LOSE): StandbyState.AWAY,
        (StandbyState.WHOLE, StandbyEvent.ROUND): StandbyState.WHOLE,
        (StandbyState.WHOLE, StandbyEvent.LOSE): StandbyState.AWAY,
    },
)
