"""The states of shard 0 and of a standby, as tables.

Shard 0 has three independent states: how far the model is (`Stage`), whether versions may be made (`Course`),
and whether the shards are informed (`OrderState`).
"""

from __future__ import annotations

from elastic_ps.core.transitions import Symbol, Transitions


class Stage(Symbol):
    """How the job gets a model that can be trained."""

    EMPTY = "empty"
    """No worker has sent a model."""
    CONFIGURING = "being laid out"
    """The first worker's model is being divided among the shards."""
    LAID_OUT = "laid out"
    """The shards know its layout. The next worker to join sends its values."""
    LOADING = "being loaded"
    """A worker is sending its values."""
    ARRIVED = "there"
    """All values have arrived, so that the worker is not needed any more."""
    BEGUN = "begun"
    """Workers compute on the first values, but no version is made before these are on disk."""
    RESUMED = "resumed"
    """The model comes from a checkpoint, and no worker has taken records since."""
    TRAINING = "being trained"
    """They are kept."""


class StageEvent(Symbol):
    """The events that change the stage of a model."""

    CONFIGURE = "configure"
    FAIL = "fail"
    LAY_OUT = "lay out"
    BRING = "bring"
    LOSE = "lose"
    ARRIVE = "arrive"
    BEGIN = "begin"
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
        (Stage.ARRIVED, StageEvent.BEGIN): Stage.BEGUN,
        (Stage.ARRIVED, StageEvent.KEEP): Stage.TRAINING,
        (Stage.BEGUN, StageEvent.KEEP): Stage.TRAINING,
        (Stage.RESUMED, StageEvent.TAKE): Stage.TRAINING,
    },
)


class Course(Symbol):
    """Whether shard 0 makes versions and answers calls."""

    RUNNING = "running"
    PAUSED = "paused"
    """No round is committed, and calls of workers wait, while the version is saved to continue from."""
    ROLLING_BACK = "rolling back"
    """All shards go back to the newest checkpoint, in a new term: one has lost the model, or new mutable
    fields take effect."""
    CLOSING = "closing"
    """The parameter server ends, and answers no calls."""
    CLOSING_LOST = "closing without the model"
    """It ends instead of going back, so there is nothing to save."""


class CourseEvent(Symbol):
    """The events that change the course of shard 0."""

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


class OrderState(Symbol):
    """Whether the shards know the workers of the open round. One thread at a time sends them orders."""

    SENT = "sent"
    UNSENT = "unsent"
    """They do not know of the last change."""
    SENDING = "being sent"
    """A thread sends them an order."""
    OUTDATED = "outdated"
    """A thread sends an order, but something has changed that the order lacks."""


class OrderEvent(Symbol):
    """The events that change what the shards know."""

    CHANGE = "change"
    SEND = "send"
    """A thread begins to send a complete order."""
    SEND_OTHER = "send another"
    """A thread begins to send an order that may lack changes."""
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


class StandbyState(Symbol):
    """How much of a shard's model its standby has."""

    AWAY = "away"
    """It does not answer, or does not know the model yet."""
    READY = "ready"
    """It knows the model's layout, but has no values."""
    CATCHING_UP = "catching up"
    """It receives the shard's buckets, some with each round."""
    WHOLE = "whole"
    """It has every round before the shard applies it."""


class StandbyEvent(Symbol):
    """The events that change the state of a standby."""

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
