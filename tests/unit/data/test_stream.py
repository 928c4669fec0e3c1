"""The items of a stream, by number: they are the right ones, and few are read for it."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from elastic_ps.api.job import Data
from elastic_ps.data.seed import seed_everything
from elastic_ps.data.source import read_source
from elastic_ps.data.stream import OFTEN, IndexedStream, ItemIndex
from elastic_ps.errors import InvalidModel, UsageError


class Stream(IterableDataset[int]):
    """The numbers from 0 on. It remembers where it was begun, and how many items were read.

    Args:
        items: how many it gives; None for ever.
    """

    def __init__(self, items: int | None = 20) -> None:
        self.items, self.begun, self.read = items, list[int](), 0

    def __iter__(self) -> Iterator[int]:
        return self._from(0)

    def _from(self, number: int) -> Iterator[int]:
        self.begun.append(number)
        for item in itertools.count(number):
            if item == self.items:
                return
            self.read += 1
            yield item


class Sought(Stream):
    """It can begin anywhere."""

    def iterate_from(self, number: int) -> Iterator[int]:
        return self._from(number)


class OfEpoch(Stream):
    """Each epoch has another order."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch  # of this iterator, whatever comes later
        return (item + 100 * epoch for item in self._from(0))


def indexed(
    stream: IterableDataset[Any], *, ends: bool = True, near: int = 0, keep: int = 0
) -> IndexedStream:
    return IndexedStream(stream, records=20, said="its __len__", ends=ends, near=near, keep=keep)


def items(data: IndexedStream, *numbers: int, epoch: int = 0) -> list[int]:
    return data.__getitems__([ItemIndex(epoch, number) for number in numbers])


def test_it_reads_on() -> None:
    stream = Stream()
    data = indexed(stream)
    assert items(data, 0, 1) == [0, 1]
    assert items(data, 7, 8, 12) == [7, 8, 12]
    assert data[ItemIndex(0, 13)] == 13
    assert (stream.begun, stream.read) == ([0], 14)


def test_it_begins_again_for_what_lies_behind_and_for_another_epoch() -> None:
    stream = Stream()
    data = indexed(stream)
    assert items(data, 5, 4) == [5, 4]
    assert items(data, 5, epoch=1) == [5]
    assert items(data, 6) == [6]
    assert (stream.begun, stream.read) == ([0] * 4, 6 + 5 + 6 + 7)


def test_the_stream_is_told_the_epoch() -> None:
    data = indexed(OfEpoch())
    assert items(data, 3, 4) == [3, 4]
    assert items(data, 3, 4, epoch=2) == [203, 204]
    assert items(data, 3) == [3]


def test_a_stream_that_can_begin_anywhere_does() -> None:
    stream = Sought()
    data = indexed(stream, near=4)
    assert items(data, 2, 3, 8, 14, 15, 1) == [2, 3, 8, 14, 15, 1]
    assert stream.begun == [2, 14, 1]
    assert stream.read == 2 + 5 + 2 + 1, "4 items are passed over, 5 are not"


def test_the_items_that_were_read_last_may_be_asked_for_again() -> None:
    stream = Stream()
    data = indexed(stream, keep=4)
    assert items(data, 0, 1, 6, 3, 4, 5, 6, 6, 7) == [0, 1, 6, 3, 4, 5, 6, 6, 7]
    assert (stream.begun, stream.read) == ([0], 8), "passed over or handed out, they are there"
    assert items(data, 3) == [3]
    assert (stream.begun, stream.read) == ([0, 0], 8 + 4), "the fifth last is not"
    assert items(data, 5, epoch=1) == [5]
    assert stream.begun == [0] * 3, "an epoch may have other items"
    sought = Sought()
    assert items(indexed(sought, keep=4), 6, 5, 4) == [6, 5, 4]
    assert sought.begun == [6, 5, 4], "it keeps nothing"


def test_a_script_may_change_what_it_gets() -> None:
    class Lists(IterableDataset[list[Any]]):
        def __init__(self, of: Any) -> None:
            self.of, self.begun = of, 0

        def __iter__(self) -> Iterator[list[Any]]:
            self.begun += 1
            return ([number, self.of] for number in range(20))

    for of, begun in ((7, 1), (threading.Lock(), 2)):
        stream = Lists(of)
        data = indexed(stream, keep=4)
        data[ItemIndex(0, 3)].clear()
        data[ItemIndex(0, 4)].clear()
        assert data[ItemIndex(0, 3)] == [3, of]
        assert stream.begun == begun, "what cannot be copied is read again"


def test_a_stream_may_fill_one_buffer_each_time() -> None:
    class Filled(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            buffer = torch.zeros(1)
            return (buffer.fill_(number) for number in range(20))

    data = IndexedStream(Filled(), records=20, said="its __len__", ends=False, near=0, keep=4)
    assert [data[ItemIndex(0, number)].item() for number in (0, 1, 2, 4, 2, 3, 2)] == [0, 1, 2, 4, 2, 3, 2]


@pytest.mark.parametrize(
    ("in_place", "make"),
    [
        (True, lambda number: (f"item {number}", {"x": torch.tensor([number])})),
        (True, lambda number: [numpy.full(3, number)]),
        (True, float),
        (False, lambda number: (f"item {number}", {"x": torch.tensor([number, float("nan")])})),
        (False, lambda number: object()),  # nobody can tell
    ],
)
def test_a_stream_that_has_another_order_when_it_is_begun_again(
    in_place: bool, make: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Turned(IterableDataset[Any]):
        def __init__(self) -> None:
            self.order = list(range(20))

        def __iter__(self) -> Iterator[Any]:
            if in_place:
                self.order.reverse()
            return map(make, self.order)

    data = indexed(Turned())
    with caplog.at_level(logging.WARNING):
        items(data, 3, 4)
        items(data, 3, 4, epoch=1)
        assert not caplog.records, "an epoch may have other items"
        items(data, 3, epoch=1)
    assert ["its first item has changed" in record.message for record in caplog.records] == [True] * in_place


def test_it_goes_on_after_an_error() -> None:
    class Once(Stream):
        failed = False

        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                if item == 3 and not self.failed:
                    self.failed = True
                    raise OSError("the file system is away")
                yield item

    data = indexed(Once())
    with pytest.raises(OSError, match="away"):
        items(data, 2, 3)
    assert items(data, 2, 3) == [2, 3]


@pytest.mark.parametrize("number", [12, 19])
def test_a_stream_that_ends_early(number: int) -> None:
    data = indexed(Stream(12))
    assert items(data, 11) == [11]
    with pytest.raises(
        UsageError, match=r"Stream has ended after 12 items of epoch 1, but its __len__ says .* 20"
    ):
        items(data, number, epoch=1)


@pytest.mark.parametrize(("off", "match"), [(1, "has ended after 19 items"), (-1, "has more than 20 items")])
def test_a_stream_that_begins_at_a_wrong_place(off: int, match: str) -> None:
    class Wrong(Stream):
        def iterate_from(self, number: int) -> Iterator[int]:
            return self._from(number + off if number else 0)

    with pytest.raises(UsageError, match=rf"{match}.*iterate_from\(5\).* all items but the first 5"):
        items(indexed(Wrong()), 0, 5, *range(6, 20))
    assert items(indexed(Wrong(), near=20), *range(20)) == list(range(20)), "it was not sought"


def test_an_iterator_that_does_not_begin_again() -> None:
    class Used(Stream):
        def __init__(self) -> None:
            super().__init__()
            self.only = iter(range(20))

        def __iter__(self) -> Iterator[int]:
            return self.only

    data = indexed(Used())
    assert items(data, *range(20)) == list(range(20))
    with pytest.raises(UsageError, match=r"ended after 0 items of epoch 1.*iter\(stream\) must begin"):
        items(data, 0, epoch=1)


def test_a_stream_that_goes_on() -> None:
    with pytest.raises(UsageError, match=r"has more than 20 items, but its __len__ .*records=20"):
        items(indexed(Stream(21)), 19)
    assert items(indexed(Stream(20)), 19) == [19]
    endless = Stream(None)
    assert items(indexed(endless, ends=False), 19) == [19]
    assert endless.read == 20, "the first items were asked for, so that is no error"


def test_a_stream_that_is_read_again_and_again_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for stream in (Stream(), Sought()):
            items(indexed(stream), *[3, 2] * OFTEN)
    assert ["iterate_from" in record.message for record in caplog.records] == [True]


class Sized(Stream):
    def __len__(self) -> int:
        return 20


class Shard(Sized):
    """Stands for accelerate's, which is told by its name."""

    __module__ = "accelerate.data_loader"


@pytest.mark.parametrize(
    ("make", "records", "error", "match"),
    [
        (
            Stream,
            None,
            InvalidModel,
            r'Stream is a stream without a length.*records=N.*"Streams" in docs/guides/data',
        ),
        (lambda: ChainDataset([Stream()]), None, InvalidModel, "without a length"),
        (lambda: DataLoader(Stream(), 4), None, InvalidModel, "without a length"),
        (Stream, 0, UsageError, "records is 0; expected"),
        (Sized, 21, UsageError, "records is 21, but the __len__ of Sized is 20"),
        (Shard, None, UsageError, "divides its items among processes itself"),
        (
            lambda: DataLoader(Sized(), batch_size=None),
            None,
            UsageError,
            "batch_size=1, and collate_fn=lambda",
        ),
        (lambda: range(20), 10, UsageError, "records=10 is for streams.*Subset"),
        (lambda: iter([1, 2]), None, InvalidModel, "map-style data set .*IterableDataset"),
    ],
)
def test_a_stream_that_cannot_be_shared_is_refused(
    make: Callable[[], Any], records: int | None, error: type[Exception], match: str
) -> None:
    given = make()
    batch_size = None if isinstance(given, DataLoader) else 4
    with pytest.raises(error, match=match):
        read_source(given, batch_size=batch_size, records=records, data=Data(), late=False, options={})


@pytest.mark.parametrize(
    ("make", "records", "expected"),
    [(Stream, 7, 7), (Sized, None, 20), (Sized, 7, 7), (lambda: ChainDataset([Sized(), Sized()]), None, 40)],
)
def test_how_many_records_a_stream_has(make: Callable[[], Any], records: int | None, expected: int) -> None:
    source = read_source(
        make(), batch_size=4, records=records, data=Data(), late=False, options={"num_workers": 2}
    )
    assert (source.records, source.shuffle) == (expected, False)


@pytest.mark.parametrize(("late", "begun"), [(True, [0]), (False, [0, 0])])
def test_batches_are_kept_where_records_of_late_steps_come_back(late: bool, begun: list[int]) -> None:
    stream = Sized()
    data = read_source(stream, batch_size=2, records=None, data=Data(), late=late, options={}).readable
    assert items(data, *range(18), 2) == [*range(18), 2]
    assert stream.begun == begun


def test_a_data_pipe_that_shuffles_has_the_same_order_in_each_worker() -> None:
    orders = []
    for seed, epoch in ((0, 0), (0, 0), (0, 1), (0, 1), (7, 0)):
        pipe = IterableWrapper(range(20)).shuffle()
        source = read_source(
            pipe, batch_size=2, records=None, data=Data(seed=seed), late=False, options={"num_workers": 0}
        )
        orders.append(items(source.readable, *range(20), epoch=epoch))
        assert items(source.readable, 3, 4, epoch=epoch) == orders[-1][3:5]
    assert [sorted(order) for order in orders] == [list(range(20))] * 5
    assert orders[0] == orders[1] != list(range(20))
    assert orders[2] == orders[3] != orders[0]
    assert orders[4] != orders[0], "data.seed changes it"


class Shuffled(IterableDataset[float]):
    """Its order is that of a generator that the whole process has.

    Args:
        kind: of generator.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[float]:
        rest = list(range(20))
        while rest:
            yield rest.pop(self.below(len(rest)))

    def below(self, end: int) -> int:
        if self.kind == "torch":
            return int(torch.randint(end, ()))
        return random.randrange(end) if self.kind == "random" else int(numpy.random.randint(end))


class Wrapped(IterableDataset[int]):
    def __init__(self, items: IterableDataset[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


def shuffled_pipe() -> IterableDataset[int]:
    return IterableWrapper(range(20)).shuffle()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shuffled("torch"),
        lambda: Shuffled("random"),
        lambda: Shuffled("numpy"),
        lambda: Wrapped(shuffled_pipe()),
        lambda: ChainDataset([shuffled_pipe()]),
    ],
    ids=["torch", "random", "numpy", "a pipe within", "a chain of pipes"],
)
def test_a_stream_that_shuffles_with_a_global_generator_has_one_order(make: Callable[[], Any]) -> None:
    """However much each worker's script draws from it; otherwise items would be trained twice, or never."""

    def drawn() -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    def order(worker: int, epoch: int, seed: int = 0) -> list[int]:
        data = IndexedStream(make(), records=20, said="records=20", ends=True, near=0, seed=seed)
        torch.manual_seed(worker)
        found = list[int]()
        for number in range(20):
            found += items(data, number, epoch=epoch)
            drawn()
        assert items(data, 3, 4, epoch=epoch) == found[3:5], "it was begun again"
        return found

    orders = [order(0, 0), order(1, 0), order(0, 1), order(1, 1), order(0, 0, seed=7)]
    assert [sorted(each) for each in orders] == [list(range(20))] * 5
    assert orders[0] == orders[1] != orders[2]
    assert orders[2] == orders[3]
    assert orders[4] != orders[0], "data.seed changes it"
    found = []
    for reads in (False, True):
        seed_everything(0, worker=0, version=0)
        if reads:
            items(IndexedStream(make(), records=20, said="records=20", ends=True, near=0), 5, 6)
        found.append(drawn())
    assert found[0] == found[1], "the script draws what it would draw without a stream"
