"""Files that a process writes about itself: histories (what happened, for checks) and traces (when).

Both are JSON lines, with one file for each process, so that processes share nothing and a killed one loses at
most its last line. Unless `env` names a directory, both are off, and `record` and `span` do nothing. Times
are those of the machine-wide monotonic clock.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)


class _Lines:
    """A file of JSON lines. Thread-safe; a forked child writes nothing."""

    def __init__(self, directory: Path | None, process: str) -> None:
        path = directory / f"{process}-{os.getpid()}.jsonl" if directory else None
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._pid = os.getpid()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            cut_off = _cut_off(path)
            self._file = path.open("a", buffering=1)
            if cut_off:
                self._file.write("\n")

    @property
    def enabled(self) -> bool:
        """True if lines are written. If not, callers can skip costly ones."""
        return self._file is not None and os.getpid() == self._pid

    def _write(self, value: dict[str, Any]) -> None:
        with self._lock:
            if self._file is not None and os.getpid() == self._pid:
                self._file.write(json.dumps(value) + "\n")

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()


def _cut_off(path: Path) -> bool:
    """Whether an earlier process with the same id was killed within its last line, as in containers."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class History(_Lines):
    """The history of a process: steps sent, rounds committed, records handed out."""

    def record(self, event: str, **values: Any) -> None:
        """Append an event. Blocks for the write; does nothing without a directory."""
        if self.enabled:
            self._write({"event": event, "time": time.monotonic(), **values})


class Trace(_Lines):
    """Spans of time in Chrome's trace event format; the launcher joins the files of all processes."""

    def __init__(self, directory: Path | None, process: str) -> None:
        super().__init__(directory, process)
        self._threads: set[int] = set()
        if self.enabled:
            self._metadata("process_name", 0, process)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as that of a model whose hooks write spans, writes none."""
        return Trace, (None, "")

    def _write(self, value: dict[str, Any]) -> None:
        """A full disk ends the trace, and not the training."""
        try:
            super()._write(value)
        except OSError as error:
            logger.warning("the trace of this process ends here: %s", error)
            with suppress(OSError):  # of what is left in the buffer
                self.close()

    def _metadata(self, kind: str, tid: int, name: str) -> None:
        self._write({"ph": "M", "name": kind, "pid": os.getpid(), "tid": tid, "args": {"name": name}})

    def complete(self, name: str, start: int, end: int, *, row: str | None = None, **args: Any) -> None:
        """A span from `start` to `end`, in nanoseconds of `time.monotonic_ns`.

        It is shown on the row of the calling thread, or on a row of its own named `row`.
        """
        if not self.enabled:
            return
        thread = threading.current_thread()
        tid = thread.native_id or 0 if row is None else hash(row) % 1_000_000
        if tid not in self._threads:
            self._threads.add(tid)
            self._metadata("thread_name", tid, row or thread.name)
        self._write(
            {
                "ph": "X",
                "name": name,
                "pid": os.getpid(),
                "tid": tid,
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "args": args,
            }
        )

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """A span of the block's time, on the calling thread's row."""
        return self._timed(name, args) if self.enabled else nullcontext()

    @contextmanager
    def _timed(self, name: str, args: Mapping[str, Any]) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.complete(name, start, time.monotonic_ns(), **args)
