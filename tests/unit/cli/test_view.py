"""What a job looks like in a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from elastic_ps.cli.view import LINES, LiveDisplay
from elastic_ps.local import LocalStatus, Record


def test_what_a_process_printed_costs_one_redraw_however_much_it_is() -> None:
    output = io.StringIO()
    display = LiveDisplay(Console(file=output, force_terminal=True, width=80, height=24))
    display.update(LocalStatus(job="digits", launcher_pid=1, started=0, updated=0, workers=2), Record())
    output.seek(output.truncate(0))
    display.show([f"line {n}" for n in range(LINES)])
    shown = output.getvalue()
    assert all(f"line {n}\n" in shown for n in range(LINES))
    assert shown.count("digits") == 1, "the table was drawn once"

    output.seek(output.truncate(0))
    display.show([f"line {n}" for n in range(50 * LINES)])
    shown = output.getvalue()
    assert shown.count("line ") == LINES
    assert f"line {50 * LINES - 1}\n" in shown, "the newest ones are shown"
    assert f"{49 * LINES:,} lines are left out here; `elastic-ps logs` has them" in shown

    output.seek(output.truncate(0))
    display.show([])
    assert output.getvalue() == ""
    display.close()
