"""A script that uses `session.server` alone: it counts in a tensor until a file is there."""

from __future__ import annotations

from pathlib import Path

import torch

import elastic_ps

ELEMENTS = 3000


def main(until: str) -> None:
    """Add ones to a tensor again and again; if it is lost, say so and begin anew."""
    session = elastic_ps.connect()
    session.server.init("count", torch.zeros(ELEMENTS))
    print("begun", flush=True)
    while not Path(until).exists():
        try:
            session.server.push("count", torch.ones(ELEMENTS)).wait()
        except elastic_ps.TensorLost as lost:
            print(f"told: {lost}", flush=True)
            session.server.init("count", torch.zeros(ELEMENTS))
    session.report(**{f"least_{session.worker}": session.server.pull("count").min()})
