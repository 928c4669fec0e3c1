"""Of several operators one works, and another one goes on when it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_operator.api import Api
from elastic_operator.leader import DURATION, GIVE_UP, RENEW, Leadership, Record, may_take
from elastic_operator.metrics import Metrics
from elastic_operator.settings import Settings
from tests.polling import eventually
from tests.unit.api_server import ApiServer, Refusal
from tests.unit.test_operator_process import Process, start

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


def candidate(server: ApiServer, directory: Path, me: str, clock: Clock) -> Leadership:
    api = Api(Settings(kubeconfig=server.kubeconfig(directory)), Metrics())
    return Leadership(api, "system", "operator", me, clock=clock)


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
    assert GIVE_UP + RENEW < DURATION


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


def test_one_that_was_slower_waits(server: ApiServer, tmp_path: Path) -> None:
    """Both have read that the lease is free."""
    second = candidate(server, tmp_path, "second", Clock())

    def refuse(request: object) -> None:
        if getattr(request, "method", "") == "POST":
            raise Refusal(409, "AlreadyExists")

    server.refuse = refuse
    assert not second.attempt()


def test_the_second_operator_goes_on_when_the_first_ends(server: ApiServer, tmp_path: Path) -> None:
    def begin(name: str) -> Process:
        (tmp_path / name).mkdir()
        return start(server, tmp_path / name, *LEASE, "--identity", name)

    first = begin("first")
    operators = [first]
    try:
        eventually(lambda: server.watched("pods"), f"the first one works: {first.said}")
        second = begin("second")
        operators.append(second)
        eventually(lambda: "waiting for the lease" in second.said, f"the second one waits: {second.said}")
        assert second.page("/readyz") == (200, "ok")
        server.add_job()
        eventually(lambda: "digits-worker-0" in server.names("pods"), "the first one starts the job")
        assert "created" not in second.said
        first.child.terminate()
        assert first.child.wait(60) == 0
        server.remove("pods", "digits-worker-0")
        eventually(lambda: "digits-worker-0" in server.names("pods"), f"the second goes on: {second.said}")
        assert spec(server)["holderIdentity"] == "second"
    finally:
        for operator in operators:
            operator.close()
