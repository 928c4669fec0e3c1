"""Keeps the remainders of a worker's steps, and which of the steps count.

The remainder of a step is its gradient minus the data that was sent. The sum of remainders, over all steps in
the model, is added to the next gradient (error feedback). A step that is only in the sums of an uncommitted
round may still be dropped. It counts at first; if it is dropped, its remainder is removed again.

So at most two sums are kept: with such steps, and without them. All of them are in the same attempt of the
same round, so all of them get into the model, or none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elastic_ps.codec.base import MOMENTUM, Packed, PackedTensor, few, pack
from elastic_ps.codec.memory import as_bytes, name_of
from elastic_ps.codec.plan import Run

_BELOW_FLOAT16 = 65280.0
"""The largest number of bfloat16 in the range of float16, whose own largest one bfloat16 rounds up."""

State = dict[str, Any]
"""The state of a codec for a part of the model."""

Round = tuple[int, int, int]
"""A term, the version that the round continues from, and its attempt."""


class Update(NamedTuple):
    """The remainders of a bucket: flat, float32; None if there are none. They never change.

    Attributes:
        before: the remainder before the step, which its bytes include.
        after: the remainder after the step.
    """

    before: torch.Tensor | None
    after: torch.Tensor | None

    def of(self, now: torch.Tensor | None) -> torch.Tensor | None:
        """The remainder after the step if the one before it was `now` instead of `before`.

        The step has sent a part of `before`. If that is dropped, the result has the opposite sign: the next
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
    """The remainder of each bucket, and the codecs' state for each run."""

    rests: Mapping[int, torch.Tensor]
    states: Mapping[tuple[int, int], State]


class _Undecided(NamedTuple):
    """Steps in the sums of a round. `without`: the remainders if they are dropped."""

    round: Round
    newest: int
    without: _Sum


class Feedback:
    """The error-feedback buffers of a worker. Not thread-safe."""

    def __init__(self) -> None:
        self._sum = _Sum({}, {})
        self._undecided: _Undecided | None = None
        self._step = -1
        self._round: Round | None = None  # the round of the step, once a bucket is pushed
        self._updates: dict[int, Update] = {}  # the remainders of the step's buckets
        self._states: dict[tuple[int, int], State] = {}

    @property
    def rests(self) -> Mapping[int, torch.Tensor]:
        """The remainders, by bucket index, if there are any. Do not change them."""
        return self._sum.rests

    def state(self, bucket: int, run: int) -> State:
        """A copy of the state of a run's codec, so that a dropped step changes nothing."""
        return dict(self._sum.states.get((bucket, run), {}))

    def forget_states(self) -> None:
        """Reset the codecs' state for other codecs. No step may be under way."""
        self._sum = self._sum._replace(states={})
        if self._undecided is not None:
            without = self._undecided.without._replace(states={})
            self._undecided = self._undecided._replace(without=without)
        self._states.clear()

    def begin(self, step: int) -> None:
        """Begin the step with this number. The previous one is settled."""
        self._step, self._round = step, None
        self._updates.clear()
        self._states.clear()

    def pushed(self, round_: Round) -> None:
        """Note the round of the step. Steps of an earlier attempt of it are dropped."""
        self._round = round_ if self._round is None else max(self._round, round_)
        undecided = self._undecided
        if undecided is not None and undecided.round[:2] == round_[:2] and undecided.round < round_:
            self._take_back(undecided)

    def note(self, bucket: int, update: Update, states: Mapping[int, State]) -> None:
        """Store the result of an encoded bucket: the new remainders and codecs' states."""
        self._updates[bucket] = update
        self._states |= {(bucket, run): state for run, state in states.items()}

    def applied(self, *, in_sums: bool) -> None:
        """Note that the step, with those before it, is in the model, or in the sums of its round."""
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
        """Note that the job is at `version` of `term`. A step under way is unknown.

        The sums of the open round stay undecided.

        Args:
            made: the worker's steps below this number are in the model, unless they were dropped.
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
    """Encodes the gradient of a bucket in a step, and computes the remainder.

    Args:
        waiting: the remainder before; None if there is none.
        gradient: flat, of the bucket's dtype.
        absent: the slices of pieces without a gradient. Their remainders go on waiting.
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
        """Encode a run. Stores the codec's data and momentum in `state`."""
        if (codec := run.codec) is None:
            own = self.plain(run.elements)
            return Packed((PackedTensor("", name_of(own.dtype), run.length),), "", [as_bytes(own)], run.name)
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
            packed, values = packed.copied(), sent.values.clone()  # a codec may send its input's memory
            if momentum is not None:
                stopped, values_there = sent._replace(values=values).without(absent)
                state[MOMENTUM] = momentum.index_fill_(0, stopped[values_there != 0], 0.0)
            if state.keys() - {"version", MOMENTUM}:  # or keep it
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
                decoded[piece] = 0.0  # a dense codec also changes absent pieces
            state[MOMENTUM] = momentum.masked_fill_(decoded != 0, 0.0)
        return packed

    def _in_range(self, total: torch.Tensor, *, rounds: bool) -> torch.Tensor:
        """A total, clamped to the range of the model's dtype, which a sum of gradients may exceed.

        Args:
            rounds: whether the codec rounds.
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
        """The momentum with this step's gradient, which is added to `total`; None if the codec has none.

        The momentum of pieces without a gradient stays the same, and is not added.
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
        """Send these elements without a codec. Only what their dtype cannot hold remains."""
        if self._waiting is None:
            return self._gradient[elements]
        dtype = self._gradient.dtype
        total = self._total(elements, torch.promote_types(dtype, torch.float32))
        sendable = self._in_range(total, rounds=False)
        self._leave_cut(elements, total, sendable)
        return sendable.to(dtype)

    def _total(self, elements: slice, dtype: torch.dtype) -> torch.Tensor:
        """The gradient plus the remainder, without pieces that have no gradient."""
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
        """Keep values beyond the model's range in the remainder."""
        if sendable is not total and bool((sendable != total).any()):
            self._leave(elements, total - sendable)

    def _leave(self, elements: slice, rest: torch.Tensor) -> None:
        if len(rest) == len(self._gradient):
            self._rest = rest
            return
        if self._rest is None:
            self._rest = torch.zeros_like(self._gradient, dtype=torch.float32)
        self._rest[elements] = rest
