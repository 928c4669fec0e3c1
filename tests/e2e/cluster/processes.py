"""Starting programs that outlive us, and ending exactly those.

Each program is recorded by process id and start time (an id alone may belong to somebody else by the time it
is read again) and carries the variable MARKER with its cluster's directory, which finds what a killed `up`
did not come to record. Nothing is ever ended by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from .errors import ClusterError
from .layout import MARKER, Layout
from .shell import tail_of, wait_for

PROC = Path("/proc")
GRACE = timedelta(seconds=10)


def spawn(name: str, argv: Sequence[str], layout: Layout, *, env: dict[str, str] | None = None) -> int:
    """Start a component in a session of its own, its output appended to `logs/NAME.log`; return its id."""
    log = layout.logs / f"{name}.log"
    log.touch()
    environment = {**os.environ, MARKER: str(layout.state_dir), **(env or {})}
    # posix_spawn and not subprocess.Popen: the program is meant to outlive this process, which a Popen object
    # would complain about when it is collected.
    process = os.posix_spawn(
        argv[0],
        list(argv),
        environment,
        setsid=True,
        setsigmask=[],
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    record = {"pid": process, "started": start_time(process), "argv": list(argv)}
    (layout.pids / f"{name}.json").write_text(json.dumps(record))
    return process


def pid_of(name: str, layout: Layout) -> int | None:
    """The id of a component that is running, or None."""
    path = layout.pids / f"{name}.json"
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
    except ValueError:  # a killed `up` may have left half a file; `marked` finds the process
        return None
    pid = int(record["pid"])
    return pid if alive(pid) and start_time(pid) == record["started"] else None


def require_alive(names: Iterable[str], layout: Layout) -> None:
    """Raise ClusterError with the end of the log of the first component that is not running."""
    for name in names:
        if pid_of(name, layout) is None:
            log = layout.logs / f"{name}.log"
            raise ClusterError(f"{name} has ended. The end of {log}:\n{tail_of(log)}")


def end(pids: Iterable[int], *, force: bool = False, grace: timedelta = GRACE) -> None:
    """End processes: SIGTERM and after `grace` SIGKILL, or that at once with `force`. Blocks until gone."""
    remaining = {pid: start_time(pid) for pid in pids}

    def gone() -> bool:
        for pid in list(remaining):
            if not alive(pid) or start_time(pid) != remaining[pid]:
                del remaining[pid]
        return not remaining

    for number, limit in ((signal.SIGTERM, grace), (signal.SIGKILL, timedelta(seconds=15))):
        if force and number == signal.SIGTERM:
            continue
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + limit.total_seconds()
        while not gone() and time.monotonic() < deadline:
            time.sleep(0.02)
    wait_for(gone, what=f"processes {sorted(remaining)} end", timeout=timedelta(seconds=1))


def marked(state_dir: Path | None = None) -> dict[int, str]:
    """Running processes that carry MARKER, with its value; only those of `state_dir` when that is given.

    Containers do not carry it (they have an environment of their own), their shims do.
    """
    found = {}
    wanted = f"{MARKER}=".encode()
    for pid in _all():
        with contextlib.suppress(OSError):
            for item in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                if item.startswith(wanted):
                    value = item[len(wanted) :].decode(errors="replace")
                    if state_dir is None or value == str(state_dir):
                        found[pid] = value
    found.pop(os.getpid(), None)
    return {pid: value for pid, value in found.items() if alive(pid)}


def descendants(roots: Iterable[int]) -> set[int]:
    """All children, grandchildren and so on of `roots`."""
    children: dict[int, list[int]] = {}
    for pid in _all():
        fields = _stat(pid)
        if fields:
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def command_line(pid: int) -> list[str]:
    """The argv of a process, empty when it is gone."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def alive(pid: int) -> bool:
    """Whether a process runs. A child of ours that has ended is collected here."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty when there is none."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (the name before them may contain anything)."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _all() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]
