"""Shard 0's way to another shard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import Settings
from elastic_ps.errors import ConnectionLost
from elastic_ps.server.orders import Configuration, RemoteShard
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
from elastic_ps.transport.inproc import InprocConnection, InprocServer, connect

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


@pytest.mark.parametrize(("version", "minutes"), [(None, 1), (7, 10)])
def test_a_shard_that_reads_a_checkpoint_is_given_time(version: int | None, minutes: int) -> None:
    """Ordered once more, it would read it once more, beside the first time."""
    given: list[timedelta] = []

    class Noting(InprocConnection):
        def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
            given.append(timeout)
            return super().call(method, frame, timeout=timeout)

    listener = InprocServer()
    listener.serve(lambda method, incoming: iter([Frame(pb.Done().SerializeToString())]))
    RemoteShard("job", Noting(listener)).configure(replace(CONFIGURATION, load_version=version))
    assert given == [timedelta(minutes=minutes)]
    listener.close()


def test_a_shard_that_does_not_come_is_not_waited_for_for_ever() -> None:
    remote = RemoteShard("job", connect(InprocServer()), start=timedelta(milliseconds=100))
    with pytest.raises(ConnectionLost):
        remote.configure(CONFIGURATION)
