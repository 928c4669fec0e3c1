"""Of several operators one works, and another one goes on when it is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_operator.api import Api
from elastic_operator.leader import DURATION, GIVE_UP, RENEW, Leadership, Record, may_take
from elastic_operator.metrics import Metrics
from elastic_operator.settings import Settings
from tests.testing.api_server import ApiServer, Refusal, Request
from tests.testing.polling import LIMIT, eventually

LEASE = ("--lease", "system/operator")


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


class Clock:
    """One that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def candidate(
    server: ApiServer, directory: Path, me: str, clock: Clock, *, renew: float = RENEW
) -> Leadership:
    api = Api(Settings(kubeconfig=server.kubeconfig(directory)), Metrics())
    return Leadership(api, "system", "operator", me, renew=renew, clock=clock)


def spec(server: ApiServer) -> dict[str, object]:
    found: dict[str, object] = server.get("leases", "operator", "system")["spec"]
    return found


@pytest.mark.parametrize(
    ("holder", "unchanged", "may"),
    [("me", 0, True), ("", 0, True), ("other", 14.9, False), ("other", 15, True)],
)
def test_a_lease_may_be_taken_that_is_free_or_has_run_out(holder: str, unchanged: float, may: bool) -> None:
    record = Record(holder=holder, mark="1", transitions=0)
    assert may_take(record, "me", timedelta(seconds=unchanged)) is may


def test_a_holder_stops_before_its_lease_has_run_out() -> None:
    assert GIVE_UP + RENEW < 1


def test_a_lease_has_one_holder_until_it_has_not_been_renewed_for_long(
    server: ApiServer, tmp_path: Path
) -> None:
    clock = Clock()
    first, second = (candidate(server, tmp_path, me, clock) for me in ("first", "second"))
    assert first.attempt()
    assert spec(server)["holderIdentity"] == "first"
    for _ in range(10):
        assert not second.attempt()
        clock.now += 5
        assert first.attempt(), "it is renewed"
    assert not second.attempt()
    clock.now += DURATION.total_seconds() - 1
    assert not second.attempt()
    clock.now += 1
    assert second.attempt()
    assert (spec(server)["holderIdentity"], spec(server)["leaseTransitions"]) == ("second", 1)
    assert not first.attempt()


def test_a_lease_that_was_given_up_is_free_at_once(server: ApiServer, tmp_path: Path) -> None:
    clock = Clock()
    first, second = (candidate(server, tmp_path, me, clock) for me in ("first", "second"))
    first.acquire()
    first.release()
    second.acquire(lambda _: pytest.fail("it need not wait"))
    first.release()
    assert spec(server)["holderIdentity"] == "second", "what is another's is not given up"


def test_a_holder_renews_its_lease_until_it_gives_it_up(server: ApiServer, tmp_path: Path) -> None:
    holder = candidate(server, tmp_path, "me", Clock(), renew=1e-4)
    holder.acquire()
    assert not holder.held, "it is mine, but nobody renews it yet"
    holder.hold(lambda: pytest.fail("it is not lost"))
    assert holder.held
    seen = {str(spec(server)["renewTime"])}
    eventually(lambda: seen.add(str(spec(server)["renewTime"])) or len(seen) > 3, "it is renewed")
    assert (spec(server)["leaseTransitions"], spec(server)["leaseDurationSeconds"]) == (0, 15)
    holder.release()
    assert spec(server)["holderIdentity"] == ""
    assert not [t for t in threading.enumerate() if t.name == "lease"], "nobody renews it any more"


def test_a_holder_that_cannot_renew_its_lease_for_long_has_lost_it(server: ApiServer, tmp_path: Path) -> None:
    clock, lost = Clock(), threading.Event()
    holder = candidate(server, tmp_path, "me", clock, renew=1e-4)
    holder.acquire()
    failed = threading.Semaphore(0)

    def refuse(request: Request) -> None:
        failed.release()
        raise Refusal(500, "InternalError")

    server.refuse = refuse
    holder.hold(lost.set)
    clock.now = GIVE_UP * DURATION.total_seconds()
    for _ in range(3):
        assert failed.acquire(timeout=LIMIT)
    assert not lost.is_set(), "it may still be renewed"
    clock.now += 1
    assert lost.wait(60)
    holder.release()
    server.refuse = lambda _: None
    assert spec(server)["holderIdentity"] == "me", "it could not be given up"


def test_a_holder_that_meets_what_nobody_foresaw_goes_on_renewing_and_then_stops_working(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If its thread just died, another operator would take the lease, and both would work."""
    clock, lost = Clock(), threading.Event()
    holder = candidate(server, tmp_path, "me", clock, renew=1e-4)
    holder.acquire()
    failed = threading.Semaphore(0)

    lease = server.get("leases", "operator", "system")
    server.put("leases", {**lease, "spec": {**lease["spec"], "leaseTransitions": "nobody foresaw this"}})
    server.refuse = lambda _: failed.release()
    holder.hold(lost.set)
    for _ in range(3):
        assert failed.acquire(timeout=LIMIT)
    assert not lost.is_set(), "it may still be renewed"
    clock.now = GIVE_UP * DURATION.total_seconds() + 1
    assert lost.wait(60)
    server.put("leases", lease)
    holder.release()
    assert "ValueError: " in caplog.text
    assert "nobody foresaw this" in caplog.text


def test_one_that_was_slower_waits(server: ApiServer, tmp_path: Path) -> None:
    """Both have read that the lease is free."""
    second = candidate(server, tmp_path, "second", Clock())

    def refuse(request: object) -> None:
        if getattr(request, "method", "") == "POST":
            raise Refusal(409, "AlreadyExists")

    server.refuse = refuse
    assert not second.attempt()


def test_a_lease_that_cannot_be_read_is_nobodys_to_take(server: ApiServer, tmp_path: Path) -> None:
    """Only of one that is not there it is known that nobody holds it."""
    me = candidate(server, tmp_path, "me", Clock(), renew=1e-4)

    def refuse(request: Request) -> None:
        if request.method == "GET":
            raise Refusal(500, "InternalError")

    server.refuse = refuse
    assert not me.attempt()
    assert not server.asked("POST", "leases")
    server.refuse = lambda _: None
    assert me.attempt()
    assert len(server.asked("POST", "leases")) == 1
