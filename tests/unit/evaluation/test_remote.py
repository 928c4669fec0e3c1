"""The temporary copies of checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from elastic_ps.evaluation.remote import JobSource
from elastic_ps.transport import ways

SCRIPT = """
import time
from elastic_ps.evaluation.remote import JobSource
from elastic_ps.transport import ways
source = JobSource("another", ways.connect("127.0.0.1:1"))
print(flush=True)
time.sleep(600)
"""


def test_what_a_killed_evaluator_has_left_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], env=variables, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline(), "it has begun"
            with closing(JobSource("job", ways.connect("127.0.0.1:1"))):
                assert len(list(tmp_path.iterdir())) == 2, "the one of a living process is left alone"
        finally:
            other.kill()
    assert len(list(tmp_path.iterdir())) == 1
    with closing(JobSource("job", ways.connect("127.0.0.1:1"))):
        assert len(list(tmp_path.iterdir())) == 1, "its own"
    assert list(tmp_path.iterdir()) == []
