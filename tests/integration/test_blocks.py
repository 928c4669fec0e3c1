"""A job whose records are in blocks: each is trained once, and a worker reads its own blocks."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from elastic_ps.data.blocks import BlockDataset
from elastic_ps.data.columnar import ParquetDataset
from elastic_ps.data.order import Order
from elastic_ps.data.tar import TarDataset
from elastic_ps.data.text import TextDataset
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Job, events, make_mlp, running_job
from tests.testing.histories import check_histories
from tests.testing.oracle import assert_each_record_once, ranges_of
from tests.testing.trained import await_training
from tests.unit.data.test_stream import Stream
from tests.unit.data.test_tar import write_tar

LINES, PER_FILE, FILES, PER_BLOCK = 240, 60, 4, 20


def write(folder: Path, kind: str = "txt") -> str:
    """Files whose records are numbers, in blocks of 20; returns their pattern. Lines of text have 4 bytes."""
    for number in range(FILES):
        path, first = folder / f"{number}.{kind}", number * PER_FILE
        lines = [f"{line:03}" for line in range(first, first + PER_FILE)]
        if kind == "txt":
            path.write_text("".join(f"{line}\n" for line in lines))
        elif kind == "tar":
            write_tar(path, {f"{line}.txt": line.encode() for line in lines})
        else:
            pyarrow.parquet.write_table(pyarrow.table({"line": lines}), path, row_group_size=PER_BLOCK)
    return f"{folder}/*.{kind}"


def numbers(pattern: str, folder: Path) -> BlockDataset:
    index = folder / "index"
    if pattern.endswith("tar"):  # a header and some content, in 512 bytes each
        size = PER_BLOCK * 1024
        return TarDataset(pattern, transform=lambda r: int(r["txt"]), block_bytes=size, index=index)
    if pattern.endswith("parquet"):
        return ParquetDataset(pattern, transform=lambda r: int(r["line"]), index=index)
    return TextDataset(pattern, transform=int, block_bytes=80, index=index)


def cost(data: BlockDataset) -> tuple[float, int]:
    """How many bytes are read for a block, and in addition when the files are opened."""
    read = [0]
    for _ in range(2):
        data.__getitems__(range(LINES))
        read.append(data.bytes_read)
    again = read[2] - read[1]
    return again / len(data.block_sizes()), read[1] - again


def trains(
    data: Any, epochs: int, *, seen: list[int], between: Callable[[Session, int], bool] | None = None
) -> Callable[[Session], None]:
    """A worker's script; `between` may do something in a step, and ends the script if it is True."""

    def script(session: Session) -> None:
        model = make_mlp((1, 4, 1))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
        for step, batch in enumerate(session.loader(data, batch_size=5, epochs=epochs)):
            seen.extend(batch.tolist())
            optimizer.zero_grad()
            model(batch[:, None] / LINES).square().mean().backward()
            if between is not None and between(session, step):
                session.close()
                return
            optimizer.step()

    return script


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_workers_come_and_go_and_the_server_is_lost(tmp_path: Path, seed: int) -> None:
    """A worker dies in a step, one is added, and the server is lost; then another number of them resumes."""
    pattern, chance = write(tmp_path), random.Random(seed)
    checkpoints, epochs = tmp_path / "checkpoints", 3
    fields: dict[str, Any] = {
        "parameterServer": {"checkpoint": {"everyVersions": 2}},
        "data": {"order": {"buffer": 1 + seed}, "shardRecords": 10},
    }
    dies, lost, stops = (chance.randrange(*span) for span in ((2, 6), (8, 12), (14, 18)))
    with running_job(tmp_path / "1", checkpoints=checkpoints, **fields) as job:

        def happens(session: Session, _: int) -> bool:
            if session.version >= lost and not restarted.is_set():
                restarted.set()
                job.restart(0)
            if session.version >= stops:
                session.drain()
            return False

        restarted, dead = threading.Event(), threading.Event()

        def death(_: Session, step: int) -> bool:
            if step == dies:
                dead.set()
            return step == dies

        def added(session: Session, step: int) -> bool:
            if session.version >= stops:
                session.drain()
            return False

        job.start(0, trains(numbers(pattern, tmp_path), epochs, seen=[], between=happens))
        job.start(1, trains(numbers(pattern, tmp_path), epochs, seen=[], between=death))
        job.until(dead.is_set, "worker 1 has died")
        job.start(1, trains(numbers(pattern, tmp_path), epochs, seen=[], between=added))
        job.join()
        assert restarted.is_set()
        reached = job.version
    with running_job(tmp_path / "2", checkpoints=checkpoints, resume="require", **fields) as job:
        for worker in range(3):
            job.start(worker, trains(numbers(pattern, tmp_path), epochs, seen=[]))
        job.join()
        assert job.status().progress.finished
    commits: dict[int, dict[str, Any]] = {}
    for part in ("1", "2"):  # a version that was made again replaces the one that was lost
        for event in events(tmp_path / part / "history", "ps-0"):
            if event["event"] == "commit":
                commits = {version: each for version, each in commits.items() if version < event["version"]}
                commits[event["version"]] = event
    assert max(commits) > reached
    assert_each_record_once(commits.values(), records=LINES, epochs=epochs)


def _are_there(job: Job, workers: int, _: Session, step: int) -> bool:
    """In its first step a worker waits for the others, so that none has trained all before they begin."""
    if step == 0:
        await_training(job, *range(workers))
    return False


@pytest.mark.parametrize("kind", ["txt", "tar", "parquet"])
def test_the_records_of_an_epoch_are_the_lines_of_the_files(tmp_path: Path, kind: str) -> None:
    """In the same order as without a job, and each worker reads its share and at most two blocks more."""
    epochs = 2
    pattern = write(tmp_path, kind)
    numbers(pattern, tmp_path)  # makes the index
    of_block, opening = cost(numbers(pattern, tmp_path))
    tail, size = 4096, (tmp_path / f"0.{kind}").stat().st_size
    most = {"txt": 80, "tar": PER_BLOCK * 1024, "parquet": size * PER_BLOCK / PER_FILE + min(size, tail)}
    assert of_block <= most[kind]
    assert opening == 0 or kind == "parquet"
    for workers in (1, 3):
        data = [numbers(pattern, tmp_path) for _ in range(workers)]
        assert all(each.block_sizes() == [PER_BLOCK] * (LINES // PER_BLOCK) for each in data)
        seen: list[list[int]] = [[] for _ in range(workers)]
        with running_job(
            tmp_path / str(workers), worker={"replicas": workers}, data={"shardRecords": 5}
        ) as job:
            everyone = partial(_are_there, job, workers)

            for worker in range(workers):
                job.start(worker, trains(data[worker], epochs, seen=seen[worker], between=everyone))
            job.join()
            commits = check_histories(job.history, records=LINES, epochs=epochs)
        assert sorted(itertools.chain(*seen)) == sorted([*range(LINES)] * epochs)
        orders = [Order(LINES, data[0].block_sizes()).of_epoch(epoch) for epoch in range(epochs)]
        trained = [orders[r.epoch][r.start : r.stop] for each in commits for r in ranges_of(each)]
        assert Counter(itertools.chain(*trained)) == Counter([*range(LINES)] * epochs)
        if workers == 1:
            assert seen[0] == [*itertools.chain(*orders)]
        for own, lines in zip(data, seen, strict=True):
            blocks = len(lines) / PER_BLOCK + 2 * epochs
            assert own.bytes_read <= of_block * blocks + opening


class Counted(Stream):
    """A stream of so many numbers."""

    def __len__(self) -> int:
        return self.items or 0


@pytest.mark.parametrize("make", [Indexes, Counted])
def test_records_are_in_the_blocks_that_the_job_says(tmp_path: Path, make: Callable[[int], Any]) -> None:
    """Also those of a worker that is lost. A stream keeps its order."""
    epochs, records = 2, 100
    seen: tuple[list[int], list[int]] = ([], [])
    with running_job(tmp_path, data={"order": {"blocks": 7, "buffer": 2}, "shardRecords": 5}) as job:

        def lost(session: Session, step: int) -> bool:
            _are_there(job, 2, session, step)
            return step == 6

        job.start(0, trains(make(records), epochs, seen=seen[0], between=partial(_are_there, job, 2)))
        job.start(1, trains(make(records), epochs, seen=seen[1], between=lost))
        job.join()
        commits = job.commits()
    assert_each_record_once(commits, records=records, epochs=epochs)
    order = Order(records, 7, 2, make is Indexes, job.spec.data.seed)
    trained: tuple[list[int], list[int]] = ([], [])
    runs = dict[tuple[int, int], set[int]]()
    for each in (c for commit in commits for c in commit["contributions"]):
        for epoch, start, stop in each["records"]:
            trained[each["worker"]].extend(order.of_epoch(epoch)[start:stop])
            for position in range(start, stop):
                runs.setdefault((epoch, order.run_end(epoch, position)), set()).add(each["worker"])
    assert trained[0] == seen[0]
    assert trained[1] == seen[1][: len(trained[1])] != []
    shared = sum(len(workers) > 1 for workers in runs.values())
    assert shared <= 2 < len(runs), "the last group of an epoch may be shared, and that of the lost worker"


def test_a_file_that_changes_under_a_job_is_refused(tmp_path: Path) -> None:
    """The job keeps what it has trained, and trains none of the changed records."""
    pattern, seen, changed = write(tmp_path), list[int](), list[int]()

    def changes(session: Session, step: int) -> bool:
        if step == 2:
            place = next(n for n in range(FILES) if not any(line // PER_FILE == n for line in seen))
            (tmp_path / f"{place}.txt").write_text("999\n" * PER_FILE)
            changed.append(place)
        return False

    with running_job(tmp_path, checkpoints=tmp_path / "kept", data={"shardRecords": 5}) as job:
        with pytest.raises(UsageError, match=r"\d\.txt has changed since its index was made"):
            job.run(trains(numbers(pattern, tmp_path), 1, seen=seen, between=changes), workers=1)
        trained = {line // PER_FILE for line in seen}
        assert changed[0] not in trained
        assert 999 not in seen
        assert job.version >= 2


def test_a_worker_whose_files_are_other_ones_is_refused(tmp_path: Path) -> None:
    pattern = write(tmp_path)
    first = numbers(pattern, tmp_path)
    (tmp_path / "host").mkdir()
    changed = write(tmp_path / "host")
    path = tmp_path / "host" / "2.txt"
    path.write_text(path.read_text().replace("130", "999"))
    other = numbers(changed, tmp_path)
    refused: list[str] = []

    def second(session: Session) -> None:
        with pytest.raises(InvalidModel) as caught:
            trains(other, 1, seen=[])(session)
        refused.append(str(caught.value))

    with running_job(tmp_path) as job:
        began = threading.Event()

        def joins(_: Session, step: int) -> bool:
            if step == 0:
                began.set()
                job.until(lambda: bool(refused), "worker 1 is refused")
            return False

        job.start(0, trains(first, 1, seen=[], between=joins))
        job.until(began.is_set, "worker 0 has begun")
        job.start(1, second)
        job.join()
    assert "the entries of TextDataset.block_digests() differ" in refused[0]
