"""Blocks of records stay together, and every record has one position in each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.core.ledger import Ledger, Range
from elastic_ps.data.order import MOST_BLOCKS, Order

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)
BLOCKS = st.one_of(st.integers(1, 30), SIZES)


def order(blocks: int | Sequence[int], *, buffer: int = 1, records: int = 50, shuffle: bool = True) -> Order:
    records = records if isinstance(blocks, int) else sum(blocks)
    return Order(records, blocks, buffer, shuffle, seed=3)


def block_of(given: Order) -> list[int]:
    """The block of each record."""
    return [block for block, size in enumerate(given.sizes.tolist()) for _ in range(size)]


@given(BLOCKS, st.integers(1, 5), st.booleans(), st.integers(0, 3), st.data())
def test_every_record_has_one_position(
    blocks: int | list[int], buffer: int, shuffle: bool, epoch: int, data: st.DataObject
) -> None:
    given = order(blocks, buffer=buffer, shuffle=shuffle)
    found = given.of_epoch(epoch)
    assert sorted(found) == list(range(given.records)) == sorted(found[:])
    start = data.draw(st.integers(0, given.records))
    stop = data.draw(st.integers(start, given.records))
    assert list(found)[start:stop] == found[start:stop] == [found[i] for i in range(start, stop)]
    assert found[start:stop:2] == found[start:stop][::2]


@given(BLOCKS, st.integers(1, 5), st.integers(0, 3))
def test_a_run_is_so_many_whole_blocks(blocks: int | list[int], buffer: int, epoch: int) -> None:
    given = order(blocks, buffer=buffer)
    found, of = given.of_epoch(epoch), block_of(given)
    start, seen = 0, Counter[int]()
    while start < given.records:
        end = given.run_end(epoch, start)
        run = Counter(of[index] for index in found[start:end])
        assert len(run) <= buffer
        assert all(given.run_end(epoch, position) == end for position in range(start, end))
        seen += run
        start = end
    assert seen == Counter(of)


def test_blocks_and_their_records_are_in_another_order_in_each_epoch_and_with_each_seed() -> None:
    orders = {tuple(Order(60, 6, seed=seed).of_epoch(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    blocks = {tuple(index // 6 for index in each[::6]) for each in orders}
    assert len(blocks) == 25
    assert tuple(Order(60, 6, seed=1).of_epoch(2)) in orders
    inside = {tuple(index % 6 for index in each[:6]) for each in orders}
    assert len(inside) > 20


def test_a_larger_buffer_mixes_blocks() -> None:
    first = order(5, buffer=4).of_epoch(0)[:20]
    assert len({index // 5 for index in first}) == 4
    assert len({index // 5 for index in first[:5]}) > 1


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    given = order(7, shuffle=False)
    assert list(given.of_epoch(4)) == list(range(50))
    assert [given.run_end(4, 0), given.run_end(4, 13), given.run_end(4, 49)] == [7, 14, 50]


def test_an_order_travels_as_text() -> None:
    for one in (order(7, buffer=2), order([3, 0, 9]), order(9, shuffle=False)):
        again = Order.from_text(one.to_text(), records=one.records, seed=3)
        assert list(again.of_epoch(1)) == list(one.of_epoch(1))


@pytest.mark.parametrize(
    "text",
    ["", "7", "null", "[7, 1]", '["7", 1, true]', "[0, 1, true]", "[5, 0, true]", "[[20, 31], 1, true]"],
)
def test_text_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Order.from_text(text, records=50, seed=0)


def test_too_many_blocks_are_refused_with_the_size_to_take() -> None:
    with pytest.raises(ValueError, match="Make blocks of 3 records or more"):
        Order(3 * MOST_BLOCKS, 2)


@given(
    blocks=BLOCKS,
    workers=st.integers(1, 5),
    batch=st.integers(1, 9),
    shard_records=st.integers(1, 40),
    lost=st.lists(st.integers(0, 200), max_size=4),
    speeds=st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
def test_each_record_is_trained_once_in_each_epoch_whatever_happens(
    blocks: int | list[int], workers: int, batch: int, shard_records: int, lost: list[int], speeds: list[int]
) -> None:
    """Workers of different speeds, some of which are lost with what they hold."""
    given, epochs = order(blocks), 2
    ledger = Ledger(given.records, epochs, shard_records, run_end=given.run_end)
    holders, trained, turn = list(range(workers)), Counter[tuple[int, int]](), 0
    while not ledger.finished:
        turn += 1
        place = turn % workers
        if turn in lost:
            ledger.give_back(holders[place])
            holders[place] += 100
        if turn % speeds[place]:
            continue
        for each in ledger.take(holders[place], batch=batch, workers=workers):
            if turn + 1 in lost:
                continue  # its worker dies with it
            ledger.apply(holders[place], [each])
            indexes = given.of_epoch(each.epoch)[each.start : each.stop]
            trained.update((each.epoch, index) for index in indexes)
        if turn + 1 in lost:
            ledger.give_back(holders[place])
            holders[place] += 100
    assert trained == Counter((epoch, index) for epoch in range(epochs) for index in range(given.records))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("blocks", [32, [20, 44, 31, 33] * 10])
def test_a_worker_opens_its_share_and_at_most_two_blocks_more(blocks: int | list[int], workers: int) -> None:
    """It goes on with the block that it has open, and takes of others' only when there is no other one."""
    given = order(blocks, records=1280)
    ledger, of = Ledger(given.records, 1, 16, run_end=given.run_end), block_of(given)
    taken: list[list[Range]] = [[] for _ in range(workers)]
    while not ledger.finished:
        for worker in range(workers):
            found = ledger.take(worker, batch=8, workers=workers)
            ledger.apply(worker, found)
            taken[worker] += found
    for ranges in taken:
        indexes = [i for each in ranges for i in given.of_epoch(0)[each.start : each.stop]]
        opened = sum(given.sizes[block] for block in {of[i] for i in indexes})
        assert len(indexes) <= opened <= len(indexes) + 2 * max(given.sizes)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("batch", [3, 4])
def test_no_single_record_is_left_of_a_run(batch: int, workers: int) -> None:
    """BatchNorm, for one, can do nothing with it."""
    given = order(9, records=90)
    ledger, sizes = Ledger(given.records, 1, 16, run_end=given.run_end), Counter[int]()
    while not ledger.finished:
        for worker in range(workers):
            found = ledger.take(worker, batch=batch, workers=workers)
            ledger.apply(worker, found)
            sizes.update(each.records for each in found)
    assert min(sizes) > 1
