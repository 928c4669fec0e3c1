"""`python -m elastic_ps.spare`: a process that has imported everything before it is needed.

Importing torch takes seconds, and most of the time that passes until a process that was killed is replaced.
So the launcher may keep a process that has done so, and waits. One line on its standard input says, in JSON,
which program it becomes, with which environment variables, and where its output goes (`local.spares`). If
the launcher ends instead, so does this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping

from elastic_ps import process


def _programs() -> Mapping[str, Callable[[], int]]:
    """What this process can become, by the name of the module; imports what they need."""
    with process.importing():
        from elastic_ps import compiler  # noqa: F401
        from elastic_ps.server import __main__ as server
        from elastic_ps.server import process as parameter_server  # noqa: F401
        from elastic_ps.server import status  # noqa: F401
        from elastic_ps.transport import (  # noqa: F401
            credentials,
            grpc,
            ways,
        )
        from elastic_ps.worker import __main__ as worker
        from elastic_ps.worker import current  # noqa: F401
    return {"elastic_ps.server": server.main, "elastic_ps.worker": worker.main}


def main() -> int:
    """Wait, then be the other program; returns its exit status."""
    programs = _programs()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    order = json.loads(line)
    os.environ.update(order["variables"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    sys.argv = [order["program"]]
    return programs[order["program"]]()


if __name__ == "__main__":
    sys.exit(main())
