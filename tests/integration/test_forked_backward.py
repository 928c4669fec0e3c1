"""A child that the script forks computes on the model by itself: its gradients are not the worker's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.polling import eventually


class Child:
    """A forked child that computes on the model when it is told to."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        told, self._tell = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.read(told, 1)
                (1000 * mse(model, x, y)).backward()
            finally:
                os._exit(0)
        os.close(told)

    def compute(self) -> None:
        """Returns when it has."""
        os.write(self._tell, b"!")
        os.close(self._tell)
        eventually(lambda: os.waitpid(self._pid, os.WNOHANG) != (0, 0), "the child ends")


@pytest.mark.parametrize("none", [True, False], ids=["new gradients", "gradients in shared memory"])
def test_what_a_forked_child_computes_is_not_in_the_workers_step(tmp_path: Path, none: bool) -> None:
    data, ours, alone = Numbers(16), make_mlp(), make_mlp()

    def script(session: Session) -> None:
        optimizer = session.optimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad(set_to_none=none)
            child = Child(ours, x, y)
            mse(ours, x, y).backward()
            child.compute()  # before the last bucket is sent, which is in `step`
            optimizer.step()

    with running_job(tmp_path, data={"shuffle": False}) as job:
        job.start(0, script)
        job.join()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x, y in torch.utils.data.DataLoader(data, 4):
        optimizer.zero_grad()
        mse(alone, x, y).backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)
