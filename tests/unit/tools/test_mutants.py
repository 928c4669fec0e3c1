"""Which places `tools/mutants.py` changes, which tests it runs then, and when they have noticed a change."""

from __future__ import annotations

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
    (tests / "rig.py").write_text("from elastic_ps.server.shards.shard import Shard\n")
    (tests / "test_by_rig.py").write_text("from tests.unit.rig import Rig\n")
    (tests / "test_itself.py").write_text("from elastic_ps.server.shards import shard\n")
    (tests / "test_node.py").write_text("from elastic_ps.server.calls.node import Node\n")
    (tests / "test_other.py").write_text("from elastic_ps.core.ledger import Ledger\n")
    chosen = chosen_tests(ROOT / "elastic_ps/server/shards/shard.py", tmp_path)
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
