"""Change the code in small ways and see whether the unit tests notice.

`python tools/mutants.py core --count 60` takes 60 places of `elastic_ps/core` by chance, and for each of them
runs the package's unit tests on a copy of the project in which that place is wrong. It prints the
mutants that nothing noticed, and the share that was. A survivor is a missing test, or the changed code means
the same (then the line ends with `# mutant: equal`, and is left out). After R. DeMillo, R. Lipton and
F. Sayward, "Hints on Test Data Selection", Computer, 1978.

Each run is a fork of a process that has imported torch and the test tools already.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {
    "core": ["elastic_ps/core/*.py"],
    "server": ["elastic_ps/server/*.py"],
    "operator": ["operator/elastic_operator/*.py"],
    "decisions": [
        f"operator/elastic_operator/{name}.py"
        for name in ("reconcile", "verdict", "status", "builders", "failures", "renewal")
    ],
}
EQUAL = "# mutant: equal"
TREE = (
    "benchmarks",
    "docs",
    "elastic_ps",
    "operator",
    "tests",
    "charts",
    "manifests",
    "tools",
    "pyproject.toml",
)
LIMIT = 120.0
"""Seconds for the unit tests, at the least; a mutant that never ends is noticed, too."""

SLACK = 4
"""As many times as long as without a change may the tests take, on a machine that does other things, too."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Mutant:
    """One change: in the `text` of `file`, node number `node`, as `ast.walk` counts, becomes `changed`."""

    file: Path
    text: str
    node: int
    line: int
    before: str
    changed: ast.AST

    @property
    def after(self) -> str:
        """The node as it is then."""
        return _text(self.changed)

    @property
    def source(self) -> str:
        """The file as it is then."""
        return _replaced(self.text, self.node, self.changed)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may be changed into."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp() if type(node.op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        case ast.BoolOp():
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield ast.BoolOp(other, node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float() as number):
            yield ast.Constant(number + 1)
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Continue():
            yield ast.Pass()
        case ast.If() | ast.IfExp():
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield ast.Return(ast.Constant(None))


def mutants(file: Path) -> list[Mutant]:
    """All mutants of a file, but for annotations, places marked as equal, logs, and what runs at import."""
    source = file.read_text()
    lines, found = source.splitlines(), []
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for part in [*function.body, *function.args.defaults, *function.args.kw_defaults]
        if part is not None
        for node in ast.walk(part)
    }
    inside -= {id(part) for node in ast.walk(tree) if _logs(node) for part in ast.walk(node)}
    for number, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", 0)
        if id(node) not in inside or EQUAL in lines[line - 1]:
            continue
        for after in changes(node):
            found.append(Mutant(file, source, number, line, _text(node), after))
    return found


def _logs(node: ast.AST) -> bool:
    """Whether it only writes to a log."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return True
    return False


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]


def _replaced(source: str, number: int, after: ast.AST) -> str:
    """The source with one node replaced."""
    tree = ast.parse(source)
    target = next(node for at, node in enumerate(ast.walk(tree)) if at == number)

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return after if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Replace().visit(tree)))


def chosen_tests(file: Path, tree: Path) -> list[str]:
    """The copy's unit tests that speak of the module's package; first those that are about the module."""
    package = ".".join(file.relative_to(ROOT).parts[-3:-1]).removeprefix("operator.")
    texts = {path: _with_helpers(path, tree) for path in sorted((tree / "tests" / "unit").glob("test_*.py"))}
    module = re.compile(rf"\b{package}(\.| import .*){file.stem}\b")
    near = [path for path, text in texts.items() if package in text]
    near.sort(key=lambda path: (file.stem not in path.stem, module.search(texts[path]) is None))
    return [str(path.relative_to(tree)) for path in near]


def _with_helpers(test: Path, tree: Path) -> str:
    """The text of a test file, and of the modules beside the tests that it imports."""
    text = test.read_text()
    names = re.findall(r"^from (tests[\w.]+) ", text, re.MULTILINE)
    helpers = [tree / f"{name.replace('.', '/')}.py" for name in names]
    return "\n".join([text, *(helper.read_text() for helper in helpers if helper.is_file())])


def outcome(file: Path, source: str, tree: Path, limit: float) -> str:
    """Run the tests in a child of this process, on the copy in `tree`, in which `file` has this `source`.

    Returns "alive" if they pass, "noticed" if one fails, "late" if they have not ended after `limit` seconds.
    """
    place = tree / file.relative_to(ROOT)
    original = place.read_text()
    place.write_text(source)
    try:
        child = os.fork()
        if child == 0:
            _test(tree, chosen_tests(file, tree))
        deadline = time.monotonic() + limit
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return "noticed" if status else "alive"
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "late"
            time.sleep(0.02)
    finally:
        place.write_text(original)


def _test(tree: Path, tests: list[str]) -> None:
    """In the child: run the tests and end with their status."""
    import pytest

    os.setsid()
    os.chdir(tree)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.path[:0] = [str(tree), str(tree / "operator")]
    sys.dont_write_bytecode = True
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests]))
    except BaseException:  # noqa: BLE001
        code = 1
    os._exit(code)


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of what the unit tests need."""
    with tempfile.TemporaryDirectory() as name:
        for part in TREE:
            source, target = ROOT / part, Path(name) / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(name) / ".hypothesis")
        yield Path(name)


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("--files", default="", help="only files whose name contains this")
    parser.add_argument("--count", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="of the choice")
    parser.add_argument("--least", type=float, default=0.95, help="the share that must be noticed")
    parsed = parser.parse_args()
    files = [path for pattern in GROUPS[parsed.group] for path in sorted(ROOT.glob(pattern))]
    everything = [mutant for file in files if parsed.files in file.name for mutant in mutants(file)]
    chosen = random.Random(parsed.seed).sample(everything, min(parsed.count, len(everything)))
    # What is not under test is imported once for all.
    for name in ("torch", "yaml", "pydantic", "kubernetes.client", "kopf"):
        importlib.import_module(name)
    outcomes = Counter[str]()
    with copied() as tree:
        began = time.monotonic()
        if outcome(files[0], files[0].read_text(), tree, math.inf) != "alive":
            raise SystemExit("the unit tests fail without any change")
        limit = max(LIMIT, SLACK * (time.monotonic() - began))
        for number, mutant in enumerate(sorted(chosen, key=lambda each: (each.file, each.line)), 1):
            became = outcome(mutant.file, mutant.source, tree, limit)
            outcomes[became] += 1
            if became != "noticed":
                where = f"{mutant.file.relative_to(ROOT)}:{mutant.line}"
                print(f"{became} ({number}): {where}: {mutant.before}  ->  {mutant.after}", flush=True)
    found, late = len(chosen) - outcomes["alive"], outcomes["late"]
    share = found / len(chosen)
    print(f"{found} of {len(chosen)} mutants noticed ({share:.1%}), {late} of them by the time limit")
    print(f"{len(everything)} are possible; seed {parsed.seed}")
    return 0 if share >= parsed.least else 1


if __name__ == "__main__":
    sys.exit(main())
