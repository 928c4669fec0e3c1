"""Evaluate the checkpoints of the digits' training while it goes on: an ordinary loop over checkpoints.

It runs beside the workers when a job names it (examples/digits/evaluated.yaml). Later, on what the run left:
elastic-ps evaluate DIR, or by itself: python examples/digits/evaluate.py DIR
"""

import sys

import elastic_ps
from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet
from elastic_ps.contrib.zoo.scores import evaluate


def main(directory: str | None = None) -> None:
    """Report the loss and the precision of each checkpoint on the held-out fifth of the digits."""
    _, test = digits()
    model = LeNet(size=8)
    for checkpoint in elastic_ps.checkpoints(directory):
        checkpoint.load(model)
        scores = evaluate(model, test, batch_size=360)
        print(f"version {checkpoint.version}: {scores}", flush=True)
        checkpoint.report(loss=scores.loss, **{"prec@1": scores.prec1, "prec@5": scores.prec5})


if __name__ == "__main__":
    main(*sys.argv[1:])
