"""A worker's script for jobs of real processes: a small model, and steps that take a while."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch

import elastic_ps
from tests.testing.harness import Numbers, make_mlp
from tests.testing.oracle import mse


def main(
    records: int,
    epochs: int = 1,
    batch_size: int = 4,
    seconds: float = 0.0,
    hurry: str = "",
    fork_every: int = 0,
    poisoned: str = "",
    stuck: str = "",
    frozen: bool = False,
    widths: tuple[int, ...] = (6, 16, 16, 1),
) -> None:
    """Train.

    Args:
        seconds: what a batch takes at least, until the file `hurry` exists. Half of the steps take it before
            backward, when nothing of them is pushed, the others after, when most of them is.
        fork_every: fork in a step, after so many steps; 0 for never.
        poisoned: a file; worker 1's 5th gradient is NaN if it is not there yet, and then it is.
        stuck: a file; if it is not there yet, worker 1 makes it in its 5th step and goes on for ever: in a
            loop or, if `frozen`, in a C function that keeps the interpreter locked, so that no thread runs.
    """
    torch.set_num_threads(1)
    model = make_mlp(widths)
    session = elastic_ps.connect()
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)
    data = Numbers(records, features=widths[0])
    for step, (x, y) in enumerate(session.loader(data, batch_size, epochs=epochs)):
        pause = 0.0 if not seconds or Path(hurry).exists() else seconds
        optimizer.zero_grad()
        loss = mse(model, x, y)
        if poisoned and session.worker == 1 and step == 5 and not Path(poisoned).exists():
            Path(poisoned).touch()
            loss = loss * float("nan")
        if stuck and session.worker == 1 and step == 5 and not Path(stuck).exists():
            go_on_for_ever(Path(stuck), frozen=frozen)
        time.sleep(pause * (step % 2))  # the work of a larger model
        loss.backward()
        if fork_every and step % fork_every == 0:
            fork()
        session.report(loss=loss)
        time.sleep(pause * (1 - step % 2))
        optimizer.step()
    if session.is_chief:
        session.report(trained=1.0)


def go_on_for_ever(stuck: Path, *, frozen: bool) -> None:
    stuck.touch()
    if frozen:
        ctypes.PyDLL(None).sleep(1000)
    while True:
        time.sleep(0.001)


def fork() -> None:
    """Fork in both of the ways that scripts use, while pushes are under way."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    process = multiprocessing.get_context("fork").Process(target=torch.zeros, args=(3,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    process.start()
    process.terminate()  # as a Pool ends its processes
    process.join(120)
    assert process.exitcode == -signal.SIGTERM
