"""Faults against jobs of real processes: each happens, the job recovers, and nothing is lost.

What fails is printed as the one command that repeats it. `docs/faults.md` has the table.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from elastic_ps.checkpoint.store import Manifest, Store
from elastic_ps.drill.faults import Kind, schedule
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.drill.runner import Drill, run
from elastic_ps.errors import CheckpointError, ElasticPSError, Fenced, Refused
from elastic_ps.job import TrainingJob, parse_job
from elastic_ps.local import Launcher, Options
from elastic_ps.local.poller import fetch_status
from elastic_ps.server.keeper import Keeper
from elastic_ps.server.orders import Written
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, unary
from elastic_ps.transport.grpc import GrpcConnection
from elastic_ps.transport.wire import messages
from tests.integration.launching import eventually

LIMIT = timedelta(seconds=120)
MIB = 1024 * 1024
RECORDS = 4000


def job(name: str, *, records: int = RECORDS, workers: int = 2, **arguments: Any) -> TrainingJob:
    spec = {
        "entrypoint": "tests.integration.fault_job:main",
        "arguments": {"records": records, "epochs": 1, **arguments},
        "parameterServer": {"bucketBytes": 4096, "checkpoint": {"interval": "300ms"}},
        "worker": {"replicas": workers, "leaseDuration": "2s"},
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    return parse_job({**document, "metadata": {"name": name}, "spec": spec}, source="test")


def drill(tmp_path: Path, kinds: list[Kind], *, seed: int) -> Drill:
    """Train with these faults; fails with the command that repeats it."""
    faults = schedule(seed, kinds, workers=2)
    history = tmp_path / "history"
    result = run(job("faults"), faults, options=Options(root=tmp_path), history=history, limit=LIMIT)
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    lines = [f"again: python -m pytest '{test}'", *map(str, result.injections), *map(str, result.violations)]
    assert result.passed, "\n".join([str(result.outcome.verdict), *lines])
    assert result.records == RECORDS
    for each in result.injections:
        if each.state == "unavailable":
            pytest.skip(each.detail)
        assert (each.lost, each.twice) == (0, 0)
    return result


@pytest.mark.parametrize("seed", [1])
def test_workers_are_killed_frozen_and_taken_away(tmp_path: Path, seed: int) -> None:
    result = drill(tmp_path, ["kill-worker", "freeze-worker", "stop-worker"], seed=seed)
    assert [each.state for each in result.injections] == ["recovered"] * 3
    assert [each.redone for each in result.injections] == [0] * 3
    assert result.outcome.status.failures == 0


@pytest.mark.parametrize("seed", [1])
def test_the_parameter_server_is_killed_and_a_checkpoint_broken(tmp_path: Path, seed: int) -> None:
    result = drill(tmp_path, ["kill-ps", "corrupt-checkpoint", "kill-ps"], seed=seed)
    assert [each.state for each in result.injections] == ["recovered"] * 3
    histories = read(tmp_path / "history")
    assert [started.epoch for started in histories.started] == [1, 2, 3, 4]
    assert len(list((tmp_path / "history").glob("worker-*"))) == 2, "no worker restarted"


@pytest.mark.parametrize("seed", [1])
def test_a_frozen_parameter_server_and_one_that_another_took_over_from(tmp_path: Path, seed: int) -> None:
    result = drill(tmp_path, ["freeze-ps", "rival-ps"], seed=seed)
    assert [each.state for each in result.injections] == ["recovered"] * 2
    histories = read(tmp_path / "history")
    assert [started.epoch for started in histories.started] == [1, 2, 3]
    assert {commit.epoch for commit in histories.committed} == {1, 3}
    assert result.outcome.status.failures == 0


@pytest.mark.parametrize("seed", [1])
def test_the_disk_is_full(tmp_path: Path, seed: int) -> None:
    result = drill(tmp_path, ["fill-disk"], seed=seed)
    assert "No space left" in result.injections[0].detail


@contextlib.contextmanager
def training(tmp_path: Path, job: TrainingJob) -> Iterator[Launcher]:
    """A job whose workers train."""
    with Launcher(job, Options(root=tmp_path, history=tmp_path / "history")) as launcher:
        launcher.start()
        eventually(lambda: version_of(launcher) > 5, "some versions")
        yield launcher


def version_of(launcher: Launcher) -> int:
    http = launcher.status().http
    status = fetch_status(http[0]) if http else None
    return status.progress.version if status else 0


def assert_nothing_lost(tmp_path: Path, launcher: Launcher, *, records: int) -> None:
    """The job succeeds, with every record in the model once."""
    assert launcher.wait(LIMIT), launcher.status()
    assert launcher.outcome().verdict.phase == "Succeeded", launcher.outcome().verdict
    assert check(read(tmp_path / "history"), Data(records, 1)) == []


def test_a_gradient_that_is_not_finite_is_refused_with_the_workers_name(tmp_path: Path) -> None:
    poisoned = tmp_path / "poisoned"
    with training(tmp_path, job("poison", records=1200, poisoned=str(poisoned))) as launcher:
        assert_nothing_lost(tmp_path, launcher, records=1200)
        assert poisoned.exists(), "there was a NaN"
        text = launcher.directory.log("worker", 1).read_text()
        assert "worker 1, step 5" in text
        assert launcher.outcome().status.failures == 1
        histories = read(tmp_path / "history")
        assert len(list((tmp_path / "history").glob("worker-0-*"))) == 1, "worker 0 went on"
        assert sum(started.epoch for started in histories.started) == 1


def test_random_bytes_a_flood_of_joins_and_calls_that_stall(tmp_path: Path) -> None:
    """The parameter server lives on with little more memory, and training goes on."""
    rng = random.Random(0)
    with training(tmp_path, job("flood", records=2000)) as launcher:
        status = launcher.status()
        server = psutil.Process(next(p.pid for p in status.processes if p.role == "ps"))
        before, version = server.memory_info().rss, version_of(launcher)
        for address in (status.addresses[0], status.http[0]):
            for _ in range(20):
                send_bytes(address, rng.randbytes(rng.randrange(1, 100_000)))
        half_open = [open_socket(status.addresses[0]) for _ in range(50)]
        flood_of_joins(status.job, status.addresses[0], threads=8, each=25)
        with stalled_calls(status.job, status.addresses[0], count=100) as calls:
            assert server.memory_info().rss - before < 64 * MIB, "while they are open"
            for call in calls:
                with contextlib.suppress(grpc.RpcError):
                    list(call)
            codes = Counter(call.code() for call in calls)
            assert codes == {grpc.StatusCode.OK: 50, grpc.StatusCode.CANCELLED: 50}, "refused, cut off"
        for each in half_open:
            each.close()
        after = server.memory_info().rss
        assert after - before < 64 * MIB, f"{(after - before) / 1e6:.0f} MB more"
        eventually(lambda: version_of(launcher) > version, "training goes on")
        assert_nothing_lost(tmp_path, launcher, records=2000)
        assert [p.restarts for p in launcher.outcome().status.processes if p.role == "ps"] == [0]


@contextlib.contextmanager
def stalled_calls(name: str, address: str, *, count: int) -> Iterator[list[Any]]:
    """Pushes whose senders stop: half of them within the header, the others within a body of 8 MiB."""
    leave = threading.Event()
    request = pb.PushRequest(caller=pb.Caller(job=name, epoch=1, worker=1), bucket=0, samples=1, codec="none")
    body = memoryview(bytes(8 * MIB))

    def send(number: int) -> Iterator[bytes]:
        header = bytes(2 * MIB) if number % 2 else request.SerializeToString()
        yield from itertools.islice(messages(Frame(header, body), "Push"), 1 if number % 2 else 3)
        leave.wait(60)

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream("/elastic_ps.transport.Transport/Call", None, None)
        calls = [call(send(number), timeout=120) for number in range(count)]
        try:
            yield calls
        finally:
            leave.set()


def open_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def send_bytes(address: str, data: bytes) -> None:
    with contextlib.suppress(OSError), open_socket(address) as opened:
        opened.sendall(data)


def flood_of_joins(name: str, address: str, *, threads: int, each: int) -> None:
    """Processes of another model ask to join, and are refused."""
    refused: list[str] = []

    def ask(start: int) -> None:
        connection = GrpcConnection(address)
        try:
            for worker in range(start, start + each):
                request = pb.JoinRequest(caller=pb.Caller(job=name, worker=1000 + worker), pid=1, host="x")
                request.optimizer.name = "SGD"
                request.optimizer.groups = '{"groups": [], "schedulers": [], "stepped": false}'
                try:
                    unary(connection, "Join", request.SerializeToString(), timeout=timedelta(seconds=20))
                except Refused as refusal:
                    refused.append(str(refusal))
                except ElasticPSError as error:
                    refused.append(f"other: {error}")
        finally:
            connection.close()

    running = [threading.Thread(target=ask, args=(i * each,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert len(refused) == threads * each, refused[:3]


def test_an_older_epoch_cannot_finish_a_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, new = store.next_epoch(), store.next_epoch()
    file = store.write_shard(old, 3, 0, 1, iter(()))
    manifest = Manifest(job="j", version=3, epoch=old, tensors=[], optimizer="SGD", state={}, files=[file])
    with pytest.raises(Fenced, match=f"epoch {new} has taken over"):
        store.commit(manifest, keep=3)
    assert store.versions() == []


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what failed writes leave behind would keep a full disk full."""

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store(tmp_path)
    epoch = store.next_epoch()
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("elastic_ps.checkpoint.store._flush", full)
    with pytest.raises(CheckpointError, match="No space left"):
        store.write_shard(epoch, 3, 0, 1, iter(()))
    assert sorted(tmp_path.iterdir()) == before


def test_a_roll_back_is_not_taken_for_a_rival(tmp_path: Path) -> None:
    """A checkpoint that was being finished in the epoch before is given up; the process is not fenced."""
    store = Store(tmp_path)
    keeper = Keeper(
        store,
        job="j",
        epoch=store.next_epoch(),
        shards=1,
        interval=timedelta(0),
        keep=3,
        now=0.0,
    )
    state = {"tensors": [], "optimizer": "SGD"}
    for version in (1, 2):
        keeper.begin(version, 0.0, dict(state))
        file = store.write_shard(keeper.epoch, version, 0, 1, iter(()))
        written = Written(version, file, "", timedelta(0))
        if version == 1:
            keeper.parts(0, [written])
            eventually(lambda: keeper.durable_version == 1, "version 1 is on disk")
    with store._locked():  # version 2 waits here to be finished
        keeper.parts(0, [written])
        rolled = threading.Thread(target=keeper.roll_back)
        rolled.start()
    rolled.join()
    keeper.close()
    assert keeper.epoch == 2
    assert not keeper.check_fence()
