"""Tensors that a worker keeps on the servers: what it does where these do not answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from elastic_ps.errors import UsageError
from elastic_ps.tensors.client import Tensors
from elastic_ps.tensors.handles import MOST_QUEUED
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.calls import DECLARE_TENSOR, Call
from tests.testing.polling import eventually


class Silent:
    """A client whose server knows every tensor, and does not answer a push before it is let go."""

    shards, instance = 1, "one"

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def ask(self, call: Call[Any, Any], _: Any, **__: Any) -> Any:
        if call is DECLARE_TENSOR:
            return pb.DeclareTensorReply(birth=pb.Birth(number=1), life=1)
        assert self.let_go.wait(60)
        return pb.Done()


def test_a_session_is_closed_although_a_push_waits_for_room() -> None:
    """The push holds what all others need, and a server may not answer for 15 minutes."""
    client = Silent()
    kept = Tensors(client, bucket_bytes=1024, renew=timedelta(0))  # type: ignore[arg-type]
    kept.init("w", torch.ones(4))
    queued: list[object] = []

    def push() -> None:
        while True:
            queued.append(kept.push("w", torch.ones(4)))

    with ThreadPoolExecutor(2) as threads:
        try:
            pushing = threads.submit(push)
            eventually(lambda: len(queued) > MOST_QUEUED, "no further push has room")
            threads.submit(kept.close, timedelta(0)).result(60)
            with pytest.raises(UsageError, match="the session is closed"):
                pushing.result(60)
        finally:
            client.let_go.set()
