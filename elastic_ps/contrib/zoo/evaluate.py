"""Evaluates checkpoints of the zoo's networks: the evaluator of `elastic-ps train --evaluate`.

It uses what every evaluator's script may use, and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import elastic_ps
from elastic_ps.contrib.zoo.catalog import check_fit, find_dataset, find_network
from elastic_ps.contrib.zoo.scores import evaluate
from elastic_ps.contrib.zoo.train import build, choose_device


def main(
    *,
    network: str = "LeNet",
    dataset: str = "MNIST",
    data_dir: str | None = None,
    test_batch_size: int = 500,
    enable_gpu: bool = False,
) -> None:
    """Report loss, prec@1 and prec@5 of each checkpoint. The arguments are those of `zoo.train`."""
    net, data = find_network(network), find_dataset(dataset)
    check_fit(net, data)
    device = choose_device(enable_gpu, 0)
    training, test = data.read(None if data_dir is None else Path(data_dir))
    model = build(net, data, training).to(device)
    for checkpoint in elastic_ps.checkpoints():
        checkpoint.load(model)
        scores = evaluate(model, test, batch_size=test_batch_size, device=device)
        print(f"version {checkpoint.version}: {scores}", flush=True)
        checkpoint.report(loss=scores.loss, **{"prec@1": scores.prec1, "prec@5": scores.prec5})
