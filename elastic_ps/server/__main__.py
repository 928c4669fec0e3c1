"""`python -m elastic_ps.server`, see `serving`."""

from __future__ import annotations

from elastic_ps.contract import exits


def main() -> int:
    """Be a shard or its standby; returns the exit status, see `elastic_ps.contract.exits`."""
    exits.end_on_request(0)
    from elastic_ps.server import serving

    return serving.main()


if __name__ == "__main__":
    status = main()
    from elastic_ps.process import lifecycle

    lifecycle.end_now(status)
