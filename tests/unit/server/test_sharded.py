"""Several parameter servers of a job and their standbys, in one process: what is left when some are lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic_ps.contract.env import Role
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.job.status import StatusServer
from elastic_ps.server.process import ParameterServer
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.inproc import InprocServer, connect
from tests.testing.polling import eventually
from tests.testing.service import Worker, code, environment

SHARDS = range(2)
ELEMENTS = 512
TENSORS = tuple(TensorSpec(name, (ELEMENTS,), "float32", Rule.GRADIENT, 0) for name in "vw")
SPEC = {"replicas": len(SHARDS), "bucketBytes": 4 * ELEMENTS, "checkpoint": {"interval": "1h"}}
"""Each shard has one bucket."""


class Servers:
    """The processes of a job, by role and shard. Each has an address, at which it may start again."""

    def __init__(self, directory: Path, *, standbys: bool) -> None:
        self._directory = directory
        self._roles: tuple[Role, ...] = ("standby", "ps") if standbys else ("ps",)
        self._listeners: dict[tuple[Role, int], InprocServer] = {
            (role, shard): InprocServer() for role in self._roles for shard in SHARDS
        }
        self._running: dict[tuple[Role, int], ParameterServer] = {}
        for role in self._roles:
            for shard in SHARDS:
                self.start(role, shard)

    @property
    def shard_0(self) -> ParameterServer:
        return self._running["ps", 0]

    def start(self, role: Role, shard: int) -> None:
        """Start the process; the one before has to be gone."""
        assert (role, shard) not in self._running
        given = environment(checkpoints=self._directory, index=shard, parameterServer=SPEC)
        at = self._listeners
        self._running[role, shard] = ParameterServer(
            replace(given, role=role),
            at[role, shard],
            lambda shard: connect(at["ps", shard]),
            (lambda shard: connect(at["standby", shard])) if "standby" in self._roles else None,
        )

    def lose(self, role: Role, shard: int) -> None:
        """The process ends without keeping anything."""
        self._running.pop((role, shard)).close(keep=False)

    def close(self) -> None:
        for place in list(self._running):
            self.lose(*place)

    def worker(self) -> ShardedWorker:
        """One that is a member."""
        worker = ShardedWorker(*(self._listeners["ps", shard] for shard in SHARDS))
        worker.begin()
        return worker


class ShardedWorker(Worker):
    """A worker's side of the calls to two shards."""

    def __init__(self, first: InprocServer, second: InprocServer) -> None:
        super().__init__(first, 0, second)

    def begin(self) -> None:
        """Join, and bring the model if there is none."""
        if self.join(tensors=TENSORS).initialise:
            for shard in SHARDS:
                request = pb.InitRequest(caller=self.caller(), bucket=shard)
                self.ask(request, torch.zeros(ELEMENTS), shard=shard)
            self.ask(pb.InitDoneRequest(caller=self.caller()))

    def train(self, step: int) -> int:
        """A step with a gradient of ones on shard 0, of twos on shard 1. Returns its version."""
        taken = self.take(records=1_000_000)
        for shard in SHARDS:
            request = pb.PushRequest(
                caller=self.caller(),
                step=step,
                version=taken.version,
                bucket=shard,
                weight=10,
                codec="none",
            )
            self.ask(request, torch.full((ELEMENTS,), 1.0 + shard), shard=shard)
        self.ask(self.finishing(step, taken))
        return taken.version + 1

    def assert_trained(self, version: int) -> None:
        """Every shard has the version, and it is made of that many steps."""
        for shard in SHARDS:
            request = pb.PullRequest(caller=self.caller(), version=version, buckets=[shard])
            ((header, values),) = self.ask(request, shard=shard)
            assert pb.PullReply.FromString(header).version == version
            assert torch.equal(values, torch.full((ELEMENTS,), -version * (1.0 + shard)))


def train_until_followed(servers: Servers, worker: ShardedWorker, version: int) -> int:
    """A standby is told of the model meanwhile, and has it after the next round. Returns the last version."""

    def followed() -> bool:
        nonlocal version
        version = worker.train(version)
        return servers.shard_0.status().standbys == [True, True]

    eventually(followed, "both standbys follow")
    return version


def await_commit(servers: Servers, version: int) -> None:
    """The worker may have gone on a moment before."""
    eventually(lambda: servers.shard_0.status().progress.version == version, "shard 0 has the version")


@pytest.fixture
def with_standbys(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path, standbys=True)
    yield servers
    servers.close()


@pytest.fixture
def without(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path, standbys=False)
    yield servers
    servers.close()


def test_no_round_is_lost_with_all_parameter_servers_while_the_standbys_are_left(
    with_standbys: Servers,
) -> None:
    servers = with_standbys
    worker = servers.worker()
    assert servers.shard_0.status().standbys == [False, False]
    followed = train_until_followed(servers, worker, 0)
    assert [worker.train(step) for step in range(followed, followed + 2)] == [followed + 1, followed + 2]
    version = followed + 2
    await_commit(servers, version)
    before = servers.shard_0.status().progress
    assert before.durable_version == 0, "the interval is an hour"
    for shard in SHARDS:
        servers.lose("ps", shard)
    for shard in reversed(SHARDS):
        servers.start("ps", shard)
    status = servers.shard_0.status()
    assert (status.term, status.progress.version, status.progress.durable_version) == (2, version, version)
    assert status.progress.records_applied == before.records_applied > 0
    assert status.standbys == [False, False], "they have to catch up with the new term"
    worker = servers.worker()
    worker.assert_trained(version)
    worker.assert_trained(train_until_followed(servers, worker, version))


def test_no_round_is_lost_with_one_shard_while_its_standby_is_left(with_standbys: Servers) -> None:
    servers = with_standbys
    worker = servers.worker()
    version = worker.train(train_until_followed(servers, worker, 0))
    await_commit(servers, version)
    servers.lose("ps", 1)
    servers.start("ps", 1)
    eventually(lambda: servers.shard_0.status().term > 1, "it is noticed")
    with pytest.raises(Refused) as refused:
        worker.train(version)
    assert code(refused) is RefusalCode.STALE_TERM
    worker = servers.worker()
    assert servers.shard_0.status().progress.version == version
    worker.assert_trained(version)
    assert worker.train(version) == version + 1


def test_without_standbys_all_go_back_to_the_checkpoint(without: Servers) -> None:
    servers = without
    worker = servers.worker()
    assert worker.train(0) == 1
    servers.lose("ps", 1)
    servers.start("ps", 1)
    eventually(lambda: servers.shard_0.status().term > 1, "it is noticed")
    worker = servers.worker()
    progress = servers.shard_0.status().progress
    assert (progress.version, progress.records_applied) == (0, 0)
    worker.assert_trained(0)
    assert worker.train(0) == 1
    worker.assert_trained(1)


def test_a_process_that_fails_is_not_kept_alive_by_its_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    servers = Servers(tmp_path, standbys=True)
    http = StatusServer("127.0.0.1:0", servers.shard_0.status, list)
    try:
        started = set(threading.enumerate()) - before
        assert {thread.name for thread in started} >= {
            "checkpoint",
            "follower",
            "checkpointer",
            "ticker",
            "http",
        }
        assert all(thread.daemon for thread in started)
    finally:
        http.close()
        servers.close()
    assert not [thread for thread in started if thread.is_alive()], "a server that is closed has none left"
