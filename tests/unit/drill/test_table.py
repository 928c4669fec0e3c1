"""What `elastic-ps drill` prints at the end."""

from __future__ import annotations

import io
from datetime import timedelta

from rich.console import Console

from elastic_ps.cli.drill import show
from elastic_ps.drill.faults import Fault
from elastic_ps.drill.runner import Drill, Injection
from elastic_ps.drill.target import Result


def test_the_table_can_be_read_where_lines_are_short() -> None:
    """Output that goes into a file, or through a pipe, has 80 columns."""
    fault = Fault(kind="corrupt-checkpoint", at=13.0)
    struck = Injection(
        fault=fault, state="recovered", detail="", at=123.4, version=12345, seconds=104.2, redone=40
    )
    result = Drill(Result("j", "Succeeded", "", "done", timedelta(), 0, None), injections=[struck], records=9)
    console = Console(width=80, file=io.StringIO(), record=True)
    show(console, result)
    head, row, *_ = console.export_text().splitlines()
    assert head.split() == ["fault", "when", "outcome", "seconds", "redone", "lost", "twice"]
    assert row.split() == [
        "corrupt-checkpoint",
        "123.4",
        "s,",
        "version",
        "12345",
        "recovered",
        "104.2",
        "40",
        "0",
        "0",
    ]
