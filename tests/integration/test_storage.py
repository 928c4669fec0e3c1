"""A parameter server whose checkpoint directory cannot be used for a while waits, and says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_ps.api.status import ServerStatus
from elastic_ps.contract.env import ProcessEnvironment, inherited
from elastic_ps.local.poller import fetch, fetch_status
from tests.testing.addresses import addresses
from tests.testing.harness import make_spec
from tests.testing.polling import LIMIT, eventually

FULL = """
import errno, os, sys
from elastic_ps.checkpoint import files
from elastic_ps.server.__main__ import main
flush = files.flush
def full(path):
    if os.path.exists(sys.argv[1]):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    flush(path)
files.flush = full
sys.exit(main())
"""
"""A parameter server on a disk that is full as long as a file is there."""


class Server:
    """A parameter server's process."""

    def __init__(self, path: Path) -> None:
        self.mark = path / "full"
        address, self.http = addresses(2)
        environment = ProcessEnvironment(
            job="test",
            spec=make_spec(),
            role="ps",
            index=0,
            addresses=(address,),
            bind=address,
            http=self.http,
            checkpoints=path / "checkpoints",
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", FULL, str(self.mark)],
            env={**inherited(), **environment.to_variables()},
        )

    def status(self) -> ServerStatus | None:
        assert self.process.poll() is None, "the parameter server has ended"
        return fetch_status(self.http, waiting=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "full").touch()
    with running(tmp_path) as server:
        yield server


@contextmanager
def running(path: Path) -> Iterator[Server]:
    server = Server(path)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_a_parameter_server_on_a_full_disk_waits_for_room(server: Server) -> None:
    def waits() -> ServerStatus | None:
        status = server.status()
        return status if status is not None and status.problem else None

    status = eventually(waits, "the parameter server tells what it waits for")
    assert "No space left on device" in status.problem
    assert not status.ready
    assert not status.begun
    eventually(lambda: fetch(server.http, "/healthz"), "nobody shall kill it for waiting")
    server.mark.unlink()
    status = eventually(
        lambda: s if (s := server.status()) and s.begun else None, "it goes on when there is room"
    )
    assert (status.term, status.problem) == (1, "")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LIMIT) == 0


def test_a_parameter_server_that_waits_ends_when_it_is_asked_to(server: Server) -> None:
    eventually(lambda: (s := server.status()) and s.problem, "the parameter server waits")
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait(LIMIT) == 0
