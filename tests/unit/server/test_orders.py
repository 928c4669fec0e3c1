"""Orders to shards and their answers on the wire."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elastic_ps.api.mutable import MutableFields
from elastic_ps.checkpoint.manifest import ShardFile
from elastic_ps.core.settings import Application, Settings
from elastic_ps.core.stages import StandbyState
from elastic_ps.errors import Malformed
from elastic_ps.server.orders import Advance, Configuration, OrderId, OrderLog, Report, Written
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.convert import from_message, settings_from_message, to_message
from tests.testing.shard import one_bucket, tensor

SETTINGS = Settings(({"lr": 0.5},))
APPLICATION = Application(2, ((0, 10, 3), (4, 14, 9)), 640, SETTINGS, assigns=True)
ORDER = OrderId("a", 7)


@pytest.mark.parametrize(
    "order",
    [
        Advance(0, 0, {}),
        Advance(
            5, 2, {4: 14, 0: 10}, APPLICATION, checkpoint=3, term=2, prepare=True, state="{}", rescued_term=1
        ),
        Advance(6, 0, {}, Application(2, ((0, 10, 3),), 640, SETTINGS, norm=0.0)),
        Advance(4, 1, {}, term=2, next=Advance(5, 0, {}, APPLICATION, term=2, state="{}"), last=True),
    ],
)
def test_an_order_arrives_as_it_was_given(order: Advance) -> None:
    message = to_message(pb.AdvanceRequest, order, job="job", **vars(ORDER))
    message = pb.AdvanceRequest.FromString(message.SerializeToString())
    assert (from_message(Advance, message), from_message(OrderId, message)) == (order, ORDER)


@pytest.mark.parametrize("load_version", [None, 0, 3])
@pytest.mark.parametrize("follows", [False, True])
def test_a_model_arrives_as_it_was_described(load_version: int | None, follows: bool) -> None:
    layout = one_bucket(tensor("w", 4), tensor("v", 2))
    tuning = MutableFields(generation=4 if follows else 0)
    configuration = Configuration(layout, "Adam", SETTINGS, 3, load_version, follows, tuning)
    message = to_message(pb.ConfigureRequest, configuration, job="job", **vars(ORDER))
    message = pb.ConfigureRequest.FromString(message.SerializeToString())
    assert (from_message(Configuration, message), from_message(OrderId, message)) == (configuration, ORDER)


@pytest.mark.parametrize(
    "report",
    [
        Report(),
        Report(standby=StandbyState.CATCHING_UP),
        Report(Written(1, 2, 3, ShardFile("part", "digest", 99), "", timedelta(microseconds=1234567))),
        Report(Written(1, 2, 3, None, "No space left", timedelta(0)), StandbyState.WHOLE),
    ],
)
def test_an_answer_arrives_as_it_was_given(report: Report) -> None:
    message = pb.AdvanceReply.FromString(to_message(pb.AdvanceReply, report).SerializeToString())
    assert from_message(Report, message) == report


def test_what_nobody_can_have_said_is_refused() -> None:
    with pytest.raises(Malformed, match="9 is not a state of a standby"):
        from_message(Report, pb.AdvanceReply(standby=9))
    with pytest.raises(Malformed, match="ConfigureRequest has no layout"):
        from_message(Configuration, pb.ConfigureRequest(settings=SETTINGS.to_json()))
    for text in ("", "{", "[]", "{}"):
        with pytest.raises(Malformed, match="not the settings of an optimizer"):
            settings_from_message(text)


def test_an_order_is_old_when_it_or_a_later_one_of_its_source_has_come() -> None:
    log = OrderLog()
    seen = [
        log.is_old(OrderId(source, number)) for source, number in (("a", 1), ("a", 1), ("a", 3), ("a", 2))
    ]
    assert seen == [False, True, False, True]
    assert not log.is_old(OrderId("b", 1)), "of another source"
    assert log.is_last(OrderId("a", 3))
    assert not log.is_last(OrderId("a", 2))
    assert not log.is_last(OrderId("c", 1))
    log.clear()
    assert not log.is_last(OrderId("a", 3))
    assert not log.is_old(OrderId("a", 1)), "a new term"
