"""The command that the kubelet starts with a parameter server: it waits, so that no probe has to fail."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_operator import names, probes
from elastic_ps.api.status import ServerStatus
from elastic_ps.contract.env import DEFAULT_HTTP_PORT
from elastic_ps.local.processes import free_ports
from elastic_ps.process import lifecycle
from elastic_ps.server.job.status import StatusServer
from tests.testing.polling import eventually


@pytest.fixture
def port() -> Iterator[int]:
    with contextlib.ExitStack() as held:
        (port,) = free_ports(1, held=held)
        yield port


def waits(port: int, limit: str = "280") -> subprocess.Popen[bytes]:
    python, option, script = probes.of_server()["startupProbe"]["exec"]["command"]
    assert (python, option) == ("python", "-c")
    text = script.replace(str(DEFAULT_HTTP_PORT), str(port)).replace("> 280:", f"> {limit}:")
    return subprocess.Popen([sys.executable, option, text], stdout=subprocess.PIPE)


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
    with waits(port, "0.5") as probe:
        said, _ = probe.communicate(timeout=30)
    assert probe.returncode == 1
    assert b"has not answered on port" in said, "the kubelet writes that into an Event"


def test_a_server_for_which_no_workers_come_has_started_all_the_same(port: int) -> None:
    server = StatusServer(f"127.0.0.1:{port}", status(ready=False), list)
    try:
        with waits(port, "0.5") as probe:
            assert probe.wait(30) == 0
    finally:
        server.close()


def test_a_worker_is_waited_for_until_it_makes_its_file(tmp_path: Path) -> None:
    """A process that has ended since may have left one, as when its container is started again."""
    python, option, script = probes.of_worker()["readinessProbe"]["exec"]["command"]
    assert (python, option) == ("python", "-Sc")
    joined = tmp_path / "joined"
    tell = "import pathlib, sys; from elastic_ps.process import lifecycle; "
    tell += "lifecycle.tell_joined(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", tell, str(joined)], check=True)
    assert joined.exists()
    with subprocess.Popen([sys.executable, option, script.replace(names.JOINED, str(joined))]) as probe:
        with pytest.raises(subprocess.TimeoutExpired):
            probe.wait(1)
        lifecycle.tell_joined(joined)
        assert probe.wait(30) == 0
