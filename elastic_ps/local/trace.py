"""Joining the trace events of all processes into one file for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import os
from pathlib import Path


def merge_traces(directory: Path, target: Path) -> int:
    """Write every event below `directory` (`*.jsonl`, one object a line) into `target`; returns how many.

    The last line of a process that was killed may be cut off; such a line is left out. `target` is
    replaced in one step.
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
