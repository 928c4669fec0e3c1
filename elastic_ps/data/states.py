"""Where a worker is on its way through the records: its part in the rounds, and its script's loops."""

from __future__ import annotations

import enum

from elastic_ps.core.transitions import Transitions


class Part(enum.Enum):
    """A worker's part in the rounds, as far as it knows."""

    NONE = "in no round"
    TAKEN = "in the rounds"
    LAST_STEP = "about to make its last step"
    """Its script has left the loop over the loader, and has computed on a batch before."""
    OVER = "at the end of the training"
    """All records are in the model, or the training was stopped."""


class PartEvent(enum.Enum):
    """What changes a worker's part."""

    ASK = "ask for records"
    GRANT = "be given records"
    FINISH = "learn of the end"
    BREAK_OFF = "leave the loop in a step"
    LEAVE = "leave"


PARTS = Transitions(
    "the worker",
    {
        (Part.NONE, PartEvent.ASK): Part.TAKEN,  # the answer may be lost
        (Part.TAKEN, PartEvent.ASK): Part.TAKEN,
        (Part.LAST_STEP, PartEvent.ASK): Part.LAST_STEP,
        (Part.TAKEN, PartEvent.GRANT): Part.TAKEN,
        (Part.LAST_STEP, PartEvent.GRANT): Part.TAKEN,
        (Part.TAKEN, PartEvent.FINISH): Part.OVER,
        (Part.LAST_STEP, PartEvent.FINISH): Part.OVER,
        (Part.TAKEN, PartEvent.BREAK_OFF): Part.LAST_STEP,
        (Part.LAST_STEP, PartEvent.BREAK_OFF): Part.LAST_STEP,
        (Part.NONE, PartEvent.LEAVE): Part.NONE,
        (Part.TAKEN, PartEvent.LEAVE): Part.NONE,
        (Part.LAST_STEP, PartEvent.LEAVE): Part.NONE,
    },
)


class Loop(enum.Enum):
    """Where a script is: its loop is over the records of all epochs, or of one at a time."""

    BEFORE = "before a loop"
    PASSED = "in an epoch that others have trained"
    RUNS = "in a loop"
    ENDED = "at the end of a loop"
    UNFINISHED = "at the end of a loop, before its last step"
    OWES = "between loops, before the last step of one"


class LoopEvent(enum.Enum):
    """What changes where a script is."""

    BEGIN = "begin"
    END = "end"
    END_EARLY = "end before the last step"
    BREAK = "break"
    EPOCH = "come to an epoch"
    PASS = "come to an epoch that others have trained"
    LEAVE_EPOCHS = "end the loop over epochs"
    AWAIT = "wait for the end"


LOOPS = Transitions(
    "the script",
    {
        (Loop.BEFORE, LoopEvent.BEGIN): Loop.RUNS,
        (Loop.OWES, LoopEvent.BEGIN): Loop.RUNS,
        (Loop.PASSED, LoopEvent.END): Loop.ENDED,
        (Loop.RUNS, LoopEvent.END): Loop.ENDED,
        (Loop.RUNS, LoopEvent.END_EARLY): Loop.UNFINISHED,
        (Loop.RUNS, LoopEvent.BREAK): Loop.BEFORE,
        (Loop.UNFINISHED, LoopEvent.AWAIT): Loop.ENDED,
        (Loop.OWES, LoopEvent.AWAIT): Loop.BEFORE,
        (Loop.RUNS, LoopEvent.EPOCH): Loop.RUNS,  # by an iterator that is still there
        (Loop.RUNS, LoopEvent.PASS): Loop.RUNS,
        (Loop.RUNS, LoopEvent.LEAVE_EPOCHS): Loop.RUNS,
        (Loop.UNFINISHED, LoopEvent.LEAVE_EPOCHS): Loop.OWES,
        (Loop.OWES, LoopEvent.LEAVE_EPOCHS): Loop.OWES,
    }
    | {
        (loop, event): then
        for loop in (Loop.BEFORE, Loop.PASSED, Loop.ENDED, Loop.UNFINISHED, Loop.OWES)
        for event, then in ((LoopEvent.EPOCH, Loop.BEFORE), (LoopEvent.PASS, Loop.PASSED))
    }
    | {(loop, LoopEvent.LEAVE_EPOCHS): Loop.BEFORE for loop in (Loop.BEFORE, Loop.PASSED, Loop.ENDED)},
)
