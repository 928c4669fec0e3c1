"""Jobs with each kind of layer, id and optimizer of rows: they train as the script alone does."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import elastic_ps
from elastic_ps.embedding import FTRL, SGD, Adagrad, LazyAdam, RowwiseAdagrad, uniform
from elastic_ps.embedding.optimizers import RowOptimizer
from elastic_ps.embedding.table import State
from elastic_ps.standalone import connect
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.simulation import job_document
from tests.testing.tiers import per_change
from tests.testing.transports import whole_jobs

DIM, RECORDS, TOGETHER, PADDING = 3, 40, 8, 0
IN_ORDER: dict[str, Any] = {"data": {"shuffle": False}}

Mode = Literal["sum", "mean", "max"]


class Visits(torch.utils.data.Dataset[Any]):
    """Four tags, of which some are padding, the name of a user, weights of the tags, and a number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tags = (torch.rand(RECORDS, 4, generator=generator) ** 2 * 12).long()
        self.users = (torch.rand(RECORDS, generator=generator) ** 2 * 9).long()
        self.weights = torch.rand(RECORDS, 4, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(RECORDS, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        user = f"user {int(self.users[index])}"
        return self.tags[index], user, self.weights[index], self.targets[index]


class Model(torch.nn.Module):
    """A bag of tags and a user, in a table each, and a linear layer."""

    def __init__(self, optimizer: RowOptimizer, mode: Mode, weighted: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"init": uniform(-0.5, 0.5), "dtype": torch.float64}
        self.tags = elastic_ps.EmbeddingBag(
            "tag", DIM, mode=mode, padding_idx=PADDING, optimizer=optimizer, **options
        )
        self.user = elastic_ps.Embedding("user", DIM, optimizer=SGD(lr=0.3), **options)
        self.head = torch.nn.Linear(2 * DIM, 1, dtype=torch.float64)
        torch.nn.init.constant_(self.head.weight, 0.1)
        torch.nn.init.zeros_(self.head.bias)
        self.weighted = weighted

    def forward(self, tags: torch.Tensor, users: list[str], weights: torch.Tensor) -> torch.Tensor:
        bags = self.tags(tags, per_sample_weights=weights if self.weighted else None)
        found: torch.Tensor = self.head(torch.cat([bags, self.user([*users])], 1))
        return found


KINDS: dict[str, tuple[RowOptimizer, Mode, bool]] = {
    "Adagrad, sum": (Adagrad(lr=0.3), "sum", False),
    "FTRL, weighted sum": (FTRL(lr=0.3, l1=0.01), "sum", True),
    "RowwiseAdagrad, mean": (RowwiseAdagrad(lr=0.3), "mean", False),
    "LazyAdam, max": (LazyAdam(lr=0.1), "max", False),
}


def train(session: Session, kind: str, batch_size: int, stop: int | None = None) -> Model:
    """Train two epochs. `stop`: the version after which the script ends."""
    model = Model(*KINDS[kind])
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for tags, users, weights, targets in session.loader(Visits(), batch_size=batch_size, epochs=2):
        optimizer.zero_grad()
        ((model(tags, users, weights) - targets) ** 2).mean().backward()
        optimizer.step()
        if stop is not None and session.version >= stop:
            raise SystemExit
    return model


def states(model: Model) -> dict[str, State]:
    return {layer.spec.name: layer.table.state() for layer in (model.tags, model.user)}


@whole_jobs
@pytest.mark.parametrize("kind", per_change(KINDS, keep=["FTRL, weighted sum", "LazyAdam, max"]))
def test_a_job_that_is_resumed_on_other_shards_trains_as_the_script_alone(
    tmp_path: Path, kind: str, transport: str
) -> None:
    """The rows, their optimizer's state and the counts."""
    checkpoints = tmp_path / "checkpoints"
    for shards, resume, stop in ((2, "no", 6), (3, "require", None)):
        with running_job(
            tmp_path / str(shards),
            checkpoints=checkpoints,
            resume=resume,  # type: ignore[arg-type]
            transport=transport,
            consistency={"globalBatchSize": TOGETHER},
            parameterServer={"replicas": shards, "checkpoint": {"everyVersions": 2}},
            worker={"replicas": 2},
            **IN_ORDER,
        ) as job:
            job.run(partial(train, kind=kind, batch_size=TOGETHER // 2, stop=stop), workers=2)
    found = Model(*KINDS[kind])
    assert elastic_ps.load_checkpoint(checkpoints, found) == 2 * RECORDS // TOGETHER

    (tmp_path / "alone.yaml").write_text(json.dumps(job_document("alone", **IN_ORDER)))
    session = connect(tmp_path / "alone.yaml")
    expected = train(session, kind, TOGETHER)
    session.close()
    torch.testing.assert_close(found.head.weight, expected.head.weight, rtol=1e-11, atol=1e-11)
    for name, state in states(expected).items():
        rows = states(found)[name]
        assert rows.keys() == state.keys()
        assert PADDING not in rows["ids"] or name == "user"
        for column in ("ids", "counts"):
            assert torch.equal(rows[column], state[column]), (name, column)
        for column in state.keys() - {"ids", "counts", "seen", "version", "steps"}:
            torch.testing.assert_close(rows[column], state[column], rtol=1e-11, atol=1e-11)
