"""Which places `tools/mutants.py` changes, and which tests it runs then."""

from __future__ import annotations

from pathlib import Path

from tools.mutants import ROOT, chosen_tests, mutants

SOURCE = """
LIMIT = 2


def larger(value: int, other: int = 3) -> bool:
    logger.info("compared with %d", 4 + value)
    limit = value + LIMIT
    return limit < other  # mutant: equal
"""


def test_what_is_not_a_decision_of_a_function_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    changes = {(mutant.before, mutant.after) for mutant in mutants(file)}
    assert changes == {
        ("3", "4"),
        ("limit = value + LIMIT", "pass"),
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
    assert set(chosen[:2]) == {"tests/unit/test_by_rig.py", "tests/unit/test_itself.py"}
    assert chosen[2:] == ["tests/unit/test_node.py"]
