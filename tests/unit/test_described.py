"""What a worker says about its model and optimizer, and what it refuses before it joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ps.errors import InvalidModel
from elastic_ps.worker.model import Described


@pytest.mark.parametrize(
    ("kind", "group", "match"),
    [
        (torch.optim.SGD, {"differentiable": True}, "differentiable=True, but the step is made on the"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 2.0}, "only from its constructor, .* got 0;"),
    ],
)
def test_an_argument_that_the_parameter_server_would_not_honour_is_refused(
    kind: Any, group: dict[str, Any], match: str
) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(InvalidModel, match=match):
        Described(model, kind([{"params": model.parameters(), **group}]))


def test_statistics_over_all_workers_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.raises(InvalidModel, match=r"1 is a SyncBatchNorm.* use BatchNorm.*GroupNorm"):
        Described(model, torch.optim.SGD(model.parameters(), lr=0.1))
