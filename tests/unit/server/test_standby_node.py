"""A standby that is asked by a new parameter server, while the old one is still sending."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_ps.core.settings import Application, Settings
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.calls.node import Node
from elastic_ps.server.job.standby import sum_key
from elastic_ps.server.orders import Advance, Configuration
from tests.testing.shard import LR, Body, one_bucket, ones, tensor


@pytest.fixture
def standby() -> Iterator[Node]:
    """It has been told of the round that makes version 1, in term 1; the sum is still to come."""
    node = Node(0, 1, store=None, trace=Trace(None, ""))
    node.configure(Configuration(one_bucket(tensor("w", 4)), "SGD", Settings(LR.groups), 1, None))
    order = Advance(1, 0, {}, Application(0, [(0, 10, 0)], 1, LR), term=1, state="{}")
    node.advance(Advance(0, 0, {}, term=1, next=order))
    yield node
    node.close()


def test_what_came_before_the_question_is_in_the_answer(standby: Node) -> None:
    standby.take_sum(sum_key(1, 0, 0, 0), [True], Body(ones(4)))
    assert [order.version for order in standby.held(2)] == [1]


def test_what_is_not_in_the_answer_is_refused(standby: Node) -> None:
    """Else the old parameter server would show its workers a version that the new one does not know."""
    gate = threading.Event()
    body = Body(ones(4), gate=gate)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(standby.take_sum, sum_key(1, 0, 0, 0), [True], body)
        assert body.started.wait(10)
        assert standby.held(2) == []
        gate.set()
        with pytest.raises(Refused) as refused:
            sent.result(10)
    assert refused.value.code is RefusalCode.STALE_TERM


def test_after_the_question_the_old_one_is_refused(standby: Node) -> None:
    assert standby.held(2) == []
    for call in (
        lambda: standby.take_sum(sum_key(1, 0, 0, 0), [True], Body(ones(4))),
        lambda: standby.advance(Advance(0, 0, {}, term=1)),
        lambda: standby.held(1),
    ):
        with pytest.raises(Refused) as refused:
            call()
        assert refused.value.code is RefusalCode.STALE_TERM
    assert not any(torch.any(values) for _, values in standby.shard.values())
