"""Which places `tools/mutants.py` changes, which tests it runs then, and when they have noticed a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.mutants import ROOT, chosen_tests, mutants
from tools.noticing import EVERY_TEST, Reach

SOURCE = """
LIMIT = 2


def larger(value: int, other: int = 3) -> bool:
    logger.info("compared with %d", 4 + value)
    limit: int | None = value + LIMIT
    return limit < other  # mutant: equal
"""


def test_what_is_not_a_decision_of_a_function_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    changes = {(mutant.before, mutant.after) for mutant in mutants(file)}
    assert changes == {
        ("3", "4"),
        ("value + LIMIT", "value - LIMIT"),
    }


def test_tests_that_reach_a_package_through_a_module_beside_them_are_run(tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "unit"
    tests.mkdir(parents=True)
    (tests / "rig.py").write_text("from elastic_ps.server.shard import Shard\n")
    (tests / "test_by_rig.py").write_text("from tests.unit.rig import Rig\n")
    (tests / "test_itself.py").write_text("from elastic_ps.server import shard\n")
    (tests / "test_node.py").write_text("from elastic_ps.server.node import Node\n")
    (tests / "test_other.py").write_text("from elastic_ps.core.ledger import Ledger\n")
    chosen = chosen_tests(ROOT / "elastic_ps/server/shard.py", tmp_path)
    assert chosen == [f"tests/unit/test_{name}.py" for name in ("by_rig", "itself", "node")]


def test_a_mutant_knows_the_function_around_it(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("@cached\ndef outer():\n    def inner():\n        return 1 + outer\n\n    return inner\n")
    assert {mutant.function for mutant in mutants(file)} == {range(1, 7)}


def test_those_that_run_a_function_are_asked_the_fastest_first_and_then_those_that_start_processes() -> None:
    reach = Reach(
        seconds={"a::slow": 3, "a::fast": 1, "b::one": 2, "b::other": 1, "c::process": 0.5},
        callers={"m.py": {10: {"a::slow", "b"}, 20: {"a::fast"}, 30: {EVERY_TEST}}},
        spawning={"c::process"},
    )
    assert reach.of("m.py", range(8, 15)) == ["b::other", "b::one", "a::slow", "c::process"]
    assert reach.of("m.py", range(20, 21)) == ["a::fast", "c::process"]
    assert reach.of("m.py", range(30, 31))[:-1] == ["a::fast", "b::other", "b::one", "a::slow"]
    assert reach.of("m.py", range(11, 15)) == reach.of("other.py", range(99)) == ["c::process"]


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


def test_what_notices_a_change_is_a_test_that_fails_for_it_and_not_for_a_slow_machine(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-c", CHECK, str(tmp_path), MODULE]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["noticed", "alive", "alive"]
    assert (tmp_path / "seen").read_text() == "2", "a test has failed once"
