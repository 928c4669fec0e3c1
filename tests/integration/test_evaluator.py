"""An evaluator beside a job: what it is given, what is kept for it, and what it finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ps
from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.store import Store
from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet
from elastic_ps.errors import StorageUnavailable
from elastic_ps.evaluation import checkpoints as scripts
from elastic_ps.evaluation import remote
from elastic_ps.evaluation.decisions import Evaluation, Evaluations
from elastic_ps.evaluation.remote import JobSource
from elastic_ps.evaluation.results import FILE
from elastic_ps.evaluation.source import Checkpoint
from elastic_ps.worker.session import Session
from examples.digits import evaluate
from tests.testing.harness import Job, Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.polling import LIMIT
from tests.testing.trained import sgd

EVERY, STEPS = 5, 22
EVALUATOR = {
    "entrypoint": "tests:main",
    "every": EVERY,
    "backlog": 9,
    "best": {"metric": "loss", "mode": "min"},
}
SERVER = {"checkpoint": {"interval": "1h", "keep": 1}}
FIELDS: dict[str, Any] = {"evaluator": EVALUATOR, "parameterServer": SERVER}


class Trained:
    """A worker's script that waits for each checkpoint which the evaluator is to take.

    Attributes:
        taken: set once the evaluator has taken the first one, for which the script waits if it has to.
    """

    def __init__(self, job: Job, *, waits: bool = True, until_taken: bool = False) -> None:
        self._job, self._waits = job, waits
        self.taken = threading.Event()
        if not until_taken:
            self.taken.set()
        self.values: dict[int, dict[str, torch.Tensor]] = {}

    def __call__(self, session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(sgd(model), model)
        for x, y in session.loader(Numbers(4 * STEPS), 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            version = session.version
            self.values[version] = {name: value.clone() for name, value in model.state_dict().items()}
            if self._waits and version % EVERY == 0:
                self._await_durable(version)
                assert self.taken.wait(LIMIT)
        assert session.is_chief

    def at(self, version: int) -> dict[str, torch.Tensor]:
        """What the worker had as this version. Waits for it."""
        self._job.until(lambda: version in self.values, "the worker has seen the version")
        return self.values[version]

    def _await_durable(self, version: int) -> None:
        def durable_or_lost() -> bool:
            progress = self._job.status().progress
            return int(progress.durable_version or 0) >= version or progress.version < version

        self._job.until(durable_or_lost, "the checkpoint is on disk, or the job has gone back")


@pytest.fixture(autouse=True)
def _no_source_outlasts_a_test() -> Iterator[None]:
    yield
    scripts.use(None)


def loop(job: Job) -> Iterator[Checkpoint]:
    """What the job's evaluator loops over, in this thread, as long as no worker fails."""

    class Watchful(JobSource):
        def _ask(self, *arguments: Any, **named: Any) -> Any:
            if job.errors:
                raise job.errors[0]
            return super()._ask(*arguments, **named)

    scripts.use(Watchful("test", job.open_connections()[0]))
    return elastic_ps.checkpoints()


def versions(job: Job) -> list[int]:
    return [each.version for each in job.servers[0].evaluations()]


def test_each_checkpoint_and_the_last_version_are_evaluated_as_they_were(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    fields: dict[str, Any] = {"evaluator": EVALUATOR, "parameterServer": SERVER | {"replicas": 2}}
    with running_job(tmp_path, transport="grpc", checkpoints=directory, **fields) as job:
        script = Trained(job)
        job.start(0, script)
        model = make_mlp(seed=1)
        for checkpoint in loop(job):
            checkpoint.load(model)
            for name, value in script.at(checkpoint.version).items():
                assert torch.equal(model.state_dict()[name], value)
            checkpoint.report(loss=abs(checkpoint.version - 10))
        job.join()
        assert versions(job) == [5, 10, 15, 20, STEPS]
        status = job.status().progress.evaluation
        assert (status.best_version, status.version, status.missed, status.waiting) == (10, STEPS, 0, 0)
        kept = Store(directory).versions()
        assert {10, STEPS} <= set(kept), "the best one, and the newest"
        assert 5 not in kept


def test_a_parameter_server_that_is_lost_costs_no_evaluation(tmp_path: Path) -> None:
    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints", **FIELDS) as job:
        job.start(0, Trained(job))
        for number, checkpoint in enumerate(loop(job)):
            if number == 0:
                job.until(lambda: job.version >= 12, "a second checkpoint waits")
                job.restart(0)
            checkpoint.report(loss=number)
        job.join()
        assert versions(job) == [5, 10, 15, 20, STEPS]
        assert job.status().progress.evaluation.best_version == 5


def test_the_training_does_not_wait_for_an_evaluator_that_is_slow(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    fields: dict[str, Any] = {"evaluator": EVALUATOR | {"backlog": 1}, "parameterServer": SERVER}
    with running_job(tmp_path, checkpoints=directory, **fields) as job:
        script = Trained(job, until_taken=True)
        job.start(0, script)
        evaluator = loop(job)
        assert next(evaluator).version == EVERY
        script.taken.set()
        job.join()
        assert job.status().progress.evaluation.waiting == 2
        assert [each.version for each in evaluator] == [STEPS]
        assert versions(job) == [EVERY, STEPS]
        assert job.status().progress.evaluation.missed == 3


def test_a_checkpoint_that_is_damaged_is_left_out(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    with running_job(tmp_path, checkpoints=directory, **FIELDS) as job:
        job.start(0, Trained(job))
        job.join()
        file = next(Store(directory).path(10).glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        seen = [checkpoint.version for checkpoint in loop(job)]
        assert seen == [5, 15, 20, STEPS]
        assert job.status().progress.evaluation.missed == 1


def test_what_a_script_leaves_beside_a_checkpoint_is_deleted_with_it(tmp_path: Path) -> None:
    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints", **FIELDS) as job:
        job.start(0, Trained(job))
        job.join()
        left: list[Path] = []
        for checkpoint in loop(job):
            assert not any(path.exists() for path in left)
            left.append(checkpoint.directory / "samples")
            left[-1].mkdir()
            (left[-1] / "one.txt").touch()
        assert versions(job) == [5, 10, 15, 20, STEPS]


def test_a_checkpoint_that_stays_unreadable_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoints"
    describe = Store.describe

    def failing(store: Store, version: int) -> Manifest:
        if version == 10 and store.directory == directory:
            raise StorageUnavailable("Stale file handle")
        return describe(store, version)

    with running_job(tmp_path, checkpoints=directory, **FIELDS) as job:
        job.start(0, Trained(job))
        job.join()
        monkeypatch.setattr(Store, "describe", failing)  # no test has a disk that fails
        monkeypatch.setattr(remote, "UNREADABLE", timedelta(seconds=2))
        assert [checkpoint.version for checkpoint in loop(job)] == [5, 15, 20, STEPS]
        assert job.status().progress.evaluation.missed == 1


def test_a_script_that_leaves_its_loop_has_reported(tmp_path: Path) -> None:
    """In a directory with the evaluations of an earlier run, whose checkpoints somebody has deleted."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    earlier = Evaluations(waiting=[90], newest=90, results=[Evaluation(50, {"loss": 0.0})])
    (directory / FILE).write_text(json.dumps({"state": earlier.to_json()}))
    with running_job(tmp_path, checkpoints=directory, **FIELDS) as job:
        job.start(0, Trained(job))
        job.join()
        for checkpoint in loop(job):
            checkpoint.report(loss=1.0)
            break
        scripts.settle()  # as at the end of the script
        assert versions(job) == [EVERY]


def fail(checkpoints: Iterator[Checkpoint]) -> None:
    for checkpoint in checkpoints:
        checkpoint.report(loss=1 / 2)
        checkpoint.report(accuracy=1 / 0)


def test_what_a_script_has_reported_before_it_failed_is_no_result(tmp_path: Path) -> None:
    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints", **FIELDS) as job:
        job.start(0, Trained(job))
        job.join()
        with pytest.raises(ZeroDivisionError):
            fail(loop(job))
        scripts.settle(evaluated=False)
        assert versions(job) == []
        for checkpoint in loop(job):
            assert checkpoint.version == EVERY, "it is evaluated again"
            checkpoint.report(loss=1.0)
            break
        assert next(loop(job)).version > EVERY
        assert versions(job)[0] == EVERY


@pytest.mark.nightly
def test_a_directory_is_evaluated_without_a_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "checkpoints"
    entrypoint = f"{__name__}:total"
    fields: dict[str, Any] = {
        "evaluator": EVALUATOR | {"entrypoint": entrypoint, "arguments": {"factor": 2.0}},
        "parameterServer": {"checkpoint": {"interval": "1h", "keep": 9}},
    }
    with running_job(tmp_path, checkpoints=directory, **fields) as job:
        script = Trained(job)
        job.start(0, script)
        job.join()
    versions = [0, 5, 10, 15, 20, STEPS]
    assert [each.version for each in elastic_ps.checkpoints(directory)] == versions
    loaded = [
        elastic_ps.load_checkpoint(each.directory, make_mlp(seed=1))
        for each in elastic_ps.checkpoints(directory)
    ]
    assert loaded == versions
    wanted = 2.0 * float(script.values[20]["0.weight"].sum())
    command = [sys.executable, "-m", "elastic_ps.cli", "evaluate", str(directory)]
    subprocess.run([*command, "--version", "20", "--json"], check=True)
    printed = capfd.readouterr()
    assert "NaN" not in printed.out, "it is no JSON"
    assert printed.out.startswith('{"version": 20, "metrics": {"total": ')
    assert float(printed.out.rpartition(": ")[2].rstrip("}\n")) == pytest.approx(wanted)
    assert "evaluated 20" in printed.err, "what the script prints is not among the JSON"
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has enough
    assert subprocess.run(command, stdout=writer, check=False).returncode == 1
    os.close(writer)
    assert "Traceback" not in capfd.readouterr().err
    (directory / "version-0000000020" / "manifest.json").write_text("{")
    assert subprocess.run([*command, "--version", "20"], check=False).returncode == 1
    assert "error: all checkpoints are damaged, so none is evaluated: " in capfd.readouterr().err
    assert subprocess.run(command, check=False).returncode == 0, "others are whole"
    printed = capfd.readouterr()
    assert "the checkpoint of version 20 is skipped" in printed.err
    assert "version 15: total" in printed.out
    (directory / FILE).unlink()
    assert subprocess.run(command, check=False).returncode == 2
    assert "had no evaluator" in capfd.readouterr().err
    assert subprocess.run([*command, "--entrypoint", f"{__name__}:forgetful"], check=False).returncode == 2
    assert f"{__name__}:forgetful evaluated nothing of {directory}: " in capfd.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_whoever_ends_the_command_ends_the_evaluation(
    tmp_path: Path, interruptible: None, number: signal.Signals, status: int
) -> None:
    (tmp_path / "endless.py").write_text("""
import os, time
def run():
    print("runs as", os.getpid(), flush=True)
    time.sleep(600)
""")
    (tmp_path / "version-0000000001").mkdir()
    command = [sys.executable, "-m", "elastic_ps.cli", "evaluate", ".", "--entrypoint", "endless:run"]
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **outputs) as evaluation:
        assert evaluation.stdout is not None
        process = int(evaluation.stdout.readline().removeprefix("runs as "))
        os.kill(process, number)
        said = evaluation.stdout.read()
    assert (process, evaluation.returncode) == (evaluation.pid, status)
    assert said == ("interrupted\n" if number == signal.SIGINT else "")


def forgetful() -> None:
    """It asks for no checkpoint."""


def total(factor: float = 1.0) -> None:
    model = make_mlp(seed=1)
    for checkpoint in elastic_ps.checkpoints():
        checkpoint.load(model)
        print("evaluated", checkpoint.version)
        checkpoint.report(total=factor * model.state_dict()["0.weight"].sum())


def test_the_example_evaluates_what_a_script_of_the_digits_has_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = Path(evaluate.__file__).read_text()
    page = (Path(__file__).parents[2] / "docs" / "guides" / "evaluator.md").read_text()
    assert page.partition("```python\n")[2].partition("```")[0] in code, "the page shows the example"

    def script(session: Session) -> None:
        model = LeNet(size=8)
        optimizer = session.optimizer(sgd(model), model)
        for images, labels in session.loader(torch.utils.data.Subset(digits()[0], range(8)), 8):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    with running_job(tmp_path, checkpoints=tmp_path / "checkpoints") as job:
        job.start(0, script)
        job.join()
    evaluate.main(str(tmp_path / "checkpoints"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["version 0", "version 1"]
    assert all("prec@5" in line for line in lines)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(elastic_ps.UsageError, match="is not the evaluator of a job"):
        elastic_ps.checkpoints()
    with pytest.raises(elastic_ps.UserError, match="has no checkpoint"):
        elastic_ps.checkpoints(tmp_path)
    with pytest.raises(elastic_ps.UsageError, match=r"takes one number, but got a Tensor of shape \[2\]"):
        elastic_ps.Checkpoint(1, tmp_path).report(loss=torch.zeros(2))
