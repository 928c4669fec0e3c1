"""What Lightning's progress bars say of a worker's share of an epoch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.testing.lightning import MARKS, Net, fit

pytestmark = MARKS


class Leaving(Net):
    """It leaves the most of its first epoch to the other worker."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (0, 2) else None


@pytest.mark.parametrize("leaves", [False, True], ids=["shared", "left by the other"])
@pytest.mark.parametrize("rate", [1, 4])
def test_the_bar_ends_with_the_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], leaves: bool, rate: int
) -> None:
    trained = dict[int, Net]()

    def script(session: Session) -> None:
        module = Leaving() if leaves and session.worker == 1 else Net()
        options: dict[str, Any] = {"enable_progress_bar": True, "callbacks": [TQDMProgressBar(rate)]}
        trained[session.worker] = fit(ElasticStrategy(session=session), module, **options)

    with running_job(tmp_path, worker={"replicas": 2}) as job:
        job.begin_together(2)
        job.run(script, workers=2)
    shown = re.findall(r"Epoch (\d+): +(\d+)%\|[^|]*\| (\d+)/(\d+) ", capsys.readouterr().out)
    last = {epoch: (percent, int(done), int(total)) for epoch, percent, done, total in shown if done != "0"}
    assert all(int(done) <= int(total) for _, _, done, total in shown)
    assert all((percent, done) == ("100", total) for percent, done, total in last.values())
    assert sum(done for _, done, _ in last.values()) == len(trained[0].losses)


def test_a_bar_of_rich_ends_with_the_epoch(tmp_path: Path) -> None:
    ends = list[tuple[float, float | None]]()

    class Bar(RichProgressBar):  # type: ignore[misc]
        def on_train_epoch_end(self, *args: Any) -> None:
            super().on_train_epoch_end(*args)
            ends.append((self.train_progress_bar.completed, self.train_progress_bar.total))

    def script(session: Session) -> None:
        module = Leaving() if session.worker == 1 else Net()
        bar = [Bar()] if session.worker == 0 else []
        fit(ElasticStrategy(session=session), module, enable_progress_bar=not session.worker, callbacks=bar)

    with running_job(tmp_path, worker={"replicas": 2}) as job:
        job.begin_together(2)
        job.run(script, workers=2)
    assert ends
    assert all(completed == total for completed, total in ends)
