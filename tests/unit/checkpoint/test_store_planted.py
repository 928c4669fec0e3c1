"""A checkpoint is input from outside: what it says may be wrong on purpose."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.checkpoint.manifest import ShardFile
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import CheckpointError, CheckpointUnreadable
from tests.testing.store import (
    TENSORS,
    TERM,
    broken_is_refused_and_the_one_before_is_used,
    names,
    same,
    write,
)

TENSOR, SECOND = TENSORS
F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HUGE = 1 << 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "checkpoints")
    assert store.next_term() == TERM
    return store


def rewrite(store: Store, version: int, change: dict[str, Any]) -> None:
    """Change a manifest, with the digest that goes with it."""
    found = replace(store.describe(version), **change)
    (store.path(version) / "manifest.json").write_text(found.to_text())


def plant(store: Store, version: int, header: dict[str, Any], data: bytes = b"", length: int = -1) -> None:
    """Put a file of shard 0 into a checkpoint, with the digest that goes with it."""
    text = json.dumps(header).encode()
    content = (len(text) if length < 0 else length).to_bytes(8, "little") + text + data
    name = "shard-0-of-2.safetensors"
    (store.path(version) / name).write_bytes(content)
    file = ShardFile(name, hashlib.sha256(content).hexdigest(), len(content))
    rewrite(store, version, {"files": [file, *store.describe(version).files[1:]]})


@pytest.mark.parametrize(
    "change",
    [
        {"files": [ShardFile("../shard-0-of-2.safetensors", "0" * 64, 1)]},
        {"files": [ShardFile("/etc/passwd", "0" * 64, 1)]},
        {"files": [ShardFile("shard-0-of-2.safetensors/../../x", "0" * 64, 1)]},
        {"files": [ShardFile("shard-0-of-2.safetensors", "0" * 64, -1)]},
        {"files": []},
        {"tensors": [{**TENSOR, "shape": [HUGE]}, SECOND]},
        {"tensors": [{**TENSOR, "shape": [HUGE, HUGE, HUGE]}, SECOND]},
        {"tensors": [{**TENSOR, "shape": [-4]}, SECOND]},
        {"tensors": [{**TENSOR, "shape": [4.0]}, SECOND]},
        {"tensors": [{**TENSOR, "dtype": "float128"}, SECOND]},
        {"tensors": [{**TENSOR, "dtype": "float16"}, SECOND]},
        {"tensors": [{**TENSOR, "rule": 17}, SECOND]},
        {"tensors": [{**TENSOR, "frozen": 1}, SECOND]},
        {"tensors": [{**TENSOR, "sparse": 1}, SECOND]},
        {"tensors": [TENSOR, TENSOR]},
        {"tensors": [TENSOR]},
        {"tensors": [TENSOR, SECOND, {**TENSOR, "name": "more"}]},
        {"tensors": {"name": "w"}},
        {"tensors": ["w"]},
        {"term": 1 << 70},
        {"term": -1},
        {"term": True},
        {"version": 2.0},
        {"state": []},
        {"state": {"ledger": {"applied": 1 << 63}}},
        {"job": 5},
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_set_aside(store: Store, change: dict[str, Any]) -> None:
    write(store, 1)
    write(store, 2)
    rewrite(store, 2, change)
    broken_is_refused_and_the_one_before_is_used(store, str(change))


def test_a_manifest_of_another_format_is_refused_and_left_where_it_is(store: Store) -> None:
    """Another version of elastic-ps can read it."""
    write(store, 1)
    write(store, 2)
    rewrite(store, 2, {"format": 3})
    with pytest.raises(
        CheckpointUnreadable, match=r"has format 3, but .* reads format 2\. .*It stays where it is"
    ) as refused:
        store.newest()
    assert names(store) == ["version-0000000001", "version-0000000002"]
    assert "rename its directory from version-NUMBER to corrupt-NUMBER-1 to continue" in str(refused.value)
    store.path(2).rename(store.directory / "corrupt-0000000002-1")
    assert store.newest()[0].version == 1
    store.require_version(2)  # as of a job on a cluster, whose parameter server knows that it was on disk


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({"0/0/value/elements": {**F32, "shape": [HUGE]}}, b"", -1),
        ({"0/0/value/elements": {**F32, "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}, b"", -1),
        ({"0/0/value/elements": {**F32, "data_offsets": [-16, 0]}}, bytes(16), -1),
        ({"0/0/value/elements": {**F32, "data_offsets": [0, 17]}}, bytes(17), -1),
        ({"0/0/value/elements": {**F32, "dtype": "F80"}}, bytes(16), -1),
        ({"0/0/value/elements": {**F32, "dtype": ["F32"]}}, bytes(16), -1),
        ({"0/0/value/elements": {**F32, "shape": None}}, bytes(16), -1),
        ({"0/0/value/elements": 7}, bytes(16), -1),
        ({"0/2/value/elements": F32}, bytes(16), -1),
        ({"0/0/value/scalar": F32}, bytes(16), -1),
        ({"9/0/value/elements": F32}, bytes(16), -1),
        ({"0/0/value/elements": F32, "0/0/step/scalar": F32}, bytes(16), -1),
        ({"0/0/value/elements": F32, "0/1/exp/elements": F32}, bytes(16), -1),
        ({"weight": F32}, bytes(16), -1),
        ({"0/0/value/elements": F32}, bytes(16), HUGE),
        ({}, b"", -1),
    ],
)
def test_a_file_that_says_what_cannot_be_is_set_aside(
    store: Store, header: dict[str, Any], data: bytes, length: int
) -> None:
    """Before memory is taken for it: a tensor of 2**40 elements would take all that there is."""
    write(store, 1)
    write(store, 2)
    plant(store, 2, header, data, length)
    broken_is_refused_and_the_one_before_is_used(store, str(header))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7", "{}", '{"sha256": "x"}', "\x00\xff"])
def test_a_manifest_that_is_none_is_set_aside(store: Store, text: str) -> None:
    write(store, 1)
    (write(store, 2) / "manifest.json").write_text(text)
    broken_is_refused_and_the_one_before_is_used(store, text[:20])


def test_what_is_no_ordinary_file_is_not_opened(store: Store, tmp_path: Path) -> None:
    write(store, 1)
    path = write(store, 2) / "shard-0-of-2.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    broken_is_refused_and_the_one_before_is_used(store, "link")
    path = write(store, 3) / "manifest.json"
    path.unlink()
    os.mkfifo(path)
    assert store.newest()[0].version == 1
    write(store, 4).rename(tmp_path / "version")
    store.path(4).symlink_to(tmp_path / "version", target_is_directory=True)
    assert store.newest()[0].version == 1


def test_nothing_is_written_through_a_planted_link(store: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    other = tmp_path / "other"
    other.mkdir()
    partial = store.directory / "partial-1-0-0000000002"
    partial.mkdir()
    for name in ("shard-0-of-2.safetensors", "manifest.json"):
        (partial / name).symlink_to(victim)
    (store.directory / "term.partial").symlink_to(victim)
    store.path(2).symlink_to(other, target_is_directory=True)
    write(store, 2)
    store.next_term()
    assert victim.read_text() == "mine"
    assert list(other.iterdir()) == []
    assert same(store, 2)
    (store.directory / "partial-1-0-0000000003").symlink_to(other, target_is_directory=True)
    with pytest.raises(CheckpointError, match="Not a directory"):
        write(store, 3)
    (store.directory / "lock").unlink()
    (store.directory / "lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match="symbolic"):
        store.next_term()
    assert victim.read_text() == "mine"
    assert list(other.iterdir()) == []


@pytest.mark.parametrize("term", [-1, 1 << 31, 1 << 70, True])
def test_an_absurd_term_is_refused(store: Store, term: int) -> None:
    (store.directory / "term.json").write_text(json.dumps({"term": term}))
    with pytest.raises(CheckpointError, match=r"term\.json"):
        store.next_term()
