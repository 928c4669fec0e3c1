"""`python -m elastic_ps.worker`, see `script`."""

from __future__ import annotations

import sys

from elastic_ps.contract import exits


def main() -> int:
    """Be a worker, or a process of one; returns the exit status, see `elastic_ps.contract.exits`."""
    if len(sys.argv) == 1:  # else it only tries something out
        exits.end_on_request(exits.LEFT)
    from elastic_ps.worker import script

    return script.main()


if __name__ == "__main__":
    sys.exit(main())
