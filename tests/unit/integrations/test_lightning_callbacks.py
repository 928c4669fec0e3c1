"""The states of Lightning's callbacks are values of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback

from elastic_ps.contract import env
from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import Job, running_job
from tests.testing.lightning import IN_ORDER, MARKS, Net, fit

pytestmark = MARKS

LAST = 2
"""The epoch before which a worker ends."""


class Ending(Net):
    """A worker that ends in the middle of the training, or only if it is the chief."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == LAST and self.trainer.strategy.was_chief:
            raise SystemExit

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)  # the loss falls with each epoch


class Going(Ending):
    def on_train_epoch_start(self) -> None:
        """It goes on."""


def run_twice(job: Job, callbacks: Any, **options: Any) -> list[Net]:
    """A worker ends, and another process takes its place."""
    trained = [Ending(), Going()]
    for module in trained:

        def script(session: Session, module: Net = module) -> None:
            fit(ElasticStrategy(session=session), module, callbacks=callbacks(session), **options)

        job.start(0, script)
        job.join()
    return trained


@pytest.mark.parametrize("interval", [1.0, 7])
def test_patience_is_that_of_the_job(tmp_path: Path, interval: float) -> None:
    def callbacks(_: Any = None) -> list[Any]:
        return [EarlyStopping("val/loss", mode="max", patience=7)]

    options: dict[str, Any] = {"max_epochs": 20, "val_check_interval": interval}
    alone = fit("auto", Going(), callbacks=callbacks(), **options)
    with running_job(tmp_path, data=IN_ORDER) as job:
        first, second = run_twice(job, callbacks, **options)
    assert first.evaluations
    assert first.evaluations + second.evaluations == pytest.approx(alone.evaluations, rel=1e-9)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_best_file_is_that_of_the_job(tmp_path: Path) -> None:
    saving = list[ModelCheckpoint]()

    def callbacks(_: Any) -> list[Any]:
        saving.append(ModelCheckpoint(tmp_path / "saved", "{epoch}", monitor="val/loss", mode="max"))
        return saving[-1:]

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        first, second = run_twice(job, callbacks, max_epochs=4)
    assert (len(first.evaluations), len(second.evaluations)) == (LAST, 4 - LAST)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["epoch=0.ckpt"]
    assert Path(saving[1].best_model_path).exists()
    assert saving[1].best_model_score == pytest.approx(first.evaluations[0])


def test_a_new_chief_knows_the_best_file_of_the_one_before(tmp_path: Path) -> None:
    best = dict[int, str]()

    def script(session: Session) -> None:
        name = f"{{epoch}}-of-{session.worker}"
        saving = ModelCheckpoint(tmp_path / "saved", name, monitor="val/loss", mode="max", save_last="link")
        fit(ElasticStrategy(session=session), Ending(), callbacks=[saving], max_epochs=4)
        best[session.worker] = saving.best_model_path

    with running_job(tmp_path / "job", data=IN_ORDER, worker={"replicas": 2}) as job:
        job.run(script, workers=2)
    [(worker, path)] = best.items()
    assert Path(path).name == f"epoch=0-of-{1 - worker}.ckpt"
    link = tmp_path / "saved" / "last.ckpt"
    assert {*(tmp_path / "saved").iterdir()} == {Path(path), link}
    assert link.resolve() == Path(path).resolve()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("mode", ["min", "max"])
def test_files_get_the_names_of_lightning_alone_where_worker_1_saves(tmp_path: Path, mode: str) -> None:
    """There is a file of an earlier run, and each epoch's file has the same name."""

    def saved(strategy: Any, where: Path) -> dict[str, str]:
        where.mkdir()
        (where / "best.ckpt").write_text("earlier")
        saving = ModelCheckpoint(where, "best", monitor="val/loss", mode=mode, save_top_k=2, save_last="link")
        fit(strategy, Going(), callbacks=[saving], max_epochs=4)
        assert (where / "best.ckpt").read_text() == "earlier"
        return {path.name: path.resolve().name for path in where.iterdir()}

    alone, ours = saved("auto", tmp_path / "alone"), list[dict[str, str]]()
    with running_job(tmp_path / "job", data=IN_ORDER, worker={"replicas": 2}) as job:
        job.start(1, lambda session: ours.append(saved(ElasticStrategy(session=session), tmp_path / "ours")))
        job.join()
    assert ours == [alone]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_list_of_files_may_be_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Saving(ModelCheckpoint):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "of_its_own": torch.Generator(), "last_model_path": "x" * 70000}

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        job.start(
            0, lambda session: fit(ElasticStrategy(session=session), Net(), callbacks=[Saving(tmp_path)])
        )
        job.join()
        assert job.coordinator.job.state.script_state == "{}"
    assert caplog.text.count("workers that join later do not get the state of lightning") == 1


def test_a_worker_that_takes_anothers_place_writes_the_config_of_the_cli_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{env.PREFIX}ROLE", "worker")

    class Parser:
        """What `jsonargparse` does: it is not installed."""

        def save(self, config: str, path: str, *, overwrite: bool, **_: Any) -> None:
            assert overwrite or not Path(path).exists()
            Path(path).write_text(config)

    written = list[str]()

    def script(session: Session) -> None:
        saving = SaveConfigCallback(Parser(), str(len(written)))
        module = Going() if written else Ending()
        try:
            fit(ElasticStrategy(session=session), module, callbacks=[saving], default_root_dir=tmp_path)
        finally:
            written.append((tmp_path / "config.yaml").read_text())

    with running_job(tmp_path / "job", data=IN_ORDER) as job:
        for _ in range(2):
            job.start(0, script)
            job.join()
    assert written == ["0", "1"]


def test_without_such_callbacks_nothing_is_written(tmp_path: Path) -> None:
    with running_job(tmp_path, data=IN_ORDER) as job:
        job.start(0, lambda session: fit(ElasticStrategy(session=session), Net()))
        job.join()
        assert job.coordinator.job.state.script_state == "{}"
