"""The common parts of a job's manifests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from elastic_ps.api.job import API_VERSION, KIND

Manifest: TypeAlias = dict[str, Any]


def owner(job: Mapping[str, Any]) -> Manifest:
    """The owner reference by which the garbage collector finds the objects of the job."""
    metadata = job["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }


def metadata(job: Mapping[str, Any], name: str, labels: dict[str, str]) -> Manifest:
    """The metadata of an object that belongs to the job."""
    return {
        "name": name,
        "namespace": job["metadata"]["namespace"],
        "labels": labels,
        "ownerReferences": [owner(job)],
    }
