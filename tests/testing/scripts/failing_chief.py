"""A script whose chief fails once while it saves."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import elastic_ps
from tests.testing.harness import Indexes, Tally


def main(folder: str, exits: bool) -> None:
    """Train an epoch. The chief saves the model at its second attempt."""
    session = elastic_ps.connect()
    model = Tally(16)
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for batch in session.loader(Indexes(16), 4):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    if session.is_chief:
        tried = Path(folder) / "tried"
        if not tried.exists():
            tried.touch()
            if exits:
                sys.exit("the disk is full")
            raise OSError("the disk is full")
        (Path(folder) / "saved").touch()
