"""The operator as a process, beside an API server on localhost: what it reacts to, what its probes say."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_operator import handlers, names, settings
from elastic_operator.api import Api
from elastic_operator.listings import Listings
from elastic_operator.metrics import HealthServer, Metrics
from elastic_operator.store import Store
from tests.testing.api_server import JOBS, ApiServer, Refusal, Request
from tests.testing.impatient import Slow, assert_only_what_fails_is_told, broken
from tests.testing.polling import eventually

ROOT = Path(__file__).parents[2]


def get(port: int, path: str, *, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and text of a page on localhost."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Process:
    """`python -m elastic_operator`."""

    def __init__(self, log: Path, *arguments: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "operator")])
        self._log = log
        with log.open("wb") as stream:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "elastic_operator", *arguments],
                env={**os.environ, "PYTHONPATH": path},
                stderr=stream,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def page(self, path: str) -> tuple[int, str]:
        pattern = r"probes and metrics on port (\d+)"
        found = eventually(lambda: re.search(pattern, self.said), f"it tells its port: {self.said}")
        return get(int(found[1]), path)

    def wait_for_page(self, path: str, code: int, text: str) -> None:
        eventually(
            lambda: (answer := self.page(path))[0] == code and text in answer[1],
            f"{path} says {text!r}: {self.said}",
        )

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[Process]:
    """An operator that lists everything each second."""
    process = start(server, tmp_path, "--resync", "1s", "--watch-limit", "2s")
    yield process
    process.close()


def start(server: ApiServer, directory: Path, *arguments: str) -> Process:
    config = str(server.kubeconfig(directory))
    fixed = ["--kubeconfig", config, "--health", "127.0.0.1:0", "--poll", "1h"]
    return Process(directory / "log", *fixed, *arguments)


@pytest.fixture
def listening(server: ApiServer, tmp_path: Path) -> Iterator[Process]:
    """An operator that lists nothing and looks at no job again for an hour: it has to be told."""
    process = start(server, tmp_path, "--resync", "1h")
    eventually(lambda: server.watched(JOBS) and server.watched("pods"), f"it watches: {process.said}")
    yield process
    process.close()


def test_it_reacts_to_jobs_and_pods_and_ends_in_order(server: ApiServer, listening: Process) -> None:
    operator = listening
    job = server.add_job(worker={"replicas": 1})
    eventually(lambda: "digits-worker-0" in server.names("pods"), f"the job is started: {operator.said}")
    for name in server.names("pods"):
        server.start(name)
    eventually(
        lambda: server.phase("digits") == "Running",
        f"the pods' start is noticed: {operator.said}",
    )
    first = job = server.get(JOBS, "digits")
    edited = {**job, "spec": {**job["spec"], "worker": {"replicas": 2}}}
    edited["metadata"]["generation"] = 2
    server.put(JOBS, edited)
    eventually(lambda: "digits-worker-1" in server.names("pods"), f"it is scaled: {operator.said}")
    server.remove("pods", "digits-worker-0")
    eventually(lambda: "digits-worker-0" in server.names("pods"), f"a pod is replaced: {operator.said}")
    old = server.get("pods", "digits-ps-0")
    before = {**old["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}
    server.put("pods", {**old, "metadata": before})
    job = server.get(JOBS, "digits")
    annotations = {"elastic-ps.dev/restartedAt": "2026-01-01T00:00:01Z"}
    server.put(JOBS, {**job, "metadata": {**job["metadata"], "annotations": annotations}})
    eventually(
        lambda: (
            "digits-ps-0" in server.names("pods")
            and server.get("pods", "digits-ps-0")["metadata"]["uid"] != before["uid"]
        ),
        f"the parameter server is restarted: {operator.said}",
    )
    assert operator.page("/healthz") == (200, "ok")
    metrics = operator.page("/metrics")[1]
    assert 'elastic_ps_operator_jobs_total{event="started"} 1.0' in metrics
    assert 'elastic_ps_operator_watch_age_seconds{resource="pods"}' in metrics
    assert "elastic_ps_operator_queue " in metrics
    assert not {"finalizers", "annotations"} & first["metadata"].keys(), "kopf writes nothing"
    assert {request.method for request in of_kopf(server)} == {"GET"}
    operator.child.send_signal(signal.SIGTERM)
    assert operator.child.wait(60) == 0


def of_kopf(server: ApiServer, *, watch: bool | None = None, resource: str = "") -> list[Request]:
    """The requests that kopf has made so far, and not our own client."""
    return [
        request
        for request in list(server.requests)
        if request.headers["user-agent"].startswith("kopf/")
        and request.path.endswith(resource)
        and watch in (None, "watch" in request.query)
    ]


def deaf(request: Request) -> None:
    if request.query.get("watch") == "true":
        raise Refusal(403, "Forbidden", "no right to watch")


def without_definition(request: Request) -> None:
    if JOBS in request.path and request.query.get("watch") != "true":
        raise Refusal(404, "NotFound", "there is no such resource")


def test_its_probes_say_that_a_watch_is_dead(server: ApiServer, operator: Process) -> None:
    server.refuse = deaf
    server.add_job()
    operator.wait_for_page("/healthz", 503, "the watch of trainingjobs has missed a change")
    assert operator.page("/readyz") == (200, "ok")


def test_its_probes_tell_a_definition_that_is_gone_from_one_that_is_yet_to_come(
    server: ApiServer, operator: Process
) -> None:
    server.refuse = without_definition
    operator.wait_for_page("/readyz", 503, "the API server does not serve TrainingJobs yet")
    assert operator.page("/healthz") == (200, "ok"), "a restart would not help"
    server.refuse = lambda _: None
    operator.wait_for_page("/readyz", 200, "ok")
    eventually(lambda: server.watched(JOBS), f"it watches: {operator.said}")
    server.refuse = without_definition
    operator.wait_for_page("/healthz", 503, "the API server no longer knows TrainingJobs")


def test_its_probes_are_content_while_pods_come_and_go(server: ApiServer, operator: Process) -> None:
    operator.wait_for_page("/readyz", 200, "ok")
    eventually(lambda: server.watched(JOBS) and server.watched("pods"), f"it watches: {operator.said}")
    server.add_job()
    for _ in range(2):
        eventually(lambda: "digits-worker-0" in server.names("pods"), f"the pod is there: {operator.said}")
        server.remove("pods", "digits-worker-0")

    def listings() -> int:
        requests = server.asked("GET", "pods")
        return sum("watch" not in request.query for request in requests)

    before = listings()
    eventually(lambda: listings() >= before + 5, "it has listed everything for longer than its limit")
    operator.wait_for_page("/healthz", 200, "ok")  # on a busy machine a watch may have been late just now


def test_what_no_watch_delivers_is_found_by_a_listing(server: ApiServer, tmp_path: Path) -> None:
    def deaf(request: Request) -> None:
        if request.query.get("watch") == "true" and "pods" in request.path:
            raise Refusal(403, "Forbidden", "no right to watch")

    server.refuse = deaf
    operator = start(server, tmp_path, "--resync", "1s")
    try:
        server.add_job()
        eventually(lambda: "digits-worker-0" in server.names("pods"), f"it is started: {operator.said}")
        for name in server.names("pods"):
            server.start(name)
        eventually(
            lambda: server.phase("digits") == "Running",
            f"the pods' start is noticed: {operator.said}",
        )
    finally:
        operator.close()


def test_a_watch_goes_on_from_where_it_was_and_begins_anew_where_that_is_forgotten(
    server: ApiServer, tmp_path: Path
) -> None:
    """What was deleted while there was no watch, no watch tells."""
    refusals: list[Refusal] = []

    def refuse(request: Request) -> None:
        if request.query.get("watch") == "true" and "pods" in request.path and refusals:
            raise refusals.pop(0)

    server.refuse = refuse
    operator = start(server, tmp_path, "--resync", "1h", "--namespace", "default")
    try:
        eventually(lambda: server.watched(JOBS) and server.watched("pods"), f"it watches: {operator.said}")
        server.add_job()
        eventually(lambda: "digits-worker-0" in server.names("pods"), f"it is started: {operator.said}")
        refusals += [Refusal(code, "Refused") for code in (500, 403, 404)]
        server.cut()
        eventually(lambda: not refusals and server.watched("pods"), f"it watches again: {operator.said}")
        server.start("digits-worker-0")
        server.start("digits-ps-0")
        eventually(lambda: server.phase("digits") == "Running", f"it is told of that: {operator.said}")
        assert len(of_kopf(server, watch=False, resource="/pods")) == 1, "it has missed nothing"
        watches = of_kopf(server, watch=True, resource="/pods")
        versions = [int(request.query["resourceVersion"]) for request in watches]
        assert versions[0] < versions[1] == versions[-1]
        assert {request.query["allowWatchBookmarks"] for request in watches} == {"true"}
        assert {request.query["labelSelector"] for request in watches} == {names.JOB_LABEL}
        for number, code in enumerate((410, 500), start=2):
            refusals.append(Refusal(code, "Refused", streamed=True))
            server.cut()
            server.remove("pods", "digits-worker-0")
            eventually(lambda: "digits-worker-0" in server.names("pods"), f"it is noticed: {operator.said}")
            assert len(of_kopf(server, watch=False, resource="/pods")) == number
        assert {request.path for request in server.asked("GET", JOBS)[2:]} == {
            f"/apis/elastic-ps.dev/v1alpha1/namespaces/default/{JOBS}"
        }
    finally:
        operator.close()


def test_jobs_that_are_nested_too_deeply_cost_only_themselves(server: ApiServer, tmp_path: Path) -> None:
    """One is there before kopf lists, and a watch delivers the other one."""
    server.texts["DEEP"] = "[" * 10_000 + "]" * 10_000
    server.add_job("listed", arguments={"a": "DEEP"})
    operator = start(server, tmp_path, "--resync", "1h")
    try:
        eventually(lambda: server.watched(JOBS) and server.watched("pods"), f"it watches: {operator.said}")
        server.add_job("watched", arguments={"a": "DEEP"})
        server.add_job()
        eventually(lambda: "digits-worker-0" in server.names("pods"), f"one is started: {operator.said}")
        eventually(
            lambda: server.phase("listed") == server.phase("watched") == "Failed",
            f"the others are told: {operator.said}",
        )
        assert operator.page("/healthz") == (200, "ok")
    finally:
        operator.close()


def test_kopf_asks_again_though_it_is_not_known(server: ApiServer, listening: Process) -> None:
    """The API server may not have read all accounts yet, or the token be an old one."""
    unknown = [401, 401]

    def refuse(request: Request) -> None:
        if request.headers["user-agent"].startswith("kopf/") and unknown:
            raise Refusal(unknown.pop(), "Unauthorized")

    server.refuse = refuse
    server.cut()
    eventually(lambda: not unknown and server.watched("pods"), f"it watches again: {listening.said}")
    eventually(lambda: server.watched(JOBS), f"it watches again: {listening.said}")
    server.add_job()
    eventually(lambda: "digits-worker-0" in server.names("pods"), f"it is started: {listening.said}")
    assert {request.headers["authorization"] for request in of_kopf(server)} == {"Bearer secret"}


def test_an_operator_that_cannot_reach_a_cluster_ends_with_2_and_a_sentence(tmp_path: Path) -> None:
    process = Process(tmp_path / "log", "--kubeconfig", str(tmp_path / "none"), "--health", "127.0.0.1:0")
    assert process.child.wait(60) == 2
    assert process.said.startswith("elastic-operator: no cluster is configured")
    assert "set --kubeconfig" in process.said


def test_an_operator_whose_port_is_taken_ends_with_2_and_a_sentence(
    server: ApiServer, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = str(server.kubeconfig(tmp_path))
        process = Process(tmp_path / "log", "--kubeconfig", config, "--health", address)
        assert process.child.wait(60) == 2
    assert process.said == f"elastic-operator: cannot listen on {address}: Address already in use\n"


def test_the_command_line() -> None:
    defaults = settings.parse([])
    assert defaults == settings.Settings()
    given = settings.parse(
        [
            *("--namespace", "a", "--namespace", "b", "--kubeconfig", "k", "--health", ":81"),
            *("--concurrency", "1", "--resync", "5s", "--watch-limit", "1m30s", "--poll", "500ms"),
            *("--log-level", "debug", "--fail-after-writes", "3", "--lease", "system/operator"),
        ]
    )
    assert given.namespaces == ("a", "b")
    assert given.lease == ("system", "operator")
    assert (given.kubeconfig, given.health) == (Path("k"), ("0.0.0.0", 81))
    assert (given.concurrency, given.fail_after_writes, given.log_level) == (1, 3, "debug")
    assert (given.resync, given.watch_limit) == (timedelta(seconds=5), timedelta(seconds=90))
    assert given.options.poll == timedelta(milliseconds=500)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--health here", "'here' is not host:port"),
        ("--concurrency 0", "'0' is not a whole number of at least 1"),
        ("--concurrency x", "'x' is not a whole number of at least 1"),
        ("--poll 5", "write it like 30s"),
        ("--poll 0s", "'0s' is too short;"),
        ("--resync 0m", "'0m' is too short;"),
        ("--certificate-lifetime 1s", "60s at least"),
        ("--lease operator", "'operator' is not namespace/name"),
        ("--lease system/", "'system/' is not namespace/name"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings.parse(arguments.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_kopf_looks_for_nothing_and_writes_nothing(server: ApiServer, tmp_path: Path) -> None:
    given = settings.Settings(kubeconfig=server.kubeconfig(tmp_path))
    chosen = handlers.build_settings(given, Listings(Api(given, Metrics()), Store(), given))
    assert chosen.scanning.disabled, "it may not look for kinds of objects"
    assert not chosen.posting.enabled, "it may not create events"


def test_the_health_server_says_what_is_wrong_until_it_is_closed() -> None:
    wrong: dict[str, str | None] = {"healthy": None, "ready": "not yet"}
    server = HealthServer(
        ("127.0.0.1", 0), Metrics(), healthy=lambda: wrong["healthy"], ready=lambda: wrong["ready"]
    )
    port = server.port
    assert get(port, "/healthz") == (200, "ok")
    assert get(port, "/readyz") == (503, "not yet")
    wrong["healthy"] = "a watch is dead"
    assert get(port, "/healthz") == (503, "a watch is dead")
    assert get(port, "/else") == (
        404,
        "there is no /else here; this server has /healthz, /readyz, /metrics\n",
    )
    code, text = get(port, "/metrics")
    assert code == 200
    assert "elastic_ps_operator_reconcile_seconds_count 0.0" in text
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_probes_are_answered_over_both_protocols() -> None:
    address = settings.parse(["--health=0.0.0.0:0"]).health
    server = HealthServer(address, Metrics(), healthy=lambda: None, ready=lambda: None)
    try:
        for host in ("127.0.0.1", "[::1]"):
            assert get(server.port, "/healthz", host=host) == (200, "ok")
    finally:
        server.close()


def test_a_probe_that_does_not_wait_for_the_answer_is_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    server = HealthServer(("127.0.0.1", 0), Metrics(), healthy=slow.make, ready=broken)
    slow.ask_and_go(server.port, "/healthz")
    assert_only_what_fails_is_told(server.port, "/readyz", capfd)
    server.close()


def test_the_second_operator_goes_on_when_the_first_ends(server: ApiServer, tmp_path: Path) -> None:
    def begin(name: str) -> Process:
        (tmp_path / name).mkdir()
        return start(server, tmp_path / name, "--lease", "system/operator", "--identity", name)

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
        assert server.get("leases", "operator", "system")["spec"]["holderIdentity"] == "second"
    finally:
        for operator in operators:
            operator.close()
