"""Change the code in small ways and see whether the unit tests notice.

`python tools/mutants.py core --count 60` takes 60 places of `elastic_ps/core` by chance, and for each of them
runs the unit tests that call its function on a copy of the project in which that place is wrong. It prints
the mutants that nothing noticed, and the share that was. A survivor is a missing test, or the changed code
means the same (then the line ends with `# mutant: equal`, and is left out). After R. DeMillo, R. Lipton and
F. Sayward, "Hints on Test Data Selection", Computer, 1978.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.noticing import Project, Reach, copied, noticed  # noqa: E402

GROUPS = {
    "core": ["elastic_ps/core/*.py"],
    "data": ["elastic_ps/data/*.py"],
    "server": [
        "elastic_ps/server/**/*.py",
        *(
            f"elastic_ps/{name}.py"
            for name in ("tensors/store", "tensors/spread", "codec/decoder", "codec/values")
        ),
    ],
    "operator": ["operator/elastic_operator/*.py"],
    "decisions": [
        f"operator/elastic_operator/{name}.py"
        for name in ("reconcile", "verdict", "status", "builders", "failures", "renewal")
    ],
}
EQUAL = "# mutant: equal"
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
    """One change: in the `text` of `file`, node number `node`, as `ast.walk` counts, becomes `changed`.

    `function` are the lines of the function around it, the outermost one.
    """

    file: Path
    text: str
    node: int
    line: int
    function: range
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
    inside = dict[int, range]()
    for function in ast.walk(tree):  # the outermost first
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            begin = min(part.lineno for part in (function, *function.decorator_list))
            lines_of = range(begin, (function.end_lineno or begin) + 1)
            for place in [*function.body, *function.args.defaults, *function.args.kw_defaults]:
                for inner in ast.walk(place) if place is not None else ():
                    inside.setdefault(id(inner), lines_of)
    for node in ast.walk(tree):
        for left_out in (node if _logs(node) else None, getattr(node, "annotation", None)):
            for part in ast.walk(left_out) if left_out is not None else ():
                inside.pop(id(part), None)
    for number, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", 0)
        if id(node) not in inside or EQUAL in lines[line - 1]:
            continue
        for after in changes(node):
            found.append(Mutant(file, source, number, line, inside[id(node)], _text(node), after))
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
    """The test files below `tree` that speak of the module's package."""
    parts = [part for part in file.relative_to(ROOT).parts[:-1] if part != "operator"]
    package = ".".join(parts[:2])
    tests = sorted((tree / "tests" / "unit").rglob("test_*.py"))
    return [str(path.relative_to(tree)) for path in tests if package in _with_helpers(path, tree)]


def _with_helpers(test: Path, tree: Path) -> str:
    """The text of a test file, and of the modules beside the tests that it imports."""
    text = test.read_text()
    names = re.findall(r"^from (tests[\w.]+) ", text, re.MULTILINE)
    helpers = [tree / f"{name.replace('.', '/')}.py" for name in names]
    return "\n".join([text, *(helper.read_text() for helper in helpers if helper.is_file())])


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("--files", default="", help="only files whose name contains this")
    parser.add_argument("--count", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="of the choice; one choice for each")
    parser.add_argument("--least", type=float, default=0.95, help="the share that must be noticed")
    parsed = parser.parse_args()
    files = [path for pattern in GROUPS[parsed.group] for path in sorted(ROOT.glob(pattern))]
    everything = [mutant for file in files if parsed.files in file.name for mutant in mutants(file)]
    # What is not under test is imported once for all.
    for name in ("torch", "yaml", "pydantic", "grpc", "hypothesis", "kubernetes.client", "kopf"):
        importlib.import_module(name)
    with copied(ROOT) as project:
        reach = project.reach(chosen_tests(files[0], ROOT))
        shares = [sampled(project, reach, everything, parsed.count, seed) for seed in parsed.seed]
    return 0 if min(shares) >= parsed.least else 1


def sampled(project: Project, reach: Reach, everything: Sequence[Mutant], count: int, seed: int) -> float:
    """Try so many of these mutants, taken by chance; print those that nothing noticed.

    Returns the share that was noticed.
    """
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    outcomes = Counter[str]()
    for mutant in sorted(chosen, key=lambda each: (each.file, each.line)):
        file, plain = str(mutant.file.relative_to(ROOT)), ast.unparse(ast.parse(mutant.text))
        became = noticed(project, reach, file, plain, mutant.source, mutant.function)
        outcomes[became] += 1
        if became != "noticed":
            print(f"{became}: {file}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    found, late = len(chosen) - outcomes["alive"], outcomes["late"]
    share = found / len(chosen)
    print(f"{found} of {len(chosen)} mutants noticed ({share:.1%}), {late} of them by the time limit")
    print(f"{len(everything)} are possible; seed {seed}", flush=True)
    return share


if __name__ == "__main__":
    sys.exit(main())
