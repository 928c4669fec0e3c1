"""An evaluator's script for jobs of real processes that train `steady`."""

from __future__ import annotations

import elastic_ps
from tests.testing.harness import make_mlp


def main(widths: tuple[int, ...] = (6, 64, 64, 1)) -> None:
    """Report the sum of the first layer's weights."""
    model = make_mlp(widths)
    for checkpoint in elastic_ps.checkpoints():
        checkpoint.load(model)
        checkpoint.report(total=model.state_dict()["0.weight"].sum())
