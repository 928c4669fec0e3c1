"""An optimizer of the user's own on the parameter server: what it makes is what plain torch makes."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ps
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import InvalidJob, InvalidModel
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.optimizers import Counted, Lion
from tests.testing.oracle import (
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    of_the_end,
    replay,
)
from tests.testing.trained import Models, failing

OWN = ["tests.testing.optimizers:Lion", "tests.testing.optimizers:Counted"]
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Lion": lambda model: Lion(
        [{"params": model[0].parameters(), "decay": 0.1}, {"params": model[2:].parameters()}], lr=0.001
    ),
    "Counted": lambda model: Counted(model.parameters(), lr=0.05),
}


def trainer(
    make: Any, data: Numbers, models: Models, before_step: Callable[[], object] = lambda: None
) -> Callable[[Session], None]:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(make(model), model)
        models[session.worker] = model
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            before_step()
            optimizer.step()

    return script


@pytest.mark.covering(1)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_that_of_plain_torch(tmp_path: Path, name: str, shards: int) -> None:
    data, models, make = Numbers(160), Models(), KINDS[name]
    server = {"replicas": shards, "bucketBytes": 1024, "optimizers": OWN}
    with running_job(tmp_path, parameterServer=server) as job:
        for worker in range(2):
            job.start(worker, trainer(make, data, models))
        job.join()
        commits = job.commits()
    assert_equal_up_to_round_off(
        models[0], make_mlp(), lambda model: replay(commits, data, model, make, job.spec)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["checkpoint", "standby"])
@pytest.mark.parametrize("name", KINDS)
def test_it_goes_on_when_the_parameter_server_is_lost(tmp_path: Path, name: str, durability: str) -> None:
    data, models, make, once = Numbers(1600), Models(), KINDS[name], threading.Lock()
    server = {
        "bucketBytes": 1024,
        "optimizers": OWN,
        "durability": durability,
        "checkpoint": {"everyVersions": 7, "interval": "1h"},
    }
    with running_job(tmp_path, checkpoints=tmp_path / "kept", parameterServer=server) as job:

        def lose() -> None:
            ready = job.version > 8 and (durability == "checkpoint" or job.followed)
            if ready and once.acquire(blocking=False):
                job.restart(0)

        for worker in range(2):
            job.start(worker, trainer(make, data, models, lose))
        job.join()
        assert job.status().term == 2
        commits = of_the_end(job.commits())
    assert_each_record_once(commits, records=1600, epochs=1)
    assert_equal_up_to_round_off(
        models[0], make_mlp(), lambda model: replay(commits, data, model, make, job.spec)
    )


def test_what_it_leaves_goes_on_in_plain_torch(tmp_path: Path) -> None:
    """Also the number that its state has; and a job that begins with that state."""
    kept, found = tmp_path / "kept", dict[str, Any]()
    data = Numbers(40)

    def script(session: Session) -> None:
        model = make_mlp()
        wrapped = KINDS["Counted"](model)
        optimizer = session.optimizer(wrapped, model)
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        found.update(optimizer.state_dict())

    fields = {"bucketBytes": 1024, "optimizers": OWN}
    with running_job(tmp_path, checkpoints=kept, parameterServer=fields) as job:
        job.start(0, script)
        job.join()
    model = make_mlp()
    optimizer = KINDS["Counted"](model)
    assert elastic_ps.load_checkpoint(kept, model, optimizer) == 10
    assert [state["step"] for state in optimizer.state.values()] == [10] * 6
    assert found["state"][0] == {"step": 10}
    assert all(isinstance(state["step"], int) for state in optimizer.state.values())
    state = optimizer.state_dict()
    expected = make_mlp()
    expected.load_state_dict(model.state_dict())
    plain = KINDS["Counted"](expected)
    plain.load_state_dict(state)
    models = Models()

    def again(session: Session) -> None:
        begun = KINDS["Counted"](model)
        ours = session.optimizer(begun, model, state=state)
        models[0] = model
        for x, y in session.loader(data, 40):
            mse(model, x, y).backward()
            ours.step()

    with running_job(tmp_path / "again", parameterServer=fields) as job:
        job.start(0, again)
        job.join()
    mse(expected, data.x, data.y).backward()
    plain.step()
    for ours, theirs in zip(models[0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_class_that_the_job_does_not_name_is_refused(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        session.optimizer(Lion(model.parameters()), model)

    failing(tmp_path, script, InvalidModel, r"optimizers: \['tests\.testing\.optimizers:Lion'\]")


def test_a_job_that_no_longer_names_it_does_not_go_on(tmp_path: Path) -> None:
    """A checkpoint cannot make the parameter server import what the job does not name."""
    kept = tmp_path / "kept"
    server = {"optimizers": OWN}
    with running_job(tmp_path, checkpoints=kept, parameterServer=server) as job:
        job.start(0, trainer(KINDS["Lion"], Numbers(8), Models()))
        job.join()
    versions = Store(kept).versions()
    assert versions
    with (
        pytest.raises(InvalidJob, match=r"the job names none in parameterServer\.optimizers"),
        running_job(tmp_path / "again", checkpoints=kept, resume="require"),
    ):
        pass
    assert Store(kept).versions() == versions, "nothing is wrong with them"


OURS = """
from tests.testing.optimizers import {name}
class Ours({name}): pass
"""


def test_a_class_that_has_changed_is_no_mistake_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person has changed the class in the file that the job names."""
    kept, file = tmp_path / "kept", tmp_path / "ours_that_changes.py"
    fields: dict[str, Any] = {"checkpoints": kept, "parameterServer": {"optimizers": [f"{file.stem}:Ours"]}}
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text(OURS.format(name="Lion"))
    ours = importlib.import_module(file.stem)
    with running_job(tmp_path, **fields) as job:
        job.start(0, trainer(lambda model: ours.Ours(model.parameters()), Numbers(8), Models()))
        job.join()
    versions = Store(kept).versions()
    file.write_text(OURS.format(name="Counted"))
    monkeypatch.delitem(sys.modules, file.stem)  # as in another process
    importlib.invalidate_caches()
    with (
        pytest.raises(InvalidJob, match="If ours_that_changes:Ours has changed"),
        running_job(tmp_path / "again", resume="require", **fields),
    ):
        pass
    assert Store(kept).versions() == versions
    monkeypatch.delitem(sys.modules, file.stem)
