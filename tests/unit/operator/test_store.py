"""What the operator knows of the cluster: in whatever order the news come, and read when it has written."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elastic_operator import names
from elastic_operator.api import Api, ApiError
from elastic_operator.handlers import list_again
from elastic_operator.listings import Listings
from elastic_operator.metrics import Metrics
from elastic_operator.queue import Key
from elastic_operator.session import Delays
from elastic_operator.settings import Settings
from elastic_operator.store import Resource, Store
from elastic_ps.errors import ConnectionLost
from tests.testing.api_server import JOBS, ApiServer, Refusal, Request
from tests.testing.simulation import job_document
from tests.testing.virtual import Clock
from tests.unit.operator.test_cluster import Operator

KEY: Key = ("default", "digits")


def job(version: int, uid: str = "uid-digits", **status: Any) -> dict[str, Any]:
    document = job_document()
    document["metadata"] |= {"uid": uid, "resourceVersion": str(version), "managedFields": ["long"]}
    return {**document, "status": status}


def pod(
    name: str, version: int, *, uid: str = "", owner: str = "uid-digits", phase: str = ""
) -> dict[str, Any]:
    index = name.rpartition("-")[2]
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {names.JOB_LABEL: "digits", names.ROLE_LABEL: "worker", names.INDEX_LABEL: index},
            "ownerReferences": [{"uid": owner}],
        },
        "status": {"phase": phase},
    }


@pytest.fixture
def store() -> Store:
    store = Store()
    store.put("trainingjobs", job(1))
    return store


def pods(store: Store) -> dict[str, str]:
    """The versions of the job's pods as they are known."""
    snapshot = store.snapshot(KEY)
    assert snapshot is not None
    return {found.name: found.version for found in snapshot.observed.pods}


def test_an_older_version_does_not_replace_a_newer_one(store: Store) -> None:
    """The watch tells later what an own write has told before."""
    store.put("pods", pod("digits-worker-0", 9), ours=True)
    store.put("pods", pod("digits-worker-0", 5))
    assert pods(store) == {"digits-worker-0": "9"}
    store.put("pods", pod("digits-worker-0", 10))
    assert pods(store) == {"digits-worker-0": "10"}, "versions are numbers"


def test_what_is_gone_does_not_come_back(store: Store) -> None:
    """The answer to a write may come after the watch's word that the object is gone."""
    store.put("pods", pod("digits-worker-0", 5))
    store.remove("pods", pod("digits-worker-0", 7))
    store.put("pods", pod("digits-worker-0", 6), ours=True)
    assert pods(store) == {}
    store.put("pods", pod("digits-worker-0", 8, uid="the-next"))
    assert pods(store) == {"digits-worker-0": "8"}
    store.remove("pods", pod("digits-worker-0", 7))
    assert pods(store) == {"digits-worker-0": "8"}, "it was another one of that name"


def test_a_listing_removes_what_it_lacks_unless_that_is_newer(store: Store) -> None:
    for index, version in enumerate((3, 4, 12)):
        store.put("pods", pod(f"digits-worker-{index}", version))
    store.listed("pods", "default", {"uid-digits-worker-1": "4"}, "10")
    assert pods(store) == {"digits-worker-1": "4", "digits-worker-2": "12"}
    store.listed("pods", "another", {}, "20")
    assert pods(store).keys() == {"digits-worker-1", "digits-worker-2"}, "they are of another namespace"


def test_only_what_the_job_owns_belongs_to_it(store: Store) -> None:
    store.put("pods", pod("digits-worker-0", 5, owner="uid-of-the-one-before"))
    retained = {"metadata": pod("digits-ps-0", 6, owner="")["metadata"]}
    retained["metadata"]["annotations"] = {names.RUN_ANNOTATION: "uid-digits"}
    store.put("persistentvolumeclaims", retained)
    snapshot = store.snapshot(KEY)
    assert snapshot is not None
    assert snapshot.observed.pods == ()
    assert snapshot.observed.claims == {"digits-ps-0"}
    assert store.snapshot(("default", "another")) is None


def test_a_pod_whose_label_names_another_job_does_not_belong_to_the_first_one(store: Store) -> None:
    store.put("pods", pod("digits-worker-0", 5))
    other = pod("digits-worker-0", 6)
    other["metadata"]["labels"][names.JOB_LABEL] = "another"
    store.put("pods", other)
    assert pods(store) == {}
    store.remove("pods", other)
    assert pods(store) == {}


def test_a_pass_is_wanted_for_what_it_would_look_at(store: Store) -> None:
    seen: list[tuple[str, Resource]] = []
    store.changed = lambda key, resource: seen.append((key[1], resource))
    store.put("trainingjobs", job(2, phase="Running"))
    store.put("pods", pod("digits-worker-0", 5), ours=True)
    store.put("pods", pod("digits-worker-0", 6))
    assert seen == [], "a status, an own write, and a change of nothing that is looked at"
    store.put("pods", pod("digits-worker-0", 7, phase="Failed"))
    store.put("trainingjobs", {**job(8), "metadata": {**job(8)["metadata"], "generation": 2}})
    store.remove("pods", pod("digits-worker-0", 9))
    assert [resource for _, resource in seen] == ["pods", "trainingjobs", "pods"]


def test_a_job_is_kept_without_what_nobody_reads(store: Store) -> None:
    store.put("trainingjobs", job(2, phase="Running", completionTime="2026-01-01T00:00:00Z"))
    snapshot = store.snapshot(KEY)
    assert snapshot is not None
    assert "managedFields" not in json.dumps(snapshot.job)
    assert snapshot.job["status"]["phase"] == "Running"
    assert store.jobs() == {KEY: True}


def owned(name: str, version: int, **annotations: str) -> dict[str, Any]:
    """Something that belongs to the job, and is no pod."""
    metadata = pod(name, version)["metadata"]
    return {"metadata": {**metadata, "uid": f"uid-{name}-{version}", "annotations": annotations}}


def test_a_job_is_seen_with_all_that_is_its_own(store: Store) -> None:
    store.put("pods", pod("digits-worker-1", 3))
    store.put("pods", pod("digits-worker-0", 4))
    store.put("services", owned("digits-servers", 5, **{names.VALID_ANNOTATION: "{1}"}))
    store.put("persistentvolumeclaims", owned("digits-ps-0", 7))
    store.put("networkpolicies", owned("digits-servers", 8))
    foreign = pod("digits-worker-2", 9)
    foreign["metadata"]["labels"] = {"app": "another"}
    store.put("pods", foreign)
    mislabelled = pod("digits-worker-3", 9)
    mislabelled["metadata"]["labels"][names.INDEX_LABEL] = "first"
    store.put("pods", mislabelled)
    snapshot = store.snapshot(KEY)
    assert snapshot is not None
    assert [found.name for found in snapshot.observed.pods] == ["digits-worker-0", "digits-worker-1"]
    assert (snapshot.observed.service, snapshot.observed.secured) == (True, False)
    assert snapshot.observed.valid_spec == "{1}"
    assert snapshot.observed.claims == {"digits-ps-0"}
    assert snapshot.observed.policies == {"digits-servers"}


def test_a_snapshot_says_when_the_last_of_it_came_in() -> None:
    clock = Clock()
    store = Store(clock.monotonic)

    def changed(at: float) -> float:
        snapshot = store.snapshot(KEY)
        assert snapshot is not None
        clock.now = at
        return snapshot.changed

    clock.now = 1.0
    store.put("trainingjobs", job(1))
    assert changed(2.0) == 1.0
    store.put("pods", pod("digits-worker-0", 5), ours=True)
    assert changed(3.0) == 2.0
    store.put("pods", pod("digits-worker-0", 4))
    assert changed(4.0) == 2.0, "that was no news"
    store.remove("pods", pod("digits-worker-0", 6))
    assert changed(5.0) == 4.0
    store.put("trainingjobs", job(9))
    assert changed(6.0) == 5.0


def test_what_is_gone_is_remembered_for_minutes_and_not_for_ever() -> None:
    clock = Clock()
    store = Store(clock.monotonic)
    store.put("trainingjobs", job(1))
    for index, now in enumerate((0.0, 300.0, 599.0)):
        clock.now = now
        store.remove("pods", pod(f"digits-worker-{index}", 5))
        store.put("pods", pod("digits-worker-0", 6))
        assert pods(store) == {}
    clock.now = 700.0
    store.remove("pods", pod("digits-worker-3", 5))
    for index in range(4):
        store.put("pods", pod(f"digits-worker-{index}", 6))
    assert pods(store) == {"digits-worker-0": "6"}


def test_whose_job_is_gone_is_the_next_ones_only_if_that_owns_it(store: Store) -> None:
    seen: list[Resource] = []
    store.changed = lambda key, resource: seen.append(resource)
    store.put("pods", pod("digits-worker-0", 5))
    store.remove("trainingjobs", job(6))
    assert (store.snapshot(KEY), store.jobs()) == (None, {})
    store.put("trainingjobs", job(7, uid="the-next"))
    assert pods(store) == {}
    store.put("pods", pod("digits-worker-1", 8, owner="the-next"))
    store.remove("pods", pod("digits-worker-0", 9))
    store.remove("pods", pod("digits-worker-0", 9))
    assert pods(store) == {"digits-worker-1": "8"}
    store.remove("pods", pod("digits-worker-1", 10))
    assert pods(store) == {}
    store.remove("trainingjobs", job(11, uid="the-next"))
    assert seen == ["pods", "trainingjobs", "trainingjobs", "pods", "pods", "pods", "trainingjobs"]
    store.put("pods", pod("digits-worker-2", 12))
    store.remove("pods", pod("digits-worker-2", 13))
    assert store.snapshot(KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 2},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"annotations": {names.RESTART_ANNOTATION: "2026-01-01T00:00:00Z"}},
        {"uid": "the-next"},
    ],
)
def test_a_pass_is_wanted_over_a_job_that_a_person_has_changed(store: Store, change: dict[str, Any]) -> None:
    seen: list[Key] = []
    store.changed = lambda key, _: seen.append(key)
    changed = job(2)
    changed["metadata"] |= change
    store.put("trainingjobs", changed)
    store.put("trainingjobs", {**changed, "metadata": {**changed["metadata"], "resourceVersion": "3"}})
    assert seen == [KEY]


@pytest.mark.parametrize(
    ("status", "over"),
    [
        ({"completionTime": "2026-01-01T00:00:00Z"}, True),
        ({"conditions": [{"type": "Failed", "status": "True"}]}, True),
        (
            {"conditions": [{"type": "Running", "status": "True"}, {"type": "Failed", "status": "False"}]},
            False,
        ),
        ({"conditions": None}, False),
        ({}, False),
    ],
)
def test_a_job_is_over_when_its_status_says_so(store: Store, status: dict[str, Any], over: bool) -> None:
    store.put("trainingjobs", job(2, **status))
    assert store.jobs() == {KEY: over}


def test_an_object_that_cannot_be_read_hides_no_other(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    deep = job(2, uid="uid-deep")
    deep["metadata"]["name"] = "deep"
    deep["spec"]["arguments"] = {"a": nested}
    store.put("trainingjobs", deep)
    assert "trainingjobs default/deep cannot be read: RecursionError" in caplog.text
    assert store.jobs().keys() == {KEY}


def test_a_listing_is_of_one_resource_and_of_all_namespaces_if_it_names_none(store: Store) -> None:
    store.put("pods", pod("digits-worker-0", 5))
    store.listed("services", "", {}, "10")
    store.listed("pods", "", {"uid-digits-worker-0": "5"}, "10")
    store.listed("pods", "", {}, "4")
    assert pods(store) == {"digits-worker-0": "5"}
    store.listed("pods", "", {}, "5")
    assert pods(store) == {}


def test_of_versions_that_are_no_numbers_the_last_that_is_told_counts(store: Store) -> None:
    def versioned(version: str) -> dict[str, Any]:
        found = pod("digits-worker-0", 0)
        found["metadata"]["resourceVersion"] = version
        return found

    for version in ("7", "b", "a", "6"):
        store.put("pods", versioned(version))
        assert pods(store) == {"digits-worker-0": version}
    store.listed("pods", "", {}, "unknown")
    assert pods(store) == {}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


@pytest.fixture
def filled(server: ApiServer, tmp_path: Path) -> tuple[Store, Listings]:
    """A store, and the listings that fill it; kopf does not run."""
    store, settings = Store(), Settings(kubeconfig=server.kubeconfig(tmp_path))
    return store, Listings(Api(settings, Metrics()), store, settings)


def test_a_listing_comes_in_pages(server: ApiServer, filled: tuple[Store, Listings]) -> None:
    store, listings = filled
    server.page = 2
    for index in range(5):
        server.add_job(f"digits-{index}")["metadata"]["uid"] = f"uid-{index}"
    listings.list_all("trainingjobs")
    assert [name for _, name in store.jobs()] == [f"digits-{index}" for index in range(5)]
    assert len(server.asked("GET", JOBS)) == 3
    server.remove(JOBS, "digits-3")
    listings.list_all("trainingjobs")
    assert len(store.jobs()) == 4


def test_a_listing_that_fails_changes_nothing(server: ApiServer, filled: tuple[Store, Listings]) -> None:
    store, listings = filled
    server.page = 1
    for name in ("a", "b"):
        server.add_job(name)
    listings.list_all("trainingjobs")

    def fail(request: Request) -> None:
        if "continue" in request.query:
            raise Refusal(500, "InternalError")

    server.refuse = fail
    with pytest.raises(ApiError):
        listings.list_all("trainingjobs")
    assert len(store.jobs()) == 2


def test_what_was_listed_before_a_watch_and_what_it_delivers_is_not_late(
    server: ApiServer, filled: tuple[Store, Listings]
) -> None:
    store, listings = filled
    server.add_job("before")
    listings.list_all("trainingjobs")
    assert listings.ages()["trainingjobs"] > 0, "nobody watches yet"
    assert "networkpolicies" not in listings.ages(), "jobs get none"
    listings.notify("trainingjobs", {"type": None, "object": server.get(JOBS, "before")})
    listings.answered("list", ("trainingjobs", ""))
    listings.list_all("trainingjobs")
    assert listings.ages()["trainingjobs"] > 0, "it was listed by kopf, which does not watch yet"
    assert not listings.due.is_set()
    listings.answered("watch", ("trainingjobs", ""))
    assert listings.due.is_set()
    listings.list_all("trainingjobs")
    assert listings.ages()["trainingjobs"] == 0, "there was a watch before it was listed"
    later = server.add_job("later")
    listings.list_all("trainingjobs")
    assert listings.ages()["trainingjobs"] > 0, "the watch has not told of it"
    listings.notify("trainingjobs", {"type": "ADDED", "object": later})
    assert listings.ages()["trainingjobs"] == 0
    server.remove(JOBS, "before")
    listings.notify("trainingjobs", {"type": "DELETED", "object": {**later}})
    assert [*store.jobs()] == [("default", "before")]
    listings.due.clear()
    listings.answered("watch", ("trainingjobs", ""))
    assert not listings.due.is_set(), "a watch that goes on from where it was has missed nothing"


def test_a_listing_that_fails_is_no_proof_and_the_next_one_is(
    server: ApiServer, filled: tuple[Store, Listings]
) -> None:
    _, listings = filled
    server.add_job()
    listings.list_all("trainingjobs")
    listings.answered("list", ("trainingjobs", ""))
    listings.answered("watch", ("trainingjobs", ""))

    def fail(_: Request) -> None:
        raise Refusal(500, "InternalError")

    server.refuse = fail
    with pytest.raises(ApiError):
        listings.list_all("trainingjobs")
    assert listings.ages()["trainingjobs"] > 0
    server.refuse = lambda _: None
    listings.list_all("trainingjobs")
    assert listings.ages()["trainingjobs"] == 0


def test_what_kopf_is_refused_it_asks_for_less_and_less_often() -> None:
    first = [delay / 2 for delay in itertools.islice(Delays(lambda low, high: low + high), 10)]
    assert first == [1, 1, 2, 3, 5, 8, 13, 20, 20, 20]


def test_no_error_of_a_listing_ends_the_listings(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operator = Operator(server, tmp_path, resync=timedelta(milliseconds=1))
    errors = [RecursionError("maximum recursion depth exceeded"), ConnectionLost("no route")]
    listed = threading.Event()

    def list_all() -> None:
        if errors:
            raise errors.pop()
        listed.set()

    async def main() -> None:
        monkeypatch.setattr(operator.controller, "list_all", list_all)
        listings = Listings(operator.api, operator.store, operator.settings)
        task = asyncio.create_task(list_again(operator.controller, listings, operator.settings))
        assert await asyncio.to_thread(listed.wait, 20), "it has not listed again"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert "cannot list all objects; trying again in 0.001 s: no route" in caplog.text
    assert caplog.text.count("Traceback") == 1, "an outage is no bug"
