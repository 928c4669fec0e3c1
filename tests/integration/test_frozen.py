"""What is frozen, or has no gradient in a step, is neither pushed nor pulled."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from elastic_ps.transport.base import Connection, Frame, Incoming
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, running_job

EPOCHS = 2


class Counted(Connection):
    """Counts the bytes of bodies, by method."""

    def __init__(self, connection: Connection, counts: dict[str, int]) -> None:
        self._connection, self._counts = connection, counts

    def call(self, method: str, frame: Frame, *, timeout: timedelta) -> Iterator[Incoming]:
        self._counts[method] = self._counts.get(method, 0) + len(frame.body)
        answers = self._connection.call(method, frame, timeout=timeout)
        return self._count(method, answers)

    def _count(self, method: str, answers: Iterator[Incoming]) -> Iterator[Incoming]:
        for answer in answers:
            self._counts[method] += answer.size
            yield answer

    def close(self) -> None:
        self._connection.close()


class Adapted(torch.nn.Module):
    """A large layer that is frozen, with a small one beside it, as LoRA has them (Hu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.read = torch.nn.Linear(6, 512)
        self.base = torch.nn.Linear(512, 512)
        self.down, self.up = torch.nn.Linear(512, 2, bias=False), torch.nn.Linear(2, 512, bias=False)
        self.out = torch.nn.Linear(512, 1)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.read(x)
        result: torch.Tensor = self.out(torch.relu(self.base(hidden) + self.up(self.down(hidden))))
        return result


def train(model: Adapted, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()


def test_a_worker_goes_on_when_the_parameter_server_of_a_frozen_base_is_lost(tmp_path: Path) -> None:
    """The model comes back in the same buckets. In others, every worker would have to be started again."""

    def script(session: Session) -> None:
        model = Adapted()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), model)
        for step, (x, y) in enumerate(session.loader(Numbers(64), 4)):
            if step == 8:
                job.restart(0)
            train(model, optimizer, x, y)

    server = {"checkpoint": {"everyVersions": 2, "interval": "1h"}}
    with running_job(tmp_path, checkpoints=tmp_path / "kept", parameterServer=server) as job:
        job.start(0, script)
        job.join()
        assert job.status().term == 2
        assert job.version == 16


@pytest.mark.parametrize("shards", [1, 2])
def test_a_frozen_base_costs_nothing_on_the_wire(tmp_path: Path, shards: int) -> None:
    counts: dict[str, int] = {}
    finals: list[dict[str, torch.Tensor]] = []
    unfreeze_at, steps = 12, 0

    def script(session: Session) -> None:
        nonlocal steps
        model = Adapted()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), model)
        counts.clear()  # the first values went along
        for x, y in session.loader(Numbers(64), 4, epochs=EPOCHS):
            if steps == unfreeze_at:
                frozen.update(counts)
                model.base.requires_grad_(True)
            train(model, optimizer, x, y)
            steps += 1
        finals.append({name: value.clone() for name, value in model.state_dict().items()})

    frozen: dict[str, int] = {}
    with running_job(tmp_path, data={"shuffle": False}, parameterServer={"replicas": shards}) as job:
        before = job.open_connections
        job.open_connections = lambda: [Counted(connection, counts) for connection in before()]
        job.start(0, script)
        job.join()

    alone = Adapted()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1e-3, momentum=0.9)
    data = torch.utils.data.DataLoader(Numbers(64), 4)
    batches = [batch for _ in range(EPOCHS) for batch in data]
    for number, (x, y) in enumerate(batches):
        if number == unfreeze_at:
            alone.base.requires_grad_(True)
        train(alone, optimizer, x, y)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(finals[0][name], value, rtol=1e-5, atol=1e-6)
    trained = sum(p.nbytes for name, p in alone.named_parameters() if not name.startswith("base"))
    assert frozen["Push"] == trained * unfreeze_at
    assert frozen["Pull"] == trained * unfreeze_at
    whole = trained + sum(p.nbytes for p in alone.base.parameters())
    assert counts["Push"] - frozen["Push"] == whole * (steps - unfreeze_at), "all of it, since it is trained"
