"""Classify handwritten digits with a script for Hugging Face's accelerate, in which one line is changed.

elastic-ps run examples/accelerate/job.yaml, or alone in one process: python examples/accelerate/train.py
"""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet
from elastic_ps.integrations.accelerate import ElasticAccelerator


def main(epochs: int = 8, batch_size: int = 16, steps: int = 2, lr: float = 0.003) -> None:
    """Train on the digits, and evaluate on the held-out fifth of them after each epoch."""
    # Alone: accelerator = Accelerator(gradient_accumulation_steps=steps)
    accelerator = ElasticAccelerator(epochs=epochs, max_grad_norm=1.0, gradient_accumulation_steps=steps)
    training, test = digits()
    torch.manual_seed(1)
    model = LeNet(size=8)
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(training, batch_size=batch_size, shuffle=True)
    held_out = DataLoader(test, batch_size=256)
    total = epochs * math.ceil(len(loader) / steps)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / total)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(
        model, optimizer, loader, held_out, schedule
    )

    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = loss_fn(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

        model.eval()
        correct = []
        for images, labels in held_out:
            with torch.no_grad():
                found = model(images).argmax(1)
            correct.append(accelerator.gather_for_metrics(found == labels))
        if accelerator.is_main_process:
            accuracy = torch.cat(correct).float().mean()
            print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
            accelerator.session.report(test_accuracy=accuracy)


if __name__ == "__main__":
    main()
