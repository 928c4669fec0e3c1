"""The items of a stream by number, so that its records can be given to workers like those of a data set.

A record is an item's number within an epoch. Each worker iterates over the stream by itself and passes over
what others train. Records are given in ascending order, so a worker reads a stream about once in an epoch. It
goes back only to records that another worker has given back.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from elastic_ps.data.seed import OwnRandom, seed_of
from elastic_ps.errors import UsageError

logger = logging.getLogger(__name__)

OFTEN = 10
"""A warning says that a stream is read again and again when it has begun so many times in an epoch."""


class ItemIndex(NamedTuple):
    """The epoch, and an item's number in the stream, both from 0."""

    epoch: int
    number: int


class IndexedStream(Dataset[Any]):
    """A map-style data set of a stream's items, indexed by `ItemIndex`.

    It reads on from where it stands if that is possible, and otherwise begins the stream again. If the
    stream has a method `iterate_from(number)`, which returns an iterator that begins with that item, it is
    called wherever more than `near` items would be passed over. If it has a method `set_epoch(epoch)`, that
    is called before each beginning. What the stream draws from the global generators of torch (on the CPU),
    `random` and numpy follows from the seed and the epoch, at each beginning anew. So a stream that shuffles
    with them has the same order in each worker, and so has one of torch's data pipes.

    A copy in another process has a place of its own. `torch.utils.data.get_worker_info()` tells the stream
    that there is one process, so that a stream that shares itself out among a DataLoader's processes is
    whole in each of them, and gives it a seed that all of them have. A stream of Hugging Face's, which has
    another order in a DataLoader's process, is told that it is in none.

    Args:
        stream: gives the same items in the same order, whenever and wherever it is begun in an epoch.
        records: items in an epoch; later ones are not read.
        said: where that number comes from, for messages.
        ends: the stream must have no more items than that.
        near: how many items are passed over rather than sought.
        keep: how many of the last items are kept as copies, for the case that they come again. A stream that
            can begin anywhere needs none.
        seed: of the random numbers that the stream draws.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        *,
        records: int,
        said: str,
        ends: bool,
        near: int,
        keep: int = 0,
        seed: int = 0,
    ) -> None:
        self._stream, self._name = stream, type(stream).__name__
        self._records, self._said, self._ends = records, said, ends
        self._near, self._seeks = near, callable(getattr(stream, "iterate_from", None))
        self._keep = 0 if self._seeks else keep
        self._kept: dict[ItemIndex, Any] = {}
        self._seed, self._random = seed, OwnRandom()
        self._items: Iterator[Any] | None = None
        self._process = os.getpid()
        self._next = ItemIndex(0, 0)  # of the item that comes next
        self._begun = 0  # times in this epoch
        self._sought: int | None = None  # what `iterate_from` was called with; None: it was not
        self._first: ItemIndex | None = None  # of the item that is compared with what comes there again
        self._first_item: Any = None

    def __len__(self) -> int:
        return self._records

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_items": None}

    def __getitem__(self, index: ItemIndex) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indexes: Sequence[ItemIndex]) -> list[Any]:
        """The items with these indexes, in this order.

        Raises:
            UsageError: the stream has fewer items than `records`, or more although it `ends`.
        """
        try:
            hidden = isinstance(self._stream, HuggingFaceStream)
            seed = None if hidden else f"stream/{self._seed}/{indexes[0].epoch}"  # a batch is of one epoch
            with _undivided(seed), self._random.in_force():
                return [self._item(index) for index in indexes]
        except BaseException:
            self._items = None  # its position is unknown
            raise

    def _item(self, index: ItemIndex) -> Any:
        if self._process != os.getpid():  # the place in a file is that of all processes which have it open
            self._items, self._process = None, os.getpid()
        if index in self._kept:
            return copy.deepcopy(self._kept[index])  # the script may change what it gets
        passed = index.number - self._next.number
        goes_on = self._items is not None and index.epoch == self._next.epoch and passed >= 0
        if not goes_on or (self._seeks and passed > self._near):
            self._begin(index)
        while self._next != index:
            self._read()
        item = self._read()
        if self._ends and self._next.number == self._records:
            self._require_end()
        return item

    def _begin(self, index: ItemIndex) -> None:
        self._begun = self._begun + 1 if index.epoch == self._next.epoch else 1
        self._items = None  # files of the last iterator are closed
        self._random.seed(f"stream/{self._seed}/{index.epoch}")
        if callable(set_epoch := getattr(self._stream, "set_epoch", None)):
            set_epoch(index.epoch)
        _seed_pipes(self._stream, self._seed + index.epoch)
        if self._seeks:
            stream: Any = self._stream
            self._sought = index.number
            self._items, self._next = iter(stream.iterate_from(index.number)), index
            return
        self._items, self._next = iter(self._stream), index._replace(number=0)
        if isinstance(self._stream, HuggingFaceStream):
            self._items, self._next = self._stream.begin(index), index
        if self._begun == OFTEN:
            logger.warning(
                "%s is begun for the %dth time in epoch %d, because other workers gave back records that "
                "come before its position. Each time it is read again from its first item. A stream of your "
                "own may have a method iterate_from(number), which returns an iterator that begins with that "
                'item. See "Streams" in docs/guides/data.md',
                self._name,
                OFTEN,
                index.epoch,
            )

    def _read(self) -> Any:
        assert self._items is not None, "it is begun"
        try:
            item = next(self._items)
        except StopIteration:
            raise UsageError(
                f"{self._name} has ended after {self._next.number} items of epoch "
                f"{self._next.epoch}, but {self._said} says that it has {self._records}. Each time that a "
                "stream is begun, in each worker, it must give all items in the same order. It must not "
                "share them out among workers, and iter(stream) must begin with the first item"
                + self._blame()
            ) from None
        if self._next.number == 0:
            self._compare_first(item)
        self._keep_for_later(self._next, item)
        self._next = self._next._replace(number=self._next.number + 1)
        return item

    def _compare_first(self, item: Any) -> None:
        """Warn if the epoch's first item has changed: the order has probably changed, too."""
        if self._first != self._next:
            self._first = self._next
            self._first_item = _copied(item)
        elif self._first_item is not None and not _equal(self._first_item, item):
            logger.warning(
                "%s was begun again in epoch %d, and its first item has changed. If its order has changed, "
                "some items are trained twice, and others never. In __iter__, create a new generator with "
                'a constant seed; if you shuffle a list, shuffle a copy. See "Streams" in '
                "docs/guides/data.md",
                self._name,
                self._next.epoch,
            )

    def _keep_for_later(self, index: ItemIndex, item: Any) -> None:
        """Keep a copy: the script may change the item, and a stream may reuse its buffer."""
        if not self._keep:
            return
        self._kept.pop(index, None)  # it becomes the last one
        if (kept := _copied(item)) is None:
            return
        self._kept[index] = kept
        if len(self._kept) > self._keep:
            del self._kept[next(iter(self._kept))]

    def _blame(self) -> str:
        """Say in a message where the stream was begun, if it was not at its first item."""
        if not self._sought:
            return ""
        return (
            f". It was started with iterate_from({self._sought}), which must give all items but the first "
            f"{self._sought}, as itertools.islice(stream, {self._sought}, None) does"
        )

    def _require_end(self) -> None:
        assert self._items is not None, "it is begun"
        advice = (
            f"{self._blame()}. Correct iterate_from or __len__"
            if self._sought
            else ", so the others would not be trained. Correct __len__; or pass session.loader(..., "
            f"records={self._records}) to train only the first ones"
        )
        for _ in self._items:
            raise UsageError(
                f"{self._name} has more than {self._records} items, but {self._said} says that it has "
                f"{self._records}{advice}"
            )


class HuggingFaceStream(IterableDataset[Any]):
    """An `IterableDataset` of Hugging Face's `datasets`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def begin(self, index: ItemIndex) -> Iterator[Any]:
        """Iterate over an epoch from an item on. The items before it are read, too.

        After epoch 0 `datasets` draws an order of the shards for each epoch, but not for what `skip` returns.
        """
        self._stream._epoch = index.epoch  # noqa: SLF001 (a DataLoader's processes share the one of `set_epoch`)
        if index.epoch or not index.number:
            return itertools.islice(self._stream, index.number, None)
        return iter(self._stream.skip(index.number))


def _copied(item: Any) -> Any:
    """A copy of an item; None if it cannot be copied."""
    try:
        return copy.deepcopy(item)
    except Exception:  # noqa: BLE001 (whatever it is made of)
        return None


def _equal(one: Any, other: Any) -> bool:
    """Whether two items are the same; True if that cannot be told."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, str | bytes):
        return bool(one == other)
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    except Exception:  # noqa: BLE001 (whatever they are made of)
        return True
    return True


def _seed_pipes(stream: IterableDataset[Any], seed: int) -> None:
    """Fix the random order of torch's data pipes, which torch no longer develops."""
    kind = getattr(torch.utils.data, "IterDataPipe", None)
    if kind is not None and isinstance(stream, kind):
        from torch.utils.data.graph_settings import apply_random_seed

        apply_random_seed(stream, torch.Generator().manual_seed(seed))


@contextmanager
def _undivided(seed: str | None) -> Iterator[None]:
    """Within this, torch reports this process as a DataLoader's only one; with None, as no process of one.

    `seed`: a text from which the reported seed follows.
    """
    info = get_worker_info()
    if info is None:
        yield
        return
    before = {"id": info.id, "num_workers": info.num_workers, "seed": info.seed}
    if seed is not None:
        _say(info, {"id": 0, "num_workers": 1, "seed": seed_of(seed)})
    else:
        torch_worker._worker_info = None  # noqa: SLF001 (no other way)
    try:
        yield
    finally:
        torch_worker._worker_info = info  # noqa: SLF001
        _say(info, before)


def _say(info: Any, fields: dict[str, int]) -> None:
    for name, value in fields.items():
        object.__setattr__(info, name, value)  # scripts must not change it, says its class
