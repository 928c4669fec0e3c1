"""Classify handwritten digits with Lightning: the module and the Trainer are as ever, but for the strategy.

elastic-ps run examples/lightning/job.yaml, or alone in one process: python examples/lightning/train.py
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from elastic_ps.contrib.datasets import digits
from elastic_ps.contrib.models import LeNet
from elastic_ps.integrations.lightning import ElasticStrategy


class Digits(pl.LightningModule):  # type: ignore[misc]
    """LeNet on images of 8 x 8 pixels."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr, self.model = lr, LeNet(size=8)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        self.log("test_accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def on_validation_end(self) -> None:
        accuracy = self.trainer.callback_metrics["test_accuracy"]
        self.print(f"epoch {self.trainer.current_epoch}: accuracy {accuracy:.3f}", flush=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        total = self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: 1 - step / total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(epochs: int = 8, batch_size: int = 16, lr: float = 0.003, output: str = "runs/lightning") -> None:
    """Train on the digits, and evaluate on the held-out fifth of them after each epoch."""
    training, test = digits()
    torch.manual_seed(1)
    trainer = pl.Trainer(
        strategy=ElasticStrategy(),  # alone: without this line
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(output, monitor="test_accuracy", mode="max")],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Digits(lr), DataLoader(training, batch_size, shuffle=True), DataLoader(test, batch_size=256))


if __name__ == "__main__":
    main()
