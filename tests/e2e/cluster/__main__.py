"""`python -m tests.e2e.cluster up|down|status`: what `make cluster` and `make cluster-down` call.

Progress goes to stderr; stdout has the result alone, so `eval "$(python -m tests.e2e.cluster up)"` works.
"""

from __future__ import annotations

import argparse
import json
import sys

from . import Cluster, ClusterError, ClusterUnavailable, down, status

CANNOT_RUN = 2


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 1 when something failed, 2 where no cluster can run on this machine."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.cluster", description=__doc__)
    parser.add_argument("action", choices=("up", "down", "status"))
    action = parser.parse_args(arguments).action
    try:
        if action == "up":
            cluster = Cluster.up()
            print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        elif action == "down":
            if not down():
                print("there is no cluster to take down", file=sys.stderr)
        else:
            state = status()
            print(json.dumps(state, indent=2) if state else "no cluster is up")
    except ClusterUnavailable as error:
        print(f"cannot run a cluster here: {error}", file=sys.stderr)
        return CANNOT_RUN
    except ClusterError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
