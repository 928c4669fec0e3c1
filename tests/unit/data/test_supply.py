"""Ranges are cut into batches: each of one epoch, and of one version where its size is fixed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from elastic_ps.core.ledger import Range
from elastic_ps.data.order import Order
from elastic_ps.data.source import Source
from elastic_ps.data.supply import Supply


class Cutting:
    """A supply that is given ranges one after the other, when it asks for more."""

    def __init__(
        self,
        ranges: Iterable[Range],
        *,
        batch: int,
        records: int = 100,
        drop_last: bool = False,
        version: int | None = None,
        blocks: int | None = None,
    ) -> None:
        order = Order(records, blocks, shuffle=False) if blocks else None
        source = Source(None, None, records, batch, False, drop_last, options={}, order=order)
        self.supply, self._ranges = Supply(source, seed=0, version_records=version), iter(ranges)

    def more(self) -> bool:
        found = next(self._ranges, None)
        self.supply.in_hand += [found] if found else []
        return found is not None

    def batches(self, only: int | None = None) -> list[tuple[list[Range], list[int] | None]]:
        """All that there are."""
        found = []
        while (each := self.supply.cut(self.more, only=only))[0]:
            found.append(each)
        return found


def test_a_batch_is_of_several_ranges_and_of_one_epoch() -> None:
    cutting = Cutting([Range(0, 0, 3), Range(0, 7, 12), Range(1, 0, 2)], batch=4)
    assert cutting.batches() == [
        ([Range(0, 0, 3), Range(0, 7, 8)], [0, 1, 2, 7]),
        ([Range(0, 8, 12)], [8, 9, 10, 11]),
        ([Range(1, 0, 2)], [0, 1]),
    ]


def test_records_of_a_later_epoch_stay_in_hand() -> None:
    cutting = Cutting([Range(0, 0, 3), Range(1, 0, 4)], batch=4)
    assert cutting.batches(only=0) == [([Range(0, 0, 3)], [0, 1, 2])]
    assert cutting.supply.in_hand == [Range(1, 0, 4)]
    assert cutting.batches(only=1) == [([Range(1, 0, 4)], [0, 1, 2, 3])]


def test_what_does_not_fill_a_batch_is_left_out_with_drop_last() -> None:
    cutting = Cutting([Range(0, 0, 6)], batch=4, records=6, drop_last=True)
    assert cutting.batches() == [([Range(0, 0, 4)], [0, 1, 2, 3]), ([Range(0, 4, 6)], None)]


def test_what_does_not_fill_a_version_is_left_out_with_drop_last() -> None:
    ranges = [Range(0, 0, 3), Range(0, 8, 10)]
    cutting = Cutting(ranges, batch=4, records=10, drop_last=True, version=8)
    assert cutting.batches() == [([Range(0, 0, 3)], [0, 1, 2]), ([Range(0, 8, 10)], None)]


@pytest.mark.parametrize(("records", "sizes"), [(4, [4]), (5, [3, 2]), (6, [4, 2])])
def test_of_a_version_no_single_record_is_left(records: int, sizes: list[int]) -> None:
    """BatchNorm, for one, can do nothing with it."""
    cutting = Cutting([Range(0, 0, records)], batch=4, version=8)
    assert [len(indices or ()) for _, indices in cutting.batches()] == sizes


@pytest.mark.parametrize(
    ("more", "sizes"), [([], [4, 3, 2]), ([Range(0, 18, 20)], [4, 4, 3]), ([Range(1, 0, 4)], [4, 3, 2, 4])]
)
def test_of_the_last_run_no_single_record_is_left(more: list[Range], sizes: list[int]) -> None:
    cutting = Cutting([Range(0, 0, 7), Range(0, 7, 9), *more], batch=4, records=20, blocks=9)
    assert [len(indices or ()) for _, indices in cutting.batches()] == sizes


def test_of_the_last_run_whole_batches_are_kept_with_drop_last() -> None:
    cutting = Cutting([Range(0, 0, 9)], batch=4, records=9, blocks=9, drop_last=True)
    assert [len(batch or ()) for _, batch in cutting.batches()] == [4, 4, 0]


def test_a_batch_has_records_of_one_version() -> None:
    cutting = Cutting([Range(0, 0, 3), Range(0, 8, 11)], batch=4, version=8)
    assert [batch for batch, _ in cutting.batches()] == [[Range(0, 0, 3)], [Range(0, 8, 11)]]
