"""The command that runs benchmarks and writes their page."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as benchmarks

WRITES = """
import sys, pathlib
from benchmarks.figures import Figure, write
write(pathlib.Path(sys.argv[-1]), [Figure("async", 96.9, 97.0, "%", "target", more=True)])
sys.exit(1)
"""


def test_figures_are_kept_of_a_benchmark_that_misses_what_it_has_to_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = {"short": WRITES, "broken": "raise SystemExit(1)"}
    monkeypatch.setattr(benchmarks, "command_of", lambda name, _: ["-c", programs[name]])
    [figure] = benchmarks.run("short", benchmarks.BENCHMARKS["modes"])
    assert figure.ours == 96.9
    with pytest.raises(RuntimeError, match="failed"):
        benchmarks.run("broken", benchmarks.BENCHMARKS["modes"])
