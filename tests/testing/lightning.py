"""What tests of Lightning's Trainer share: a module, and trainers of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from elastic_ps.integrations import pytorch_lightning as other
from elastic_ps.integrations.lightning import ElasticStrategy
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp

EPOCHS, RECORDS, BATCH = 3, 50, 4
IN_ORDER = {"shuffle": False}

MARKS = [
    pytest.mark.usefixtures("workers_may_be_threads"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # on machines with more cores
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # Lightning, of torch
]


class Regression:
    """What modules of both packages are. `interval` and `frequency` are of its schedule."""

    trainer: Any
    log: Any
    parameters: Any

    def __init__(self, interval: str = "step", frequency: int = 1) -> None:
        super().__init__()
        self.mlp = make_mlp().double()
        self.losses, self.rates, self.evaluations = list[float](), list[float](), list[float]()
        self.schedule = {"interval": interval, "frequency": frequency}

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.mlp(x.double()), y.double())

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def on_validation_end(self) -> None:
        self.evaluations.append(self.trainer.callback_metrics["val/loss"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: 1 - step / total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.schedule}}


class Net(Regression, pl.LightningModule):  # type: ignore[misc]
    pass


class InTurn(Net):
    """Two optimizers that step in turn. The first one clips where there is a `limit`."""

    limit: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        number = self.number_of(batch_idx) % 2
        optimizer = self.optimizers()[number]
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if self.limit is not None and number == 0:
            self.clip_gradients(optimizer, gradient_clip_val=self.limit, gradient_clip_algorithm="norm")
        optimizer.step()
        self.losses.append(loss.item())
        return loss

    def number_of(self, batch_idx: int) -> int:
        return batch_idx

    def configure_optimizers(self) -> Any:
        first, *rest = self.mlp
        return torch.optim.Adam(first.parameters(), 0.01), torch.optim.SGD(
            torch.nn.ModuleList(rest).parameters(), 0.1, momentum=0.9
        )


class OtherNet(Regression, pytorch_lightning.LightningModule):  # type: ignore[misc]
    pass


class Package(NamedTuple):
    """`lightning` has a copy of `pytorch_lightning`, with classes of its own."""

    library: Any
    strategy: Any
    net: Any


PACKAGES = [Package(pl, ElasticStrategy, Net), Package(pytorch_lightning, other.ElasticStrategy, OtherNet)]


def trainer_of(strategy: Any, *, package: Any = pl, **options: Any) -> Any:
    usual = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "enable_checkpointing": any(
            isinstance(each, package.callbacks.ModelCheckpoint) for each in options.get("callbacks", [])
        ),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "log_every_n_steps": 1,
    }
    return package.Trainer(strategy=strategy, **(usual | options))


def fit(strategy: Any, module: Any, *, records: int = RECORDS, batch: int = BATCH, **options: Any) -> Any:
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, DataLoader(Numbers(records), batch), DataLoader(Numbers(20), 7))
    return module


def in_job(
    job: Any,
    make: Callable[[], Any] = Net,
    *,
    workers: int = 1,
    options: Any = None,
    kind: Any = ElasticStrategy,
    **of_strategy: Any,
) -> dict[int, Any]:
    trained = dict[int, Any]()

    def script(session: Session) -> None:
        strategy = kind(session=session, **of_strategy)
        trained[session.worker] = fit(strategy, make(), **(options or {}))

    job.run(script, workers=workers)
    return trained


def assert_same_model(ours: Any, theirs: Any) -> None:
    """Up to round-off."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
