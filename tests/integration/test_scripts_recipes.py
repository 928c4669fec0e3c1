"""What docs/guides/scripts.md shows, as it stands there."""

from __future__ import annotations

import gzip
import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, mse

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "scripts.md"


def recipe(heading: str) -> str:
    """The code under a heading that says that it runs here."""
    part = DOCS.read_text().split(f"### {heading}\n", 1)[1]
    found = re.search(r"<!-- runs in [^\n]*test_scripts_recipes.py -->\n```python\n(.*?)```", part, re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["in turn", "in one step", "with one optimizer"])
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
        exec(recipe("Averages of the model"), names)
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


def test_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses, validated = [0.9, 0.5, 0.7, 0.8, 0.6, 0.1], list[int]()

    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        loader = session.loader(Numbers(16), 4, epochs=6)

        def validate(_: torch.nn.Module) -> float:
            validated.append(names["epoch"])
            return losses[int(names["epoch"])]

        names: dict[str, Any] = {"math": math, "torch": torch, "loss_of": mse, "validate": validate}
        names |= {"session": session, "model": model, "optimizer": optimizer, "loader": loader}
        exec(recipe("Patience"), names)

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
        assert job.status().progress.stopped == "the validation loss has not improved for 3 epochs"
    assert validated == [0, 1, 2, 3, 4]
    assert Path("model.pt").exists()


def test_episodes_in_place_of_a_data_set(tmp_path: Path) -> None:
    def script(session: Session) -> None:
        model = make_mlp()
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        names = {"session": session, "model": model, "optimizer": optimizer}
        names |= {"play_episode": lambda model: model(torch.randn(1, 6)), "loss_of": torch.sum}
        exec(recipe("No data set"), names)

    with running_job(tmp_path) as job:
        job.run(script, workers=2)
        assert_each_record_once(job.commits(), records=40, epochs=1)
