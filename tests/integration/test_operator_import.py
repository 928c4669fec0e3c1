"""The operator's image has no torch: nothing that the operator imports may need it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.testing.polling import LIMIT

ROOT = Path(__file__).parents[2]

SCRIPT = """
import importlib, pkgutil, sys
for name in ("torch", "numpy", "grpc", "safetensors", "rich"):
    sys.modules[name] = None
import elastic_operator
for module in pkgutil.iter_modules(elastic_operator.__path__):
    if module.name != "__main__":
        importlib.import_module(f"elastic_operator.{module.name}")
import elastic_operator.__main__
loaded = sorted(name for name in sys.modules if name.startswith("elastic_ps") and sys.modules[name])
print(" ".join(loaded))
"""


def test_operator_imports_without_torch() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "operator")])
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert answer.returncode == 0, answer.stderr
    loaded = {name.split(".")[1] for name in answer.stdout.split() if name != "elastic_ps"}
    assert loaded == {"api", "contract", "errors", "process", "version"}
    assert copied() == {"__init__", *loaded}, "the operator's image has just what it imports"


def copied() -> set[str]:
    """The modules and packages of `elastic_ps` that operator/Dockerfile copies."""
    return set(re.findall(r"\belastic_ps/(\w+)(?:\.py|/) ", (ROOT / "operator" / "Dockerfile").read_text()))
