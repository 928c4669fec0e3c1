"""The recipes of docs/cookbook.md and of the guides of data and files run as they stand there."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import elastic_ps
from elastic_operator import builders
from elastic_ps.api.job import TrainingJobSpec
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, mse

ROOT = Path(__file__).parents[2]
NAMES = ("cookbook.md", "guides/data.md", "guides/files.md")
PAGES = "\n".join((ROOT / "docs" / name).read_text() for name in NAMES)
RUNS = r"<!-- runs in [^\n]*test_scripts_recipes.py -->\n```{}\n(.*?)```"


def recipes(heading: str, language: str = "python") -> list[str]:
    """The code under a heading that says that it runs here."""
    part = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGES, re.S | re.M)
    assert part is not None
    found: list[str] = re.findall(RUNS.format(language), part[1], re.S)
    return found


def recipe(heading: str, language: str = "python") -> str:
    (code,) = recipes(heading, language)
    return code


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["in one step", "with one optimizer"])
def test_two_networks(tmp_path: Path, how: str, workers: int) -> None:
    dataset = torch.utils.data.TensorDataset(torch.randn(480, 2) * 0.1 + 3.0)
    networks: dict[int, Any] = {}

    def script(session: Session) -> None:
        names = {
            "torch": torch,
            "session": session,
            "dataset": dataset,
            "generator": make_mlp((2, 8, 2)),
            "critic": make_mlp((2, 8, 1), seed=1),
        }
        exec(recipe(f"Two networks {how}"), names)
        networks[session.worker] = names

    with running_job(tmp_path) as job:
        job.run(script, workers=workers)
        assert_each_record_once(job.commits(), records=480, epochs=2)
    trained = networks[0]
    for name, before in (("generator", make_mlp((2, 8, 2))), ("critic", make_mlp((2, 8, 1), seed=1))):
        pairs = zip(trained[name].parameters(), before.parameters(), strict=True)
        assert not all(torch.equal(ours, first) for ours, first in pairs), name
    assert max(float(p.detach().abs().max()) for p in trained["critic"].parameters()) <= 0.5


@pytest.mark.parametrize(("heading", "records"), [("Streams", 35), ("Chunks", 7)])
def test_a_stream_and_chunks(tmp_path: Path, heading: str, records: int) -> None:
    files = [tmp_path / f"{number}.gz" for number in range(7)]
    for number, file in enumerate(files):
        with gzip.open(file, "wt") as lines:
            lines.writelines(f"{number} {row} 1 2 3 4\n" for row in range(5))
    seen: list[float] = []

    def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> Any:
        seen.extend(rows[:, 0].tolist())
        return model(rows).square().mean()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        names = {"gzip": gzip, "itertools": itertools, "torch": torch, "files": files, "loss_of": loss_of}
        exec(recipe(heading), {**names, "session": session, "model": model, "optimizer": optimizer})

    with running_job(tmp_path) as job:
        job.start(0, script)
        job.join()
        assert_each_record_once(job.commits(), records=records, epochs=3)
    assert sorted(seen) == sorted([float(number) for number in range(7)] * 15)


def test_an_average_of_the_epochs(tmp_path: Path) -> None:
    """One worker averages all epochs, also those of which another one was the chief."""
    averages: list[Any] = []
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randn(64, 1))

    def script(session: Session) -> None:
        model = make_mlp((2, 1))
        names: dict[str, Any] = {
            "torch": torch,
            "session": session,
            "dataset": dataset,
            "model": model,
            "optimizer": session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model),
            "loss_of": mse,
            "directory": tmp_path,
        }
        exec(recipe("An average of the epochs"), names)
        averages.append(names.get("average"))

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
    (average,) = (each for each in averages if each is not None)
    epochs = [torch.load(tmp_path / f"epoch-{epoch}.pt")["0.weight"] for epoch in range(3)]
    torch.testing.assert_close(average.module[0].weight.detach(), torch.stack(epochs).mean(0))


SCORES = [0.5, 0.9, 0.6, 0.7, 0.65, 0.8]
"""Of the epochs of a job that is continued after four of them."""


@pytest.mark.parametrize(
    "consistency", [{}, {"mode": "async"}, {"mode": "local", "steps": 2}], ids=["sync", "async", "local"]
)
def test_the_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consistency: dict[str, Any]
) -> None:
    """The first chief dies after the best epoch, and the job is continued later."""
    monkeypatch.chdir(tmp_path)

    class Died(BaseException):
        pass

    died: list[int] = []

    def script(session: Session, epochs: int) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        loader = session.loader(Numbers(16), 4, epochs=epochs)

        def validate(_: torch.nn.Module) -> float:
            if not died and session.state.get("best_epoch") == 1:
                died.append(session.worker)
                raise Died
            return SCORES[int(names["epoch"])]

        names: dict[str, Any] = {"math": math, "os": os, "torch": torch, "loss_of": mse}
        names |= {"session": session, "model": model, "optimizer": optimizer, "loader": loader}
        names["validate"] = validate
        try:
            exec(recipe("The best checkpoint"), names)
        except Died:
            session.close()

    settings: dict[str, Any] = {"consistency": consistency, "checkpoints": tmp_path / "checkpoints"}
    with running_job(tmp_path, **settings) as job:
        job.run(lambda session: script(session, 4), workers=2)
    with running_job(tmp_path, resume="require", **settings) as job:
        job.run(lambda session: script(session, 6), workers=2)
    best = torch.load("best.pt")
    assert (best["epoch"], best["score"]) == (1, 0.9)
    assert died


@pytest.mark.parametrize(
    ("losses", "epochs"), [([0.9, 0.5, 0.7, 0.8, 0.6, 0.1], 5), ([math.nan] * 6, 3)], ids=["finite", "NaN"]
)
def test_the_recipe_of_early_stopping_waits_as_many_epochs_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], epochs: int
) -> None:
    monkeypatch.chdir(tmp_path)
    validated = list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        loader = session.loader(Numbers(16), 4, epochs=6)

        def validate(_: torch.nn.Module) -> float:
            validated.append(names["epoch"])
            return losses[int(names["epoch"])]

        names: dict[str, Any] = {"math": math, "torch": torch, "loss_of": mse, "validate": validate}
        names |= {"session": session, "model": model, "optimizer": optimizer, "loader": loader}
        exec(recipe("Early stopping"), names)

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
        assert job.status().progress.stopped == "the validation loss has not improved for 3 epochs"
    assert validated == [*range(epochs)]
    assert Path("model.pt").exists()


def test_episodes_in_place_of_a_data_set(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        names = {"session": session, "model": model, "optimizer": optimizer}
        names |= {"play_episode": lambda model: model(torch.randn(1, 6)), "loss_of": torch.sum}
        exec(recipe("Reinforcement learning, and data made on the fly"), names)

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=40, epochs=1)


class Bar:
    """Stands for tqdm's, which the tests do not install."""

    def __init__(self, *, total: int, unit: str, disable: bool) -> None:
        self.total, self.n, self.hidden = total, 0, disable

    def update(self, more: int) -> None:
        self.n += more


@pytest.mark.parametrize("consistency", [{}, {"globalBatchSize": 24}], ids=["batches", "globalBatchSize"])
def test_a_progress_bar_counts_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consistency: dict[str, Any]
) -> None:
    module = ModuleType("tqdm")
    vars(module)["tqdm"] = Bar
    monkeypatch.setitem(sys.modules, "tqdm", module)
    bars: list[Bar] = []

    def script(session: Session) -> None:
        model, dataset = make_mlp(), Numbers(24)
        names: dict[str, Any] = {"session": session, "model": model, "dataset": dataset, "loss_of": mse}
        names["optimizer"] = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        names["loader"] = session.loader(dataset, batch_size=16, epochs=10)
        exec(recipe("A progress bar"), names)
        bars.append(names["bar"])

    with running_job(tmp_path, consistency=consistency) as job:
        job.run(script, workers=1)
    assert [(bar.n, bar.total, bar.hidden) for bar in bars] == [(240, 240, False)]


class Writer:
    """Stands for TensorBoard's, which the tests do not install."""

    def __init__(self, directory: str) -> None:
        self.directory, self.steps = directory, list[int]()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert name == "loss"
        assert math.isfinite(value)
        self.steps.append(step)


def test_only_worker_0_writes_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    writers: dict[int, Writer | None] = {}

    def script(session: Session) -> None:
        model = make_mlp()
        names: dict[str, Any] = {"session": session, "model": model, "loss_of": mse}
        names["optimizer"] = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        names["loader"] = session.loader(Numbers(160), batch_size=16)
        exec(recipe("TensorBoard"), names)
        writers[session.worker] = names["writer"]

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
    assert writers.pop(1) is None
    writer = writers.pop(0)
    assert writer is not None
    assert writer.steps == sorted(set(writer.steps))


def test_a_fixed_number_of_steps(tmp_path: Path) -> None:
    versions: list[int] = []

    def script(session: Session) -> None:
        model = make_mlp()
        names: dict[str, Any] = {"session": session, "model": model, "loss_of": mse, "dataset": Numbers(64)}
        names["optimizer"] = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        exec(recipe("A fixed number of steps"), names)
        versions.append(session.version)

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
        assert job.status().progress.stopped == "20 steps are done"
    assert set(versions) <= {20, 21}, "a step that another worker has begun is finished"


def test_a_hidden_state_goes_from_piece_to_piece(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = torch.nn.GRU(2, 4, batch_first=True), torch.nn.Linear(4, 1)
            self.begun: list[bool] = []

        def forward(self, x: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self.begun.append(hidden is None)
            outputs, hidden = self.gru(x, hidden)
            return self.head(outputs), hidden

    dataset = torch.utils.data.TensorDataset(torch.randn(32, 60, 2), torch.randn(32, 60, 1))
    models: list[Net] = []

    def script(session: Session) -> None:
        models.append(Net())
        names: dict[str, Any] = {"torch": torch, "session": session, "model": models[-1], "dataset": dataset}
        exec(recipe("Hidden state between batches"), names)

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=32, epochs=2)
    assert sorted(each for model in models for each in model.begun) == [False] * 16 + [True] * 8


def test_fine_tuning_begins_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = make_mlp()

    def earlier(session: Session) -> None:
        optimizer = session.optimizer(torch.optim.Adam(trained.parameters(), lr=0.01), trained)
        for x, y in session.loader(Numbers(16), batch_size=4):
            optimizer.zero_grad()
            mse(trained, x, y).backward()
            optimizer.step()

    def script(session: Session) -> None:
        model = make_mlp(seed=3)
        names: dict[str, Any] = {"torch": torch, "elastic_ps": elastic_ps, "session": session, "model": model}
        exec(recipe("Fine-tuning"), names)
        (group,) = names["optimizer"].param_groups
        assert group["lr"] == 1e-4
        for ours, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        state = names["optimizer"].state_dict()["state"]
        assert {int(each["step"]) for each in state.values()} == {4}
        session.stop("that was all")

    with running_job(tmp_path / "a", checkpoints=tmp_path / "checkpoints") as job:
        job.run(earlier, workers=1)
    with running_job(tmp_path / "b") as job:
        job.run(script, workers=1)


def test_an_exponential_moving_average(tmp_path: Path) -> None:
    """It is the mean of plain torch, and the same in both workers."""
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
    averages: list[list[torch.Tensor]] = []
    values: dict[int, list[torch.Tensor]] = {}  # of a version

    def script(session: Session) -> None:
        def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
            values[session.version] = [value.detach().clone() for value in model.parameters()]
            return mse(model, x, y)

        names: dict[str, Any] = {
            "torch": torch,
            "copy": copy,
            "session": session,
            "dataset": dataset,
            "loss_of": loss_of,
        }
        names["model"] = model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), make_mlp((2, 1)))
        exec(recipe("An exponential moving average"), names)
        averages.append([value.detach() for value in names["both"]["average"].parameters()])
        assert all(map(torch.equal, names["both"]["average"].buffers(), model.buffers()))

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
    expected = values[0]
    for version in sorted(values):
        expected = [mean.lerp(value, 0.1) for mean, value in zip(expected, values[version], strict=True)]
    for average in averages:
        torch.testing.assert_close(average, expected)


def elastic_ps_run(directory: Path, *command: str) -> str:
    environment = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        (sys.executable, *command),
        cwd=directory,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cells_of_a_notebook_run_again(tmp_path: Path) -> None:
    before = """
import torch, elastic_ps
model = torch.nn.Linear(2, 1)
dataset = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
def loss_of(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)
losses = []
"""
    after = "losses.append(float(loss_of(model, *dataset.tensors)))\n"
    cells = "".join(recipes("A notebook")) + after
    end = "assert losses[1] <= losses[0] < 1e-3\nprint('done')\n"
    (tmp_path / "cells.py").write_text(before + 2 * cells + end)
    assert elastic_ps_run(tmp_path, "cells.py") == "done\n"


@pytest.mark.nightly
def test_a_script_in_a_config_map(tmp_path: Path) -> None:
    """The job is valid, a worker's pod has the script where it looks for it, and the script trains."""
    text = recipe("A script without an image of its own", "yaml")
    config_map, job = yaml.safe_load_all(text)
    (script,) = config_map["data"].items()
    job["metadata"].update(namespace="default", uid="u")
    pod = builders.pod(job, TrainingJobSpec.model_validate(job["spec"]), "worker", 0)
    (container,) = pod["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["script"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert container["workingDir"] == mounts["script"]
    assert script[0] == job["spec"]["entrypoint"].partition(":")[0] + ".py"

    (tmp_path / script[0]).write_text(script[1])
    (tmp_path / "job.yaml").write_text(text.partition("---\n")[2])
    elastic_ps_run(tmp_path, "-m", "elastic_ps.cli", "run", "job.yaml", "--report", "out")
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert report["records_applied"] == report["records_expected"] == 768
    assert report["loss"]
