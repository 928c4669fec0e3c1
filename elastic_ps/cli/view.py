"""The display of a job in a terminal: the live view, plain lines, and a job's status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_ps.cli import words
from elastic_ps.contract import exits
from elastic_ps.local import Event, LocalStatus, Outcome, ProcessStatus, Record
from elastic_ps.local.snapshot import member_of

PLAIN_SECONDS = 2.0
LINES = 100
"""The most lines of the processes' output that the live view shows at each refresh."""
STATE_STYLES = {
    "training": "green", "serving": "green", "following": "green", "idle": "yellow", "joining": "yellow",
    "running": "green", "starting": "yellow", "leaving": "cyan", "ended": "dim",
}  # fmt: skip
PHASE_STYLES = {"Succeeded": "bold green", "Failed": "bold red", "Running": "bold green"}
EVENT_STYLES = {
    "joined": "green",
    "left": "cyan",
    "lost": "red",
    "hung": "red",
    "died": "red",
    "warning": "yellow",
    "scale": "bold",
    "changed": "bold",
}
COLUMNS = {"process": 9, "pid": 7, "state": 9, "step": 8, "samples": 10, "step time": 9, "joined at": 9}
SPARED = ("joined at", "step time", "samples", "pid", "step")
"""The columns that a narrow terminal leaves out, the first one first."""
BLOCKS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    """Shows a run in progress."""

    def update(self, status: LocalStatus, record: Record) -> None:
        """Show the present state and the new events."""

    def show(self, lines: Sequence[str]) -> None:
        """Show output of the job's processes."""

    def close(self) -> None:
        """End the display, and restore the terminal."""


class LiveDisplay:
    """Redraws a few lines at the bottom of the terminal; events scroll by above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self, status: LocalStatus, record: Record) -> None:
        events = record.events[self._shown :]
        self._shown += len(events)
        for event in events:
            self._console.print(event_line(event), soft_wrap=True)
        self._live.update(self._frame(status, record), refresh=True)

    def _frame(self, status: LocalStatus, record: Record) -> RenderableType:
        return frame(status, record, height=self._console.height, width=self._console.width)

    def show(self, lines: Sequence[str]) -> None:
        shown = [Text.from_ansi(line) for line in lines[-LINES:]]
        if len(lines) > LINES:
            left_out = f"{len(lines) - LINES:,} lines are left out here; `elastic-ps logs` has them"
            shown.insert(0, Text(left_out, style="dim"))
        if shown:  # all at once: each print redraws the live view
            self._console.print(Text("\n").join(shown), soft_wrap=True)

    def close(self) -> None:
        self._live.update(Text(""), refresh=True)
        self._live.stop()


class PlainDisplay:
    """Prints a line about every two seconds, and one for each event."""

    def __init__(self) -> None:
        self._shown = 0
        self._next = PLAIN_SECONDS

    def update(self, status: LocalStatus, record: Record) -> None:
        events = record.events[self._shown :]
        self._shown += len(events)
        for event in events:
            print(event_line(event).plain)
        if status.elapsed >= self._next:
            self._next = status.elapsed + PLAIN_SECONDS
            print(f"{status.elapsed:7.1f} s  {words.progress_line(status)}")
        sys.stdout.flush()

    def show(self, lines: Sequence[str]) -> None:
        for line in lines:
            print(line)

    def close(self) -> None:
        sys.stdout.flush()


def event_line(event: Event) -> Text:
    line = Text(f"{event.elapsed:7.1f} s  ", style="dim")
    return line.append(event.text, style=EVENT_STYLES.get(event.kind, "not dim"))


def frame(
    status: LocalStatus, record: Record | None = None, *, height: int = 100, width: int
) -> RenderableType:
    """A job's state in at most `height` lines of `width` columns, readable from 60 columns on."""
    parts: list[RenderableType] = [_headline(status), _table(status, rows=max(3, height - 8), width=width)]
    if status.server is not None and status.server.only_tensors:
        parts.append(Text(words.ONLY_TENSORS))
    elif status.goes_on and (waiting := words.waits_for(status)):
        parts.append(Text(waiting))
    elif status.server is not None and status.server.ready:
        parts += [_bar(status), _numbers(status, record)]
        if record is None and (network := words.traffic(status.server.traffic)):
            parts.append(Text(network, style="dim"))
        if record is None:
            parts += [Text(f"table {words.table_line(each)}", style="dim") for each in status.server.tables]
        if record is None and (overlap := status.server.traffic.overlap):
            parts.append(Text(overlap, style="dim"))
        if (found := status.server.progress.diverged) is not None:
            parts.append(Text(f"diverged: {found.message}", style="yellow"))
        tuning = status.server.tuning
        if record is None and tuning.generation:
            parts.append(Text(f"consistency: {tuning.consistency}", style="dim"))
            parts.append(Text(f"compression: {tuning.compression}", style="dim"))
            parts.append(Text(f"both have been in force since version {tuning.since}", style="dim"))
        if record is None and tuning.problem:
            parts.append(Text(f"the last change was refused: {tuning.problem}", style="yellow"))
    if status.server is not None and status.server.problem:
        parts.append(Text(f"problem: {status.server.problem}", style="yellow"))
    return Group(*parts)


def _headline(status: LocalStatus) -> Text:
    line = Text(status.job, style="bold")
    line.append(f"  {status.phase}", style=PHASE_STYLES.get(status.phase, "bold yellow"))
    if status.server is not None and status.server.ready and not status.server.only_tensors:
        progress = status.server.progress
        line.append(f"  {words.epoch(progress)}  version {progress.version:,}", style="not bold")
    if status.reason:
        line.append(f"  {status.reason}", style="not bold yellow")
    return line.append(f"  {words.duration(status.elapsed)}", style="not bold dim")


def _table(status: LocalStatus, *, rows: int, width: int) -> Table:
    ended = not status.goes_on
    shown = [each for each in status.processes if ended or each.role != "worker" or _present(each)]
    lines = [_row(process, status) for process in shown[:rows]]
    if len(shown) > rows:
        lines.append({"process": Text(f"and {len(shown) - rows} more", style="dim")})
    widths = {
        name: 2 + max([least, *(cell_len(str(line.get(name, ""))) for line in lines)])
        for name, least in COLUMNS.items()
    }
    for name in SPARED:
        if sum(widths.values()) > width:
            del widths[name]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in widths:
        left = name in ("process", "state")
        table.add_column(name, justify="left" if left else "right", no_wrap=True, min_width=COLUMNS[name])
    for line in lines:
        table.add_row(*(line.get(name, "") for name in widths))
    return table


def _row(process: ProcessStatus, status: LocalStatus) -> dict[str, str | Text]:
    """The cells of a process, by their columns."""
    member = member_of(process.index, process.pid, status.server) if process.role == "worker" else None
    state = Text(process.state, style=STATE_STYLES.get(process.state, "red"))
    if process.restarts:
        state.append(f" (started {process.restarts + 1} times)", style="dim")
    if member is not None and member.late:
        state.append(f" ({member.late:,} late steps dropped)", style="dim")
    if member is not None and member.staleness:
        state.append(f" (staleness {member.staleness:,})", style="dim")
    kind = "server" if process.role == "ps" else process.role
    name = kind if kind == "evaluator" else f"{kind} {process.index}"
    row: dict[str, str | Text] = {"process": name, "pid": str(process.pid), "state": state}
    if member is not None:
        row |= {"step": f"{member.steps:,}", "samples": f"{member.records:,}"}
        row |= {"step time": words.step_time(member), "joined at": str(member.joined_version)}
    return row


def _present(process: ProcessStatus) -> bool:
    return process.state != "ended" or process.exit not in (0, exits.LEFT)


def _bar(status: LocalStatus) -> RenderableType:
    assert status.server is not None
    progress = status.server.progress
    row = Table.grid(padding=(0, 2, 0, 0), expand=False)
    percent = Text(f"{progress.percent:3d} %")
    remaining = words.eta(progress) if status.goes_on else ""
    after = Text(f"{remaining} left" if remaining else "", style="dim")
    row.add_row(ProgressBar(total=100, completed=progress.percent, width=48), percent, after)
    return row


def _numbers(status: LocalStatus, record: Record | None) -> Text:
    assert status.server is not None
    progress = status.server.progress
    line = Text()
    if (pace := words.pace(status.server)) is not None:
        line.append(pace, style="bold").append("   ")
    if progress.loss is not None:
        line.append("loss ").append(f"{progress.loss:.4f}", style="bold").append("  ")
        if record is not None:
            line.append(sparkline([loss for _, loss in record.loss_curve()], 24), style="magenta")
    on_disk = words.on_disk(status)
    if on_disk is not None:
        line.append(f"   {on_disk}", style="dim")
    if progress.evaluation is not None and progress.evaluation.version is not None:
        line.append(f"\n{progress.evaluation}", style="not dim")
    for name, value in sorted(progress.metrics.items())[:3]:
        line.append(f"   {name.replace('_', ' ')} ").append(words.metric(name, value), style="bold")
    return line


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of small bars, at most `width` of them."""
    if not values:
        return ""
    step = max(1, -(-len(values) // width))
    groups = [values[start : start + step] for start in range(0, len(values), step)]
    means = [sum(group) / len(group) for group in groups]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def print_outcome(console: Console, outcome: Outcome) -> None:
    """The summary at the end of a run."""
    phase = outcome.verdict.phase
    style = PHASE_STYLES.get(phase, "bold yellow")
    verb = {"Succeeded": "succeeded", "Failed": "failed"}.get(phase, "was stopped")
    took = words.duration(outcome.elapsed.total_seconds())
    console.print(Text(outcome.status.job, style="bold").append(f" {verb}", style).append(f" after {took}"))
    for name, value in words.summary(outcome):
        line = Text(f"  {name:<13} ", style="yellow" if name == "warning" else "dim")
        console.print(line.append(value, style="not dim"), soft_wrap=True)
