"""What a script does beside the job's optimizer: refused where workers would drift apart, else left alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.errors import UsageError
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.trained import adam, alone, failing, sgd


@pytest.mark.parametrize("first", [True, False], ids=["before the step", "after the step"])
def test_a_second_model_with_a_local_optimizer_is_refused(tmp_path: Path, first: bool) -> None:
    """As the generator of a GAN: each worker's would be another."""

    def script(session: Session) -> None:
        model, generator = make_mlp(), make_mlp(seed=1)
        optimizer, local = session.optimizer(sgd(model), model), adam(generator)
        for x, y in session.loader(Numbers(40), 4):
            for mine in [local, optimizer] if first else [optimizer, local]:
                mine.zero_grad()
                mse(model if mine is optimizer else generator, x, y).backward()
                mine.step()

    failing(tmp_path, script, UsageError, r"a second optimizer \(Adam\) makes a step")


def test_optimizers_of_a_workers_own_and_outside_the_loop_are_left_alone(tmp_path: Path) -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.probe = make_mlp((6, 6, 1)), make_mlp()

        def forward(self, x: torch.Tensor) -> Any:
            result: torch.Tensor = self.body(x)
            return result

    def script(session: Session) -> None:
        model = Both()
        optimizer = session.optimizer(sgd(model.body), model, own=["probe"])
        probe = sgd(model.probe)
        before = [p.detach().clone() for p in model.probe.parameters()]
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            probe.zero_grad()
            mse(model.probe, x, y).backward()
            probe.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.probe.parameters(), strict=True)]
        assert all(moved)
        after = adam(make_mlp(seed=3))
        after.step()

    alone(tmp_path, script)
    adam(make_mlp()).step()


def test_workers_draw_different_numbers_and_the_same_again(tmp_path: Path) -> None:
    drawn: dict[tuple[int, int], list[float]] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(40), 4):
            torch.manual_seed(0)
            session.seed(5)
            drawn[session.worker, session.version] = torch.rand(4).tolist()
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    commits = alone(tmp_path / "1", script)
    first = dict(drawn)
    drawn.clear()
    alone(tmp_path / "2", script)
    assert drawn == first
    assert len({tuple(numbers) for numbers in drawn.values()}) == len(commits) == 10
    with running_job(tmp_path / "3") as job:
        sessions = [job.session(worker) for worker in range(2)]
        seeds = []
        for session in sessions:
            seeds.append((session.seed(5), random.random(), float(torch.rand(()))))
            session.close()
    assert all(a != b for a, b in zip(*seeds, strict=True))
