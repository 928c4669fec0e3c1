"""A script that pushes to a tensor, and comes to its end at once."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch

import elastic_ps
from elastic_ps.worker.wire import dialogue
from tests.testing.polling import eventually

ELEMENTS = 2_000_000
PUSHES = 30


def main(*, exits: bool) -> None:
    """Worker 0 pushes; worker 1 waits for that, and reports it. `exits`: by `sys.exit`.

    A worker that leaves has no time here to carry out anything.
    """
    object.__setattr__(dialogue.USUAL, "goodbye", timedelta(0))
    session = elastic_ps.connect()
    server = session.server
    server.init("count", torch.zeros(ELEMENTS))
    if session.worker == 0:
        for _ in range(PUSHES):
            server.push("count", torch.ones(ELEMENTS))
        if exits:
            sys.exit(0)
    else:
        eventually(lambda: bool(server.pull("count").eq(PUSHES).all()), "all pushes are carried out")
        session.report(least=server.pull("count").min())
