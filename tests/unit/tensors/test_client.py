"""Tensors that a worker keeps on the servers: what it does where these do not answer."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from elastic_ps.errors import UsageError
from elastic_ps.tensors import handles
from elastic_ps.tensors.client import Tensors
from elastic_ps.tensors.handles import MOST_BYTES, MOST_QUEUED
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.calls import DECLARE_TENSOR, Call
from tests.testing.polling import eventually


class Silent:
    """A client whose server knows every tensor, and does not answer a push before it is let go."""

    shards = 1

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.asked = 0

    def ask(self, call: Call[Any, Any], _: Any, **__: Any) -> Any:
        if call is DECLARE_TENSOR:
            return pb.DeclareTensorReply(birth=pb.Birth(number=1), life=1)
        self.asked += 1
        assert self.let_go.wait(60)
        return pb.Done()


@pytest.mark.parametrize(("most_bytes", "queued_at_most"), [(MOST_BYTES, MOST_QUEUED), (8, 1)])
def test_a_session_is_closed_although_a_push_waits_for_room(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, queued_at_most: int
) -> None:
    """The push holds what all others need, and a server may not answer for 15 minutes."""
    monkeypatch.setattr(handles, "MOST_BYTES", most_bytes)
    client = Silent()
    kept = Tensors(client, os.getpid(), bucket_bytes=1024, renew=timedelta(0))  # type: ignore[arg-type]
    kept.init("w", torch.ones(4))
    queued: list[object] = []

    def push() -> None:
        while True:
            queued.append(kept.push("w", torch.ones(4)))

    with ThreadPoolExecutor(2) as threads:
        try:
            pushing = threads.submit(push)
            eventually(lambda: len(queued) > queued_at_most, "no further push has room")
            threads.submit(kept.close, timedelta(0)).result(60)
            with pytest.raises(UsageError, match="the session is closed"):
                pushing.result(60)
        finally:
            client.let_go.set()


def test_large_pushes_wait_for_room_before_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a copy of its tensor."""
    monkeypatch.setattr(handles, "MOST_BYTES", 64)
    client = Silent()
    kept = Tensors(client, os.getpid(), bucket_bytes=1024, renew=timedelta(0))  # type: ignore[arg-type]
    kept.init("w", torch.ones(100))
    with ThreadPoolExecutor(2) as threads:
        try:
            for _ in range(2):  # one is sent, and one waits for its turn
                threads.submit(kept.push, "w", torch.ones(100)).result(60)
                eventually(lambda: client.asked, "the first one is sent")
            third = threads.submit(kept.push, "w", torch.ones(100))
            with pytest.raises(TimeoutError):
                third.result(0.2)
        finally:
            client.let_go.set()
        third.result(60).wait(timedelta(seconds=60))
    kept.close(timedelta(seconds=60))
