"""A checkpoint directory belongs to one job, and to one run of it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.owner import running
from elastic_ps.checkpoint.store import Store
from elastic_ps.errors import InvalidJob, StorageUnavailable, UserError
from elastic_ps.local import preflight
from tests.testing import machine
from tests.testing.launching import make_job
from tests.testing.store import write


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Store]:
    """The store of run 1 of job a, which goes on."""
    store = Store(tmp_path)
    store.claim("a", "1")
    yield store
    store.close()


def test_two_jobs_do_not_share_a_directory_while_one_runs(first: Store) -> None:
    for adopt, way in ((False, "Each job"), (True, "wait until it has ended.* Otherwise")):
        with pytest.raises(InvalidJob, match=rf"belongs to job 'a' .*which is running.*{way}.*name another"):
            Store(first.directory).claim("b", "1", adopt=adopt)
    owner = running(first.directory)
    assert owner is not None
    assert (owner.job, owner.run) == ("a", "1")


def test_another_run_of_the_job_is_refused_or_waits_as_asked(first: Store) -> None:
    with pytest.raises(InvalidJob, match="which is running"):
        Store(first.directory).claim("a", "2", adopt=True)
    second = Store(first.directory)
    with pytest.raises(StorageUnavailable, match="still used by an earlier run"):
        second.claim("a", "2", wait=True)
    first.close()
    assert running(first.directory) is None
    second.claim("a", "2", wait=True)
    assert running(first.directory) is not None
    second.close()


def test_what_an_interrupted_write_left_makes_room_for_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full of it. That of a run that goes on is none."""
    partial = tmp_path / "partial-1-1-0000000001"
    machine.fails(monkeypatch, files, "write_text", machine.full(), partial.exists)
    partial.mkdir()
    first = Store(tmp_path)
    first.claim("a", "1")
    assert not partial.exists()
    partial.mkdir()
    with pytest.raises(StorageUnavailable, match="still used by an earlier run"):
        Store(tmp_path).claim("a", "2", wait=True)
    assert partial.exists()
    first.close()
    second = Store(tmp_path)
    second.claim("a", "2", wait=True)
    assert not partial.exists()
    second.close()


def test_processes_of_one_run_share_it(first: Store) -> None:
    """One is taken for dead and replaced; the other takes the lock once it is free."""
    second = Store(first.directory)
    second.claim("a", "1")
    first.close()
    second.next_term()
    write(second, 1)
    with pytest.raises(InvalidJob, match="which is running"):
        Store(first.directory).claim("b", "1", adopt=True)
    second.close()


def test_the_directory_of_a_job_that_has_ended_is_taken_over_only_if_asked_for(first: Store) -> None:
    first.close()
    with pytest.raises(InvalidJob, match=r"of job 'a' .*which has ended.*job\.json"):
        Store(first.directory).claim("b", "1")
    second = Store(first.directory)
    second.claim("b", "1", adopt=True)
    owner = running(first.directory)
    assert owner is not None
    assert owner.job == "b"
    second.close()


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"job": "a"}'])
def test_an_owner_that_cannot_be_understood_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    store = Store(tmp_path)
    store.claim("b", "1")
    store.close()


def test_the_command_line_refuses_the_directory_of_a_running_job(first: Store) -> None:
    """Before anything is started."""
    Store(first.directory).path(3).mkdir()
    (first.directory / "version-0000000003" / "manifest.json").touch()
    path = {"checkpoint": {"path": str(first.directory)}}
    for resume, job in ((first.directory, make_job()), (None, make_job(spec={"parameterServer": path}))):
        with pytest.raises(UserError, match=r"belongs to job 'a' .*which is running"):
            preflight.check_checkpoints(job, resume)
    first.close()
    preflight.check_checkpoints(make_job(), first.directory)
