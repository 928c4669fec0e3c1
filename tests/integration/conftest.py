"""What integration tests share."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ps.cli import main
from elastic_ps.local import Programs
from elastic_ps.process import compiler
from tests.testing.certificates import remove_pair
from tests.testing.launching import PROGRAMS, Here
from tests.testing.polling import eventually
from tests.testing.transports import TRANSPORTS, World

compiler.defer()


@pytest.fixture(scope="session")
def certificates_of_transports() -> Iterator[None]:
    """Not by `atexit`, which the processes of pytest-xdist leave out."""
    yield
    remove_pair()


@pytest.fixture(params=TRANSPORTS, ids=lambda transport: transport.__name__)
def world(request: pytest.FixtureRequest, certificates_of_transports: None) -> Iterator[World]:
    before = set(threading.enumerate())
    world = World(request.param())
    yield world
    world.close()
    eventually(lambda: set(threading.enumerate()) <= before, "the threads end")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; in a shell's background jobs it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def elastic_ps_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Here:
    """`elastic-ps` in this process and in the test's directory: spares a test the start of a Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: object, programs: Programs | None = PROGRAMS) -> subprocess.CompletedProcess[str]:
        try:
            code = main([str(word) for word in words], programs=programs)
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capfd.readouterr()
        return subprocess.CompletedProcess([str(word) for word in words], code, said.out, said.err)

    return run
