"""Notices that a script has changed values that only the job can change.

What a script writes into a parameter between two steps is overwritten by the next version, and was never
part of the job. So the bits of values are summed up when they arrive, and again before they are replaced. Of
much memory most steps do that with a part of each page, chosen at random: a change of 4 KiB or more is
noticed at once, a smaller one when it is repeated. Values that a step does not replace, or that are on
another device, are looked at less often, and when torch's counters say that they were written to. (The
counters miss what is written through `.data`.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from elastic_ps.core.partition import Layout, Rule

ALWAYS = 4
"""Everything is looked at of the values that arrive first, so many times."""

EVERY = 64
"""Afterwards each so many-th time."""

PAGE = 4096
PARTS = 8
"""Of each `PAGE` bytes, one of so many parts is looked at the other times."""

MUCH = 1024 * 1024
"""Bytes; what is smaller is looked at as a whole, which takes no time."""


class Seal:
    """The values of parameters as the job gave them. Belongs to the training thread.

    Args:
        trained, constant: flat memory that values are pulled into, of parameters with and without optimizer;
            none of those that the script trains on this worker.
        tensors: the model's, in the layout's order.
        apart: which of these have memory of their own.
        pulled: gives the pulled values of one of these.
    """

    def __init__(
        self,
        layout: Layout,
        trained: Sequence[torch.Tensor],
        constant: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        apart: Sequence[int],
        pulled: Callable[[int], torch.Tensor],
    ) -> None:
        self._trained, self._constant = [_Bits(flat) for flat in trained], [_Bits(flat) for flat in constant]
        self._tensors, self._pulled = tensors, pulled
        rules = [spec.rule for spec in layout.tensors]
        self._fixed = [i for i, rule in enumerate(rules) if rule is Rule.CONSTANT]
        watched = {Rule.GRADIENT, Rule.CONSTANT} if trained else {Rule.CONSTANT}
        self._watched = [i for i, rule in enumerate(rules) if rule in watched]
        self._apart = [i for i in apart if i in set(self._watched)]
        self._closed = False
        self._written = False  # the script writes to values that only the job can change, as counters say
        self._arrivals = 0
        self._random = random.Random(0)  # what a script does every so many steps must not always miss it
        self._whole = True  # all is looked at of the values that have arrived last
        self._part: int | None = None  # what `_sums` are of
        self._sums: list[int] = []
        self._constant_sums: list[int] = []
        self._counters: list[int] = []

    def open(self) -> None:
        """Values are about to arrive."""
        self._closed = False

    def close(self) -> None:
        """The values have arrived."""
        self._arrivals += 1
        self._whole = self._arrivals <= ALWAYS or self._arrivals % EVERY == 0
        self._part = None if self._whole or self._written else self._random.randrange(PARTS)
        self._sums = [bits.sum(self._part) for bits in self._trained]
        if not self._constant_sums:
            self._constant_sums = [bits.sum() for bits in self._constant]
        self._counters = self._versions()
        self._closed = True

    def changed(self, *, thorough: bool = False) -> list[int] | None:
        """The tensors that were changed since: [] if it cannot be said which. None: none was.

        Args:
            thorough: look at all tensors.
        """
        if not self._closed:
            return None
        touched = [
            index
            for index, before, now in zip(self._watched, self._counters, self._versions(), strict=True)
            if before != now
        ]
        self._written |= bool(touched)
        broken = self._sums != [bits.sum(self._part) for bits in self._trained]
        if thorough or touched or self._whole:
            broken |= self._constant_sums != [bits.sum() for bits in self._constant]
            different = self._different()
            touched = [i for i in touched if i not in self._apart or i in different]
            broken |= bool(different)
            touched = sorted({*touched, *different})
        return touched if broken else None

    def changed_constants(self) -> list[int] | None:
        """As `changed`, of the tensors without optimizer alone."""
        different = [i for i in self._different() if i in self._fixed]
        if not different and self._constant_sums == [bits.sum() for bits in self._constant]:
            return None
        now = dict(zip(self._watched, self._versions(), strict=True))
        before = dict(zip(self._watched, self._counters, strict=True))
        return sorted({*different, *(i for i in self._fixed if before[i] != now[i])})

    def _different(self) -> list[int]:
        return [i for i in self._apart if not torch.equal(self._tensors[i].cpu(), self._pulled(i))]

    def _versions(self) -> list[int]:
        return [self._tensors[index]._version for index in self._watched]


class _Bits:
    """The bits of flat memory."""

    def __init__(self, flat: torch.Tensor) -> None:
        raw = flat.view(torch.uint8)
        paged = len(raw) // PAGE * PAGE if len(raw) >= MUCH else 0
        pages = raw[:paged].view(torch.int64).view(-1, PAGE // 8)
        self._parts = pages.chunk(PARTS, dim=1)
        tail = raw[paged:]
        whole = len(tail) // 8 * 8
        self._pages, self._words, self._rest = pages, tail[:whole].view(torch.int64), tail[whole:]

    def sum(self, part: int | None = None) -> int:
        """A number that is another one when a bit has changed, but for rare accidents.

        Args:
            part: look at this part of each page alone, if there are many, and at what is after the last page.
        """
        pages = self._pages if part is None else self._parts[part]
        return sum(int(each.sum()) for each in (pages, self._words, self._rest) if each.numel())
