"""The training script of the fault tests: a small model, and steps that take a while."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import elastic_ps
from tests.integration.harness import Numbers, make_mlp
from tests.integration.oracle import mse

WIDTHS = (6, 64, 64, 1)


def main(records: int = 800, epochs: int = 2, pause: float = 0.01, poisoned: str = "") -> None:
    """Train; with `poisoned`, worker 1's 5th gradient is NaN if the file is not there yet."""
    torch.set_num_threads(1)
    session = elastic_ps.connect()
    model = make_mlp(WIDTHS, seed=0)
    optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model)
    for step, (x, y) in enumerate(session.loader(Numbers(records), 4, epochs=epochs)):
        optimizer.zero_grad()
        loss = mse(model, x, y)
        if poisoned and session.worker == 1 and step == 5 and not Path(poisoned).exists():
            Path(poisoned).touch()
            loss = loss * float("nan")
        loss.backward()
        session.report(loss=loss)
        time.sleep(pause)
        optimizer.step()
