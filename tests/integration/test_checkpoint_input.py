"""A checkpoint is input from outside: what a job cannot go on from is set aside, the one before is used."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ps
from elastic_ps.api.mutable import MutableFields
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import CheckpointCorrupt, CheckpointUnreadable
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.store import same, write
from tests.testing.trained import adam

SERVER = {"checkpoint": {"interval": "1h", "everyVersions": 2, "keep": 2}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a job, the second one of the model when it ended."""
    root = tmp_path_factory.mktemp("trained")

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
        for x, y in session.loader(Numbers(40), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()

    with running_job(root, checkpoints=root / "checkpoints", parameterServer=SERVER) as job:
        job.start(0, script)
        job.join()
    assert len(Store(root / "checkpoints").versions()) == 2
    return root / "checkpoints"


def rewrite(store: Store, version: int, change: Callable[[Manifest], Manifest]) -> None:
    """Change a manifest, with the digest that goes with it."""
    text = change(store.describe(version)).to_text()
    (store.path(version) / "manifest.json").write_text(text)


def state(**entries: Any) -> Callable[[Manifest], Manifest]:
    """Other entries of the state; those that are a function are made of what is there."""

    def changed(found: Manifest) -> Manifest:
        new = {key: make(found.state[key]) if callable(make) else make for key, make in entries.items()}
        return replace(found, state={**found.state, **new})

    return changed


def settings(**entries: Any) -> Callable[[Manifest], Manifest]:
    return state(settings=lambda text: json.dumps({**json.loads(text), **entries}))


def member(**entries: Any) -> Callable[[Manifest], Manifest]:
    return state(members=lambda members: [{**members[0], **entries}])


def ledger(**entries: Any) -> Callable[[Manifest], Manifest]:
    return state(ledger=lambda known: {**known, **entries})


CHANGES: dict[str, Callable[[Manifest], Manifest]] = {
    "ledger without entries": state(ledger={}),
    "more records than there are": ledger(applied=10**12),
    "records that nobody has had": ledger(returned=[[0, 39, 41]]),
    "records that are in the model already": ledger(returned=[[0, 3, 5]]),
    "records in words": ledger(records="forty"),
    "shares of other records": ledger(shares=[]),
    "member of the far future": member(incarnation=1 << 62),
    "member with less than no steps": member(steps=-1),
    "settings that are no JSON": state(settings="{"),
    "settings of another kind": state(settings="[]"),
    "no parameter groups": settings(groups=[]),
    "a hyperparameter in words": settings(groups=[{"lr": "fast"}]),
    "parameters among the hyperparameters": settings(groups=[{"lr": 0.1, "params": []}]),
    "limits in words": settings(groups=[{"lr": 0.1, "clamp": "narrow"}]),
    "values that were assigned in the future": state(assigned=1000),
    "an optimizer that there is not": lambda found: replace(found, optimizer="load"),
    "the state of another optimizer": lambda found: replace(found, optimizer="Adadelta"),
    "tensors of another group": lambda found: replace(
        found, tensors=[{**tensor, "group": 5} for tensor in found.tensors]
    ),
}


OF_OTHER_VERSIONS: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "nothing": (lambda found: replace(found, state={}), "settings: Field required"),
    "ledger of another kind": (state(ledger=[1, 2]), r"ledger: Input should be an object"),
    "member in words": (state(members=["one"]), r"members\.0: Input should be an object"),
    "member with a worker in words": (
        member(worker="zero"),
        r"members\.0\.worker: Input should be a valid int",
    ),
    "metrics in words": (
        state(metrics={"accuracy": "good"}),
        r"metrics\.accuracy: Input should be a valid num",
    ),
    "a loss curve of words": (state(loss=[["a", "b"]]), r"loss\.0\.0: Input should be a valid int"),
    "a field that a change has made": (
        state(tuning=MutableFields(generation=1).to_json().replace("{", '{"later": 1, ', 1)),
        r"later: Extra inputs are not permitted",
    ),
    "losses in words": (state(trend={"best": "low"}), r"trend\.best: Input should be a valid num"),
}


@pytest.mark.parametrize("what", OF_OTHER_VERSIONS)
def test_what_another_version_has_written_is_refused_and_left(
    trained: Path, tmp_path: Path, what: str
) -> None:
    """To train on from the one before would throw away what it holds, and that version can read it."""
    store = Store(tmp_path / "checkpoints")
    shutil.copytree(trained, store.directory)
    before, newest = store.versions()
    change, message = OF_OTHER_VERSIONS[what]
    rewrite(store, newest, change)
    with (
        pytest.raises(CheckpointUnreadable, match=f"version {newest}.*{message}.*It stays where it is"),
        running_job(tmp_path, checkpoints=store.directory, resume="auto", parameterServer=SERVER),
    ):
        pass
    assert store.versions() == [before, newest]


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_job_cannot_go_on_from_is_set_aside(trained: Path, tmp_path: Path, what: str) -> None:
    store = Store(tmp_path / "checkpoints")
    shutil.copytree(trained, store.directory)
    before, newest = store.versions()
    rewrite(store, newest, CHANGES[what])
    with running_job(tmp_path, checkpoints=store.directory, resume="auto", parameterServer=SERVER) as job:
        assert job.version == before
        assert "no job can continue from" in job.status().problem
    assert list(store.directory.glob(f"corrupt-{newest:010d}-*")), "it is kept for a look"


def test_where_a_checkpoint_was_nothing_begins_anew(trained: Path, tmp_path: Path) -> None:
    """A job that goes on by itself, as on a cluster, would throw away what was trained."""
    store = Store(tmp_path / "checkpoints")
    shutil.copytree(trained, store.directory)
    for version in store.versions():
        rewrite(store, version, CHANGES["settings that are no JSON"])
    for _ in range(2):
        with (
            pytest.raises(CheckpointCorrupt, match=r"(?s)all checkpoints.*name an empty directory"),
            running_job(tmp_path, checkpoints=store.directory, resume="auto"),
        ):
            pass


def test_the_default_device_is_not_for_what_is_read(trained: Path) -> None:
    """`meta` stands in for a GPU."""
    model, expected = make_mlp(seed=1), make_mlp(seed=2)
    optimizer, usual = adam(model), adam(expected)
    elastic_ps.load_checkpoint(trained, expected, usual)
    with torch.device("meta"):
        elastic_ps.load_checkpoint(trained, model, optimizer)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), usual.state_dict(), rtol=0, atol=0)


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from elastic_ps.checkpoint.store import Store
from tests.testing.store import write
deleted = itertools.count(1)

def audit(event, arguments):
    # A file in a directory that is deleted; the second one is not deleted any more.
    if event == "os.remove" and arguments[1] != -1 and next(deleted) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(audit)
write(Store(Path(sys.argv[1])), 7)
"""


def test_a_kill_while_a_version_is_written_again_leaves_a_whole_one(tmp_path: Path) -> None:
    """In the middle of deleting the one that was there."""
    store = Store(tmp_path / "checkpoints")
    store.next_term()
    write(store, 7)
    killed = subprocess.run([sys.executable, "-c", KILLED, store.directory], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert same(Store(store.directory), 7)
    Store(store.directory).discard_partial()
    assert {path.name for path in store.directory.glob("*-*")} == {store.path(7).name}
