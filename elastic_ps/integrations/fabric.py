"""Lightning Fabric: a script that is written for a `Fabric` of `lightning.fabric` trains as part of a job.

```python
fabric = Fabric(strategy=ElasticStrategy(epochs=3))
```

The script otherwise stays as it is. Each worker is the only process for Fabric; the job divides the records
and adds up the gradients. See docs/guides/lightning.md.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import SingleDeviceStrategy

from elastic_ps.integrations.fabric_strategy import FabricInJob


class ElasticStrategy(FabricInJob, SingleDeviceStrategy):  # type: ignore[misc]
    __doc__ = FabricInJob.__doc__

    environment_kind: type[Any] = LightningEnvironment
