"""A worker's script that trains on a stream, and writes down how much of it was read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

import elastic_ps
from tests.testing.harness import Tally
from tests.testing.polling import LIMIT


class Counted(IterableDataset[int]):
    """The numbers from 0 to `items - 1`.

    Attributes:
        read: how many items were read, over all iterators.
        begun: where each iterator began.
    """

    def __init__(self, items: int) -> None:
        self.items, self.read, self.begun = items, 0, list[int]()

    def __iter__(self) -> Iterator[int]:
        return self._from(0)

    def _from(self, number: int) -> Iterator[int]:
        self.begun.append(number)
        for item in range(number, self.items):
            self.read += 1
            yield item


class Sought(Counted):
    """It can begin anywhere."""

    def iterate_from(self, number: int) -> Iterator[int]:
        return self._from(number)


def main(
    records: int,
    read: str,
    epochs: int = 1,
    batch_size: int = 4,
    processes: int = 0,
    seeks: bool = False,
    seconds: float = 0.0,
    hurry: str = "",
) -> None:
    """Train.

    Args:
        read: a directory, for a file with the number of items that this worker has read.
        processes: that load ahead.
        seeks: the stream can begin anywhere.
        seconds: what a batch takes at least, until the file `hurry` exists.
    """
    torch.set_num_threads(1)
    model, stream = Tally(records), (Sought if seeks else Counted)(records)
    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    loader = session.loader(
        stream,
        batch_size,
        epochs=epochs,
        records=records,
        num_workers=processes,
        timeout=LIMIT * bool(processes),
    )
    for batch in loader:
        optimizer.zero_grad()
        (model(batch) / len(batch)).backward()
        optimizer.step()
        if not (seconds and Path(hurry).exists()):
            time.sleep(seconds)
    Path(read, str(session.worker)).write_text(str(stream.read))
