"""What a parameter server answers over HTTP, and in Prometheus' text format."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from http.server import SimpleHTTPRequestHandler

import pytest

from elastic_ps.api.status import EvaluationStatus, MemberStatus, Progress, ServerStatus, Staleness
from elastic_ps.api.tables import TableStatus
from elastic_ps.api.traffic import Traffic
from elastic_ps.errors import CannotListen
from elastic_ps.local.poller import fetch_status
from elastic_ps.process.listening import HttpServer
from elastic_ps.server.job.status import StatusServer, metrics
from tests.testing import machine
from tests.testing.impatient import Slow, assert_only_what_fails_is_told, broken
from tests.testing.polling import eventually


def status_of(*, ready: bool) -> ServerStatus:
    return ServerStatus(job="job", shard=0, shards=1, term=3, ready=ready, tensor_bytes=4096)


@pytest.fixture(scope="module")
def server() -> Iterator[StatusServer]:
    server = StatusServer("127.0.0.1:0", lambda: status_of(ready=False), list)
    yield server
    server.close()


def get(server: StatusServer, path: str, *, host: str = "127.0.0.1") -> tuple[int, str, str]:
    """Code, type and text of a page."""
    try:
        answer = urllib.request.urlopen(f"http://{host}:{server.port}{path}", timeout=10)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_pages_are_those_of_the_moment(server: StatusServer) -> None:
    server.show(lambda: status_of(ready=False), list)
    assert get(server, "/readyz") == (503, "text/plain", "no\n")
    assert get(server, "/healthz") == (200, "text/plain", "ok\n")
    assert get(server, "/loss") == (200, "application/json", "[]")
    server.show(lambda: status_of(ready=True), lambda: [(1, 0.5), (2, 0.25)])
    assert get(server, "/readyz") == (200, "text/plain", "ok\n")
    assert get(server, "/loss") == (200, "application/json", "[[1, 0.5], [2, 0.25]]")
    code, kind, text = get(server, "/status")
    assert (code, kind) == (200, "application/json")
    assert ServerStatus.model_validate_json(text) == status_of(ready=True)
    assert "checkpointPauseSeconds" in json.loads(text), "as Kubernetes writes names"
    code, kind, text = get(server, "/metrics")
    assert (code, kind, text) == (200, "text/plain; version=0.0.4", metrics(status_of(ready=True)))


@contextlib.contextmanager
def serving(kind: type[HttpServer]) -> Iterator[tuple[str, int]]:
    with kind(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield "127.0.0.1", server.server_address[1]
        server.shutdown()
        thread.join()


class Impatient(HttpServer):
    limit = timedelta(milliseconds=500)


class Small(HttpServer):
    requests = 2


def test_a_request_that_takes_long_is_cut_off_however_often_something_of_it_comes() -> None:
    """A byte now and then would keep its thread and its descriptor for ever."""
    with serving(Impatient) as address, socket.create_connection(address) as slow:
        eventually(lambda: not takes(slow), "it is cut off")


def test_strangers_that_say_nothing_leave_room_for_others() -> None:
    with serving(Small) as address, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/", timeout=10) as answer:
            assert answer.status == 200
        for each in silent[:4]:
            each.settimeout(20)
            assert each.recv(1) == b"", "the oldest make room"


def takes(sock: socket.socket) -> bool:
    try:
        sock.sendall(b"G")
    except ConnectionError:
        return False
    return True


def test_a_page_that_does_not_exist_is_named(server: StatusServer) -> None:
    code, kind, text = get(server, "/else")
    assert (code, kind) == (404, "text/plain")
    assert text.startswith("there is no /else here; this server has /status, /loss, ")


def test_one_that_does_not_wait_for_the_answer_is_not_logged(
    server: StatusServer, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = Slow()

    def status() -> ServerStatus:
        slow.make()
        return status_of(ready=True)

    server.show(status, list)
    slow.ask_and_go(server.port, "/status")
    server.show(broken, list)
    assert_only_what_fails_is_told(server.port, "/status", capfd)


def test_a_port_that_is_taken_is_said_in_words(server: StatusServer) -> None:
    bind = f"127.0.0.1:{server.port}"
    with pytest.raises(CannotListen, match=f"cannot listen on {bind}: Address already in use"):
        StatusServer(bind, lambda: status_of(ready=True), list)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("bind", "hosts"),
    [
        ("0.0.0.0:0", ["127.0.0.1", "[::1]"]),
        ("[::]:0", ["127.0.0.1", "[::1]"]),
        (":0", ["127.0.0.1", "[::1]"]),
        ("[::1]:0", ["[::1]"]),
    ],
)
def test_pages_are_served_over_both_protocols(bind: str, hosts: list[str]) -> None:
    server = StatusServer(bind, lambda: status_of(ready=True), list)
    try:
        assert [get(server, "/healthz", host=host)[0] for host in hosts] == [200] * len(hosts)
    finally:
        server.close()


def test_pages_are_served_where_there_is_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.lacks_ipv6(monkeypatch)
    server = StatusServer("0.0.0.0:0", lambda: status_of(ready=True), list)
    try:
        assert get(server, "/healthz")[0] == 200
    finally:
        server.close()


def test_metrics_count_what_the_status_says() -> None:
    def member(worker: int, state: str) -> MemberStatus:
        fields = {"worker": worker, "incarnation": worker, "pid": 1, "host": "here", "joined_version": 0}
        return MemberStatus.model_validate({**fields, "state": state})

    status = status_of(ready=True).model_copy(
        update={
            "progress": Progress(version=7, records_applied=70, samples_per_second=2.5, durable_version=6),
            "durable_age_seconds": 1.5,
            "checkpoint_pause_seconds": 0.25,
            "traffic": Traffic(pushed_bytes=303, decode_seconds=1.5),
            "members": [member(0, "training"), member(1, "idle"), member(2, "lost")],
        }
    )
    lines = metrics(status).splitlines()
    values = dict(line.split(" ") for line in lines if not line.startswith("#"))
    assert values == {
        'elastic_ps_version{job="job"}': "7",
        'elastic_ps_records_applied{job="job"}': "70",
        'elastic_ps_workers{job="job"}': "2",
        'elastic_ps_samples_per_second{job="job"}': "2.5",
        'elastic_ps_durable_version{job="job"}': "6",
        'elastic_ps_durable_age_seconds{job="job"}': "1.5",
        'elastic_ps_term{job="job"}': "3",
        'elastic_ps_tensor_bytes{job="job"}': "4096",
        'elastic_ps_checkpoint_pause_seconds_total{job="job"}': "0.25",
        'elastic_ps_pushed_bytes_total{job="job"}': "303",
        'elastic_ps_pushed_plain_bytes_total{job="job"}': "0",
        'elastic_ps_pulled_bytes_total{job="job"}': "0",
        'elastic_ps_pulled_plain_bytes_total{job="job"}': "0",
        'elastic_ps_encode_seconds_total{job="job"}': "0.0",
        'elastic_ps_decode_seconds_total{job="job"}': "1.5",
        'elastic_ps_push_seconds_total{job="job"}': "0.0",
        'elastic_ps_hidden_seconds_total{job="job"}': "0.0",
    }, "no loss was reported"
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    assert kinds["elastic_ps_version"] == kinds["elastic_ps_records_applied"] == "gauge", "they can fall"
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        name for name in kinds if name.endswith("_total")
    }
    chosen = metrics(status.model_copy(update={"bucket_bytes": 65536})).splitlines()
    assert set(chosen) - set(lines) == {
        "# HELP elastic_ps_bucket_bytes Bucket size that was chosen.",
        "# TYPE elastic_ps_bucket_bytes gauge",
        'elastic_ps_bucket_bytes{job="job"} 65536',
    }
    stale = status.progress.model_copy(update={"staleness": Staleness(p50=1, p99=6, max=9)})
    lines = metrics(status.model_copy(update={"progress": stale})).splitlines()
    found = [line for line in lines if line.startswith("elastic_ps_staleness")]
    assert [line.split()[-1] for line in found] == ["1", "6", "9"]
    assert "# TYPE elastic_ps_workers gauge" in lines


def test_tables_have_their_names_as_labels() -> None:
    tables = [TableStatus(name="a", rows=3, hits=7), TableStatus(name='"b"')]
    lines = metrics(status_of(ready=True).model_copy(update={"tables": tables})).splitlines()
    assert lines.count("# TYPE elastic_ps_table_rows gauge") == 1
    assert 'elastic_ps_table_rows{job="job",table="a"} 3' in lines
    assert "# TYPE elastic_ps_table_hits_total counter" in lines
    assert 'elastic_ps_table_hits_total{job="job",table="a"} 7' in lines
    assert r'elastic_ps_table_hits_total{job="job",table="\"b\""} 0' in lines


def test_what_scripts_report_has_its_name_as_a_label() -> None:
    reported = {"prec@1": 97.5, 'a "b"\n\\': -1.0, "lost": math.nan, "far": -math.inf}
    status = status_of(ready=True).model_copy(update={"progress": Progress(metrics=reported)})
    lines = [line for line in metrics(status).splitlines() if "elastic_ps_reported" in line]
    assert lines[1:] == [
        "# TYPE elastic_ps_reported gauge",
        r'elastic_ps_reported{job="job",name="a \"b\"\n\\"} -1.0',
        'elastic_ps_reported{job="job",name="far"} -Inf',
        'elastic_ps_reported{job="job",name="lost"} NaN',
        'elastic_ps_reported{job="job",name="prec@1"} 97.5',
    ]


def test_a_value_that_is_not_finite_does_not_make_the_status_unreadable(server: StatusServer) -> None:
    """Who looks after the job would take the parameter server for lost, and the job for failed."""
    reported = {"norm": math.inf, "lost": math.nan, "accuracy": 0.5}
    evaluation = EvaluationStatus(version=3, metrics=reported)
    progress = Progress(loss=math.nan, metrics=reported, evaluation=evaluation)
    server.show(lambda: status_of(ready=True).model_copy(update={"progress": progress}), list)
    found = fetch_status(f"127.0.0.1:{server.port}")
    assert found is not None
    assert found.progress.metrics == {"accuracy": 0.5}
    assert found.progress.loss is None
    assert found.progress.evaluation is not None
    assert found.progress.evaluation.metrics == {"accuracy": 0.5}
    assert 'name="norm"} +Inf' in get(server, "/metrics")[2], "there it has a name"
