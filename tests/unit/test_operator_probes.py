"""The command that the kubelet starts with a parameter server: it waits, so that no probe has to fail."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from elastic_operator import probes
from elastic_ps.env import DEFAULT_HTTP_PORT
from elastic_ps.server.status import StatusServer
from elastic_ps.status import ServerStatus
from tests.testing.polling import eventually


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def waits(port: int, limits: str = "280 if up else 50") -> subprocess.Popen[bytes]:
    python, option, script = probes.of_server()["startupProbe"]["exec"]["command"]
    assert (python, option) == ("python", "-c")
    text = script.replace(str(DEFAULT_HTTP_PORT), str(port)).replace("280 if up else 50", limits)
    return subprocess.Popen([sys.executable, option, text])


def status(*, ready: bool) -> Callable[[], ServerStatus]:
    return lambda: ServerStatus(job="digits", shard=0, shards=1, term=1, ready=ready)


def test_it_waits_for_a_server_that_is_not_there_yet_and_for_the_model(port: int) -> None:
    probe = waits(port)
    asked: list[str] = []

    def unready() -> ServerStatus:
        asked.append("ready?")
        return status(ready=False)()

    with probe:
        server = StatusServer(f"127.0.0.1:{port}", unready, list)
        try:
            eventually(lambda: len(asked) > 2, "it asks again and again")
            assert probe.poll() is None
            server.show(status(ready=True), list)
            assert probe.wait(30) == 0
        finally:
            server.close()
            probe.kill()


def test_it_fails_if_nobody_answers(port: int) -> None:
    assert waits(port, "60 if up else 0.5").wait(30) == 1


def test_a_server_for_which_no_workers_come_has_started_all_the_same(port: int) -> None:
    server = StatusServer(f"127.0.0.1:{port}", status(ready=False), list)
    try:
        assert waits(port, "0.5 if up else 60").wait(30) == 0
    finally:
        server.close()
