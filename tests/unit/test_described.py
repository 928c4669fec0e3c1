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
