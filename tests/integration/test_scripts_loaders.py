"""What a script may give to `session.loader`, and what is made of a DataLoader's options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Tally, running_job
from tests.testing.trained import alone, failing

RECORDS = 21


def batches_of(tmp_path: Path, source: Any, *, epochs: int = 1, **fields: Any) -> list[list[int]]:
    """Train on a loader alone; returns the records of each batch. All records are accounted for."""
    batches: list[list[int]] = []

    def script(session: Session) -> None:
        model = Tally(RECORDS)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        loader = session.loader(source, epochs=epochs)
        assert loader.dataset is source.dataset
        assert len(loader) == len(source)
        for _ in loader.epochs():
            for batch in loader:
                batches.append(batch.tolist())
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()

    with running_job(tmp_path, **fields) as job:
        job.start(0, script)
        job.join()
        assert job.status().progress.finished
        skipped = job.status().progress.records_skipped
    assert skipped == RECORDS * epochs - sum(len(batch) for batch in batches)
    assert check(read(tmp_path / "history"), Data(RECORDS, epochs)) == []
    return batches


def test_a_dataloader_without_shuffle_keeps_the_order(tmp_path: Path) -> None:
    batches = batches_of(tmp_path, DataLoader(Indexes(RECORDS), batch_size=4))
    assert [record for batch in batches for record in batch] == list(range(RECORDS))


def test_a_dataloader_with_shuffle_has_a_random_order(tmp_path: Path) -> None:
    source = DataLoader(Indexes(RECORDS), batch_size=4, shuffle=True)
    batches = batches_of(tmp_path, source, data={"shuffle": False})
    records = [record for batch in batches for record in batch]
    assert sorted(records) == list(range(RECORDS))
    assert records != sorted(records)


@pytest.mark.parametrize("drop_last", [True, False])
def test_only_the_end_of_an_epoch_makes_a_smaller_batch(tmp_path: Path, drop_last: bool) -> None:
    """Whatever number of records is handed out at a time; `drop_last` skips it."""
    source = DataLoader(Indexes(RECORDS), batch_size=4, shuffle=True, drop_last=drop_last)
    batches = batches_of(tmp_path, source, epochs=2, data={"shardRecords": 6})
    epoch = [4] * 5 + ([] if drop_last else [1])
    assert [len(batch) for batch in batches] == epoch * 2


def test_any_number_of_batches_may_be_left_out_in_a_row(tmp_path: Path) -> None:
    """With `drop_last`, of a version that cannot be whole. Each of them was a call in a call."""
    whole = 1200
    batches: list[torch.Tensor] = []
    source = DataLoader(Indexes(2 * whole - 1), batch_size=1, drop_last=True)

    def script(session: Session) -> None:
        model = Tally(2 * whole)
        session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        batches.extend(session.loader(source))

    with pytest.raises(UsageError, match="all records were skipped"):
        alone(tmp_path, script, consistency={"globalBatchSize": whole})
    assert len(batches) == whole


@pytest.mark.parametrize(("epochs", "batch_size"), [(0, 4), (2**32, 4), (1, 2**32)])
def test_more_than_a_call_can_say_is_refused(tmp_path: Path, epochs: int, batch_size: int) -> None:
    def script(session: Session) -> None:
        model = Tally(RECORDS)
        session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        session.loader(Indexes(RECORDS), batch_size, epochs=epochs)

    failing(tmp_path, script, UsageError, "expected a whole number from 1 to 4294967295")


@pytest.mark.parametrize(
    ("source", "persistent"), [("data set", True), ("globalBatchSize", False), ("stream", False)]
)
def test_worker_processes_of_a_loader_persist_if_it_says_so(
    tmp_path: Path, source: str, persistent: bool
) -> None:
    """Else each loop begins new ones, which have the data set as it is then. None are new within a loop."""
    data = PidsStream(RECORDS) if source == "stream" else Pids(RECORDS)
    given = DataLoader(
        data, batch_size=4, num_workers=1, persistent_workers=persistent, multiprocessing_context="fork"
    )
    seen: list[set[int]] = []

    def script(session: Session) -> None:
        model = Tally(RECORDS)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        loader = session.loader(given, epochs=2)
        for _ in loader.epochs():
            seen.append(set())
            for records, pids in loader:
                seen[-1].update(pids.tolist())
                optimizer.zero_grad()
                model(records).backward()
                optimizer.step()

    alone(tmp_path, script, consistency={"globalBatchSize": 7} if source == "globalBatchSize" else {})
    assert [len(pids) for pids in seen] == [1, 1]
    assert (seen[0] == seen[1]) == persistent
    assert check(read(tmp_path / "history"), Data(RECORDS, 2)) == []


class Pids(torch.utils.data.Dataset[tuple[int, int]]):
    """Records with the process that they were fetched by."""

    def __init__(self, records: int) -> None:
        self._records = records

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class PidsStream(torch.utils.data.IterableDataset[tuple[int, int]]):
    """The same as a stream."""

    def __init__(self, records: int) -> None:
        self._records = records

    def __len__(self) -> int:
        return self._records

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((index, os.getpid()) for index in range(self._records))


class Scaling(DataLoader[Any]):
    """Does work in its loop."""

    def __iter__(self) -> Any:
        return (batch / 255 for batch in super().__iter__())


class Stateful(DataLoader[Any]):
    """Has iterators of its own."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


class Prepared(DataLoader[int]):
    """Stands for accelerate's, which is not needed to tell it by its name."""

    __module__ = "accelerate.data_loader"


DATA = Indexes(RECORDS)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(5))), "has a SubsetRandomSampler"),
        (lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 21, 21)), "WeightedRandomSampler"),
        (lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=8)), "has a RandomSampler"),
        (lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)), "has a RandomSampler"),
        (
            lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)),
            "batch_sampler of its own",
        ),
        (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
        (lambda: Prepared(DATA, 4), "before accelerator.prepare"),
        (lambda: Scaling(DATA, 4), "Scaling, which has a __iter__ of its own"),
        (lambda: Stateful(DATA, 4, shuffle=True), "Stateful, which has a _get_iterator of its own"),
        (lambda: Scaling(PidsStream(RECORDS), 4), "Scaling, which has a __iter__ of its own"),
    ],
)
def test_a_dataloader_that_chooses_records_or_makes_batches_is_refused(
    tmp_path: Path, make: Callable[[], Any], match: str
) -> None:
    failing(tmp_path, lambda session: session.loader(make()), UsageError, match)


@pytest.mark.parametrize("option", ["sampler", "batch_sampler", "shuffle"])
def test_options_that_choose_records_are_refused(tmp_path: Path, option: str) -> None:
    def script(session: Session) -> None:
        options: dict[str, Any] = {option: None}
        session.loader(DATA, 4, **options)

    failing(tmp_path, script, UsageError, f"no option {option}")


@pytest.mark.parametrize("given", ["option", "DataLoader"])
def test_batches_out_of_order_are_refused(tmp_path: Path, given: str) -> None:
    """Records would be counted with another batch than theirs."""

    def script(session: Session) -> None:
        if given == "option":
            session.loader(DATA, 4, num_workers=2, in_order=False)
        source = DataLoader(DATA, 4, num_workers=2)
        source.in_order = False
        session.loader(source)

    failing(tmp_path, script, UsageError, "in_order is False")


class Growing(Indexes):
    """Has more records, or fewer, when a script says so."""

    def grow(self, records: int) -> None:
        self._records = records


@pytest.mark.parametrize(("at", "records", "trained"), [(0, 42, 1), (6, 42, 7), (0, 1, 1), (None, 42, 6)])
def test_a_data_set_whose_length_changes_is_refused(
    tmp_path: Path, at: int | None, records: int, trained: int
) -> None:
    """At the next batch, or where the next loop begins: the job would go on with the first length."""
    data, batches = Growing(RECORDS), 0

    def script(session: Session) -> None:
        nonlocal batches
        model = Tally(RECORDS)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        loader = session.loader(DataLoader(data, batch_size=4), epochs=3)
        for _ in loader.epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
                if batches == at:
                    data.grow(records)
                batches += 1
            if at is None:
                data.grow(records)

    failing(tmp_path, script, UsageError, f"has {records} records now; it had {RECORDS}")
    assert batches == trained


def own_split(session: Session, rank: int = 0, *, records: int = RECORDS) -> None:
    """Train on a part of the data that this process has drawn itself."""
    part, _ = random_split(Indexes(100), [records, 100 - records])
    model = Tally(100)
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for batch in session.loader(part, 4, epochs=2):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


def test_records_that_each_worker_draws_are_refused(tmp_path: Path) -> None:
    """With a generator that has a seed they are the same; see `test_fingerprint` for what is compared."""
    checkpoints = tmp_path / "checkpoints"
    with running_job(tmp_path, checkpoints=checkpoints) as job:
        job.start(0, own_split)
        job.join()
        job.start(1, own_split)
        with pytest.raises(
            InvalidModel, match=r"not the job's: .*Subset\.indices .*manual_seed.*session\.seed"
        ):
            job.join()
    with running_job(tmp_path, checkpoints=checkpoints, resume="require") as job:
        job.start(0, own_split)
        with pytest.raises(InvalidModel, match=r"not those of the checkpoint .*Subset\.indices"):
            job.join()


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (own_split, r"of process 1 of this worker are not those of process 0: .*Subset\.indices"),
        (
            lambda session, rank: own_split(session, records=9 + rank),
            "10 records for 2 epochs .* has 9 for 2",
        ),
    ],
)
def test_records_that_each_process_of_a_worker_draws_are_refused(
    tmp_path: Path, script: Callable[[Session, int], None], match: str
) -> None:
    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        with pytest.raises(InvalidModel, match=match):
            job.join()


def test_two_loaders_at_a_time_are_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = Tally(RECORDS)
        session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for _ in zip(session.loader(DATA, 4), session.loader(DATA, 4), strict=True):
            pass

    failing(tmp_path, script, UsageError, "StackDataset")
