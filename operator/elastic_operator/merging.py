"""Merges a user's pod template over the default one, as Kubernetes' strategic merge patch does. Pure.

Mappings are merged key by key. A list replaces the other one, except those of which the API says by which
fields its items are told apart: two mounts of one volume have two paths, so both stay. `null` removes. As an
API server drops nulls before we see them, a probe is also removed by an empty mapping, `{}`. Of a volume's
sources, a probe's handlers and a variable's values there is only one: the template's takes the other's place.
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
"""By the name of a list's field: the fields by which its items are told apart (API of core/v1)."""

_DEFAULTS = {"protocol": "TCP"}
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_ONE_OF = {
    **dict.fromkeys(_PROBES, ("exec", "httpGet", "tcpSocket", "grpc")),
    "env": ("value", "valueFrom"),
}


def merge(base: Any, over: Any, field: str = "") -> Any:
    """`over` merged over `base`, as the module's docstring says; neither is changed.

    Args:
        field: the name of the field that both are the value of, or an item of.
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
    """`base` without that of which there is only one, if `over` has another."""
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
