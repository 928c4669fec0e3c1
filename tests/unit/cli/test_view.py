"""What a job looks like in a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from elastic_ps.api.status import MemberStatus, ServerStatus
from elastic_ps.cli.view import COLUMNS, LINES, LiveDisplay, frame
from elastic_ps.local import LocalStatus, ProcessStatus, Record


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


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (120, set()),
        (100, {"joined at"}),
        (80, {"joined at", "step time", "samples"}),
        (60, {"joined at", "step time", "samples", "pid", "step"}),
    ],
)
def test_a_narrow_terminal_leaves_out_whole_columns(width: int, left_out: set[str]) -> None:
    member = MemberStatus(
        worker=0, incarnation=1, pid=40_000, host="h", state="training", joined_version=1, staleness=12
    )
    status = LocalStatus(
        job="digits",
        phase="Running",
        launcher_pid=1,
        started=0,
        updated=0,
        workers=1,
        processes=[
            ProcessStatus(role="ps", index=0, pid=10, state="serving"),
            ProcessStatus(role="worker", index=0, pid=40_000, state="training", restarts=1),
        ],
        server=ServerStatus(job="digits", shard=0, shards=1, term=1, ready=True, members=[member]),
    )
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(frame(status, width=width))
    header, _, worker, *_ = capture.get().splitlines()[1:]
    assert {name for name in COLUMNS if name in header} == set(COLUMNS) - left_out
    assert "training (started 2 times) (staleness 12)" in worker
    assert "…" not in capture.get()
