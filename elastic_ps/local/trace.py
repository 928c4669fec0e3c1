"""Joins the trace events of all processes in one file for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path


def collect_traces(directory: Path, target: Path) -> str:
    """Merge the traces below `directory`, and delete them. Returns why that failed; "" if it did not."""
    try:
        merge_traces(directory, target)
        shutil.rmtree(directory)
    except OSError as error:
        return f"the trace cannot be written: {error}"
    return ""


def merge_traces(directory: Path, target: Path) -> int:
    """Write every event below `directory` (`*.jsonl`, one object a line) to `target`; returns the number.

    The last line of a killed process may be cut off, and is left out. `target` is replaced atomically.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    count = 0
    with temporary.open("w") as output:
        output.write('{"traceEvents": [')
        for path in sorted(directory.glob("*.jsonl")):
            with path.open(errors="replace") as lines:
                for line in lines:
                    try:
                        event = json.loads(line)
                    except ValueError:
                        continue
                    output.write(",\n" if count else "\n")
                    output.write(json.dumps(event, separators=(",", ":")))
                    count += 1
        output.write("\n]}\n")
    temporary.replace(target)
    return count
