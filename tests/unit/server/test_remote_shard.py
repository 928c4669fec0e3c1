"""Shard 0's way to another shard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest

from elastic_ps.codec.state import CopiedTensor
from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import Settings
from elastic_ps.errors import ConnectionLost
from elastic_ps.server.job.standby import sum_key
from elastic_ps.server.limits import SLOWEST
from elastic_ps.server.orders import Configuration, RemoteShard
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame, Incoming
from elastic_ps.transport.inproc import InprocServer, connect

LAYOUT = partition([TensorSpec("w", (4,), "float32", Rule.GRADIENT, 0)], bucket_bytes=1024, shards=1)
CONFIGURATION = Configuration(LAYOUT, "SGD", Settings(({"lr": 0.1},)), 1, None)


def test_a_shard_that_is_not_up_yet_is_waited_for() -> None:
    listener, asked = InprocServer(), threading.Event()

    def handler(method: str, incoming: Incoming) -> Iterator[Frame]:
        asked.set()
        yield Frame(pb.Done().SerializeToString())

    starting = threading.Timer(0.3, lambda: listener.serve(handler))
    starting.start()
    RemoteShard("job", connect(listener)).configure(CONFIGURATION)
    assert asked.is_set()
    starting.join()
    listener.close()


class Noting(Connection):
    """Answers each call, and notes how long it might have taken."""

    def __init__(self) -> None:
        self.given: list[timedelta] = []

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        self.given.append(timeout)
        return iter([cast(Incoming, SimpleNamespace(header=b""))])

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("version", "size", "minutes"), [(None, 0, 1), (7, 16, 10), (7, 600 * SLOWEST, 20)])
def test_a_shard_that_reads_a_checkpoint_is_given_time(version: int | None, size: int, minutes: int) -> None:
    """Ordered once more, it would read it once more, beside the first time. Rows of tables take time, too."""
    noting = Noting()
    RemoteShard("job", noting).configure(replace(CONFIGURATION, load_version=version, load_bytes=size))
    assert [round(each.total_seconds()) for each in noting.given] == [60 * minutes]


def test_a_standby_may_take_as_long_as_a_large_bucket_needs() -> None:
    """Else it would never have the bucket, and be left behind with each round."""
    noting, body = Noting(), memoryview(bytes(2 * SLOWEST))
    remote = RemoteShard("job", noting, timeout=timedelta(seconds=10))
    remote.sum(sum_key(1, 0, 0, 0), body, [True])
    remote.state(CopiedTensor(0, 0, 0, "value", "float32", False, True), body, term=1)
    remote.rows(pb.RowsRequest(), body, term=1)
    assert noting.given == [timedelta(seconds=12)] * 3


def test_a_shard_that_does_not_come_is_not_waited_for_for_ever() -> None:
    remote = RemoteShard("job", connect(InprocServer()), start=timedelta(milliseconds=100))
    with pytest.raises(ConnectionLost):
        remote.configure(CONFIGURATION)
