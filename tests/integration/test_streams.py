"""An `IterableDataset` is trained as a data set of its items is: each is in the model exactly once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import active_children, current_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic_ps.checkpoint.plain import load_checkpoint
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.errors import UsageError
from elastic_ps.local import Launcher, Options
from elastic_ps.worker.session import Session
from elastic_ps.worker.wire.dialogue import WorkerLimits
from tests.testing.harness import Job, Numbers, Tally, events, make_mlp, running_job
from tests.testing.launching import make_job, version_of, wait_for_end, wait_for_workers
from tests.testing.oracle import (
    Commit,
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    ranges_of,
    replay,
)
from tests.testing.polling import LIMIT, eventually
from tests.testing.scripts.streamed import Counted, Sought
from tests.testing.tiers import per_change
from tests.testing.trained import failing, sgd

Pair = tuple[torch.Tensor, torch.Tensor]
STREAMED = "tests.testing.scripts.streamed:main"
IN_ORDER = {"shuffle": False, "shardRecords": 10}


class Stream(IterableDataset[Pair]):
    """The records of `Numbers` one after the other."""

    def __init__(self, data: Numbers) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Pair]:
        return (self.data[index] for index in range(len(self.data)))

    def __len__(self) -> int:
        return len(self.data)


class Divided(Counted):
    """Shares its items out among the processes of a DataLoader, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        processes, process = (info.num_workers, info.id) if info is not None else (1, 0)
        return iter(range(process, self.items, processes))


@pytest.fixture
def short_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where processes keep sockets while they live; a killed one leaves them.

    A socket's path may have 107 bytes, for which pytest's directories may be too deep.
    """
    del tmp_path  # pytest has made its own directory
    with TemporaryDirectory(dir="/tmp") as path:
        # A documented name of tempfile, which reads TMPDIR only once.
        monkeypatch.setattr("tempfile.tempdir", path)
        # Another test may have made this process's own directory, which forked processes share.
        config = current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001
        monkeypatch.delitem(config, "tempdir", raising=False)
        yield Path(path)


def trainer(models: dict[Any, torch.nn.Module], source: Any, **options: Any) -> Callable[..., None]:
    """The ordinary loop, of a worker or of one of its processes."""

    def script(session: Session, rank: int = 0) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        models[session.worker, rank] = model
        for x, y in session.loader(source, **options):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    return script


def tally(counted: dict[int, Tally], source: Any, **options: Any) -> Callable[[Session], None]:
    """The loop with a model that tells which items it was trained on: see `assert_in_the_model`."""

    def script(session: Session) -> None:
        model = counted[session.worker] = Tally(options["records"])
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for batch in session.loader(source() if callable(source) else source, 4, **options):
            optimizer.zero_grad()
            (model(batch) / len(batch)).backward()
            optimizer.step()

    return script


def assert_in_the_model(model: Tally, commits: list[Commit], *, records: int, epochs: int) -> None:
    """Each item's weight has gone down by its share of each version that it is counted in."""
    assert_each_record_once(commits, records=records, epochs=epochs)
    expected = torch.zeros(records)
    for commit in commits:
        numbers = [i for r in ranges_of(commit) for i in range(r.start, r.stop)]
        for number, times in Counter(numbers).items():
            expected[number] -= times / len(numbers)
    torch.testing.assert_close(model.weight.detach(), expected)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_bits_are_those_of_a_data_set(tmp_path: Path, workers: int) -> None:
    data, values = Numbers(131), []
    for name, source in (("set", data), ("stream", Stream(data)), ("seconds", Stream(data))):
        models: dict[Any, torch.nn.Module] = {}
        fields: dict[str, Any] = {"consistency": {"deterministic": True}, "worker": {"replicas": workers}}
        with running_job(tmp_path / name, data={**IN_ORDER, "shuffle": name == "stream"}, **fields) as job:
            job.run(trainer(models, source, batch_size=5, epochs=2), workers=workers)
            assert_each_record_once(job.commits(), records=131, epochs=2)
        values.append(torch.cat([p.detach().flatten() for p in models[0, 0].parameters()]))
    assert torch.equal(values[0], values[1]), "data.shuffle is for data sets"
    assert torch.equal(values[0], values[2])


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_options_of_a_dataloader(tmp_path: Path, num_workers: int, drop_last: bool) -> None:
    """A stream that shares itself out among the DataLoader's processes is whole for the job."""
    source = DataLoader(
        Divided(22),
        batch_size=4,
        num_workers=num_workers,
        drop_last=drop_last,
        collate_fn=lambda items: torch.tensor(items) + 100,
        multiprocessing_context="fork" if num_workers else None,
    )
    batches: list[list[int]] = []

    def script(session: Session) -> None:
        model = Tally(22)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        loader = session.loader(source, epochs=2, records=22)
        assert loader.dataset is source.dataset
        assert len(loader) == (5 if drop_last else 6)
        for _ in loader.epochs():
            for batch in loader:
                batches.append(batch.tolist())
                optimizer.zero_grad()
                model(batch - 100).backward()
                optimizer.step()

    with running_job(tmp_path, data={"shardRecords": 6}) as job:
        job.run(script, workers=1)
        assert job.status().progress.records_skipped == (4 if drop_last else 0)
    epoch = [list(range(100 + start, min(122, 104 + start))) for start in range(0, 22, 4)]
    assert batches == (epoch[:5] if drop_last else epoch) * 2


MODES: list[dict[str, Any]] = [
    {"mode": "sync"},
    {"deterministic": True},
    {"globalBatchSize": 7},
    {"backupWorkers": 1},
    {"mode": "accumulate", "gradients": 2},
    {"mode": "bounded", "maxStaleness": 2, "stalenessScale": "none"},
    {"mode": "async", "stalenessScale": "none"},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [Counted, Sought])
@pytest.mark.parametrize("consistency", MODES, ids=lambda each: " ".join(map(str, each.values())))
def test_each_item_is_in_the_model_once_in_every_mode(
    tmp_path: Path, consistency: dict[str, Any], stream: type[Counted]
) -> None:
    counted: dict[int, Tally] = {}
    with running_job(tmp_path, consistency=consistency, worker={"replicas": 3}, data=IN_ORDER) as job:
        job.run(tally(counted, lambda: stream(150), records=150, epochs=2), workers=3)
        assert_in_the_model(counted[0], job.commits(), records=150, epochs=2)
    assert check(read(tmp_path / "history"), Data(150, 2)) == []


@pytest.mark.parametrize("outer", ["average", "downpour"])
def test_local_steps(tmp_path: Path, outer: str) -> None:
    counted: dict[int, Tally] = {}
    consistency = {"mode": "local", "steps": 3, "outer": outer}
    with running_job(tmp_path, consistency=consistency, worker={"replicas": 2}, data=IN_ORDER) as job:
        job.run(tally(counted, lambda: Counted(70), records=70), workers=2)
        assert_each_record_once(job.commits(), records=70, epochs=1)
    assert bool((counted[0].weight < 0).all())


@pytest.mark.parametrize("strategy", ["parameter-server", "all-reduce"])
def test_the_steps_are_those_of_one_process(tmp_path: Path, strategy: str) -> None:
    """The replay reads the data set at the positions that the parameter server has recorded."""
    data, models = Numbers(131), dict[Any, torch.nn.Module]()
    checkpoints = tmp_path / "checkpoints"
    with running_job(tmp_path, strategy=strategy, checkpoints=checkpoints, data=IN_ORDER) as job:
        job.run(trainer(models, Stream(data), batch_size=5, epochs=2), workers=3)
        assert_replayed(job, models[0, 0], data, epochs=2)


def test_the_processes_of_a_worker_share_its_batches(tmp_path: Path) -> None:
    data, models = Numbers(131), dict[Any, torch.nn.Module]()
    with running_job(tmp_path, worker={"processes": 2}, data=IN_ORDER) as job:
        for worker in range(2):
            job.start_processes(worker, trainer(models, Stream(data), batch_size=5, epochs=2))
        job.join()
        assert_replayed(job, models[0, 0], data, epochs=2)


def assert_replayed(job: Job, model: torch.nn.Module, data: Numbers, *, epochs: int) -> None:
    commits = job.commits()
    assert_each_record_once(commits, records=len(data), epochs=epochs)
    assert_equal_up_to_round_off(model, make_mlp(), lambda fresh: replay(commits, data, fresh, sgd, job.spec))


class OfEpoch(Counted):
    """Each epoch has another order."""

    def set_epoch(self, epoch: int) -> None:
        self.order = list(range(self.items))[:: 1 - 2 * (epoch % 2)]

    def _from(self, number: int) -> Iterator[int]:
        return iter(self.order[number:])


def test_a_stream_is_told_the_epoch(tmp_path: Path) -> None:
    batches: list[list[int]] = []

    def script(session: Session) -> None:
        model = Tally(12)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for batch in session.loader(OfEpoch(12), 4, records=12, epochs=3):
            batches.append(batch.tolist())
            model(batch).backward()
            optimizer.step()

    with running_job(tmp_path) as job:
        job.run(script, workers=1)
    forth = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batches == [*forth, *(batch[::-1] for batch in forth[::-1]), *forth]


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [Counted, Sought])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pausing_leaving_an_epoch_and_losing_the_parameter_server(
    tmp_path: Path, stream: type[Counted], num_workers: int
) -> None:
    """After each of them records come again that lie before what was read."""
    counted: dict[int, Tally] = {}

    def script(session: Session) -> None:
        model = counted[session.worker] = Tally(120)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        options: dict[str, Any] = {"num_workers": num_workers}
        if num_workers:
            options["multiprocessing_context"] = "fork"
        loader, steps = session.loader(stream(120), 4, epochs=2, records=120, **options), 0
        for _ in loader.epochs():
            for batch in loader:
                optimizer.zero_grad()
                (model(batch) / len(batch)).backward()
                optimizer.step()
                steps += 1
                if session.worker == 0 and steps % 7 == 3:
                    session.pause()
                if session.worker == 1 and steps == 5:
                    break
                if session.worker == 0 and steps == 9:
                    job.restart(0)

    with running_job(
        tmp_path,
        checkpoints=tmp_path / "checkpoints",
        parameterServer={"checkpoint": {"everyVersions": 1}},
        worker={"replicas": 2},
        data=IN_ORDER,
    ) as job:
        job.run(script, workers=2)
    histories = read(tmp_path / "history")
    assert check(histories, Data(120, 2)) == []
    assert bool((counted[0].weight < 0).all())


def test_what_three_workers_read(tmp_path: Path) -> None:
    """About the whole stream once in an epoch; one that can begin anywhere, about their parts."""
    records, epochs = 600, 2
    found: dict[str, list[Counted]] = {}
    for kind in (Counted, Sought):
        streams = found[kind.__name__] = [kind(records) for _ in range(3)]
        counted: dict[int, Tally] = {}

        def script(session: Session, streams: list[Counted] = streams, counted: Any = counted) -> None:
            tally(counted, streams[session.worker], records=records, epochs=epochs)(session)

        with running_job(tmp_path / kind.__name__, worker={"replicas": 3}, data={"shardRecords": 20}) as job:
            job.run(script, workers=3)
            assert_in_the_model(counted[0], job.commits(), records=records, epochs=epochs)
    for stream in found["Counted"]:
        assert len(stream.begun) <= epochs
        assert stream.read <= records * epochs
    together = sum(stream.read for stream in found["Sought"])
    assert together < 1.1 * records * epochs, "a batch or less is passed over"


@pytest.mark.usefixtures("short_directory")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("items", "match"), [(18, "has ended after 18 items"), (21, "has more than 20 items")]
)
def test_a_length_that_is_wrong(tmp_path: Path, num_workers: int, items: int, match: str) -> None:
    class Lying(Counted):
        def __len__(self) -> int:
            return 20

    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options["multiprocessing_context"] = "fork"

    def script(session: Session) -> None:
        model = Tally(30)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for batch in session.loader(Lying(items), 4, **options):
            model(batch).backward()
            optimizer.step()

    failing(tmp_path, script, UsageError, match)


def test_the_first_items_of_a_stream_without_an_end(tmp_path: Path) -> None:
    counted: dict[int, Tally] = {}
    with running_job(tmp_path) as job:
        job.run(tally(counted, Counted(10**12), records=50, epochs=2), workers=1)
        assert_in_the_model(counted[0], job.commits(), records=50, epochs=2)


@pytest.mark.parametrize("leaves", [False, True])
def test_the_processes_that_read_a_stream_end_with_the_session(
    tmp_path: Path, short_directory: Path, leaves: bool
) -> None:
    """They live as long as the job, and clean up behind themselves, which a killed process does not."""
    before = set(active_children())
    seen: list[list[Path]] = []
    kept, kind = short_directory, "pymp-*"

    def script(session: Session) -> None:
        model = Tally(40)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for batch in session.loader(
            Counted(40), 4, records=40, num_workers=2, multiprocessing_context="fork"
        ):
            seen.append(list(kept.glob(kind)))
            model(batch).sum().backward()
            optimizer.step()
            if leaves:
                session.drain()

    with running_job(tmp_path) as job:
        job.worker_limits = WorkerLimits(fetching=timedelta(seconds=LIMIT))
        job.run(script, workers=1)
        assert len(set(active_children()) - before) == 0
    assert seen[-1], "the processes keep something while they live"
    assert list(kept.glob(kind)) == []


class Stuck(Numbers):
    """Waits for a file before it has any record but the first ones."""

    def __init__(self, records: int, go: Path) -> None:
        super().__init__(records)
        self.go = go

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index > 8:
            eventually(self.go.exists, "the test lets it go on")
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_session_does_not_wait_for_a_record_that_does_not_come(tmp_path: Path) -> None:
    before, alive = set(active_children()), list[int]()
    go = tmp_path / "go"

    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(sgd(model), model)
        for _ in session.loader(DataLoader(Stuck(80, go), batch_size=4, num_workers=2)):
            break
        session.close()
        alive.append(len(set(active_children()) - before))

    with running_job(
        tmp_path, consistency={"globalBatchSize": 40}, data={"shuffle": False, "shardRecords": 40}
    ) as job:
        job.worker_limits = WorkerLimits(fetching=timedelta(0))
        job.run(script, workers=1)
    go.touch()
    assert alive == [2]
    eventually(lambda: not set(active_children()) - before, "they end")


# --- real processes


@pytest.mark.parametrize(("seeks", "processes"), per_change([(False, 0), (True, 2)], keep=[(True, 2)]))
@pytest.mark.nightly
def test_a_worker_is_killed_and_the_job_continues_from_a_checkpoint(
    tmp_path: Path, short_directory: Path, monkeypatch: pytest.MonkeyPatch, seeks: bool, processes: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_directory))  # so no `forks()`, which other tests use afterwards
    records, epochs = 900, 2
    hurry, checkpoints, counts = tmp_path / "hurry", tmp_path / "checkpoints", tmp_path / "counts"
    counts.mkdir()
    job = make_job(
        workers=3,
        spec={
            "entrypoint": STREAMED,
            "data": {"shardRecords": 40},
            "parameterServer": {"checkpoint": {"path": str(checkpoints)}},
        },
        records=records,
        epochs=epochs,
        read=str(counts),
        seeks=seeks,
        processes=processes,
        seconds=0.5,
        hurry=str(hurry),
    )
    with Launcher(job, Options(root=tmp_path / "state", history=tmp_path / "1")) as launcher:
        launcher.start()
        workers = wait_for_workers(launcher, lambda w: len(w) == 3, "3 workers train")
        eventually(lambda: version_of(launcher) > 5, "some steps")
        os.kill(workers[1], signal.SIGKILL)
        wait_for_workers(launcher, lambda w: w.get(1) not in (None, workers[1]), "it is replaced")
        now = version_of(launcher)
        eventually(lambda: version_of(launcher) > now + 5, "some steps more")
        launcher.stop("the test says so")
        wait_for_end(launcher)
    first = [e for e in events(tmp_path / "1", "ps-0") if e["event"] == "commit"]
    hurry.touch()
    with Launcher(
        job, Options(root=tmp_path / "state", history=tmp_path / "2", resume=checkpoints)
    ) as launcher:
        launcher.start()
        wait_for_end(launcher)
        assert launcher.outcome().verdict.phase == "Succeeded", launcher.outcome().verdict
    second = [e for e in events(tmp_path / "2", "ps-0") if e["event"] == "commit"]
    assert 5 < second[0]["version"] <= len(first) + 1
    commits = first[: second[0]["version"] - 1] + second
    model = Tally(records)
    assert load_checkpoint(checkpoints, model) == commits[-1]["version"]
    assert_in_the_model(model, commits, records=records, epochs=epochs)
    assert all(int(count.read_text()) <= (epochs + 1) * records for count in counts.iterdir())
