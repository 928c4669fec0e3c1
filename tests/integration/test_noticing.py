"""When tests have noticed a change of `tools/mutants.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants import ROOT

TESTS = """
from pathlib import Path
import pytest
from module import doubled, other, waited

@pytest.fixture(scope="module")
def four(): return doubled(2)

def test_doubled(four): assert four == 4
def test_another(four): assert four > 0
def test_other(): assert other() is None
def test_now_and_then():
    waited()
    seen = Path("seen")
    before = seen.read_text() if seen.exists() else ""
    seen.write_text({"": "1"}.get(before, "2"))
    assert before != "1", "the machine is slow"
"""
MODULE = """
def doubled(value): return 2 * value
def other(): pass
def waited(): pass
"""
CHECK = """
import sys
from pathlib import Path
import hypothesis
from tools import noticing
tree, module = Path(sys.argv[1]), sys.argv[2]
project = noticing.Project(tree)
reach = project.reach(["test_module.py"])
assert {name.split("::")[1] for name in reach.of("module.py", [2])} >= {"test_doubled", "test_another"}
assert [name.split("::")[1] for name in reach.of("module.py", [3])] == ["test_other"]
noticing.DOUBTFUL = 0
for line, old, new in (2, "2 *", "3 *"), (3, "pass", "return"), (4, "pass", "return"):
    print(noticing.noticed(project, reach, "module.py", module, module.replace(old, new), [line]))
"""


@pytest.mark.nightly
def test_what_notices_a_change_is_a_test_that_fails_for_it_and_not_for_a_slow_machine(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-c", CHECK, str(tmp_path), MODULE]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["noticed", "alive", "alive"]
    assert (tmp_path / "seen").read_text() == "2", "a test has failed once"
