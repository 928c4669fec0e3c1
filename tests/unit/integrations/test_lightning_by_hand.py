"""Modules with manual optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.errors import UsageError
from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import running_job
from tests.unit.integrations.test_lightning import (
    Net,
    _workers_may_be_threads,  # noqa: F401
    fit,
    pytestmark,  # noqa: F401
)


class Gan(Net):
    """As Lightning's example has it: both optimizers make a step with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first, *rest = self.mlp
        others = torch.nn.ModuleList(rest).parameters()
        return torch.optim.Adam(first.parameters(), 0.01), torch.optim.SGD(others, 0.1)


def test_a_second_step_with_a_batch_is_refused_in_the_words_of_lightning(tmp_path: Path) -> None:
    said = r"^a second step is made.*Choose the optimizer by self\.trainer\.strategy\.session\.version"

    def script(session: Session) -> None:
        fit(ElasticStrategy(session=session), Gan())

    with running_job(tmp_path) as job, pytest.raises(UsageError, match=said):
        job.run(script, workers=1)
