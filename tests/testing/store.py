"""Checkpoints of a small model, and what is expected of a broken one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from elastic_ps.checkpoint.manifest import Manifest
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec.state import Stored
from elastic_ps.core.partition import Rule, TensorSpec
from elastic_ps.errors import CheckpointCorrupt

SHARDS = 2
TERM = 1
TENSORS = [asdict(TensorSpec(f"w{number}", (4,), "float32", Rule.GRADIENT, 0)) for number in range(SHARDS)]


def manifest(version: int, *, term: int = TERM) -> Manifest:
    return Manifest(
        job="job",
        version=version,
        term=term,
        tensors=list(TENSORS),
        optimizer="SGD",
        state={"ledger": {"applied": 10 * version}, "loss": [[1, 0.1 + version], [2, float("nan")]]},
    )


def content(version: int, shard: int) -> list[Stored]:
    return [
        Stored(shard, 0, "value", torch.arange(4.0) + version),
        Stored(shard, 0, "step", torch.tensor([float(version)]), scalar=True),
    ]


def write(store: Store, version: int, *, keep: int = 3) -> Path:
    found = manifest(version)
    for shard in range(SHARDS):
        found.files.append(store.write_shard(TERM, version, shard, SHARDS, iter(content(version, shard))))
    return store.commit(found, keep=keep)


def same(store: Store, version: int) -> bool:
    """Whether the newest whole checkpoint holds the content of `version`."""
    with store.open(store.newest()[0].version) as reader:
        for shard in range(SHARDS):
            value, step = content(version, shard)
            if not torch.equal(reader.value(shard, 0, 4), value.value):
                return False
            if reader.state(shard, 0, 4) != {"step": step.value[0]}:
                return False
    return True


def names(store: Store) -> list[str]:
    """Of all directories."""
    return sorted(path.name for path in store.directory.iterdir() if path.is_dir())


def files(store: Store, version: int) -> list[Path]:
    return sorted(store.path(version).iterdir())


def broken_is_refused_and_the_one_before_is_used(store: Store, what: str) -> None:
    with pytest.raises(CheckpointCorrupt):
        store.manifest(2)
    found, problems = store.newest()
    assert found.version == 1, what
    assert same(store, 1)
    assert len(problems) == 1
    assert str(store.path(2)) in problems[0]
    assert [name.split("-")[0] for name in names(store)] == ["corrupt", "version"], "kept aside"
    assert store.newest() == (found, []), "and reported once"
