"""`python -m elastic_ps.evaluation`, see `script`."""

from __future__ import annotations

import sys

from elastic_ps.contract import exits


def main() -> int:
    """Be the evaluator of a job or of a directory; returns the exit status, see `contract.exits`."""
    if len(sys.argv) == 1:  # else a person's command
        exits.end_on_request(exits.LEFT)
    from elastic_ps.evaluation import script

    return script.main()


if __name__ == "__main__":
    sys.exit(main())
