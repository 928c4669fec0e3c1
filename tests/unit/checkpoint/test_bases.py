"""The file of an earlier checkpoint in later ones, which have only what changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elastic_ps.checkpoint.bases import Bases
from elastic_ps.checkpoint.manifest import Manifest, ShardFile
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec.state import Stored


def write(
    store: Store, bases: Bases, version: int, *, keep: int = 2, commit: bool = True
) -> ShardFile | None:
    """Write a version as a server does; returns the base."""
    base = bases.link(bases.version, 1, version, version)
    tensors = iter([Stored(0, 0, "value", torch.full((2,), float(version)))])
    file = store.write_shard(1, version, 0, 1, tensors, number=version)
    bases.wrote(version, file, base)
    if commit:
        both = [file] if base is None else [file, base]
        tensor: dict[str, Any] = {"name": "a", "shape": [2], "dtype": "float32", "rule": 0, "group": 0}
        tensor |= {"aliases": [], "frozen": False, "sparse": False, "content": ""}
        state: dict[str, Any] = {"tensors": [tensor], "optimizer": "SGD", "state": {}}
        manifest = Manifest(job="j", version=version, term=1, number=version, files=both, **state)
        store.commit(manifest, keep=keep)
    return base


def test_a_base_is_there_as_long_as_a_checkpoint_needs_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.next_term()
    bases = Bases(store)
    assert write(store, bases, 1) is None
    for version in range(2, 20):
        base = write(store, bases, version, commit=version % 3 != 0)
        assert base is not None
        assert base.file == "base-0-of-1.safetensors"
    assert store.versions() == [17, 19]
    for version in store.versions():
        with store.open_whole(version) as reader:
            assert reader.value(0, 0, 2).tolist() == [version] * 2


def test_there_is_no_base_where_the_checkpoints_with_it_are_gone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.next_term()
    bases = Bases(store)
    assert bases.link(None, 1, 1, 1) is None
    write(store, bases, 1, commit=False)
    assert bases.version == 1
    assert bases.link(0, 1, 2, 2) is None
    assert write(store, bases, 2) is None
    assert bases.version == 2
