"""Tracks which records are handed out, in the model, or to be handed out again.

Records of an epoch are numbered by position, 0 to `records - 1`; the loader maps positions to records by a
seeded permutation. Each position of each epoch is always in exactly one state: not handed out yet, held by a
worker, given back, or in the model. This is the guarantee of "exactly once", and the ledger refuses calls
that would break it.

A master that hands out ranges, and takes them back from dead workers, is the idea of ElasticDL's dynamic data
sharding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeAlias

LEAST = 2
"""The smallest part of a batch, in records, if there are as many: BatchNorm cannot train on one record."""


class Range(NamedTuple):
    """Positions `start` to `stop - 1` of an epoch."""

    epoch: int
    start: int
    stop: int

    @property
    def records(self) -> int:
        return self.stop - self.start


_Take: TypeAlias = Callable[[int], Range | None]
"""Takes records, at most so many, that nobody holds; None if there are none."""


class LedgerError(ValueError):
    """A call names records that its holder does not hold."""


@dataclass
class Ledger:
    """The records of a job.

    Attributes:
        records: the number of records in the data set.
        epochs: how often to train each of them.
        shard_records: the most records to hand out at a time.
        applied: the number of records in the model.
        skipped: the number of records that scripts have skipped, for example for a loss that was not finite.
        run_end: the end of the run that has a position, by epoch and position: whoever begins a run is given
            the rest of it, too, as long as there are other runs for others. None: there are no runs.

    A holder of records is a worker's incarnation, a number that is used only once.
    """

    records: int
    epochs: int
    shard_records: int
    applied: int = 0
    skipped: int = 0
    _next_epoch: int = 0
    _next_position: int = 0
    _returned: list[Range] = field(default_factory=list)
    _held: dict[int, list[Range]] = field(default_factory=dict)
    run_end: Callable[[int, int], int] | None = field(default=None, compare=False)
    _begun: dict[int, Range] = field(default_factory=dict)  # the rest of a run, kept for who has begun it

    @property
    def total(self) -> int:
        """Records of all epochs together."""
        return self.records * self.epochs

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch is in the model, or was skipped."""
        return self.applied + self.skipped == self.total

    @property
    def complete_epochs(self) -> int:
        """Epochs of which every record is in the model."""
        held = [r.epoch for ranges in self._held.values() for r in ranges]
        kept = [r.epoch for r in (*self._returned, *self._begun.values())]
        return min([*kept, *held, self._next_epoch])

    def extend(self, epochs: int) -> None:
        """Train each record `epochs` times instead, which is not fewer than before."""
        self.epochs = epochs

    def held(self, holder: int, *, besides: Iterable[Range] = ()) -> list[Range]:
        """The ranges that `holder` holds, without `besides`. Raises LedgerError if it does not hold those."""
        return self._without(holder, list(besides))

    def take(self, holder: int, *, batch: int, workers: int, fresh: bool = False) -> list[Range]:
        """Hand records to `holder`; an empty list if none are available at the moment.

        Near the end of the job ranges become smaller (guided self-scheduling, Polychronopoulos and Kuck
        1987), so that the `workers` workers run out of records together. Ranges are whole batches, so that
        only the end of an epoch has a smaller one, as without a parameter server.

        Args:
            fresh: prefer records that nobody has had yet. By default those that were given back come first.
        """
        held = sum(r.records for ranges in self._held.values() for r in ranges)
        left = self.total - self.applied - self.skipped - held
        fair = -(-left // (2 * max(1, workers) * batch)) * batch
        limit = max(batch, min(self.shard_records, fair) // batch * batch)
        sources = (self._take_new, self._take_returned) if fresh else (self._take_returned, self._take_new)
        taken = self._take_of_run(holder, limit, batch, sources) if self.run_end else _first(sources, limit)
        if taken is None:
            return []
        self._held.setdefault(holder, []).append(taken)
        return [taken]

    def _take_of_run(self, holder: int, limit: int, batch: int, sources: Sequence[_Take]) -> Range | None:
        """Take records of the run that `holder` has begun, of another run, or of one kept for someone else.

        No single record is left of a run, unless a batch is as small.
        """
        run = self._begun.pop(holder, None) or _first(sources, self.records) or self._half_of_longest()
        if run is None:
            return None
        stop = min(run.stop, run.start + limit)
        if stop + 1 == run.stop and batch > LEAST:
            stop -= 1
        if stop < run.stop:
            self._begun[holder] = run._replace(start=stop)
        return run._replace(stop=stop)

    def _half_of_longest(self) -> Range | None:
        """The end of the longest rest of a run: no other records are left."""
        other = max(self._begun, key=lambda each: self._begun[each].records, default=None)
        if other is None:
            return None
        rest = self._begun.pop(other)
        if rest.records < 2 * LEAST:
            return rest
        middle = rest.start + rest.records // 2
        self._begun[other] = rest._replace(stop=middle)
        return rest._replace(start=middle)

    def _within_run(self, epoch: int, start: int, limit: int) -> int:
        return min(limit, self.run_end(epoch, start) - start) if self.run_end else limit

    def _take_returned(self, limit: int) -> Range | None:
        if not self._returned:
            return None
        first = self._returned.pop(0)
        limit = self._within_run(first.epoch, first.start, limit)
        if first.records > limit:
            self._returned.insert(0, first._replace(start=first.start + limit))
            first = first._replace(stop=first.start + limit)
        return first

    def _take_new(self, limit: int) -> Range | None:
        if self._next_epoch >= self.epochs:
            return None
        limit = self._within_run(self._next_epoch, self._next_position, limit)
        stop = min(self.records, self._next_position + limit)
        taken = Range(self._next_epoch, self._next_position, stop)
        self._next_position = stop
        if stop == self.records:
            self._next_epoch, self._next_position = self._next_epoch + 1, 0
        return taken

    def apply(self, holder: int, ranges: Iterable[Range]) -> None:
        """Note that `ranges`, held by `holder`, are in the model.

        Raises:
            LedgerError: `holder` does not hold all of them; nothing has changed.
        """
        wanted = list(ranges)
        self._set_held(holder, self._without(holder, wanted))
        self.applied += sum(r.records for r in wanted)

    def skip(self, holder: int, ranges: Iterable[Range]) -> None:
        """Note that `ranges`, held by `holder`, are skipped. Raises LedgerError like `apply`."""
        wanted = list(ranges)
        if not wanted:
            return
        self._set_held(holder, self._without(holder, wanted))
        self.skipped += sum(r.records for r in wanted)

    def give_back(self, holder: int, *, keep: Iterable[Range] = ()) -> None:
        """Take back the ranges that `holder` holds, except `keep`, to hand them to others."""
        kept = list(keep)
        returned = self._without(holder, kept)
        self._set_held(holder, kept)
        if rest := self._begun.pop(holder, None):
            returned.append(rest)
        self._returned = joined([*self._returned, *returned])

    def give_back_some(self, holder: int, ranges: Iterable[Range]) -> None:
        """Take back `ranges`, to hand them to others. Raises LedgerError like `apply`."""
        wanted = list(ranges)
        self._set_held(holder, self._without(holder, wanted))
        self._returned = joined([*self._returned, *wanted])

    def _set_held(self, holder: int, ranges: list[Range]) -> None:
        if ranges:
            self._held[holder] = ranges
        else:
            self._held.pop(holder, None)

    def _without(self, holder: int, wanted: list[Range]) -> list[Range]:
        return without(self._held.get(holder, ()), wanted, holder=holder)

    def copy(self) -> Self:
        """An independent copy."""
        held = {holder: list(ranges) for holder, ranges in self._held.items()}
        return replace(self, _returned=list(self._returned), _held=held, _begun=dict(self._begun))

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint. Held records count as given back, since workers will be new ones."""
        ranges = joined([*self._returned, *self._begun.values(), *itertools.chain(*self._held.values())])
        return {
            "records": self.records,
            "epochs": self.epochs,
            "applied": self.applied,
            "skipped": self.skipped,
            "next": [self._next_epoch, self._next_position],
            "returned": [list(r) for r in ranges],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, shard_records: int) -> Self:
        """The ledger that `state()` described.

        Raises:
            LedgerError: some record would be trained twice or never.
            KeyError, TypeError, ValueError: it does not describe a ledger.
        """
        epoch, position = state["next"]
        ledger = cls(
            records=state["records"],
            epochs=state["epochs"],
            shard_records=shard_records,
            applied=state["applied"],
            skipped=state["skipped"],
            _next_epoch=epoch,
            _next_position=position,
            _returned=[Range(*r) for r in state["returned"]],
        )
        ledger._require_sound()
        return ledger

    def _require_sound(self) -> None:
        """Check that each position is in exactly one state, while nobody holds any."""
        numbers = [self.records, self.epochs, self.applied, self.skipped]
        numbers += [self._next_epoch, self._next_position]
        if any(type(n) is not int for n in itertools.chain(numbers, *self._returned)) or min(numbers) < 0:
            raise LedgerError(f"the numbers of the ledger are impossible: {self}")
        handed_out = self._next_epoch * self.records + self._next_position
        begun = [Range(0, 0, 0), *sorted(self._returned)]
        for before, after in itertools.pairwise(begun):
            inside = 0 <= after.start < after.stop <= self.records
            if not inside or (after.epoch, after.start) < (before.epoch, before.stop):
                raise LedgerError(f"{after} cannot have been given back")
            if after.epoch * self.records + after.stop > handed_out:
                raise LedgerError(f"{after} has not been handed out")
        returned = sum(r.records for r in self._returned)
        if self.applied + self.skipped + returned != handed_out or handed_out > self.total:
            raise LedgerError(
                f"{self.applied} records are in the model, {self.skipped} skipped and {returned} given back, "
                f"of {handed_out} handed out and {self.total} in all"
            )


def _first(sources: Iterable[_Take], limit: int) -> Range | None:
    """Take from the first source that has records."""
    return next((taken for source in sources if (taken := source(limit)) is not None), None)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same positions, in order and in as few ranges as possible."""
    result: list[Range] = []
    for r in sorted(ranges):
        if result and (result[-1].epoch, result[-1].stop) == (r.epoch, r.start):
            result[-1] = result[-1]._replace(stop=r.stop)
        else:
            result.append(r)
    return result


def without(ranges: Iterable[Range], wanted: Iterable[Range], *, holder: int = 0) -> list[Range]:
    """`ranges`, which `holder` holds, without the positions of `wanted`.

    Raises:
        LedgerError: one of `wanted` lies within none of `ranges`.
    """
    held = list(ranges)
    for r in wanted:
        held = _subtract(held, r, holder)
    return held


def _subtract(held: list[Range], r: Range, holder: int) -> list[Range]:
    """`held` without the positions of `r`, which must lie within one of its ranges."""
    for i, have in enumerate(held):
        if have.epoch == r.epoch and have.start <= r.start < r.stop <= have.stop:
            rest = [Range(have.epoch, have.start, r.start), Range(have.epoch, r.stop, have.stop)]
            return held[:i] + [part for part in rest if part.records] + held[i + 1 :]
    raise LedgerError(f"holder {holder} lacks some of records {r.start}:{r.stop} of epoch {r.epoch}")
