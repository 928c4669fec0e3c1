"""Serves the `Trainer` of the package `pytorch_lightning`: an unchanged LightningModule trains in a job.

```python
trainer = Trainer(strategy=ElasticStrategy(), max_epochs=3)
```

With this module imported, `strategy="elastic_ps"` is the same. See docs/guides/lightning.md.
"""

from __future__ import annotations

from typing import Any

from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import SingleDeviceStrategy, StrategyRegistry

from elastic_ps.integrations.lightning_loop import Hooks
from elastic_ps.integrations.lightning_strategy import NAME, TrainsInJob


class _Hooks(Hooks, Callback):  # type: ignore[misc]
    """The Trainer's first callback."""


class ElasticStrategy(TrainsInJob, SingleDeviceStrategy):  # type: ignore[misc]
    __doc__ = TrainsInJob.__doc__

    strategy_name = NAME
    callback_kind: type[Any] = _Hooks
    environment_kind: type[Any] = LightningEnvironment


if NAME not in StrategyRegistry:
    ElasticStrategy.register_strategies(StrategyRegistry)
