"""The usual script, whose last line needs a batch. Worker 1 comes when the others have ended the training."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import elastic_ps


def main(trained: str, *, chief_fails: bool, how: str = "error") -> None:
    """`trained`: a file that the chief makes after the training. It may fail then.

    `how`: what worker 1 fails with.
    """
    session = elastic_ps.connect()
    while session.worker == 1 and not Path(trained).exists():
        time.sleep(0.05)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    x = torch.randn(16, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    for features, target in session.loader(data, batch_size=4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(features), target)
        loss.backward()
        optimizer.step()
    if session.is_chief:
        Path(trained).touch()
        if chief_fails:
            raise RuntimeError("the disk is full")
    if session.worker == 1 and how == "report":
        session.report(loss=None)
    elif session.worker == 1 and how == "exit":
        sys.exit(3)
    else:
        print("the last loss is", loss.item())
