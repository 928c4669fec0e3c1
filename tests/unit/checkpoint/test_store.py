"""Checkpoints: whole or not at all, verified, and the one before is used when the newest is broken."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from elastic_ps.checkpoint import plain, tensors
from elastic_ps.checkpoint.manifest import parse
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec.state import Stored
from elastic_ps.core.partition import Layout, Rule, TensorSpec, partition
from elastic_ps.core.settings import Settings
from elastic_ps.errors import CheckpointCorrupt, CheckpointError, Fenced, NoCheckpoint, StorageUnavailable
from elastic_ps.server.shards.values import BucketValues
from tests.testing import machine
from tests.testing.store import (
    SHARDS,
    TENSORS,
    TERM,
    broken_is_refused_and_the_one_before_is_used,
    content,
    files,
    manifest,
    names,
    same,
    write,
)
from tests.testing.tiers import per_change


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "checkpoints")
    assert store.next_term() == TERM
    return store


def test_what_is_written_is_read_again(store: Store) -> None:
    path = write(store, 1290)
    assert path.name == "version-0000001290"
    found, problems = store.newest()
    assert problems == []
    assert (found.version, found.job, found.term, found.optimizer) == (1290, "job", 1, "SGD")
    assert found.tensors == json.loads(json.dumps(TENSORS))
    assert found.state["ledger"] == {"applied": 12900}
    assert same(store, 1290)


def test_a_model_is_cut_as_it_was_when_its_checkpoint_was_made() -> None:
    """The workers have cut their memory so. Frozen tensors have buckets of their own."""
    specs = [
        TensorSpec(f"w{number}", (4,), "float32", Rule.GRADIENT, 0, frozen=number % 2 == 0)
        for number in range(4)
    ]
    text = replace(manifest(1), tensors=[asdict(spec) for spec in specs]).to_text()
    layouts = [
        partition(tensors, bucket_bytes=1 << 20, shards=1) for tensors in (specs, parse(text, where="").specs)
    ]
    assert layouts[0] == layouts[1]
    assert len(layouts[0].buckets) == 2


def test_an_empty_tensor_is_read_although_no_file_has_any_of_it(store: Store) -> None:
    path = write(store, 1)
    empty = {**TENSORS[0], "name": "empty", "shape": [0, 4], "dtype": "float16"}
    described = replace(store.describe(1), tensors=[*TENSORS, empty])
    (path / "manifest.json").write_text(described.to_text())
    with store.open(1) as reader:
        value = plain.state_dict(reader)["empty"]
        assert reader.state(SHARDS, 0, 0) == {}
    assert (value.shape, value.dtype) == ((0, 4), torch.float16)


def test_the_newest_are_kept(store: Store) -> None:
    for version in (5, 10, 99, 100, 1000):
        write(store, version, keep=3)
    assert store.versions() == [99, 100, 1000]
    assert store.newest()[0].version == 1000


def test_a_version_that_is_written_again_replaces_the_first(store: Store) -> None:
    path = write(store, 7)
    (path / "stray").touch()
    write(store, 7)
    assert not (path / "stray").exists()
    assert same(store, 7)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_version_whose_place_is_not_taken_is_put_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write(store, 7)
    usual = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target == store.path(7) and not path.name.endswith("before"):
            raise error
        return usual(path, target)

    # A public name of Python: no disk fails at this rename alone.
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        write(store, 7)
    monkeypatch.undo()
    store.discard_partial()
    assert same(store, 7)


def test_without_a_checkpoint_the_message_says_where_was_looked(store: Store) -> None:
    with pytest.raises(NoCheckpoint, match=f"no complete checkpoint in {store.directory}"):
        store.newest()
    with pytest.raises(NoCheckpoint):
        Store(store.directory / "missing").newest()


@pytest.mark.parametrize("seed", per_change(range(12), keep=range(4)))
@pytest.mark.parametrize("number", range(SHARDS + 1))
def test_a_flipped_byte_is_found_wherever_it_is(store: Store, number: int, seed: int) -> None:
    write(store, 1)
    write(store, 2)
    path = files(store, 2)[number]
    data = bytearray(path.read_bytes())
    generator = random.Random(1000 * number + seed)
    place = generator.randrange(len(data))
    data[place] ^= 1 << generator.randrange(8)
    path.write_bytes(data)
    broken_is_refused_and_the_one_before_is_used(store, f"{path.name}, byte {place}")


def test_a_file_of_several_chunks_is_compared_with_its_digest(store: Store) -> None:
    """A thread digests a chunk while the next one is read."""
    elements = (3 * tensors.CHUNK + 64) // 4
    values = torch.arange(float(elements))
    found = replace(manifest(1), tensors=[{**TENSORS[0], "shape": [elements]}])
    found.files.append(store.write_shard(TERM, 1, 0, 1, iter([Stored(0, 0, "value", values)])))
    store.commit(found, keep=1)
    with store.open_whole(1) as reader:
        assert torch.equal(reader.value(0, 0, elements), values)
    path = store.path(1) / found.files[0].file
    size = path.stat().st_size
    assert size > 3 * tensors.CHUNK
    path.chmod(0o600)
    with path.open("r+b", buffering=0) as file:
        for place in (
            *range(0, size, tensors.CHUNK),
            *range(tensors.CHUNK - 1, size, tensors.CHUNK),
            size - 1,
        ):
            byte = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), place)
            with pytest.raises(CheckpointCorrupt):
                store.open_whole(1)
            os.pwrite(file.fileno(), byte, place)
    store.open_whole(1).close()


def test_no_character_of_the_manifest_can_change(store: Store) -> None:
    """Least of all a digit in a count of records, which is JSON all the same."""
    path = write(store, 2) / "manifest.json"
    text = path.read_bytes()
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with pytest.raises(CheckpointCorrupt):
            store.manifest(2)
    path.write_bytes(text)
    assert store.manifest(2).version == 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("number", range(SHARDS + 1))
@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_file_cut_short_is_found(store: Store, number: int, left: float) -> None:
    write(store, 1)
    write(store, 2)
    path = files(store, 2)[number]
    os.truncate(path, int(path.stat().st_size * left))
    broken_is_refused_and_the_one_before_is_used(store, path.name)


def test_a_missing_file_is_found(store: Store) -> None:
    write(store, 1)
    write(store, 2)
    (store.path(2) / "shard-1-of-2.safetensors").unlink()
    broken_is_refused_and_the_one_before_is_used(store, "missing")


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_read_at_the_moment_is_not_taken_for_broken(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(store, 1)
    write(store, 2)
    bad = store.path(2) / "shard-0-of-2.safetensors"
    read, opened = os.preadv, os.open

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.path.samestat(os.fstat(descriptor), bad.stat()):
            raise OSError(number, os.strerror(number))
        return read(descriptor, buffers, offset)

    def refusing(path: Path, flags: int, *mode: int) -> int:
        if Path(path) == bad:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *mode)

    name, function = ("preadv", failing) if number == errno.EIO else ("open", refusing)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, function)
        with pytest.raises(StorageUnavailable, match=os.strerror(number)):
            store.newest()
    assert store.versions() == [1, 2], "it may be whole, and nothing older is taken in its place"
    assert store.newest()[0].version == 2


def test_a_checkpoint_under_another_versions_name_is_refused(store: Store) -> None:
    write(store, 1)
    write(store, 2).rename(store.path(3))
    with pytest.raises(CheckpointCorrupt, match="version 2"):
        store.manifest(3)


def test_a_directory_without_a_manifest_is_not_a_checkpoint(store: Store) -> None:
    write(store, 1)
    store.path(2).mkdir()
    assert store.newest()[0].version == 1


def test_when_all_are_broken_the_message_names_them(store: Store) -> None:
    for version in (1, 2):
        (write(store, version) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointCorrupt, match=r"version-0000000002.*version-0000000001"):
        store.newest()
    with pytest.raises(CheckpointCorrupt, match=r"corrupt-0000000001-1"):
        store.newest()  # not NoCheckpoint, with which a job would begin anew


def test_a_version_that_breaks_again_is_set_aside_again(store: Store) -> None:
    """By a process of the same id, which a container's first process always has."""
    write(store, 1)
    for _ in range(3):
        (write(store, 2) / "manifest.json").write_text("{}")
        assert store.newest()[0].version == 1
    assert len(names(store)) == 4


def test_an_interrupted_write_is_not_seen_and_can_be_discarded(store: Store) -> None:
    write(store, 1)
    store.write_shard(TERM, 2, 0, SHARDS, iter(content(2, 0)))
    assert store.newest()[0].version == 1
    assert len(names(store)) == 2
    store.discard_partial()
    assert names(store) == ["version-0000000001"]


def test_what_unfinished_writes_left_does_not_pile_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full, the next try needs the place that the last one took."""
    write(store, 1)
    for version in range(2, 6):
        store.write_shard(TERM, version, 0, SHARDS, iter(content(version, 0)))
        with monkeypatch.context() as patch:
            machine.fails(patch, os, "fsync", machine.full())
            with pytest.raises(CheckpointError, match="No space left"):
                store.write_shard(TERM, version, 1, SHARDS, iter(content(version, 1)))
    left = {p.parent.name for p in store.directory.glob("partial-*/*")}
    assert left == set()
    write(store, 6)
    assert names(store) == ["version-0000000001", "version-0000000006"]


def test_a_full_disk_leaves_the_older_ones_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, 1)
    found = manifest(2)
    found.files.extend(store.write_shard(TERM, 2, s, SHARDS, iter(content(2, s))) for s in range(SHARDS))
    with monkeypatch.context() as patch:
        machine.fails(patch, os, "fsync", machine.full())
        with pytest.raises(CheckpointError, match=r"version 2: .*No space left"):
            store.commit(found, keep=1)
    assert same(store, 1)
    write(store, 2, keep=1)
    assert store.versions() == [2], "and it goes on when there is space again"


def test_an_old_one_that_cannot_be_deleted_does_not_spoil_the_new_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 1)

    unlink = os.unlink

    def failing(path: Path, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:  # as in deleting a whole directory
            raise OSError(errno.EACCES, "Permission denied")
        unlink(path)

    # A public name of Python: nothing is forbidden to root.
    monkeypatch.setattr("os.unlink", failing)
    write(store, 2, keep=1)
    assert store.newest()[0].version == 2


def test_a_directory_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    store = Store(blocked / "checkpoints")
    with pytest.raises(CheckpointError, match="cannot write shard-0-of-1"):
        store.write_shard(TERM, 1, 0, 1, iter(content(1, 0)))
    with pytest.raises(CheckpointError, match="cannot finish"):
        store.commit(manifest(1), keep=1)
    with pytest.raises(CheckpointError, match=r"term\.json"):
        store.next_term()


def test_terms_grow(store: Store) -> None:
    assert [store.next_term() for _ in range(2)] == [2, 3]
    assert Store(store.directory).next_term() == 4


def test_a_term_is_begun_after_the_own_one_only(store: Store) -> None:
    """To look and to count are one: of two that go back to a checkpoint at once, one goes on."""
    assert store.next_term() == 2
    assert store.next_term(after=2) == 3
    with pytest.raises(Fenced, match="term 3"):
        store.next_term(after=2)
    store.require_term(3)


def test_an_earlier_term_than_the_own_one_is_no_rival(store: Store) -> None:
    """Terms only grow, so the volume is away, or another one."""
    term = store.next_term()
    (store.directory / "term.json").unlink()
    with pytest.raises(StorageUnavailable, match="says that 0 is the last term, but term 2 has begun"):
        store.require_term(term)


def test_the_term_is_known_although_no_descriptor_is_left(store: Store) -> None:
    """Whoever fills a port with connections would stop the training: each version asks for the term."""
    term, before = store.next_term(), resource.getrlimit(resource.RLIMIT_NOFILE)
    store.require_term(term)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with contextlib.suppress(OSError):
            while len(taken) < 256:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        store.require_term(term)
        os.close(taken.pop())
        Store(store.directory).require_term(term)
        (store.directory / "term.json").write_text('{"term": 7}')
        taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(StorageUnavailable, match="Too many open files"):
            store.require_term(term)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert store.next_term() == 8


def test_another_directory_of_the_same_name_is_neither_written_nor_pruned(store: Store) -> None:
    """A parameter server has begun where a volume was to be mounted; then the volume is there again."""
    write(store, 1)
    volume = store.directory.rename(store.directory.parent / "volume")
    began = Store(store.directory)
    assert began.next_term() == TERM
    parts = [began.write_shard(TERM, 2, s, SHARDS, iter(content(2, s))) for s in range(SHARDS)]
    late = manifest(2)
    late.files.extend(parts)
    shutil.rmtree(store.directory)
    volume.rename(store.directory)
    acts: list[Callable[[], object]] = [
        lambda: began.commit(late, keep=1),
        lambda: began.amend(1, term=TERM, state={}),
        lambda: began.write_beside("evaluations.json", "{}", term=TERM),
        lambda: began.next_term(after=TERM),
    ]
    for act in acts:
        with pytest.raises(StorageUnavailable, match="is not the directory in which"):
            act()
    assert same(store, 1)
    assert not (store.directory / "evaluations.json").exists()
    store.require_term(TERM)


def test_a_known_version_is_required_unless_it_was_set_aside(store: Store) -> None:
    write(store, 3)
    store.require_version(3)
    with pytest.raises(
        StorageUnavailable, match=r"version 4 has disappeared from .* the newest one there is of version 3"
    ):
        store.require_version(4)
    write(store, 4)
    (store.path(4) / "manifest.json").unlink()
    assert store.newest()[0].version == 3
    store.require_version(4)
    with pytest.raises(StorageUnavailable, match="where there is none"):
        Store(store.directory / "empty").require_version(0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"term": "x"}', '{"term": null}', '{"term": 1.5}'])
def test_a_broken_term_is_said_so_and_not_begun_anew(store: Store, text: str) -> None:
    """From 1 again, a parameter server that was thought dead could pass for the present one."""
    store.next_term()
    (store.directory / "term.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"term\.json"):
        store.next_term()


def test_a_term_that_is_no_ordinary_file_is_said_so_at_once(store: Store) -> None:
    """A link could lead to another job's term, and a pipe would never be read to its end."""
    term = store.directory / "term.json"
    store.next_term()
    kept = term.rename(store.directory / "elsewhere")
    store.require_term(0)
    term.symlink_to(kept)
    with pytest.raises(CheckpointError, match="symbolic link"):
        store.require_term(0)
    term.unlink()
    os.mkfifo(term)
    with pytest.raises(CheckpointError, match="not a regular file"):
        store.require_term(0)


def test_who_was_replaced_neither_commits_nor_deletes(store: Store) -> None:
    """Two parameter servers at once: the older one may still be writing."""
    write(store, 1)
    store.write_shard(TERM, 2, 0, SHARDS, iter(content(2, 0)))
    term = Store(store.directory).next_term()
    store.write_shard(term, 2, 0, SHARDS, iter(content(2, 0)))
    files = [store.write_shard(TERM, 9, s, SHARDS, iter(content(9, s))) for s in range(SHARDS)]
    late = manifest(9)
    late.files.extend(files)
    with pytest.raises(Fenced, match="term 2 has taken over, so a parameter server of term 1"):
        store.commit(late, keep=1)
    assert store.versions() == [1]
    new = manifest(2, term=term)
    new.files.extend(store.write_shard(term, 2, s, SHARDS, iter(content(2, s))) for s in range(SHARDS))
    store.commit(new, keep=3)
    assert names(store) == ["version-0000000001", "version-0000000002"]


def test_nothing_is_pickled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(store, 1)
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}
    for file in path.glob("*.safetensors"):
        assert safetensors.torch.load_file(file)
        assert b"torch" not in file.read_bytes()

    for where, calls in ((torch, ("load", "save")), (pickle, ("load", "loads", "dump", "dumps"))):
        for call in calls:
            machine.fails(monkeypatch, where, call, AssertionError("pickle was used"))
    write(store, 2)
    assert same(store, 2)


def test_the_manifest_says_what_is_in_the_checkpoint(store: Store) -> None:
    """For people and other programs: it is JSON, with a digest for each file."""
    data = json.loads((write(store, 3) / "manifest.json").read_text())
    assert (data["format"], data["version"], data["job"]) == (2, 3, "job")
    assert [len(file["sha256"]) for file in data["files"]] == [64, 64]


# --- another cut


def trained(layout: Layout, settings: Settings) -> list[BucketValues]:
    """All buckets of a layout with Adam, zero and without state."""
    buckets = []
    for bucket in layout.buckets:
        values = BucketValues(bucket)
        values.build_optimizer([torch.optim.Adam] * len(settings.groups), settings.groups, layout.tensors)
        buckets.append(values)
    return buckets


def stored(buckets: list[BucketValues]) -> Iterator[Stored]:
    for values in buckets:
        start = 0
        for piece in values.bucket.pieces:
            part = values.values[start : start + piece.length].clone()
            yield Stored(piece.tensor, piece.start, "value", part)
            start += piece.length
        for entry in values.state():
            yield Stored(entry.tensor, entry.start, entry.key, entry.value.clone(), entry.scalar)


def whole(buckets: list[BucketValues], sizes: dict[int, int]) -> dict[tuple[int, str], torch.Tensor]:
    """Everything of each tensor, in one."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for s in stored(buckets):
        place = found.setdefault((s.tensor, s.key), torch.full((sizes[s.tensor],), float("nan")))
        place[s.start : s.start + s.value.numel()] = s.value
        if s.scalar:
            place[:] = s.value
    return found


@pytest.mark.parametrize(
    ("before", "after"), [((1, 4096), (3, 100)), ((3, 100), (1, 4096)), ((2, 64), (4, 52))]
)
def test_a_checkpoint_can_be_cut_otherwise(
    store: Store, before: tuple[int, int], after: tuple[int, int]
) -> None:
    shapes = [(13, 7), (7,), (), (50,), (3, 3)]
    specs = [TensorSpec(str(i), shape, "float32", Rule.GRADIENT, i % 2) for i, shape in enumerate(shapes)]
    specs.append(TensorSpec("frozen", (30,), "float32", Rule.CONSTANT))
    settings = Settings(({"lr": 0.1}, {"lr": 0.01}))
    first, second = (partition(specs, bucket_bytes=b, shards=s) for s, b in (before, after))
    assert first != second
    generator = torch.Generator().manual_seed(3)
    buckets = trained(first, settings)
    for values in buckets:
        values.values.copy_(torch.randn(values.bucket.elements, generator=generator))
        if values.bucket.rule is Rule.GRADIENT:
            for version in (1, 2):
                gradient = torch.randn(values.bucket.elements, generator=generator)
                present = [piece.tensor != 3 for piece in values.bucket.pieces]
                values.add(gradient, 1, present, first=True)
                values.apply(settings.groups, version)
    found = replace(manifest(2), tensors=[{**asdict(s), "shape": list(s.shape)} for s in specs])
    for shard in range(first.shards):
        own = [values for values in buckets if values.bucket.shard == shard]
        found.files.append(store.write_shard(TERM, 2, shard, first.shards, stored(own)))
    store.commit(found, keep=1)

    sizes = {i: spec.elements for i, spec in enumerate(specs)}
    loaded = trained(second, settings)
    with store.open(2) as reader:
        for values in loaded:
            values.load(reader, 2)
    expected, got = whole(buckets, sizes), whole(loaded, sizes)
    assert expected.keys() == got.keys()
    assert (3, "step") not in got, "a parameter that never had a gradient has no state"
    assert all(torch.equal(expected[place], got[place]) for place in expected)
    assert all(values.version == 2 for values in loaded)


def test_a_shard_reads_its_own_part_and_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor that is cut: the files of others are not even compared with their digests."""
    whole = torch.arange(1000.0)
    tensors = [{**TENSORS[0], "shape": [1000]}]
    found = replace(manifest(1), tensors=tensors)
    for shard in range(4):
        part = Stored(0, 250 * shard, "value", whole[250 * shard : 250 * (shard + 1)])
        found.files.append(store.write_shard(TERM, 1, shard, 4, iter([part])))
    store.commit(found, keep=1)
    (store.path(1) / "shard-3-of-4.safetensors").chmod(0o600)
    bytes_read, read = [0], os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = read(descriptor, buffers, offset)
        bytes_read[0] += count
        return count

    # A public name of Python: it counts what is read of checkpoints, and nothing else.
    monkeypatch.setattr(os, "preadv", counting)
    with store.open(1) as reader:
        headers = bytes_read[0]
        assert torch.equal(reader.value(0, 300, 100), whole[300:400])
        own = (store.path(1) / "shard-1-of-4.safetensors").stat().st_size
        assert bytes_read[0] - headers == own + 400, "its digest, and 100 elements"
        assert torch.equal(reader.value(0, 200, 800), whole[200:])


def test_a_part_that_has_gone_is_not_committed(store: Store) -> None:
    """Its writer was taken for dead, and what it had written was deleted."""
    write(store, 1)
    found = manifest(2)
    found.files.extend(store.write_shard(TERM, 2, s, SHARDS, iter(content(2, s))) for s in range(SHARDS))
    next(store.directory.glob("partial-*/shard-1*")).unlink()
    with pytest.raises(CheckpointError, match="shard-1-of-2"):
        store.commit(found, keep=1)
    assert same(store, 1)


def test_two_checkpoints_of_a_version_do_not_share_their_files(store: Store) -> None:
    """The late part of one that was given up must not stand in for that of the next."""
    store.write_shard(TERM, 2, 0, SHARDS, iter(content(2, 0)), number=1)
    found = replace(manifest(2), number=2)
    found.files.append(store.write_shard(TERM, 2, 1, SHARDS, iter(content(2, 1)), number=2))
    with pytest.raises(CheckpointError):
        store.commit(
            replace(found, files=[*found.files, replace(found.files[0], file="shard-0-of-2.safetensors")]),
            keep=1,
        )
    assert store.versions() == []


def test_a_model_that_holds_nan_is_used_and_said_so(store: Store) -> None:
    write(store, 1)
    found = manifest(2)
    values = torch.tensor([1.0, float("nan"), float("inf"), 0.0])
    found.files.append(store.write_shard(TERM, 2, 0, SHARDS, iter([Stored(0, 0, "value", values)])))
    found.files.append(store.write_shard(TERM, 2, 1, SHARDS, iter(content(2, 1))))
    store.commit(found, keep=3)
    used, (problem,) = store.newest()
    assert used.version == 2
    assert "version 2 holds NaN or Inf: 2 of w0" in problem
