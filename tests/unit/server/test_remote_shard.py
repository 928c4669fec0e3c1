"""Shard 0's way to another shard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from elastic_ps.core.partition import Rule, TensorSpec, partition
from elastic_ps.core.settings import Settings
from elastic_ps.errors import ConnectionLost
from elastic_ps.server.orders import Configuration, RemoteShard
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Frame, Incoming
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


def test_a_shard_that_does_not_come_is_not_waited_for_for_ever() -> None:
    remote = RemoteShard("job", connect(InprocServer()), start=timedelta(milliseconds=100))
    with pytest.raises(ConnectionLost):
        remote.configure(CONFIGURATION)
