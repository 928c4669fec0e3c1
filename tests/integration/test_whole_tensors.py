"""Optimizers that look at whole tensors: no tensor is divided, and a version is that of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ps
from elastic_ps.codec.several import Several
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.optimizers import Lamb, Lars
from tests.testing.oracle import assert_each_record_once, mse, of_the_end, replay
from tests.testing.trained import await_standbys

DATA = Numbers(96)
OWN = ["tests.testing.optimizers:Lamb", "tests.testing.optimizers:Lars"]
Made = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


def muon(model: torch.nn.Module) -> Mapping[str, torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return {"muon": torch.optim.Muon(matrices, lr=0.02), "adam": torch.optim.Adam(others, lr=0.005)}


KINDS: dict[str, Callable[[torch.nn.Module], Made]] = {
    "Muon": muon,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02, weight_decay=0.1),
    "Lamb": lambda model: Lamb(model.parameters(), lr=0.01),
    "Lars": lambda model: Lars(model.parameters(), lr=0.01),
}


def mlp() -> torch.nn.Module:
    return make_mlp().double()


def one(made: Made) -> torch.optim.Optimizer:
    return Several(made) if isinstance(made, Mapping) else made


def trainer(name: str, found: list[torch.nn.Module], *, until: int = 10**9) -> Callable[[Session], None]:
    """Train to the end, or to a version."""

    def script(session: Session) -> None:
        model = mlp()
        optimizer = session.optimizer(KINDS[name](model), model)
        for x, y in session.loader(DATA, 4):
            optimizer.zero_grad()
            mse(model, x.double(), y.double()).backward()
            optimizer.step()
            if session.version >= until:
                session.drain()
        found.append(model)

    return script


def check(job: Job, commits: list[dict[str, Any]], model: torch.nn.Module, name: str) -> None:
    assert_each_record_once(commits, records=len(DATA), epochs=1)
    expected = mlp()
    replay(commits, DATA, expected, lambda model: one(KINDS[name](model)), job.spec)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def server(shards: int) -> dict[str, Any]:
    """With buckets that are smaller than a tensor."""
    return {"replicas": shards, "bucketBytes": 1024, "optimizers": OWN}


@pytest.mark.parametrize("name", KINDS)
def test_it_goes_on_with_other_shards_as_plain_torch_does(tmp_path: Path, name: str) -> None:
    """One parameter server, then two; at last the state is loaded into plain torch."""
    kept, found = tmp_path / "kept", list[torch.nn.Module]()
    with running_job(tmp_path / "1", checkpoints=kept, parameterServer=server(1)) as job:
        job.run(trainer(name, found, until=6), workers=2)
        first = job.commits()
    with running_job(tmp_path / "2", checkpoints=kept, resume="require", parameterServer=server(2)) as job:
        job.run(trainer(name, found), workers=2)
        commits = first + job.commits()
        check(job, commits, found[-1], name)
        spec = job.spec
    model, expected = mlp(), mlp()
    loaded = KINDS[name](model)
    assert elastic_ps.load_checkpoint(kept, model, loaded) == len(commits)
    plain = replay(commits, DATA, expected, lambda model: one(KINDS[name](model)), spec)
    ours, theirs = one(loaded).state_dict()["state"], plain.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, state in theirs.items():
        torch.testing.assert_close(ours[number], state, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["Adafactor", "Lamb"])
def test_a_standby_takes_over_what_it_keeps(tmp_path: Path, name: str) -> None:
    kept, found, lost = tmp_path / "kept", list[torch.nn.Module](), list[int]()
    fields = server(1) | {"durability": "standby", "checkpoint": {"interval": "1h"}}

    def script(session: Session) -> None:
        model = mlp()
        optimizer = session.optimizer(KINDS[name](model), model)
        for x, y in session.loader(DATA, 4):
            if session.version == 5:
                await_standbys(job)
            if session.version == 8 and not lost:
                job.until(lambda: job.followed, "the standby has every round")
                lost.append(session.version)
                job.restart(0)
            optimizer.zero_grad()
            mse(model, x.double(), y.double()).backward()
            optimizer.step()
        found.append(model)
        states.append(optimizer.state_dict()["state"])

    states: list[Any] = []
    with running_job(tmp_path, checkpoints=kept, parameterServer=fields) as job:
        job.run(script, workers=1)
        assert (lost, job.status().term) == ([8], 2)
        check(job, of_the_end(job.commits()), found[0], name)
    first = states[0][0]
    if name == "Lamb":
        assert isinstance(first["step"], int)
    else:
        shapes = {key: tuple(value.shape) for key, value in first.items()}
        assert shapes == {"step": (), "row_var": (16, 1), "col_var": (1, 6)}


def test_all_reduce_shares_its_state(tmp_path: Path) -> None:
    """A second worker joins, and gets the state of the first one."""
    found: list[torch.nn.Module] = []

    def script(session: Session) -> None:
        model = mlp()
        optimizer = session.optimizer(KINDS["Adafactor"](model), model)
        for step, (x, y) in enumerate(session.loader(DATA, 4)):
            if (session.worker, step) == (0, 3):
                job.start(1, script)
                job.until(lambda: len(job.status().members) == 2, "worker 1 joins")
            optimizer.zero_grad()
            mse(model, x.double(), y.double()).backward()
            optimizer.step()
        found.append(model)

    fields: dict[str, Any] = {"strategy": "all-reduce", "parameterServer": server(1)}
    with running_job(tmp_path, checkpoints=tmp_path / "kept", **fields) as job:
        job.start(0, script)
        job.join()
        check(job, job.commits(), found[0], "Adafactor")
