"""Faults against jobs of real processes: each happens, the job recovers, and nothing is lost.

What fails is printed as the one command that repeats it. `docs/guides/faults.md` has the table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from elastic_ps.api.job import TrainingJob, parse_job
from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.store import Store
from elastic_ps.contract.schemes import Scheme
from elastic_ps.drill.faults import Kind, schedule
from elastic_ps.drill.history import Data, check
from elastic_ps.drill.recorded import read
from elastic_ps.drill.runner import Drill, Injection, run
from elastic_ps.errors import CheckpointError, ElasticPSError, Fenced, Refused
from elastic_ps.local import Launcher, Options
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, unary
from elastic_ps.transport.grpc import GrpcConnection
from elastic_ps.transport.wire import messages
from tests.testing import machine
from tests.testing.launching import forks, version_of
from tests.testing.polling import eventually
from tests.testing.tiers import per_change

LIMIT = timedelta(seconds=120)
MIB = 1024 * 1024
RECORDS = 2000
EARLY = 0.1
"""Faults come that much earlier than in a drill, and steps are slow until the last one is over: however long
a busy machine takes to start processes, the records do not run out before."""


def job(
    name: str,
    directory: Path,
    *,
    server: Mapping[str, Any] | None = None,
    consistency: Mapping[str, Any] | None = None,
    evaluator: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> TrainingJob:
    """A job that is slow until `hurry` in the directory exists; `server`: fields of its parameter server."""
    pace = {"seconds": 0.4, "hurry": str(directory / "hurry")}
    spec = {
        "entrypoint": "tests.testing.scripts.steady:main",
        "arguments": {"records": RECORDS, "widths": [6, 64, 64, 1], **pace, **arguments},
        "parameterServer": {"bucketBytes": 4096, "checkpoint": {"interval": "300ms"}, **(server or {})},
        "worker": {"replicas": 2, "leaseDuration": "6s"},
        "consistency": consistency or {},
        "evaluator": evaluator,
    }
    document = {"apiVersion": "elastic-ps.dev/v1alpha1", "kind": "TrainingJob"}
    return parse_job({**document, "metadata": {"name": name}, "spec": spec}, source="test")


def drill(
    directory: Path,
    kinds: list[Kind],
    *,
    seed: int,
    transport: Scheme | None = None,
    **fields: Mapping[str, Any],
) -> Drill:
    """Train with these faults, a job with these fields; fails with the command that repeats it."""
    faults = [replace(fault, at=EARLY * fault.at) for fault in schedule(seed, kinds, workers=2)]
    history, told = directory / "history", list[str]()

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == len(faults):
            (directory / "hurry").touch()

    wanted = job("faults", directory, **fields)
    options = Options(forks=forks(), root=directory, transport=transport)
    result = run(wanted, faults, options=options, history=history, tell=tell, limit=LIMIT)
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    lines = [f"again: python -m pytest '{test}'", *map(str, result.injections), *map(str, result.violations)]
    assert result.passed, "\n".join([str(result.result), *lines])
    assert result.records == RECORDS
    assert not (directory / "faults" / "checkpoints").exists(), "a drill leaves those of the job's runs alone"
    for each in result.injections:
        assert (each.lost, each.twice) == (0, 0)
    return result


def injected(result: Drill, kind: Kind) -> Injection:
    return next(each for each in result.injections if each.fault.kind == kind)


@pytest.fixture(scope="module", params=["grpc", "tcp"])
def unharmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drill:
    """A job whose parameter server lives on, whatever happens to workers and disk."""
    directory = tmp_path_factory.mktemp("workers")
    kinds: list[Kind] = ["kill-worker", "freeze-worker", "cut", "reset", "stop-worker", "fill-disk"]
    return drill(directory, kinds, seed=1, transport=request.param)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["kill-worker", "freeze-worker", "cut", "reset", "stop-worker"])
def test_workers_are_killed_frozen_cut_off_and_taken_away(unharmed: Drill, kind: Kind) -> None:
    assert injected(unharmed, kind).state == "recovered"
    assert injected(unharmed, kind).redone == 0
    assert unharmed.result.failures == 0


@pytest.mark.nightly
def test_the_disk_is_full(unharmed: Drill) -> None:
    fault = injected(unharmed, "fill-disk")
    if fault.state == "unavailable":
        pytest.skip(fault.detail)
    assert "No space left" in fault.detail


@pytest.mark.nightly
def test_a_frozen_worker_is_waited_for_where_its_records_are_nobody_else_s(tmp_path: Path) -> None:
    """In deterministic mode no version is made without it, so a drill does not wait for one."""
    result = drill(tmp_path, ["freeze-worker"], seed=1, consistency={"deterministic": True})
    assert injected(result, "freeze-worker").state == "recovered"


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_parameter_server_is_killed_frozen_and_taken_over_from(tmp_path: Path, transport: Scheme) -> None:
    """Also with a broken checkpoint. Of the five starts, that of the rival commits nothing."""
    kinds: list[Kind] = ["kill-ps", "corrupt-checkpoint", "freeze-ps", "rival-ps"]
    result = drill(tmp_path, kinds, seed=1, transport=transport)
    assert [each.state for each in result.injections] == ["recovered"] * 4
    histories = read(tmp_path / "history")
    terms = [1, 2, 3, 4, 5]
    assert [started.term for started in histories.started] == terms
    rival = next(term for term in terms if f"term {term} took over" in injected(result, "rival-ps").detail)
    assert {commit.term for commit in histories.committed} == {*terms} - {rival}
    assert len(list((tmp_path / "history").glob("worker-*"))) == 2, "no worker restarted"
    assert result.result.failures == 0


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
def test_one_of_several_parameter_servers_is_taken_over_from(tmp_path: Path, durability: str) -> None:
    server = {"replicas": 2, "durability": durability}
    result = drill(tmp_path, ["rival-ps"], seed=1, server=server)
    assert [each.state for each in result.injections] == ["recovered"]


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_shards_with_standbys_are_killed_and_nothing_is_trained_again(
    tmp_path: Path, transport: Scheme
) -> None:
    server = {"replicas": 2, "durability": "standby", "checkpoint": {"interval": "1h"}}
    result = drill(tmp_path, ["kill-ps", "kill-standby"], seed=1, server=server, transport=transport)
    assert [each.state for each in result.injections] == ["recovered"] * 2
    assert [each.redone for each in result.injections] == [0] * 2
    assert len(read(tmp_path / "history").restored) == 1
    assert result.result.failures == 0


@pytest.mark.parametrize(
    "consistency",
    per_change(
        [
            {"mode": "bounded", "maxStaleness": 3},
            {"mode": "async"},
            {"mode": "local", "steps": 4, "fragments": 2, "quorum": 1},
        ],
        keep=[{"mode": "bounded", "maxStaleness": 3}],
    ),
    ids=["bounded", "async", "local"],
)
@pytest.mark.nightly
def test_workers_parameter_server_and_evaluator_are_killed_in_other_modes(
    tmp_path: Path, consistency: dict[str, Any]
) -> None:
    evaluator = {"entrypoint": "tests.testing.scripts.evaluates:main", "every": 20, "backlog": 100}
    kinds: list[Kind] = ["kill-worker", "kill-ps", "kill-evaluator"]
    result = drill(tmp_path, kinds, seed=1, consistency=consistency, evaluator=evaluator)
    assert [each.state for each in result.injections] == ["recovered"] * 3
    assert result.result.failures == 0
    progress = result.result.progress
    assert progress is not None
    assert progress.evaluation is not None
    assert (progress.evaluation.missed, progress.evaluation.waiting) == (0, 0)
    assert progress.evaluation.version == progress.version, "the last one is evaluated, too"


@pytest.mark.nightly
def test_strangers_and_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    """What is not finite is refused with the worker's name; random bytes and a flood of joins harm nobody.

    The parameter server lives on with little more memory, and training goes on.
    """
    poisoned, history = tmp_path / "poisoned", tmp_path / "history"
    flooded = job("flooded", tmp_path, records=1200, poisoned=str(poisoned))
    # The strangers know the job's name, too.
    options = Options(forks=forks(), root=tmp_path, history=history, tls=False)
    with Launcher(flooded, options) as launcher, contextlib.ExitStack() as half_open:
        launcher.start()
        eventually(lambda: poisoned.exists() and launcher.status().failures, "a NaN, and its worker ends")
        eventually(lambda: version_of(launcher) > 5, "some versions")
        status = launcher.status()
        server = psutil.Process(next(p.pid for p in status.processes if p.role == "ps"))
        before, version = server.memory_info().rss, version_of(launcher)
        rng = random.Random(0)
        for address in (status.addresses[0], status.http[0]):
            for _ in range(20):
                send_bytes(address, rng.randbytes(rng.randrange(1, 100_000)))
        for _ in range(50):
            half_open.enter_context(open_socket(status.addresses[0]))
        flood_of_joins(status.job, status.addresses[0], threads=8, each=25)
        with stalled_calls(status.job, status.addresses[0], count=100) as calls:
            assert server.memory_info().rss - before < 128 * MIB, "while they are open"
            for call in calls:
                with contextlib.suppress(grpc.RpcError):
                    list(call)
            codes = Counter(call.code() for call in calls)
            assert codes == {grpc.StatusCode.OK: 50, grpc.StatusCode.CANCELLED: 50}, "refused, cut off"
        half_open.close()
        after = server.memory_info().rss
        assert after - before < 128 * MIB, f"{(after - before) / 1e6:.0f} MB more"
        eventually(lambda: version_of(launcher) > version, "training goes on")
        (tmp_path / "hurry").touch()
        assert launcher.wait(LIMIT), launcher.status()
        outcome = launcher.outcome()
        log = launcher.directory.log("worker", 1).read_text()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert outcome.status.failures == 1
    assert "worker 1, step 5" in log
    assert [p.restarts for p in outcome.status.processes if p.role == "ps"] == [0]
    assert len(list(history.glob("worker-0-*"))) == 1, "worker 0 went on"
    histories = read(history)
    assert [started.term for started in histories.started] == [1]
    assert check(histories, Data(1200, 1)) == []


@contextlib.contextmanager
def stalled_calls(name: str, address: str, *, count: int) -> Iterator[list[Any]]:
    """Pushes whose senders stop: half of them within the header, the others within a body of 8 MiB."""
    leave = threading.Event()
    request = pb.PushRequest(caller=pb.Caller(job=name, term=1, worker=1), bucket=0, weight=1, codec="none")
    body = memoryview(bytes(8 * MIB))

    def send(number: int) -> Iterator[bytes]:
        header = bytes(2 * MIB) if number % 2 else request.SerializeToString()
        yield from itertools.islice(messages(Frame(header, body), "Push"), 1 if number % 2 else 3)
        leave.wait(60)

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream("/elastic_ps.transport.Transport/Call", None, None)
        calls = [call(send(number), timeout=300) for number in range(count)]
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
                request.optimizer.groups = (
                    '{"groups": [], "schedulers": [], "position": [0, 0, 0], "first": []}'
                )
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


def test_an_older_term_cannot_finish_a_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old, new = store.next_term(), store.next_term()
    file = store.write_shard(old, 3, 0, 1, iter(()))
    manifest = Manifest(job="j", version=3, term=old, tensors=[], optimizer="SGD", state={}, files=[file])
    with pytest.raises(Fenced, match=f"term {new} has taken over"):
        store.commit(manifest, keep=3)
    assert store.versions() == []


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what failed writes leave behind would keep a full disk full."""
    store = Store(tmp_path)
    term = store.next_term()
    before = sorted(tmp_path.iterdir())
    machine.fails(monkeypatch, files, "flush", machine.full())
    with pytest.raises(CheckpointError, match="No space left"):
        store.write_shard(term, 3, 0, 1, iter(()))
    assert sorted(tmp_path.iterdir()) == before
