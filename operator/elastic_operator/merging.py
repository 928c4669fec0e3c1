"""Merges a user's pod template over the default one, as Kubernetes' strategic merge patch does. Pure.

Mappings are merged key by key. A list replaces the other one, unless the API names key fields for its items:
mounts are merged by path, so two mounts of one volume both stay. `null` removes. The API server drops nulls
before the operator sees them, so an empty mapping, `{}`, also removes a probe. A volume has one source, a
probe one handler and a variable one value: that of the template replaces the other one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "schedulingGates": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""The key fields of a list's items, by the name of the list's field (API of core/v1)."""

_DEFAULTS = {"protocol": "TCP"}
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_ONE_OF = {
    **dict.fromkeys(_PROBES, ("exec", "httpGet", "tcpSocket", "grpc")),
    "env": ("value", "valueFrom"),
}


def merge(base: Any, over: Any, field: str = "") -> Any:
    """Merge `over` over `base`, as the module's docstring says; neither is changed.

    Args:
        field: the name of the field that has both as values or items.
    """
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        kept = _without_alternatives(base, over, field)
        merged = {key: copy.deepcopy(value) for key, value in kept.items() if over.get(key, key) is not None}
        for key, value in over.items():
            if key in _PROBES and value == {}:
                merged.pop(key, None)
            elif value is not None:
                merged[key] = merge(kept.get(key), value, key)
        return merged
    if isinstance(base, list) and isinstance(over, list):
        return _merge_lists(base, over, field)
    if isinstance(over, Mapping):
        return {key: merge(None, value, key) for key, value in over.items() if value is not None}
    return copy.deepcopy(over)


def _without_alternatives(base: Mapping[str, Any], over: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """`base` without its source, handler or value, if `over` has another one."""
    exclusive = [key for key in base if key != "name"] if field == "volumes" else _ONE_OF.get(field, ())
    sources = [key for key in over if key != "name"] if field == "volumes" else exclusive
    if not any(over.get(key) is not None for key in sources):
        return base
    return {key: value for key, value in base.items() if key not in exclusive or key in over}


def _merge_lists(base: list[Any], over: list[Any], field: str) -> list[Any]:
    keys = _KEYS.get(field)
    items = [*base, *over]
    if keys is None or not all(isinstance(item, Mapping) and keys[0] in item for item in items):
        return [merge(None, item, field) for item in over]

    def identity(item: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(item.get(key, _DEFAULTS.get(key))) for key in keys)

    merged = {identity(item): copy.deepcopy(item) for item in base}
    for item in over:
        merged[identity(item)] = merge(merged.get(identity(item)), item, field)
    return list(merged.values())
