"""What codecs have not sent of a worker's steps yet, and which of these steps count.

Each step leaves over what its gradient is more than what was sent. The sum of that, over all steps that are
in the model, is what waits for the next gradient (error feedback). A step that may still be void, as it is
only in the sums of a round that is not committed, counts at first. If it turns out to be void, what it has
left over is taken out again.

So two sums are kept at most: with such steps, and without them. All of them are in the same attempt of the
same round, and so all of them get into the model, or none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elastic_ps.codec.base import MOMENTUM, Packed, Part, few, pack
from elastic_ps.codec.memory import as_bytes, name_of
from elastic_ps.codec.plan import Run

_BELOW_FLOAT16 = 65280.0
"""The largest number of bfloat16 in the range of float16, whose own largest one bfloat16 rounds up."""

State = dict[str, Any]
"""What a codec keeps for a part of the model."""

Round = tuple[int, int, int]
"""A term, the version that the round continues from, and its attempt."""


class Update(NamedTuple):
    """What a step makes of a bucket's buffer: flat, float32; None for nothing. They never change.

    Attributes:
        before: what was left over when the step was encoded; its bytes have that in them.
        after: what is left over with the step.
    """

    before: torch.Tensor | None
    after: torch.Tensor | None

    def of(self, now: torch.Tensor | None) -> torch.Tensor | None:
        """What is left over with the step if `now` was left over without it, and not `before`.

        The step has sent some of what was left over before. Where that is void, this is below zero: the next
        gradient makes up for what was sent too much.
        """
        if now is self.before:
            return self.after
        signed = (self.after, 1), (self.before, -1), (now, 1)
        known = [(part, sign) for part, sign in signed if part is not None]
        result = torch.zeros_like(known[0][0])
        for part, sign in known:
            result.add_(part, alpha=sign)
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


class Feedback:
    """The error-feedback buffers of one worker, over all its steps. Not thread-safe."""

    def __init__(self) -> None:
        self._sum = _Sum({}, {})
        self._undecided: _Undecided | None = None
        self._step = -1
        self._round: Round | None = None  # that the step is pushed for, once something of it is
        self._updates: dict[int, Update] = {}  # of the step's buckets
        self._states: dict[tuple[int, int], State] = {}

    @property
    def rests(self) -> Mapping[int, torch.Tensor]:
        """What is left over, by the buckets' indexes: some are missing. Not to be changed."""
        return self._sum.rests

    def state(self, bucket: int, run: int) -> State:
        """Copy the state of a run's codec. A step that is void then changes no state."""
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
        self._updates.clear()
        self._states.clear()

    def pushed(self, round_: Round) -> None:
        """The step is pushed for this round. Steps of an earlier attempt of it are void."""
        self._round = round_ if self._round is None else max(self._round, round_)
        undecided = self._undecided
        if undecided is not None and undecided.round[:2] == round_[:2] and undecided.round < round_:
            self._take_back(undecided)

    def note(self, bucket: int, update: Update, states: Mapping[int, State]) -> None:
        """The step has encoded a bucket, and its codecs have put this into the states of the runs."""
        self._updates[bucket] = update
        self._states |= {(bucket, run): state for run, state in states.items()}

    def applied(self, *, in_sums: bool) -> None:
        """The step that has begun is in the model, or in the sums of its round; with it those before it."""
        before = self._sum
        rests = dict(before.rests)
        for bucket, update in self._updates.items():
            left = update.of(rests.pop(bucket, None))
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

        The sums of the open round stay undecided.

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


class BucketFeedback:
    """What is made of a bucket's gradient in a step, and what that leaves over.

    Args:
        waiting: what was left over before; None: nothing.
        gradient: flat, of the bucket's dtype.
        absent: where there are pieces without a gradient. What waits there goes on waiting.
    """

    def __init__(self, waiting: torch.Tensor | None, gradient: torch.Tensor, absent: Sequence[slice]) -> None:
        self._waiting, self._gradient, self._absent = waiting, gradient, absent
        self._rest: torch.Tensor | None = None

    def rest(self) -> torch.Tensor | None:
        """Return the remainder when all is encoded, or None if there is none."""
        for piece in self._absent:
            if self._waiting is not None:
                if self._rest is None:
                    self._rest = torch.zeros_like(self._waiting)
                self._rest[piece] = self._waiting[piece]
            elif self._rest is not None:
                self._rest[piece] = 0.0
        return self._rest

    def encode(self, run: Run, state: State, random: torch.Generator) -> Packed:
        """A run as it travels. Puts into `state` what the codec keeps, and its momentum."""
        if (codec := run.codec) is None:
            own = self.plain(run.elements)
            return Packed((Part("", name_of(own.dtype), run.length),), "", [as_bytes(own)], run.name)
        total = self._total(run.elements, torch.float32)
        momentum = self._momentum(run.elements, codec.momentum, state, total)
        sendable = self._in_range(total, rounds=not codec.lossless)
        encoded = codec.encode(sendable, state, random)
        packed = pack(encoded, run.name)
        if not codec.feedback:
            self._leave_cut(run.elements, total, sendable)
            return packed
        absent, dtype = self._absent_in(run.elements), self._gradient.dtype
        sent = few(codec, encoded, run.length)
        if sent is not None:
            packed, values = packed.copied(), sent.values.clone()  # a codec may send the memory that it gets
            if momentum is not None:
                stopped, values_there = sent._replace(values=values).without(absent)
                state[MOMENTUM] = momentum.index_fill_(0, stopped[values_there != 0], 0.0)
            if state.keys() - {"version", MOMENTUM}:  # it may also keep that memory
                total = total.clone()
            # The parameter server has it in the model's dtype.
            values = values.to(dtype).to(torch.float32)
            self._leave(run.elements, total.index_add_(0, sent.places, values, alpha=-1))
            return packed
        decoded = torch.empty_like(total)
        codec.decode(encoded, decoded)
        self._leave(run.elements, (total - decoded.to(dtype)).to(torch.float32))
        if momentum is not None:
            for piece in absent:
                decoded[piece] = 0.0  # a codec that sends all makes something of what is absent, too
            state[MOMENTUM] = momentum.masked_fill_(decoded != 0, 0.0)
        return packed

    def _in_range(self, total: torch.Tensor, *, rounds: bool) -> torch.Tensor:
        """What of a total the model's dtype can hold. Gradients add up to more than one of them is.

        Args:
            rounds: what is sent is rounded.
        """
        dtype = self._gradient.dtype
        if dtype.itemsize >= total.dtype.itemsize:
            return total
        limit = torch.finfo(dtype).max
        if rounds and dtype is torch.float16:
            limit = _BELOW_FLOAT16
        return total.clamp(-limit, limit)

    def _momentum(
        self, elements: slice, factor: float, state: State, total: torch.Tensor
    ) -> torch.Tensor | None:
        """Momentum with this step's gradient; None: the codec has none. `total` becomes what that adds up to.

        That of pieces without a gradient stays as it is, and does not enter the total.
        """
        if not factor:
            return None
        before, gradient = state.get(MOMENTUM), self._gradient[elements]
        if before is None:
            momentum = gradient.to(torch.float32, copy=True)
        else:
            momentum = before * factor
            total += momentum
            momentum += gradient
        for piece in self._absent_in(elements):
            total[piece] = 0.0
            momentum[piece] = 0.0 if before is None else before[piece]
        return momentum

    def plain(self, elements: slice) -> torch.Tensor:
        """These elements as they are sent without a codec: only what their dtype cannot hold is left over."""
        if self._waiting is None:
            return self._gradient[elements]
        dtype = self._gradient.dtype
        total = self._total(elements, torch.promote_types(dtype, torch.float32))
        sendable = self._in_range(total, rounds=False)
        self._leave_cut(elements, total, sendable)
        return sendable.to(dtype)

    def _total(self, elements: slice, dtype: torch.dtype) -> torch.Tensor:
        """The gradient and what waits, but for pieces without a gradient."""
        gradient = self._gradient[elements]
        if self._waiting is None:
            total = gradient.to(dtype, copy=True)
        else:
            total = torch.add(gradient.to(dtype), self._waiting[elements])
        for piece in self._absent_in(elements):
            total[piece] = 0
        return total

    def _absent_in(self, elements: slice) -> list[slice]:
        """The pieces without a gradient among these elements, counted from the first of those."""
        first, last = elements.start, elements.stop
        return [
            slice(max(p.start, first) - first, min(p.stop, last) - first)
            for p in self._absent
            if p.start < last and p.stop > first
        ]

    def _leave_cut(self, elements: slice, total: torch.Tensor, sendable: torch.Tensor) -> None:
        """What is out of the model's range goes on waiting."""
        if sendable is not total and bool((sendable != total).any()):
            self._leave(elements, total - sendable)

    def _leave(self, elements: slice, rest: torch.Tensor) -> None:
        if len(rest) == len(self._gradient):
            self._rest = rest
            return
        if self._rest is None:
            self._rest = torch.zeros_like(self._gradient, dtype=torch.float32)
        self._rest[elements] = rest
