"""Classify images on the GPU of each worker, with bfloat16 and pinned memory; without a GPU, on the CPU.

elastic-ps run examples/gpu/job.yaml, or alone in one process: python examples/gpu/train.py
"""

import os

import torch
from torch import nn

import elastic_ps
from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import accuracy


def main(epochs: int = 8, batch_size: int = 32, lr: float = 0.003) -> None:
    """Train on the digits and report the accuracy on the held-out fifth of them."""
    session = elastic_ps.connect()
    gpu, device = torch.cuda.is_available(), torch.device("cpu")
    if gpu:  # of those on this machine, one for each worker, or for each process of a worker
        number = int(os.environ.get("LOCAL_RANK", session.worker))
        device = torch.device("cuda", number % torch.cuda.device_count())
    training, test = digits()
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10)).to(device)
    loss_fn = nn.CrossEntropyLoss()

    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=lr), model)
    for batch in session.loader(training, batch_size=batch_size, epochs=epochs, pin_memory=gpu):
        images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            loss = loss_fn(model(images), labels)
        loss.backward()
        session.report(loss=loss)
        optimizer.step()

    if session.is_chief:
        session.report(test_accuracy=accuracy(model, *(tensor.to(device) for tensor in test.tensors)))


if __name__ == "__main__":
    main()
