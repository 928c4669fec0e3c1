"""A job goes on from a checkpoint as if it had never been interrupted."""

from __future__ import annotations

import fcntl
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.store import Store
from elastic_ps.contract.env import ProcessEnvironment, Resume
from elastic_ps.errors import CheckpointCorrupt, InvalidJob, InvalidModel, ModelMismatch, NoCheckpoint
from elastic_ps.server.process import ParameterServer
from elastic_ps.transport.inproc import InprocServer, connect
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import (
    Commit,
    MakeOptimizer,
    assert_each_record_once,
    assert_equal_up_to_round_off,
    mse,
    replay,
)
from tests.testing.polling import eventually
from tests.testing.tiers import per_change

RECORDS, EPOCHS = 150, 2
DATA = Numbers(RECORDS)
CLASSES: dict[str, MakeOptimizer] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.003),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.005),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.05),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.005),
}


def decay(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def server(shards: int, interval: str = "1h", keep: int = 3) -> dict[str, Any]:
    return {"replicas": shards, "bucketBytes": 1024, "checkpoint": {"interval": interval, "keep": keep}}


def trainer(
    make: MakeOptimizer, *, until: int = 10**9, seed: int = 0, models: list[torch.nn.Module] | None = None
) -> Callable[[Session], None]:
    """Train to the end, or to a version."""

    def script(session: Session) -> None:
        model = make_mlp(seed=seed)
        optimizer = session.optimizer(make(model), model)
        session.scheduler(decay(optimizer), interval="step")
        for x, y in session.loader(DATA, 4, epochs=EPOCHS):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.version >= until:
                session.drain()
        if models is not None:
            models.append(model)

    return script


def check_replay(commits: list[Commit], model: torch.nn.Module, make: MakeOptimizer, job: Job) -> None:
    assert_each_record_once(commits, records=RECORDS, epochs=EPOCHS)

    def replayed(fresh: torch.nn.Module) -> None:
        optimizer = make(fresh)
        schedule = decay(optimizer)
        replay(commits, DATA, fresh, lambda _: optimizer, job.spec, after=lambda version, _: schedule.step())

    assert_equal_up_to_round_off(model, make_mlp(), replayed)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    per_change([*((name, 1, 2) for name in CLASSES), ("Adam", 3, 1)], keep=[("SGD", 1, 2), ("Adam", 3, 1)]),
)
def test_stopping_and_going_on_with_other_shards(tmp_path: Path, name: str, before: int, after: int) -> None:
    make, checkpoints = CLASSES[name], tmp_path / "checkpoints"
    with running_job(tmp_path / "1", checkpoints=checkpoints, parameterServer=server(before)) as job:
        for worker in range(2):
            job.start(worker, trainer(make, until=12))
        job.join()
        first = job.commits()
    assert len(first) >= 12
    models: list[torch.nn.Module] = []
    with running_job(
        tmp_path / "2", checkpoints=checkpoints, resume="require", parameterServer=server(after)
    ) as job:
        assert job.version == len(first)
        for worker in range(3):
            job.start(worker, trainer(make, seed=1 + worker, models=models))
        job.join()
        assert job.status().term == 2
        assert job.status().progress.records_applied == RECORDS * EPOCHS
        check_replay(first + job.commits(), models[0], make, job)


def test_going_on_from_a_checkpoint_that_was_written_while_training_ran(tmp_path: Path) -> None:
    """What came after the checkpoint is as if it had never been: its records are handed out again."""
    make, checkpoints, copied = CLASSES["Adam"], tmp_path / "checkpoints", tmp_path / "copied"
    with running_job(tmp_path / "1", checkpoints=checkpoints, parameterServer=server(2, "1ms")) as job:

        def script(session: Session) -> None:
            trainer(make, until=30)(session)

        for worker in range(2):
            job.start(worker, script)
        store = Store(checkpoints)
        job.until(lambda: any(v > 3 for v in store.versions()), "a checkpoint while training runs")
        job.join()
        first = job.commits()
    version = next(v for v in store.versions() if v > 3)
    shutil.copytree(store.path(version), Store(copied).path(version))
    models: list[torch.nn.Module] = []
    with running_job(tmp_path / "2", checkpoints=copied, resume="require", parameterServer=server(2)) as job:
        assert job.version == version
        assert job.status().term == 2, "above that of the copied checkpoint, though nothing else tells of it"
        for worker in range(2):
            job.start(worker, trainer(make, seed=4, models=models))
        job.join()
        check_replay(first[:version] + job.commits(), models[0], make, job)


def test_the_last_checkpoint_waits_for_the_one_under_way(tmp_path: Path) -> None:
    """Somebody has locked the directory for a while: at the end there are both, and both are whole."""
    checkpoints, under_way = tmp_path / "checkpoints", list[int]()

    def written() -> bool:
        under_way[:] = [int(path.name.rpartition("-")[2]) for path in checkpoints.glob("partial-*")]
        return bool(under_way)

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(CLASSES["SGD"](model), model)
        for x, y in session.loader(DATA, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.version == 2:
                fcntl.flock(lock, fcntl.LOCK_EX)
            elif session.version == 5:
                eventually(written, "a checkpoint is written, and not there yet")
                threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
                session.drain()

    checkpoints.mkdir()
    with (
        (checkpoints / "lock").open("a") as lock,
        running_job(tmp_path / "1", checkpoints=checkpoints, parameterServer=server(2, "1ms")) as job,
    ):
        job.start(0, script)
        job.join()
        version = job.version
    *_, before, last = Store(checkpoints).versions()
    assert (last, [before]) == (version, under_way)
    assert Store(checkpoints).manifest(before).version == before, "its files are there, with their digests"
    assert Store(checkpoints).manifest(last).version == last
    assert not list(checkpoints.glob("partial-*"))


def test_a_broken_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path: Path) -> None:
    make, checkpoints = CLASSES["SGD"], tmp_path / "checkpoints"
    with running_job(tmp_path / "1", checkpoints=checkpoints, parameterServer=server(2, "1ms")) as job:
        job.start(0, trainer(make, until=20))
        job.join()
        first = job.commits()
    *_, previous, newest = Store(checkpoints).versions()
    path = next(Store(checkpoints).path(newest).glob("shard-1*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    models: list[torch.nn.Module] = []
    with running_job(
        tmp_path / "2", checkpoints=checkpoints, resume="require", parameterServer=server(2)
    ) as job:
        assert job.version == previous
        assert list(checkpoints.glob("corrupt-*")), "it is kept for a look"
        job.start(0, trainer(make, models=models))
        job.join()
        check_replay(first[:previous] + job.commits(), models[0], make, job)


def test_a_checkpoint_is_required(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint), running_job(tmp_path, checkpoints=tmp_path / "none", resume="require"):
        pass


def test_part_of_a_checkpoint_is_not_enough(tmp_path: Path) -> None:
    make, checkpoints = CLASSES["SGD"], tmp_path / "checkpoints"
    with running_job(tmp_path / "1", checkpoints=checkpoints, parameterServer=server(2, keep=1)) as job:
        job.start(0, trainer(make, until=5))
        job.join()
    (version,) = Store(checkpoints).versions()
    next(Store(checkpoints).path(version).glob("shard-1*.safetensors")).unlink()
    with (
        pytest.raises((NoCheckpoint, CheckpointCorrupt), match="shard-1"),
        running_job(tmp_path / "2", checkpoints=checkpoints, resume="require", parameterServer=server(2)),
    ):
        pass


def test_another_model_cannot_go_on(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    with running_job(tmp_path / "1", checkpoints=checkpoints) as job:
        job.start(0, trainer(CLASSES["SGD"], until=5))
        job.join()
    with running_job(tmp_path / "2", checkpoints=checkpoints, resume="require") as job:
        job.start(0, trainer(CLASSES["Adam"]))
        with pytest.raises(ModelMismatch, match=r"Adam.*SGD"):
            job.join()


@pytest.mark.parametrize(("run", "chiefs"), [("a", [1]), ("b", [1, 0])])
def test_another_run_that_goes_on_after_the_end_has_a_chief_of_its_own(
    tmp_path: Path, run: str, chiefs: list[int]
) -> None:
    """In the same run, the chief has evaluated and saved, or comes again."""
    found: list[int] = []

    def script(session: Session) -> None:
        trainer(CLASSES["SGD"])(session)
        found.extend([session.worker] * session.is_chief)

    for each, worker in (("a", 1), (run, 0)):
        with running_job(tmp_path, checkpoints=tmp_path / "checkpoints", resume="auto", run=each) as job:
            job.start(worker, script)
            job.join()
            assert job.status().progress.finished
    assert found == chiefs


SYNC, LOCAL = {"mode": "sync"}, {"mode": "local", "steps": 4}


@pytest.mark.parametrize(("before", "after"), [(SYNC, LOCAL), (LOCAL, SYNC)])
def test_a_job_does_not_go_on_in_mode_local_or_leave_it(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """The optimizer's state and rates are those of the workers' optimizer, or those of the outer one."""
    kept: dict[str, Any] = {"checkpoints": tmp_path, "resume": "auto"}
    with running_job(tmp_path, **kept, run="a", consistency=before) as job:
        job.run(trainer(CLASSES["SGD"]), workers=1)
        job.restart(0)
        assert job.status().progress.finished, "the same run goes on"
    with (
        pytest.raises(InvalidJob, match=r"but in mode local the optimizer runs on the workers.*Fine-tuning"),
        running_job(tmp_path, **kept, run="b", consistency=after),
    ):
        pass
    with running_job(tmp_path, **kept, run="b", consistency=before) as job:
        assert job.status().progress.finished


def test_a_new_run_does_not_begin_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    """Its own would be the oldest and be removed, and after a crash it would go on from the other's."""
    checkpoints = tmp_path / "checkpoints"
    store = Store(checkpoints)
    term = store.next_term()
    file = store.write_shard(term, 7, 0, 1, iter(()))
    manifest = Manifest(job="j", version=7, term=term, tensors=[], optimizer="SGD", state={}, files=[file])
    store.commit(manifest, keep=3)
    with (
        pytest.raises(InvalidJob, match="checkpoints of an earlier run, up to version 7"),
        running_job(tmp_path, checkpoints=checkpoints),
    ):
        pass
    assert store.versions() == [7]


@pytest.mark.parametrize("resume", ["no", "auto", "require"])
def test_another_job_on_the_directory_is_refused_and_the_first_goes_on(
    tmp_path: Path, resume: Resume
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with running_job(tmp_path, checkpoints=checkpoints, parameterServer=server(1, "1ms")) as job:
        job.start(0, trainer(CLASSES["SGD"]))
        job.until(lambda: bool(job.version), "training has begun")
        other = ProcessEnvironment(
            job="other",
            spec=job.spec,
            role="ps",
            index=0,
            addresses=("",),
            checkpoints=checkpoints,
            resume=resume,
        )
        with pytest.raises(InvalidJob, match="belongs to job 'test'"):
            ParameterServer(other, InprocServer(), lambda _: connect(InprocServer()))
        job.join()
        assert job.status().term == 1, "nobody has taken over"
        assert job.status().progress.records_applied == RECORDS * EPOCHS


def epochs_trained(tmp_path: Path, epochs: int, *, workers: int = 2, **fields: Any) -> list[Commit]:
    """Begin or go on with a script that trains so many epochs; returns what was trained."""
    chiefs: list[int] = []

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(CLASSES["SGD"](model), model)
        for x, y in session.loader(DATA, 10, epochs=epochs):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        if session.is_chief:
            chiefs.append(session.worker)

    path = tmp_path / f"{len(list(tmp_path.glob('run-*')))}"
    with running_job(
        tmp_path / f"run-{path.name}", checkpoints=tmp_path / "checkpoints", resume="auto", **fields
    ) as job:
        job.run(script, workers=workers)
        progress = job.status().progress
        assert (progress.finished, progress.records_applied) == (True, epochs * RECORDS)
        assert len(chiefs) == 1
        return job.commits()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_finished_job_goes_on_with_more_epochs_and_trains_no_fewer(
    tmp_path: Path, deterministic: bool
) -> None:
    fields: dict[str, Any] = {
        "consistency": {"deterministic": deterministic},
        "worker": {"replicas": 2},
    }
    commits = epochs_trained(tmp_path, 1, **fields)
    assert epochs_trained(tmp_path, 1, **fields) == [], "nothing is left to train"
    commits += epochs_trained(tmp_path, 3, **fields)
    assert_each_record_once(commits, records=RECORDS, epochs=3)
    with pytest.raises(InvalidModel, match=r"for 2 epochs; the job trains 150 records for 3.*not fewer"):
        epochs_trained(tmp_path, 2, workers=1, **fields)
