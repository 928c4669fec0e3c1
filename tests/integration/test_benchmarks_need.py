"""A benchmark that lacks what it needs says so, and does not fail in the middle of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.tiers import per_change

NEEDS = {
    "buckets": "iproute2",
    "fleet": "unshare",
    "forward": "iproute2",
    "goodput_torchft": "benchmarks.goodput",
    "network": "iproute2",
    "operator": "KUBECONFIG",
    "processes": "iproute2",
}


@pytest.mark.parametrize("name", per_change(NEEDS, keep=["operator"]))
def test_what_is_missing_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "kwok").touch()
    environment = {**os.environ, "PATH": str(tmp_path), "ELASTIC_PS_KUBERNETES_BIN": str(tmp_path)}
    environment.pop("KUBECONFIG", None)
    argv = [sys.executable, "-m", f"benchmarks.{name}"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert NEEDS[name] in done.stderr
    assert "Traceback" not in done.stderr
