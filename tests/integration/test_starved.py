"""A worker that the kernel kills because there is no memory left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ps.local import Launcher, Options
from tests.testing.launching import forks, make_job
from tests.testing.polling import LIMIT

MEMORY = 64 << 20
GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose processes may have 64 MiB together."""
    old = GROUPS / "memory"
    made = (old if old.is_dir() else GROUPS) / f"elastic-ps-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"this machine lets us make no control group: {error}")
    try:
        limit = made / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")
        if not limit.exists():
            pytest.skip("this machine lets us limit no memory")
        limit.write_text(str(MEMORY))
        with contextlib.suppress(OSError):  # where there is no swap, that cannot be set
            (made / ("memory.swappiness" if old.is_dir() else "memory.swap.max")).write_text("0")
        yield made
    finally:
        made.rmdir()


def test_it_fails_the_job_if_it_starves_again_without_a_step(tmp_path: Path, group: Path) -> None:
    """Else it would be started again for ever, as one that somebody kills is."""
    job = make_job(
        workers=1,
        spec={"entrypoint": "tests.testing.scripts.hungry:main", "runPolicy": {"backoffLimit": 0}},
        group=str(group),
        nbytes=4 * MEMORY,
    )
    with Launcher(job, Options(forks=forks(), root=tmp_path / "state")) as launcher:
        launcher.start()
        assert launcher.wait(timedelta(seconds=LIMIT)), launcher.status()
        verdict = launcher.outcome().verdict
    assert (verdict.phase, verdict.reason) == ("Failed", "BackoffLimitExceeded")
    assert verdict.message.startswith(
        "worker 0 was killed by SIGKILL, probably because there was no memory left. Processes have failed"
    )
