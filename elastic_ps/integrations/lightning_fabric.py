"""Serves scripts that import `Fabric` from the package `lightning_fabric`: see `.fabric`."""

from __future__ import annotations

from typing import Any

from lightning_fabric.plugins.environments import LightningEnvironment
from lightning_fabric.strategies import SingleDeviceStrategy

from elastic_ps.integrations.fabric_strategy import FabricInJob


class ElasticStrategy(FabricInJob, SingleDeviceStrategy):  # type: ignore[misc]
    __doc__ = FabricInJob.__doc__

    environment_kind: type[Any] = LightningEnvironment
