"""The memory that bodies are received in."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch

from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.transport.buffers import RECEIVE_BUFFERS, Buffers
from tests.testing.polling import LIMIT
from tests.testing.shard import Body, ones

AT_ONCE = timedelta(microseconds=1)


def test_the_default_device_is_not_for_buffers() -> None:
    """The module of a codec may set one in the parameter server's process. `meta` stands in for a GPU."""
    with torch.device("meta"):
        buffers = Buffers(16)
    with buffers.values("w", "float32", 16, Body(ones(4)), timeout=AT_ONCE) as received:
        assert torch.equal(received, ones(4))


def test_who_waits_for_a_buffer_waits_no_longer_than_it_is_told() -> None:
    """Its thread may stand still until the time is over, at any moment of the wait."""
    refused = list[RefusalCode]()

    def wait() -> None:
        for _ in range(2000):
            buffers = Buffers(16)
            with ExitStack() as received:
                for _ in range(RECEIVE_BUFFERS):
                    received.enter_context(buffers.values("w", "float32", 16, Body(ones(4)), timeout=AT_ONCE))
                with (
                    pytest.raises(Refused, match="push again") as refusal,
                    buffers.values("w", "float32", 16, Body(ones(4)), timeout=AT_ONCE),
                ):
                    pass
                refused.append(refusal.value.code)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(LIMIT)
    assert refused == [RefusalCode.NOT_READY] * 2000
