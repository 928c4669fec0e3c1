"""A checkpoint volume that cannot be read for a moment: nothing is taken for something else meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_ps.checkpoint.plain import open_checkpoint
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import CheckpointError, Fenced, StorageUnavailable, UserError
from tests.testing import machine
from tests.testing.coordinator import finish, start, take
from tests.testing.polling import eventually
from tests.testing.store import write
from tests.unit.server.test_chief import Server


@contextmanager
def unreadable(below: Path) -> Iterator[None]:
    """All calls of the system fail that look at this file, or at something in this directory."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any, *arguments: Any, **named: Any) -> Any:
            if not isinstance(path, int) and Path(path).is_relative_to(below):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return call(path, *arguments, **named)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat", "lstat", "listdir", "open"):
            patch.setattr(os, name, failing(getattr(os, name)))
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def server(directory: Path) -> Iterator[Server]:
    made = Server(directory)
    yield made
    made.lose()


def test_a_term_that_cannot_be_read_is_not_the_first(directory: Path) -> None:
    """The one that holds the term: numbers would be given twice."""
    store = Store(directory)
    store.next_term()
    with unreadable(directory):
        for act in (store.next_term, lambda: store.require_term(1)):
            with pytest.raises(StorageUnavailable):
                act()
    store.require_term(1)


@contextmanager
def without_descriptors() -> Iterator[None]:
    """This process can open no file (EMFILE), as when strangers have all of its descriptors."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in held:
            os.close(each)


def test_a_term_is_known_without_a_descriptor_as_long_as_its_file_is_as_it_was(directory: Path) -> None:
    """Training goes on meanwhile, and a parameter server that has taken over is noticed all the same."""
    store = Store(directory)
    store.next_term()
    store.require_term(1)
    other = Store(directory)
    with without_descriptors():
        store.require_term(1)
        with pytest.raises(StorageUnavailable):
            other.require_term(1)
    other.next_term()
    with without_descriptors(), pytest.raises(StorageUnavailable):
        store.require_term(1)
    with pytest.raises(Fenced):
        store.require_term(1)


def test_what_an_interrupted_write_left_is_deleted_when_it_can_be(directory: Path) -> None:
    """A parameter server that waits for the volume tries it again and again."""
    left = directory / "partial-1-1-0000000001"
    left.mkdir(parents=True)
    with unreadable(directory):
        Store(directory).discard_partial()
    assert left.exists()
    Store(directory).discard_partial()
    assert not left.exists()


def test_a_directory_whose_owner_cannot_be_read_is_not_free(directory: Path) -> None:
    mine, other = Store(directory), Store(directory)
    mine.claim("mine", "first run")
    mine.close()
    with unreadable(directory / "job.json"), pytest.raises(StorageUnavailable):
        other.claim("another", "its run")


def test_no_round_is_committed_while_nobody_can_tell_who_leads(server: Server, directory: Path) -> None:
    """Another parameter server may have taken over, and its workers would not know of the round."""
    member = start(server.coordinator, 0)
    server.train(member, take(server.coordinator, member, call=1))
    taken = take(server.coordinator, member, call=2)
    with unreadable(directory):
        server.push(member, taken, step=1)
        commit = threading.Thread(target=finish, args=(server.coordinator, member, taken), kwargs={"step": 1})
        commit.start()
        commit.join(10)
        assert server.coordinator.job.state.rounds.decided
        assert "whether another parameter server has taken over" in server.problem
        assert server.node.shard.version == 1
    eventually(lambda: server.node.shard.version == 2, "the round is committed")
    eventually(lambda: not server.problem, "nothing is wrong any more")


def test_a_round_is_not_committed_by_a_server_that_could_not_tell(server: Server, directory: Path) -> None:
    member = start(server.coordinator, 0)
    server.train(member, take(server.coordinator, member, call=1))
    taken = take(server.coordinator, member, call=2)
    Store(directory).next_term()
    with unreadable(directory):
        server.push(member, taken, step=1)
        finish(server.coordinator, member, taken, step=1)
    eventually(lambda: server.checkpoints.fenced, "it knows that another one has taken over")
    assert server.node.shard.version == 1


def test_a_file_system_without_locks_is_refused_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre has none unless it is mounted with `flock`. Waiting does not help."""
    machine.fails(monkeypatch, fcntl, "flock", OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)))
    with pytest.raises(CheckpointError, match="Function not implemented") as refused:
        Store(directory).claim("job", "run")
    assert not isinstance(refused.value, StorageUnavailable)


def test_a_checkpoint_may_be_named_by_a_relative_path(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(directory)
    store.next_term()
    write(store, 7)
    monkeypatch.chdir(store.path(7))
    for version in (None, 7):
        with open_checkpoint(Path(), version) as reader:
            assert reader.manifest.version == 7
    with pytest.raises(UserError, match="no checkpoint of version 8"):
        open_checkpoint(Path(), 8)
