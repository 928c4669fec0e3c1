"""The training script of the fault tests: a small model, and steps that take a while."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch

import elastic_ps
from tests.integration.harness import Numbers, make_mlp
from tests.integration.oracle import mse

WIDTHS = (6, 64, 64, 1)


def main(
    records: int = 800,
    epochs: int = 2,
    pause: float = 0.01,
    poisoned: str = "",
    stuck: str = "",
    how: str = "",
) -> None:
    """Train; something happens to worker 1 at its 5th step if the file that is named is not there yet.

    With `poisoned` the gradient is NaN. With `stuck` the script is: in an endless loop, or, if `how` is
    `frozen`, in a C function that keeps the interpreter's lock, so that no other thread of it runs.
    """
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
        if stuck and session.worker == 1 and step == 5 and not Path(stuck).exists():
            Path(stuck).touch()
            if how == "frozen":
                ctypes.PyDLL(None).sleep(1000)
            while True:
                pass
        loss.backward()
        session.report(loss=loss)
        time.sleep(pause)
        optimizer.step()
