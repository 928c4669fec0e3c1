"""Messages that come late or twice: calls of a worker, orders of shard 0."""

from __future__ import annotations

import pytest

from elastic_ps.core.calls import Calls
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.server.orders import OrderId, OrderLog


def test_a_call_is_new_once() -> None:
    calls: Calls[str] = Calls()
    assert [calls.begin(7, 1), calls.begin(7, 1), calls.begin(7, 2), calls.begin(7, 2)] == [True, False] * 2


def test_a_repeated_call_is_given_the_same_answer_and_a_new_one_is_not() -> None:
    calls: Calls[str] = Calls()
    calls.begin(7, 1)
    assert calls.answer(7) is None
    assert calls.answered(7, "first") == "first"
    calls.begin(7, 1)
    assert calls.answer(7) == "first"
    calls.begin(7, 2)
    assert calls.answer(7) is None


def test_a_call_that_comes_after_a_later_one_is_refused_and_takes_no_answer_away() -> None:
    calls: Calls[str] = Calls()
    calls.begin(7, 2)
    calls.answered(7, "second")
    with pytest.raises(Refused) as refused:
        calls.begin(7, 1)
    assert refused.value.code is RefusalCode.STALE_CALL
    assert calls.answer(7) == "second"
    calls.begin(7, 2)
    calls.require_last(7, 2)


def test_each_incarnation_counts_for_itself_and_what_is_forgotten_counts_anew() -> None:
    calls: Calls[str] = Calls()
    calls.begin(7, 5)
    calls.answered(7, "kept")
    assert calls.begin(8, 1)
    calls.forget(8)
    assert calls.answer(7) == "kept"
    calls.forget(7)
    assert calls.answer(7) is None
    assert calls.begin(7, 1)


def test_an_order_is_carried_out_once_and_not_after_a_later_one() -> None:
    log = OrderLog()
    orders = [OrderId("a", 1), OrderId("a", 1), OrderId("a", 3), OrderId("a", 2), OrderId("b", 1)]
    assert [log.is_old(order) for order in orders] == [False, True, False, True, False]
    assert log.is_last(OrderId("a", 3))
    assert not log.is_last(OrderId("a", 1)), "one that is still being carried out knows that it is late"


def test_a_new_term_counts_anew() -> None:
    log = OrderLog()
    log.is_old(OrderId("a", 9))
    log.clear()
    assert not log.is_last(OrderId("a", 9))
    assert not log.is_old(OrderId("a", 1))
