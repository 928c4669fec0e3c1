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

import pytest
import torch

from elastic_ps.data.order import Order
from elastic_ps.data.text import TextDataset
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, events, make_mlp, running_job
from tests.testing.histories import check_histories
from tests.testing.oracle import assert_each_record_once, ranges_of

LINES, PER_FILE, FILES = 240, 60, 4


def write(folder: Path) -> str:
    """Text files whose lines are numbers, all of them of 4 bytes, in blocks of 20; returns their pattern."""
    for number in range(FILES):
        first = number * PER_FILE
        lines = "".join(f"{line:03}\n" for line in range(first, first + PER_FILE))
        (folder / f"{number}.txt").write_text(lines)
    return f"{folder}/*.txt"


def numbers(pattern: str, folder: Path) -> TextDataset:
    return TextDataset(pattern, transform=int, block_bytes=80, index=folder / "index")


def trains(
    data: TextDataset, epochs: int, *, seen: list[int], between: Callable[[Session, int], bool] | None = None
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
        job.until(lambda: len(job.status().members) == workers, "all workers are there")
    return False


def test_the_records_of_an_epoch_are_the_lines_of_the_files(tmp_path: Path) -> None:
    """In the same order as without a job, and each worker reads its share and at most two blocks more."""
    pattern = write(tmp_path)
    numbers(pattern, tmp_path)  # makes the index
    for workers in (1, 3):
        data = [numbers(pattern, tmp_path) for _ in range(workers)]
        seen: list[list[int]] = [[] for _ in range(workers)]
        with running_job(
            tmp_path / str(workers), worker={"replicas": workers}, data={"shardRecords": 5}
        ) as job:
            everyone = partial(_are_there, job, workers)

            for worker in range(workers):
                job.start(worker, trains(data[worker], 1, seen=seen[worker], between=everyone))
            job.join()
            commits = check_histories(job.history, records=LINES, epochs=1)
        assert sorted(itertools.chain(*seen)) == list(range(LINES))
        order = Order(LINES, data[0].block_sizes()).of_epoch(0)
        trained = [order[i] for each in commits for r in ranges_of(each) for i in range(r.start, r.stop)]
        assert Counter(trained) == Counter(range(LINES))
        if workers == 1:
            assert seen[0] == list(order)
        for own, lines in zip(data, seen, strict=True):
            assert own.bytes_read <= 4 * len(lines) + 2 * 80


def test_a_file_that_changes_under_a_job_is_refused(tmp_path: Path) -> None:
    """What was trained before stays as it was, and none of the changed records is trained."""
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
