"""A worker's calls: when it joins, and when it is refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_ps.core.settings import Settings
from elastic_ps.errors import ConnectionLost, InvalidModel, RefusalCode, Refused
from elastic_ps.process.lifecycle import tell_joined
from elastic_ps.transport import calls
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Connection, Frame, Incoming
from elastic_ps.worker import current
from elastic_ps.worker.runtime.membership import Membership
from elastic_ps.worker.wire.client import Client
from elastic_ps.worker.wire.dialogue import MemberId, WorkerLimits
from tests.testing.service import environment


class Refusing(Connection):
    """Keeps what is asked, and refuses it."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        self.asked.append(bytes(frame.header))
        raise Refused(RefusalCode.INVALID, "no")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("given", "told"), [("digits-worker-0", "digits-worker-0"), ("", None)])
def test_a_worker_calls_its_host_what_its_starter_does(given: str, told: str | None) -> None:
    """The operator knows a hung worker's pod by that, also where the pod has the hostname of its node."""
    connection = Refusing()
    client = Client("job", 0, [connection], hostname=given)
    with pytest.raises(InvalidModel):
        client.join([], "sgd", Settings(()))
    (asked,) = connection.asked
    assert pb.JoinRequest.FromString(asked).host == (told or socket.gethostname())


def test_a_worker_tells_its_starter_when_it_has_joined() -> None:
    told: list[str] = []
    reply = pb.JoinReply(lease_ms=3_600_000)
    client: Any = SimpleNamespace(join=lambda *_: reply, leave=lambda **_: None, close=lambda: None)
    described: Any = SimpleNamespace(every=[], optimizer="sgd")
    member = Membership(environment().spec, client, on_joined=lambda: told.append("joined"))
    assert told == []
    member.join(described, Settings(()))
    member.leave(in_step=False, failed=False)
    assert told == ["joined"]


def test_a_worker_whose_file_cannot_be_made_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell_joined(None)
    tell_joined(tmp_path / "missing" / "joined")
    assert "cannot write" in caplog.text


@pytest.mark.parametrize("was_open", [True, False])
def test_whether_the_script_had_closed_its_session(monkeypatch: pytest.MonkeyPatch, was_open: bool) -> None:
    """A script that goes on then loses its connections, too, but by a mistake of its own."""
    session = SimpleNamespace(open=was_open, close=lambda *, failed: None)
    monkeypatch.setattr(current, "_current", session)
    assert current.close(failed=True) is was_open


class Failing(Connection):
    """Each call fails so, in order."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        raise self.errors.pop(0)

    def close(self) -> None:
        pass


def test_one_that_leaves_waits_for_a_server_that_is_not_ready_and_not_for_one_that_is_gone() -> None:
    not_yet = Refused(RefusalCode.NOT_READY, "going back to a checkpoint")
    busy = Failing(not_yet, not_yet, ConnectionLost("gone"), ConnectionLost("gone"))
    client = Client("job", 0, [busy], limits=WorkerLimits(leaving=timedelta(0)))
    client.expect_to_leave()
    with pytest.raises(ConnectionLost, match="gone"):
        client.heartbeat()
    assert len(busy.errors) == 1


def test_the_time_that_one_that_leaves_waits_begins_when_it_was_asked() -> None:
    client, gone = Client("job", 0, []), ConnectionLost("gone")
    assert client.lost(time.monotonic() - 60, gone) is None
    client.expect_to_leave()
    assert client.lost(time.monotonic() - 60, gone) is None


class Noting(Connection):
    """Answers each call at once, and notes how long it might have taken."""

    def __init__(self) -> None:
        self.allowed = list[timedelta]()

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        self.allowed.append(timeout)
        return iter([cast(Incoming, SimpleNamespace(header=b""))])

    def close(self) -> None:
        pass


def test_a_call_may_take_as_long_as_its_bodies_need_on_a_slow_network() -> None:
    """Else it would never succeed, since each attempt begins with the first byte."""
    noting = Noting()
    client = Client("job", 0, [noting])
    client.ask(calls.PUSH, pb.PushRequest(), body=memoryview(bytes(2 * calls.SLOWEST)))
    client.heartbeat()
    list(client.pull(client.member_id, 0, pb.PullRequest(), 600 * calls.SLOWEST))
    client.ask_all(calls.LOOKUP, pb.LookupRequest(), lambda *_: None, answer=3 * calls.SLOWEST)
    assert [each.total_seconds() for each in noting.allowed] == [62, 60, 660, 63]


class Clock:
    """The time of a client's calls, and attempts that take some and fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.tried = 0.0, 0
        patch.setattr("elastic_ps.worker.wire.client.time", SimpleNamespace(monotonic=lambda: self.now))

    def attempt(self, *seconds: float) -> int:
        """One that fails after so many seconds, if it is one of the first; then the number of attempts."""
        self.tried += 1
        if self.tried > len(seconds):
            return self.tried
        self.now += seconds[self.tried - 1]
        raise ConnectionLost("reset")


def test_what_breaks_off_after_a_long_time_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body is large, or the process was stopped meanwhile."""
    clock = Clock(monkeypatch)
    assert Client("job", 0, []).retry(lambda: clock.attempt(3600)) == 2


def test_a_body_that_never_arrives_whole_ends_the_call_after_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(ConnectionLost, match="has not answered for 1260 s: reset"):
        Client("job", 0, []).retry(lambda: clock.attempt(*[400.0] * 9))
    assert clock.tried == 4


@pytest.mark.parametrize("call", [calls.LOOKUP, calls.PUSH, calls.INIT, calls.OPTIMIZER_STATE])
def test_one_that_calls_a_shard_without_the_model_asks_whether_it_is_a_member(
    call: calls.Call[Any, Any],
) -> None:
    gone = Refused(RefusalCode.STALE_TERM, "this is term 2")
    client = Client("job", 0, [Failing(gone), Failing(Refused(RefusalCode.NOT_READY, "no model yet"))])
    client.member_id = MemberId("job", 0, term=1, incarnation=7)
    with pytest.raises(Refused, match="this is term 2"):
        client.ask(call, call.request(), shard=1)
