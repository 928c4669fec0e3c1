"""The states of a worker that trains records: its presence in rounds, its script's loop, and its batch."""

from __future__ import annotations

from elastic_ps.core.transitions import Symbol, Transitions


class Presence(Symbol):
    """A worker's presence in the rounds, as far as it knows."""

    IDLE = "in no round"
    COMPUTING = "in the rounds"
    LAST_STEP = "about to make its last step"
    """Its script has left the loop over the loader, and has computed on a batch before."""
    OVER = "at the end of the training"
    """All records are in the model, or the training was stopped."""


class PresenceEvent(Symbol):
    """An event that changes a worker's presence."""

    ASK = "ask for records"
    FINISH = "learn of the end"
    LEAVE_IN_STEP = "leave the loop in a step"
    LEAVE = "leave"


PRESENCES = Transitions(
    "the worker",
    {
        (Presence.IDLE, PresenceEvent.ASK): Presence.COMPUTING,  # the answer may be lost
        (Presence.COMPUTING, PresenceEvent.ASK): Presence.COMPUTING,
        (Presence.LAST_STEP, PresenceEvent.ASK): Presence.COMPUTING,
        (Presence.COMPUTING, PresenceEvent.FINISH): Presence.OVER,
        (Presence.IDLE, PresenceEvent.LEAVE_IN_STEP): Presence.LAST_STEP,  # of a batch fetched ahead
        (Presence.COMPUTING, PresenceEvent.LEAVE_IN_STEP): Presence.LAST_STEP,
        (Presence.LAST_STEP, PresenceEvent.LEAVE_IN_STEP): Presence.LAST_STEP,
        (Presence.IDLE, PresenceEvent.LEAVE): Presence.IDLE,
        (Presence.COMPUTING, PresenceEvent.LEAVE): Presence.IDLE,
        (Presence.LAST_STEP, PresenceEvent.LEAVE): Presence.IDLE,
    },
)


class Loop(Symbol):
    """Where a script is: its loop is over the records of all epochs, or of one at a time."""

    BEFORE = "before a loop"
    PASSED = "in an epoch that others have trained"
    RUNS = "in a loop"
    ENDED = "at the end of a loop"
    UNFINISHED = "at the end of a loop, before its last step"
    OWES = "between loops, before the last step of one"

    @property
    def is_over(self) -> bool:
        """True once the loop has ended; its last step may be missing."""
        return self in (Loop.ENDED, Loop.UNFINISHED)


class LoopEvent(Symbol):
    """An event that changes where a script is."""

    BEGIN = "begin"
    END = "end"
    END_EARLY = "end before the last step"
    LEAVE = "leave"
    AWAIT = "wait for the end"
    EPOCH = "come to an epoch"
    PASS = "come to an epoch that others have trained"
    LEAVE_EPOCHS = "end the loop over epochs"


LOOPS = Transitions(
    "the script",
    {
        (Loop.BEFORE, LoopEvent.BEGIN): Loop.RUNS,
        (Loop.OWES, LoopEvent.BEGIN): Loop.RUNS,
        (Loop.PASSED, LoopEvent.END): Loop.ENDED,
        (Loop.RUNS, LoopEvent.END): Loop.ENDED,
        (Loop.RUNS, LoopEvent.END_EARLY): Loop.UNFINISHED,
        (Loop.RUNS, LoopEvent.LEAVE): Loop.BEFORE,
        (Loop.UNFINISHED, LoopEvent.AWAIT): Loop.ENDED,
        (Loop.OWES, LoopEvent.AWAIT): Loop.BEFORE,
        **{(loop, LoopEvent.EPOCH): Loop.BEFORE for loop in Loop},
        **{(loop, LoopEvent.PASS): Loop.PASSED for loop in Loop},
        **{(loop, LoopEvent.LEAVE_EPOCHS): Loop.BEFORE for loop in Loop},
        (Loop.UNFINISHED, LoopEvent.LEAVE_EPOCHS): Loop.OWES,
        (Loop.OWES, LoopEvent.LEAVE_EPOCHS): Loop.OWES,
        # The iterator of a loop may still be there.
        (Loop.RUNS, LoopEvent.EPOCH): Loop.RUNS,
        (Loop.RUNS, LoopEvent.PASS): Loop.RUNS,
        (Loop.RUNS, LoopEvent.LEAVE_EPOCHS): Loop.RUNS,
    },
)


class Hand(Symbol):
    """What a script does with the batch that it was handed last, as far as is known."""

    EMPTY = "between two batches"
    FULL = "in a batch"
    LOST = "in a batch that others have been handed"
    OUTDATED = "between two batches, after one that others have been handed"
    GIVEN_BACK = "after a batch that it has given back before backward()"
    """It has left the loop, and may still hold the batch."""
    GIVEN_BACK_OUTDATED = "after a batch that it has given back, where others have been handed the rest"


class HandEvent(Symbol):
    """An event that decides what becomes of a batch."""

    HAND_OUT = "hand out a batch"
    HAND_OUT_LOST = "hand out a batch that others get"
    LAY_DOWN = "lay it down"
    LOSE = "hand it to others"
    FORGET = "forget what others have"
    GIVE_BACK = "give it back"


HANDS = Transitions(
    "the script",
    {
        **{(hand, HandEvent.HAND_OUT): Hand.FULL for hand in Hand},
        **{(hand, HandEvent.HAND_OUT_LOST): Hand.LOST for hand in Hand},
        **{(hand, HandEvent.LAY_DOWN): hand for hand in Hand},
        (Hand.FULL, HandEvent.LAY_DOWN): Hand.EMPTY,
        (Hand.LOST, HandEvent.LAY_DOWN): Hand.OUTDATED,
        **{(hand, HandEvent.LOSE): Hand.OUTDATED for hand in Hand},
        (Hand.FULL, HandEvent.LOSE): Hand.LOST,
        (Hand.LOST, HandEvent.LOSE): Hand.LOST,
        (Hand.GIVEN_BACK, HandEvent.LOSE): Hand.GIVEN_BACK_OUTDATED,
        (Hand.GIVEN_BACK_OUTDATED, HandEvent.LOSE): Hand.GIVEN_BACK_OUTDATED,
        **{(hand, HandEvent.FORGET): hand for hand in Hand},
        (Hand.LOST, HandEvent.FORGET): Hand.FULL,
        (Hand.OUTDATED, HandEvent.FORGET): Hand.EMPTY,
        (Hand.GIVEN_BACK_OUTDATED, HandEvent.FORGET): Hand.GIVEN_BACK,
        **{(hand, HandEvent.GIVE_BACK): Hand.GIVEN_BACK for hand in Hand},
    },
)
