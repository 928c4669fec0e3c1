"""Workers of several processes (`worker.processes`): they take part in the job as one, and compute as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic_ps.errors import ModelMismatch, UsageError
from elastic_ps.local import Launcher, Options
from elastic_ps.worker.session import Session
from tests.testing.harness import Indexes, Numbers, Tally, make_mlp, running_job
from tests.testing.histories import check_histories
from tests.testing.launching import forks, gone, make_job, version_of, wait_for_end, wait_for_workers
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse, replay
from tests.testing.polling import LIMIT, eventually
from tests.testing.tiers import per_change

ROOT = Path(__file__).parents[2]
STEADY = "tests.testing.scripts.steady:main"
Models = dict[tuple[int, int], torch.nn.Module]


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.005)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trainer(
    data: Numbers,
    models: Models,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    *,
    batch_size: int = 5,
    epochs: int = 1,
    each: Callable[[Session, int, int], object] = lambda session, rank, step: None,
) -> Callable[[Session, int], None]:
    """The ordinary loop. Of process 0 the model has the same values in every worker; others' are not used."""

    def script(session: Session, rank: int) -> None:
        model = make_mlp(seed=rank)
        optimizer = session.optimizer(make(model), model)
        models[session.worker, rank] = model
        for step, (x, y) in enumerate(session.loader(data, batch_size, epochs=epochs)):
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            each(session, rank, step)
            session.report(loss=loss)
            optimizer.step()

    return script


def assert_replicas(models: Models) -> None:
    first, *others = models.values()
    for model in others:
        for ours, theirs in zip(model.parameters(), first.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("workers", "processes"), per_change([(1, 2), (1, 3), (2, 2)], keep=[(1, 3), (2, 2)])
)
def test_a_step_is_that_of_the_whole_batch(tmp_path: Path, workers: int, processes: int) -> None:
    """Batches that do not divide by the processes, and last ones with fewer records than processes."""
    data, models = Numbers(131), Models()
    server, each = {"replicas": 2, "bucketBytes": 1024}, {"processes": processes}
    with running_job(tmp_path, data={"shardRecords": 13}, parameterServer=server, worker=each) as job:
        for worker in range(workers):
            job.start_processes(worker, trainer(data, models, adam, epochs=2))
        job.join()
        commits = job.commits()
        assert_each_record_once(commits, records=131, epochs=2)
        assert max(len(commit["contributions"]) for commit in commits) <= workers, "one member each"
        assert_replicas(models)
        assert_equal_up_to_round_off(
            models[0, 0], make_mlp(), lambda model: replay(commits, data, model, adam, job.spec)
        )


@pytest.mark.parametrize(
    "consistency",
    [
        {"mode": "bounded", "maxStaleness": 3},
        {"mode": "async"},
        {"mode": "accumulate", "gradients": 3},
        {"backupWorkers": 1},
        {"deterministic": True},
        {"globalBatchSize": 7},
    ],
    ids=lambda each: next(iter(each.values())) if "mode" in each else next(iter(each)),
)
def test_other_modes(tmp_path: Path, consistency: dict[str, Any]) -> None:
    data, models = Numbers(120), Models()
    worker = {"processes": 2, "replicas": 2}
    with running_job(tmp_path, consistency=consistency, worker=worker, data={"shardRecords": 10}) as job:
        for worker_index in range(2):
            job.start_processes(worker_index, trainer(data, models))
        job.join()
        assert_each_record_once(job.commits(), records=120, epochs=1)
        assert_replicas(models)


def test_a_parameter_that_some_slices_do_not_use(tmp_path: Path) -> None:
    """A gradient that some processes do not have counts as zero, as with several workers."""
    data = Numbers(40)

    def loss_of(model: Any, x: torch.Tensor, used: bool) -> Any:
        return model[0](x).square().mean() + (model[1](x).square().mean() if used else 0)

    def script(session: Session, rank: int) -> None:
        model = torch.nn.ModuleList([make_mlp(), make_mlp(seed=1)])
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step, (x, _) in enumerate(session.loader(data, 10)):
            optimizer.zero_grad()
            loss_of(model, x, used=step % 2 == rank or step == 3).backward()
            optimizer.step()
        results[rank] = model

    results: dict[int, torch.nn.Module] = {}
    with running_job(tmp_path, worker={"processes": 2}, data={"shuffle": False}) as job:
        job.start_processes(0, script)
        job.join()
    expected = torch.nn.ModuleList([make_mlp(), make_mlp(seed=1)])
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            x = data.x[step * 10 + rank * 5 : step * 10 + rank * 5 + 5]
            (0.5 * loss_of(expected, x, used=step % 2 == rank or step == 3)).backward()
        optimizer.step()
    for ours, theirs in zip(results[1].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulated_batches_that_do_not_divide(tmp_path: Path, overlap: bool) -> None:
    data, sizes = Numbers(42), []

    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=overlap)
        optimizer.zero_grad()
        for step, (x, y) in enumerate(session.loader(data, 7)):
            sizes.append((rank, len(x)))
            last = step % 3 == 2
            with nullcontext() if last else optimizer.no_sync():
                (mse(model, x, y) / 3).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        results[rank] = model

    results: dict[int, torch.nn.Module] = {}
    with running_job(tmp_path, worker={"processes": 2}, data={"shuffle": False}) as job:
        job.start_processes(0, script)
        job.join()
    assert [size for rank, size in sizes if rank == 0] == [4] * 6
    assert [size for rank, size in sizes if rank == 1] == [3] * 6
    expected = make_mlp()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step, start in enumerate(range(0, 42, 7)):
        (mse(expected, data.x[start : start + 7], data.y[start : start + 7]) / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(results[1].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_batch_without_a_record_for_a_process_adds_nothing_to_its_gradient(
    tmp_path: Path, overlap: bool
) -> None:
    """It computes on process 0's records then, and its slice of the batch before has weight."""
    models: dict[int, Tally] = {}

    def script(session: Session, rank: int) -> None:
        model = models[rank] = Tally(6)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, overlap=overlap)
        for step, batch in enumerate(session.loader(Indexes(6), 4)):
            with optimizer.no_sync() if step == 0 else nullcontext():
                (model(batch) / len(batch)).backward()
            if step:
                optimizer.step()

    with running_job(tmp_path, worker={"processes": 3}, data={"shuffle": False}) as job:
        job.start_processes(0, script)
        job.join()
    # Slices of 2, 1 and 1 records, and of 1, 1 and 0. So the processes weigh 3, 2 and 1 sixths.
    expected = -torch.tensor([1 / 4, 1 / 4, 2 / 6, 1 / 6, 3 / 6, 2 / 6])
    for model in models.values():
        torch.testing.assert_close(model.weight.detach(), expected)


def test_buffers_and_reported_values_are_means_over_the_processes(tmp_path: Path) -> None:
    data = Numbers(30)

    def script(session: Session, rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in session.loader(data, 10):
            mse(model, x, y).backward()
            session.report(loss=float(session.version * 10 + len(x)), rank=rank)
            optimizer.step()
            optimizer.zero_grad()
        norms[rank] = model[0]

    norms: dict[int, Any] = {}
    with running_job(tmp_path, worker={"processes": 3}, data={"shuffle": False}) as job:
        job.start_processes(0, script)
        job.join()
        losses = [commit["metrics"] for commit in job.commits() if "metrics" in commit]
        assert not losses or losses[0]["loss"] == pytest.approx((4 * 4 + 3 * 3 + 3 * 3) / 10)
    mean: Any = torch.zeros(6)
    for batch in data.x.split(10):
        slices = torch.tensor_split(batch, [4, 7])
        mean = sum(len(part) / 10 * (0.9 * mean + 0.1 * part.mean(0)) for part in slices)
    for norm in norms.values():
        torch.testing.assert_close(norm.running_mean, mean)
        assert norm.num_batches_tracked == 3


def test_it_joins_again_when_the_parameter_server_is_lost(tmp_path: Path) -> None:
    data, models = Numbers(120), Models()

    def lose(session: Session, rank: int, step: int) -> None:
        if (rank, step) == (1, 6):
            job.restart(0)

    checkpoints = tmp_path / "checkpoints"
    server = {"checkpoint": {"everyVersions": 2}}
    with running_job(
        tmp_path, worker={"processes": 2}, parameterServer=server, checkpoints=checkpoints
    ) as job:
        job.start_processes(0, trainer(data, models, each=lose))
        job.join()
        assert job.status().progress.records_applied == 120
        assert_replicas(models)


def test_a_process_reads_what_it_has_written_before_its_worker_joins_again(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for epoch in (loader := session.loader(Numbers(10), 10, epochs=2)).epochs():
            for x, y in loader:
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
            if session.is_chief and epoch == 0:
                job.until(lambda: job.status().progress.durable_version == session.version, "it is on disk")
                job.restart(0)
                session.state["best"] = 0.9
                session.state["epoch"] = epoch
                assert session.state["best"] == 0.9
        assert rank or dict(session.state) == {"best": 0.9, "epoch": 0}

    server = {"checkpoint": {"everyVersions": 1}}
    with running_job(
        tmp_path, worker={"processes": 2}, parameterServer=server, checkpoints=tmp_path / "checkpoints"
    ) as job:
        job.start_processes(0, script)
        job.join()


def test_one_process_stops_the_training_of_all(tmp_path: Path) -> None:
    data, models = Numbers(10_000), Models()
    reasons: dict[int, tuple[str, bool]] = {}

    def stop(session: Session, rank: int, step: int) -> None:
        if (rank, step) == (1, 3):
            session.stop("it is good enough")

    def script(session: Session, rank: int) -> None:
        trainer(data, models, each=stop)(session, rank)
        reasons[rank] = session.stopped, session.is_chief

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        assert reasons == {0: ("it is good enough", True), 1: ("it is good enough", False)}
        assert 3 < job.version < 100


def test_one_process_that_is_asked_to_leave_takes_the_others_along(tmp_path: Path) -> None:
    data, models = Numbers(200), Models()

    def leave(session: Session, rank: int, step: int) -> None:
        if (session.worker, rank, step) == (0, 1, 3):
            session.drain()

    with running_job(tmp_path, worker={"processes": 2}) as job:
        for worker in range(2):
            job.start_processes(worker, trainer(data, models, each=leave))
        job.join()
        assert_each_record_once(job.commits(), records=200, epochs=1)
        assert {m.worker: m.state for m in job.status().members}[0] == "left"


def test_skipped_batches_and_epochs(tmp_path: Path) -> None:
    """The same decisions in all processes, and one chief among them in each epoch."""
    data, chiefs = Numbers(50), []

    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = session.loader(data, 10, epochs=3)
        for epoch in loader.epochs():
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                if step == 1:
                    continue
                mse(model, x, y).backward()
                if step == 2:
                    optimizer.skip()
                elif step == 3:
                    optimizer.zero_grad()
                else:
                    optimizer.step()
            if session.is_chief:
                chiefs.append((epoch, rank))

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        assert job.status().progress.records_skipped == 90
        assert job.status().progress.records_applied == 60
    assert chiefs == [(0, 0), (1, 0), (2, 0)]


def test_values_that_one_process_changes_between_epochs_are_not_computed_on(tmp_path: Path) -> None:
    """As where the chief evaluates an average of the values: the processes share the memory of both."""
    swapped = threading.Event()

    def script(session: Session, rank: int) -> None:
        model = Tally(20)
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for epoch in (loader := session.loader(Indexes(20), 20, epochs=2)).epochs():
            for batch in loader:
                optimizer.zero_grad()
                model(batch).backward()
                assert model.weight.tolist() == [-epoch / 2] * 20, "each process has half of the records"
                optimizer.step()
            if session.is_chief and epoch == 0:
                before = model.weight.detach().clone()
                model.weight.data.fill_(100.0)
                swapped.set()
                assert session.processes.links[0].questions.poll(LIMIT), "the other process waits"
                model.weight.data.copy_(before)
            assert swapped.wait(LIMIT)

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        assert job.status().progress.records_applied == 40


def test_a_step_is_skipped_before_another_process_has_computed_it(tmp_path: Path) -> None:
    """What comes of that step later is added to nothing."""
    data, models, skipped = Numbers(40), Models(), threading.Event()

    def script(session: Session, rank: int) -> None:
        models[session.worker, rank] = model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for step, (x, y) in enumerate(session.loader(data, 10)):
            optimizer.zero_grad()
            if (step, rank) == (1, 1):
                assert skipped.wait(LIMIT)
            mse(model, x, y).backward()
            if step != 1:
                optimizer.step()
                continue
            optimizer.skip()
            skipped.set()

    with running_job(tmp_path, parameterServer={"bucketBytes": 1024}, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()
        assert job.status().progress.records_skipped == 10
        assert_equal_up_to_round_off(
            models[0, 0], make_mlp(), lambda model: replay(job.commits(), data, model, sgd, job.spec)
        )


@pytest.mark.parametrize("drops", [False, True])
def test_processes_that_go_different_ways_are_told(tmp_path: Path, drops: bool) -> None:
    """`drops`: process 0 drops its gradients, and the other one has none."""
    data = Numbers(40)

    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in session.loader(data, 10):
            if rank == 0 or not drops:
                mse(model, x, y).backward()
            if drops:
                optimizer.zero_grad()
            elif rank == 0:
                optimizer.step()

    here = "a batch whose gradients it has dropped" if drops else r"optimizer.step\(\)"
    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        with pytest.raises(UsageError, match=rf"process 0 is at {here}, process 1 at the next batch"):
            job.join()


def test_a_process_that_ends_alone_is_named(tmp_path: Path) -> None:
    data, models = Numbers(40), Models()

    def script(session: Session, rank: int) -> None:
        if rank == 0:
            trainer(data, models)(session, rank)

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script, ending=timedelta(0))
        with pytest.raises(UsageError, match=r"process 1 of this worker has ended its script.*session\.opt"):
            job.join()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(UsageError, match=r"session\.assign does not work with worker.processes"):
            session.assign(model)
        with pytest.raises(
            UsageError, match=r"batch_size is 1, but each worker has 2 processes.*expected 2 or more"
        ):
            session.loader(Numbers(9), 1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        with pytest.raises(UsageError, match=r"the GradScaler of each process .* in bfloat16"):
            scaler.step(optimizer)
        if rank:
            with pytest.raises(UsageError, match=r"where session\.is_chief is true"):
                optimizer.state_dict()
        else:
            assert optimizer.state_dict()["param_groups"]

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        job.join()


def test_another_model_in_another_process_is_named(tmp_path: Path) -> None:
    def script(session: Session, rank: int) -> None:
        model = make_mlp((6, 16 + rank, 1))
        session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    with running_job(tmp_path, worker={"processes": 2}) as job:
        job.start_processes(0, script)
        with pytest.raises(
            ModelMismatch, match=r"process 1 of this worker.*\[17, 6\] in place of .*\[16, 6\]"
        ):
            job.join()


def test_the_parameter_server_receives_one_sum_for_all_processes(tmp_path: Path) -> None:
    """Eight records make a version: of one worker with four processes, or of four workers."""
    pushed = {}
    for processes in (4, 1):
        data, models = Numbers(80), Models()
        given = {"processes": processes, "replicas": 4 // processes}
        fields = {"deterministic": True}
        with running_job(tmp_path / str(processes), worker=given, consistency=fields) as job:
            for worker in range(4 // processes):
                script = trainer(data, models, batch_size=2 * processes)
                job.start_processes(worker, script)
            job.join()
            assert job.version == 10
            pushed[processes] = sum(member.traffic.pushed_bytes for member in job.status().members)
    assert 0 < 4 * pushed[4] == pushed[1]


# --- real processes


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


@pytest.mark.nightly
def test_a_process_that_dies_ends_its_worker_which_is_replaced(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    job = make_job(
        spec={"entrypoint": STEADY, "worker": {"replicas": 1, "processes": 2}},
        records=600,
        batch_size=4,
        seconds=0.1,
        hurry=str(hurry),
    )
    with Launcher(
        job, Options(forks=forks(), root=tmp_path / "state", history=tmp_path / "history")
    ) as launcher:
        launcher.start()
        first = wait_for_workers(launcher, lambda w: len(w) == 1, "the worker trains")[0]
        eventually(lambda: version_of(launcher), "a step")
        children = sorted(psutil.Process(first).children(), key=lambda child: child.create_time())
        places = [(each.environ()["LOCAL_RANK"], each.environ()["LOCAL_WORLD_SIZE"]) for each in children]
        assert places == [("0", "2"), ("1", "2")]
        children[1].kill()
        second = wait_for_workers(launcher, lambda w: w.get(0) not in (None, first), "it is replaced")[0]
        assert gone(children[0].pid)
        log = (launcher.directory.logs / "worker-0.log").read_text()
        assert f"process 1 of this worker (pid {children[1].pid}) was killed by SIGKILL" in log
        os.kill(second, signal.SIGTERM)
        wait_for_workers(launcher, lambda w: w.get(0) not in (None, second), "it left and is replaced")
        hurry.touch()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    assert not launcher.status().failures
    check_histories(tmp_path / "history", records=600, epochs=1)


@pytest.mark.nightly
def test_a_trainer_of_hugging_face_begins_no_process_group(tmp_path: Path) -> None:
    job = make_job(
        spec={
            "entrypoint": "tests.testing.scripts.trains_with_trainer:main",
            "worker": {"replicas": 1, "processes": 2},
        },
        directory=str(tmp_path / "out"),
    )
    with Launcher(
        job, Options(forks=forks(), root=tmp_path / "state", history=tmp_path / "history")
    ) as launcher:
        launcher.start()
        wait_for_end(launcher)
        outcome = launcher.outcome()
    assert outcome.verdict.phase == "Succeeded", outcome.verdict
    check_histories(tmp_path / "history", records=48, epochs=1)


@pytest.mark.nightly
def test_a_script_that_fails_in_one_process_says_why(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nimport time\nimport elastic_ps\nelastic_ps.connect()\n"
        "if os.environ['LOCAL_RANK'] == '1':\n    raise elastic_ps.UserError('the disk is full')\n"
        "time.sleep(600)\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "elastic_ps.cli", "run", "script.py", "--processes", "2"],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 2
    assert "the disk is full" in run.stderr
    assert "Traceback" not in run.stderr


TERMINATED = """
import faulthandler, os, signal
import lightning.pytorch as pl
from elastic_ps.integrations.lightning import ElasticStrategy

faulthandler.register(signal.SIGUSR1)

class Module(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)

pl.Trainer(strategy=ElasticStrategy(), accelerator="cpu", logger=False).validate(Module(), [1])
print("validated")
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.nightly
def test_lightning_notes_a_sigterm_as_alone() -> None:
    """Stacks are still printed on SIGUSR1 after that, though Lightning resets signals in the end."""
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=500)
    assert (done.returncode, "validated" in done.stdout) == (0, True), done.stderr
    assert "most recent call first" in done.stderr
