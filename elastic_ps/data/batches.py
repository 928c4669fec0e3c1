"""The batches that the script has in hand for the next step, and their metrics.

Only records that a backward() ran for are trained. A backward() is for the batch that was handed out last. If
that batch has had one, it is for the first batch without one, as when several batches are loaded first;
unless the script is known to run several for a batch. A batch without any is skipped when a step is made with
later ones, or when the loop ends: nobody trains it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_ps.core.ledger import Range
from elastic_ps.core.metrics import REDUCTIONS, reduce_values
from elastic_ps.core.names import LONGEST_NAME, is_name
from elastic_ps.core.portions import apportion
from elastic_ps.core.weights import is_weight
from elastic_ps.data.states import HANDS, Hand, HandEvent
from elastic_ps.errors import UsageError


class _Batch:
    """Some records, and what the script has reported of them.

    Attributes:
        sizes: how many they are; of several batches that are to be computed on again, of each.
        weight: what the script said that it weighs; None: nothing.
        values: for each name, values with their weights. Tensors stay on their device: nothing waits for it
            before the step ends.
    """

    def __init__(self, ranges: Iterable[Range], sizes: Sequence[int] = ()) -> None:
        self.ranges = list(ranges)
        self.sizes = sizes or [sum(each.records for each in self.ranges)]
        self.weight: float | None = None
        self.values: dict[str, list[tuple[Any, int]]] = {}


class Batches:
    """The batches that no step has ended yet. Belongs to the training thread.

    Attributes:
        hand: what the script does with the last one.
        grouped: the script loads several batches before it computes on them. None before any backward().
        ended: the loop has ended, and the script may still compute on those that it has loaded.
        mixes_lost: the script was handed batches that others have now. It may compute on them together with
            those that it loads next, until it makes a step.
        left_out: the last batch of a part of a version had no step in time, and no backward() has run since.
    """

    def __init__(self) -> None:
        self.hand, self.mixes_lost, self.ended, self.left_out = Hand.EMPTY, False, False, False
        self.grouped: bool | None = None
        self._repeats = False  # the script has run several backward() for a batch
        self._open: list[_Batch] = []  # that no backward() has run for
        self._weighed = False  # since the last batch was handed out, and the last backward()
        self._new = 0  # how many of the last of these were handed out since the last backward()
        self._computed: list[_Batch] = []
        self._kept: list[list[_Batch]] = []  # of the steps that the parameter server does not know of
        self._skipped: list[Range] = []
        self._reductions: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._open or self._computed or self._kept)

    @property
    def ends_group(self) -> bool:
        """Whether the next backward() is for the last batch that the script was handed."""
        return (self.ended and len(self._open) == 1) or self.mixes_lost

    def end_loop(self, *, of_epoch: bool) -> None:
        """The loop has ended. Note whether the script may still compute on what it has loaded.

        Before the first backward() that is assumed only of a loop over one epoch: a script that has ended its
        loop over all of them without a backward() has a mistake.
        """
        grouped = of_epoch if self.grouped is None else self.grouped
        self.ended = self.undecided and grouped

    def note(self, event: HandEvent) -> None:
        """Note what the script does with the last batch."""
        self.hand = HANDS.after(self.hand, event)

    @property
    def in_batch(self) -> bool:
        """Whether the script computes on a batch, as far as is known."""
        return self.hand in (Hand.FULL, Hand.LOST)

    @property
    def lost(self) -> bool:
        """Whether the last batches went to others, as this worker joined again, was late or was stopped."""
        return self.hand in (Hand.LOST, Hand.OUTDATED, Hand.GIVEN_BACK_OUTDATED)

    @property
    def may_step(self) -> bool:
        """Whether the script may still make a step with the batch that it computes on."""
        return self.in_batch and bool(self._open or self._computed or self.lost)

    @property
    def undecided(self) -> bool:
        """Whether there are batches that no backward() has run for."""
        return bool(self._open)

    @property
    def fresh(self) -> bool:
        """Whether no backward() has run since the last batch was handed out."""
        return self._new > 0

    @property
    def computed(self) -> tuple[Range, ...]:
        """The records that the next step is computed on so far."""
        return tuple(each for batch in self._computed for each in batch.ranges)

    @property
    def several(self) -> bool:
        """Whether the next step is computed on several batches."""
        return len(self._computed) > 1

    @property
    def last_kept(self) -> int:
        """How many records the last step that is kept was made with."""
        return sum(sum(batch.sizes) for batch in self._kept[-1])

    @property
    def skipped(self) -> tuple[Range, ...]:
        """Records that the script has skipped, and the parameter server does not know of."""
        return tuple(self._skipped)

    @property
    def sizes(self) -> list[int]:
        """How many records each of the batches has that the next step is computed on."""
        return [size for batch in self._computed for size in batch.sizes]

    @property
    def in_hand(self) -> list[int]:
        """How many records each batch has that the script may compute the next step on."""
        return [*self.sizes, *(size for batch in self._open for size in batch.sizes)]

    @property
    def samples(self) -> int:
        """How many records the next step is computed on."""
        return sum(self.sizes)

    @property
    def weight(self) -> float | None:
        """The weight that the script has given the next step; None if it has given none.

        Raises UsageError if it said something for several of the step's batches, but not for all.
        """
        said = [batch.weight for batch in self._computed if batch.weight is not None]
        if 1 < len(said) < len(self._computed):
            raise UsageError(
                f"session.weigh was called for {len(said)} of the {len(self._computed)} batches of a step. "
                "Call it before each backward() of the step, or once with the number of tokens of the step"
            )
        return sum(said) if said else None

    def weigh(self, weight: float) -> None:
        """The script says what the next backward() weighs; see `Session.weigh`."""
        if not (self._open or self._computed):
            if self.lost:
                return
            raise UsageError(
                "session.weigh was called without a batch. Call it after a batch of session.loader(...) is "
                "loaded, and before its backward()"
            )
        if self._weighed:
            raise UsageError(
                "session.weigh was called twice for one backward(). Call it once before each, with the "
                "number of tokens that its loss averages over"
            )
        self._weighed = True
        if self._begins:  # computed on again, it keeps what was said, or gets another weight
            self._open[-1 if self._new else 0].weight = weight
        else:
            self._computed[-1].weight = (self._computed[-1].weight or 0.0) + weight

    def add(self, ranges: Iterable[Range]) -> None:
        """A batch of these records is handed to the script."""
        self._open.append(_Batch(ranges))
        self._weighed = self.ended = False
        self._new += 1
        self.note(HandEvent.HAND_OUT)

    def compute(self) -> None:
        """A backward() has run: its batch belongs to the next step."""
        begins = self._begins
        self._repeats |= bool(self._computed) and not self._open
        self.grouped = self.grouped or (begins and (self.ended or not self._new))
        if begins:
            self._computed.append(self._open.pop(-1 if self._new else 0))
        self._new, self._weighed, self.left_out = 0, False, False

    @property
    def _begins(self) -> bool:
        """Whether the next backward() is the first one for its batch."""
        repeated = self._repeats and self._computed and not (self._new or self.grouped)
        return bool(self._open) and not repeated

    def records_of_backward(self, *, begins: bool) -> int:
        """How many records the batch of the present backward() has; 0 without one.

        `begins`: it is the first backward() of its batch.
        """
        if begins and self._begins:
            return self._open[-1 if self._new else 0].sizes[0]
        return self._computed[-1].sizes[0] if self._computed else 0

    def compute_all(self) -> None:
        """All batches belong to the next step."""
        self._computed += self._open
        self._open, self._new = [], 0

    def decide(self, *, keep_new: bool = False) -> int:
        """Skip the batches without a backward(); returns how many records they have.

        With `keep_new` those that were handed out since the last backward() stay.
        """
        decided = len(self._open) - (self._new if keep_new else 0)
        skipped = [each for batch in self._open[:decided] for each in batch.ranges]
        self._skipped += skipped
        self._open = self._open[decided:]
        self._new = len(self._open)
        return sum(each.records for each in skipped)

    def reopen(self) -> int:
        """The script has dropped its gradients; returns how many records are skipped by that.

        If no batch was handed out since, they may be computed once more, as by Foret et al. 2021,
        "Sharpness-aware minimization", and none is skipped yet.
        """
        if self._new:
            return self.skip_computed()
        if self._computed:
            again = _Batch(self.computed, self.sizes)
            again.weight = self.weight
            for name, value in self._values(self._computed):
                again.values.setdefault(name, []).append(value)
            self._open.append(again)
        self._computed, self._new = [], len(self._open)
        return 0

    def skip_computed(self) -> int:
        """Skip the batches that were computed on; returns how many records they have."""
        records = self.samples
        self._skipped += self.computed
        self._computed = []
        return records

    def drop_computed(self) -> None:
        """Forget the batches of a step that is not made: they go to others."""
        self._computed = []

    def skip(self) -> int:
        """Skip all batches in hand; returns how many records they have."""
        self.mixes_lost = False
        return self.skip_computed() + self.decide()

    def leave_out(self, ranges: Iterable[Range]) -> None:
        """These records are skipped without being handed to the script."""
        self._skipped += ranges

    def keep(self) -> None:
        """This worker has made a step by itself with what was computed."""
        self._kept.append(self._computed)
        self._computed = []

    def gather(self) -> None:
        """The next step is computed on all that was kept."""
        self._computed += [batch for step in self._kept for batch in step]
        self._kept = []

    def forget_skipped(self) -> None:
        """The parameter server knows what was skipped."""
        self._skipped = []

    def drop(self) -> None:
        """The script stopped iterating: forget the batches that it has not computed on."""
        if self._open:
            self.note(HandEvent.GIVE_BACK)
        self._open, self._new = [], 0

    def step_made(self) -> None:
        """A step was made of what was computed. A batch that was loaded before it is for the next one."""
        self._computed, self._skipped = [], []
        for batch in self._open:
            batch.values.clear()  # they were sent with this step

    def forget(self, *, lost: bool = False) -> None:
        """Forget all batches, which go to others; `lost`: the script has not asked for that."""
        self.mixes_lost |= lost and bool(self._open)
        self._open, self._computed, self._skipped, self._kept, self._new = [], [], [], [], 0
        self.note(HandEvent.LOSE if lost else HandEvent.FORGET)

    def report(self, metrics: Mapping[str, Any], reduce: str = "mean") -> None:
        """Keep these values, numbers or tensors with one element, for the step.

        Of a name that is reported several times for a batch, the last value counts. Those of several batches
        of the step become one as `reduce` says, weighted by the records of the batches.
        """
        self._reductions |= dict.fromkeys(metrics, reduce)
        if self._open or self._computed:
            batch = self._open[-1] if self._new else (self._computed[-1:] or self._open)[0]
            weight = sum(batch.sizes)
        else:
            batch, weight = self._kept[-1][-1], self.last_kept
        batch.values |= {name: [(value, weight)] for name, value in metrics.items()}

    def metrics(self) -> dict[str, float]:
        """The reported values, one for each name. Waits for the device that computes it."""
        given: dict[str, list[tuple[float, float]]] = {}
        for name, (value, weight) in self._values([*self._computed, *self._open]):
            given.setdefault(name, []).append((float(value), weight))
        return {name: reduce_values(pairs, self._reductions[name]) for name, pairs in given.items()}

    @staticmethod
    def _values(batches: Iterable[_Batch]) -> list[tuple[str, tuple[Any, int]]]:
        return [(name, value) for batch in batches for name, found in batch.values.items() for value in found]

    @property
    def reductions(self) -> dict[str, str]:
        """How the values of `metrics` are reduced, by their names, if not to their mean."""
        reported = self._values([*self._computed, *self._open])
        return {name: how for name, _ in reported if (how := self._reductions[name]) != "mean"}


def checked(metrics: Mapping[str, Any], reduce: str) -> dict[str, Any]:
    """The values, detached. Raises UsageError: see `Runtime.report`."""
    if reduce not in [*REDUCTIONS]:
        raise UsageError(f"session.metric got reduce={reduce!r}; expected one of {', '.join(REDUCTIONS)}")
    for name in metrics:
        if not is_name(name):
            raise UsageError(
                f"the name of a reported value has 1 to {LONGEST_NAME} printable characters; given: "
                f"{repr(name)[:300]}"
            )
    return {name: _checked(name, value) for name, value in metrics.items()}


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
        what = f"a tensor of {value.dtype} with shape {list(value.shape)}"
    else:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            what = repr(value)[:300]
    raise UsageError(f"the value that is reported as {name!r} has to be one number, but is {what}")


def checked_weight(weight: Any, *, processes: int = 1) -> float:
    """The weight as a number, which may be 0 in one of several processes of a worker.

    Raises:
        UsageError: see `Session.weigh`.
    """
    try:
        given = float(weight)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        given = math.nan
    if not (is_weight(given) or (processes > 1 and given == 0)):
        raise UsageError(
            "session.weigh takes a positive number, such as the number of tokens in the batch, and at most "
            f"2**64; given: {repr(weight)[:300]}. If a batch has nothing to train on, call optimizer.skip()"
        )
    return given


def slice_sizes(records: int, processes: int, *, least: int = 1) -> list[int]:
    """How many of a batch's records each process gets: the same number, or one more for the first ones.

    If that is less than `least`, the first processes get `least` or more, and the others none.
    """
    return apportion(records, [1.0] * processes, least=least)


class Slices:
    """How the processes of a worker share the batches that the script has in hand: each has a slice.

    Args:
        rank, processes: of this process, and of its worker.

    Attributes:
        least: records of a slice; see `slice_sizes`.
    """

    def __init__(self, rank: int, processes: int) -> None:
        self._rank, self.processes, self.least = rank, processes, 1

    def own(self, batch: list[int]) -> list[int]:
        """This process's slice of a batch.

        If a batch has too few records, a process without any computes on the slice of process 0, without any
        weight: see `has_none`.
        """
        if self.processes == 1:
            return batch
        sizes = slice_sizes(len(batch), self.processes, least=self.least)
        rank = self._rank if sizes[self._rank] else 0
        start = sum(sizes[:rank])
        return batch[start : start + sizes[rank]]

    def has_none(self, records: int) -> bool:
        """Whether this process has none of a batch's records."""
        return records > 0 and not slice_sizes(records, self.processes, least=self.least)[self._rank]

    def weights(self, batches: Sequence[int]) -> list[float]:
        """Return the share of each process in the records of a step on batches of these sizes."""
        slices = [slice_sizes(records, self.processes, least=self.least) for records in batches]
        return [sum(own) / max(1, sum(batches)) for own in zip(*slices, strict=True)] or [
            0.0
        ] * self.processes
