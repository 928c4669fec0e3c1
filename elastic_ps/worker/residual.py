"""What codecs have not sent of a worker's steps yet, and which of these steps count.

Each step leaves over what its gradient is more than what was sent. The sum of that, over all steps that are
in the model, is what waits for the next gradient (error feedback). A step that may still be void, as it is
only in the sums of a round that is not committed, counts at first. If it turns out to be void, what it has
left over is taken out again.

So two sums are kept at most: with such steps, and without them. All of them are in the same attempt of the
same round, and so all of them get into the model, or none does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

State = dict[str, Any]
"""What a codec keeps for a part of the model."""

Round = tuple[int, int, int]
"""A term, the version that the round continues from, and its attempt."""


class Rest(NamedTuple):
    """What is left over of a bucket after a step: flat, float32; None for nothing. They never change.

    Attributes:
        before: what was left over when the step was encoded; its bytes have that in them.
        after: what is left over with the step.
    """

    before: torch.Tensor | None
    after: torch.Tensor | None

    def on(self, now: torch.Tensor | None) -> torch.Tensor | None:
        """What is left over with the step if `now` was left over without it, and not `before`.

        The step has sent some of what was left over before. Where that is void, this is below zero: the next
        gradient makes up for what was sent too much.
        """
        if now is self.before:
            return self.after
        known = [each for each in (self.after, self.before, now) if each is not None]
        result = torch.zeros_like(known[0])
        if self.after is not None:
            result += self.after
        if self.before is not None:
            result -= self.before
        if now is not None:
            result += now
        return result


class _Sum(NamedTuple):
    """What is left over of each bucket, and what codecs keep for each run of one."""

    rests: Mapping[int, torch.Tensor]
    states: Mapping[tuple[int, int], State]


class _Undecided(NamedTuple):
    """Steps that are in the sums of a round; `without` is what is left over if they are void."""

    round: Round
    newest: int
    without: _Sum


class Residual:
    """Of one worker, over all its steps. Not thread-safe."""

    def __init__(self) -> None:
        self._sum = _Sum({}, {})
        self._undecided: _Undecided | None = None
        self._step = -1
        self._round: Round | None = None  # that the step is pushed for, once something of it is
        self._rests: dict[int, Rest] = {}  # of the step's buckets
        self._states: dict[tuple[int, int], State] = {}

    @property
    def rests(self) -> Mapping[int, torch.Tensor]:
        """By the buckets' indexes; those of which nothing is left over are missing."""
        return self._sum.rests

    def of(self, bucket: int) -> torch.Tensor | None:
        """What is left over of a bucket; not to be changed."""
        return self._sum.rests.get(bucket)

    def state(self, bucket: int, run: int) -> State:
        """What the codec of a run has kept. A copy: a step that is void changes no state."""
        return dict(self._sum.states.get((bucket, run), {}))

    def forget_states(self) -> None:
        """There are other codecs, and no step is under way."""
        self._sum = self._sum._replace(states={})
        if self._undecided is not None:
            without = self._undecided.without._replace(states={})
            self._undecided = self._undecided._replace(without=without)
        self._states.clear()

    def begin(self, step: int) -> None:
        """The step with this number begins. Of the one before nothing is to be known any more."""
        self._step, self._round = step, None
        self._rests.clear()
        self._states.clear()

    def pushed(self, round_: Round) -> None:
        """The step is pushed for this round. Steps of an earlier attempt of it are void."""
        self._round = round_ if self._round is None else max(self._round, round_)
        undecided = self._undecided
        if undecided is not None and undecided.round[:2] == round_[:2] and undecided.round < round_:
            self._take_back(undecided)

    def note(self, bucket: int, rest: Rest, states: Mapping[int, State]) -> None:
        """The step has encoded a bucket, and its codecs have put this into the states of the runs."""
        self._rests[bucket] = rest
        self._states |= {(bucket, run): state for run, state in states.items()}

    def applied(self, *, in_sums: bool) -> None:
        """The step that has begun is in the model, or in the sums of its round; with it those before it."""
        before = self._sum
        rests = dict(before.rests)
        for bucket, rest in self._rests.items():
            left = rest.on(rests.pop(bucket, None))
            if left is not None:
                rests[bucket] = left
        self._sum = _Sum(rests, {**before.states, **self._states})
        if not in_sums:
            self._undecided = None
        elif self._round is not None:
            without = self._undecided.without if self._undecided is not None else before
            self._undecided = _Undecided(self._round, self._step, without)
        self.begin(self._step)

    def settle(self, *, made: int, term: int, version: int) -> None:
        """The job is at `version` of `term`; nothing is known of the step under way, if there is one.

        What is in the sums of the open round stays undecided.

        Args:
            made: the worker's steps below this number are in the model, as far as they are not void.
        """
        undecided = self._undecided
        if undecided is not None and undecided.round[:2] != (term, version):
            if undecided.newest < made:
                self._undecided = None
            else:
                self._take_back(undecided)
        if self._round is None:
            return
        if self._round[:2] == (term, version):
            self.applied(in_sums=True)
        elif self._step < made:
            self.applied(in_sums=False)
        else:
            self.begin(self._step)

    def _take_back(self, undecided: _Undecided) -> None:
        self._sum, self._undecided = undecided.without, None
