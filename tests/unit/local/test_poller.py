"""The launcher's thread that asks the parameter servers how the job goes."""

from __future__ import annotations

import contextlib
from typing import cast

import pytest

from elastic_ps.local import gone
from elastic_ps.local.poller import Poller
from tests.testing.polling import eventually

NOWHERE = cast(str, None)
"""An address that is none, which nobody foresaw."""


def test_whoever_asks_is_told_that_the_thread_has_failed() -> None:
    """Else the job would seem to stand still for ever."""

    def told(asked: Poller) -> str:
        try:
            asked.polled()
        except RuntimeError as error:
            return str(error)
        return ""

    with contextlib.closing(Poller([NOWHERE])) as asked:
        said = eventually(lambda: told(asked), "the thread fails")
    assert said.startswith("the thread status-poller has failed: AttributeError: ")


def test_what_nobody_foresaw_when_the_end_of_a_worker_is_told_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told on a thread of which nobody asks what came of it."""
    gone.tell_parameter_server("job", (NOWHERE,), 3, "instance")
    assert "could not be told that worker 3 has ended: " in caplog.text
    assert "AttributeError" in caplog.text, "with the traceback"
