"""Classify handwritten digits with Lightning's Fabric: the script's own loop, with a strategy.

elastic-ps run examples/fabric/job.yaml, or alone in one process: python examples/fabric/train.py
"""

from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet
from elastic_ps.integrations.fabric import ElasticStrategy


def main(epochs: int = 8, batch_size: int = 16, lr: float = 0.003, output: str = "runs/fabric") -> None:
    """Train on the digits, and evaluate on the held-out fifth of them after each epoch."""
    training, test = digits()
    torch.manual_seed(1)
    fabric = Fabric(strategy=ElasticStrategy(epochs=epochs, max_grad_norm=1.0))
    network = LeNet(size=8)
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=lr))
    batches = fabric.setup_dataloaders(DataLoader(training, batch_size, shuffle=True))
    for epoch in fabric.strategy.epochs():
        model.train()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        if fabric.is_global_zero:
            model.eval()
            images, labels = next(iter(DataLoader(test, batch_size=len(test))))
            accuracy = (model(images).argmax(1) == labels).float().mean()
            fabric.strategy.session.report(test_accuracy=accuracy)
            fabric.print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
    fabric.save(Path(output, "model.ckpt"), {"model": model})


if __name__ == "__main__":
    main()
