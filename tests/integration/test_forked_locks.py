"""Locks of a process that has forked another one, which has their files open, too."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from elastic_ps.api.job import TrainingJob, parse_job
from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.owner import running
from elastic_ps.checkpoint.store import Store
from elastic_ps.local.state import JobDirectory
from tests.testing.forked import forked


def test_a_job_is_edited_again_although_a_process_was_forked_meanwhile(tmp_path: Path) -> None:
    """It has the lock's file open, too, and the next edit would wait for its end."""
    directory = JobDirectory("j", root=tmp_path)
    directory.path.mkdir()
    directory.write_job(
        parse_job(
            {
                "apiVersion": "elastic-ps.dev/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "j"},
                "spec": {"entrypoint": "a:b"},
            },
            source="test",
        )
    )
    with ExitStack() as stack:

        def edit(job: TrainingJob) -> TrainingJob:
            stack.enter_context(forked())
            return job

        directory.edit(edit)
        lock = files.try_lock(directory.path / "edit.lock")
        assert lock is not None
        files.unlock(lock)


def test_a_lock_is_given_back_although_a_process_was_forked_meanwhile(tmp_path: Path) -> None:
    """It has the file open, too: a DataLoader's process, in a program that has the parameter server in it."""
    store = Store(tmp_path)
    store.claim("a", "1")
    with ExitStack() as stack:
        with files.locked(tmp_path / "lock"):
            stack.enter_context(forked())
        stack.enter_context(forked())
        lock = files.try_lock(tmp_path / "lock")
        assert lock is not None
        files.unlock(lock)
        store.close()
        assert running(tmp_path) is None
