"""Trains a network of the zoo on one of its data sets: the entrypoint of `elastic-ps train`.

It uses what every training script may use, and nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import elastic_ps
from elastic_ps.contrib.zoo.catalog import DataSet, Network, check_fit, find_dataset, find_network
from elastic_ps.contrib.zoo.scores import evaluate


def main(
    *,
    network: str = "LeNet",
    dataset: str = "MNIST",
    data_dir: str | None = None,
    batch_size: int = 128,
    test_batch_size: int = 500,
    epochs: int = 100,
    max_steps: int = 10_000,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 0.0,
    seed: int = 1,
    log_interval: int = 10,
    enable_gpu: bool = False,
) -> None:
    """Train with SGD, and report the scores on the test set at the end.

    Args:
        network, dataset: names in `elastic_ps.contrib.zoo.catalog`.
        data_dir: where the data set's files are; None for its own place.
        batch_size: records in a batch of one worker.
        test_batch_size: records in a batch of the test set.
        epochs: how often each record is trained, by all workers together.
        max_steps: the version of the model at which training ends, if the epochs have not ended before.
        lr, momentum, weight_decay: of SGD.
        seed: of the model's first values and of the images' augmentation.
        log_interval: the loss is printed whenever this many steps have been made.
        enable_gpu: train on a GPU. Several workers on one machine share its GPUs.

    Raises:
        UserError: a name, a file or a combination of arguments cannot be used; see the message.
    """
    net, data = find_network(network), find_dataset(dataset)
    check_fit(net, data)
    session = elastic_ps.connect()
    device = choose_device(enable_gpu, session.worker)
    training, test = data.read(None if data_dir is None else Path(data_dir))
    torch.manual_seed(seed)
    model = build(net, data, training).to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    optimizer = session.optimizer(sgd, model)
    session.seed(seed)
    begun, printed = session.version, 0
    for inputs, targets in session.loader(training, batch_size=batch_size, epochs=epochs):
        if session.version >= max_steps:
            session.stop(f"{max_steps} steps are done, as --max-steps asks")
            break
        optimizer.zero_grad()
        logits = model(inputs.to(device))
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.to(device).flatten())
        loss.backward()
        session.report(loss=loss)
        optimizer.step()
        if (times := session.version // log_interval) > printed:
            printed = times
            print(f"worker {session.worker}, step {session.version}: loss {loss.item():.4f}", flush=True)

    if session.is_chief:
        if session.stopped and begun == session.version < max_steps:
            raise elastic_ps.UsageError(
                f"the earlier run was ended at step {session.version}, so this one made no step. "
                "Raise --epochs, too"
            )
        scores = evaluate(model, test, batch_size=test_batch_size, device=device)
        session.report(**{"test_loss": scores.loss, "prec@1": scores.prec1, "prec@5": scores.prec5})
        print(scores, flush=True)


def build(network: Network, dataset: DataSet, records: Any) -> torch.nn.Module:
    """The network for a data set's records. Raises InvalidModel if it cannot take them."""
    sample = records[0][0]
    if network.kind == "text":
        model = network.build(vocabulary=dataset.classes, context=len(sample))
    else:
        channels, size, _ = sample.shape
        model = network.build(size=size, channels=channels, classes=dataset.classes)
    assert isinstance(model, torch.nn.Module)
    return model


def choose_device(enable_gpu: bool, worker: int) -> torch.device:
    """The device of this process of the worker; a GPU becomes the current one of this thread.

    Raises:
        UsageError: no GPU is available.
    """
    if not enable_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise elastic_ps.UsageError(
            "--enable-gpu: torch finds no CUDA device here. Leave the flag out to train on the CPU, or "
            "install a torch with CUDA on a machine with an NVIDIA GPU"
        )
    process = worker * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", process % torch.cuda.device_count())
    torch.cuda.set_device(device)  # otherwise torch would also open a context on GPU 0
    return device
