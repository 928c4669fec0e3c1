"""The launcher's thread that asks the parameter servers how the job goes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from elastic_ps.local import gone, poller
from elastic_ps.local.poller import Poller
from elastic_ps.transport import ways
from tests.testing.polling import eventually


def unforeseen(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("nobody foresaw this")


def test_whoever_asks_is_told_that_the_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job would seem to stand still for ever."""
    monkeypatch.setattr(poller, "fetch", unforeseen)

    def told(asked: Poller) -> str:
        try:
            asked.polled()
        except RuntimeError as error:
            return str(error)
        return ""

    with contextlib.closing(Poller(["127.0.0.1:1"])) as asked:
        said = eventually(lambda: told(asked), "the thread fails")
    assert said == "the thread status-poller has failed: ZeroDivisionError: nobody foresaw this"


def test_what_nobody_foresaw_when_the_end_of_a_worker_is_told_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told on a thread of which nobody asks what came of it."""
    monkeypatch.setattr(ways, "connect", unforeseen)
    gone.tell_parameter_server("job", ("127.0.0.1:1",), 3, "instance")
    assert "could not be told that worker 3 has ended: nobody foresaw this" in caplog.text
    assert "ZeroDivisionError" in caplog.text, "with the traceback"
