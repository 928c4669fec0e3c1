"""`python -m elastic_ps.evaluator`, see `script`."""

from __future__ import annotations

import sys

from elastic_ps import exits


def main() -> int:
    """Be the evaluator of a job or of a directory; returns the exit status, see `elastic_ps.exits`."""
    exits.end_on_request(exits.LEFT)
    from elastic_ps.evaluator import script

    return script.main()


if __name__ == "__main__":
    sys.exit(main())
