"""The page of `docs/reference` about the code itself: its packages and its state machines."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_ps.core import consistency, stages, working
from elastic_ps.core.transitions import Transitions
from elastic_ps.data import states

ROOT = Path(__file__).parents[1]
_PACKAGES = """\
# Packages and states

## Packages

A package imports only from the rows below its own, and from modules of the package around it. The
docstring of each module says why it exists.

| package | content |
| --- | --- |
"""
_STATES = """
## States

A state machine is an enum and a table of what can happen in each state (`core.transitions`). Anything else
raises `ImpossibleTransition`. These pictures show the tables.
"""
MACHINES: Mapping[str, Transitions[Any, Any]] = {
    "A round (`core.consistency`)": consistency.PHASES,
    "A worker in its job, and its step (`core.working`)": working.WORKER,
    "A worker's presence in the rounds (`data.states`)": states.PRESENCES,
    "The place of a worker's script in its loop over epochs (`data.states`)": states.LOOPS,
    "The last batch that the script got (`data.states`)": states.HANDS,
    "The model, which the first worker or a checkpoint brings (`core.stages`)": stages.STAGES,
    "Shard 0, which makes versions while it is RUNNING (`core.stages`)": stages.COURSES,
    "Whether the shards know the workers of the open round (`core.stages`)": stages.ORDER_STATES,
    "The standby of a shard (`core.stages`)": stages.STANDBY_STATES,
}


def internals_page() -> str:
    """The packages and the states."""
    pictures = (f"\n### {title}\n\n{table.picture()}\n" for title, table in MACHINES.items())
    return _PACKAGES + "".join(_packages()) + _STATES + "".join(pictures)


def _packages() -> Iterator[str]:
    """A row for each package, and its own packages, in the order of the layers that `make check` enforces."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    inside = {name: contract["layers"] for contract in contracts for name in contract.get("containers", ())}
    for name in _modules(contracts[0]["layers"]):
        yield _row(name)
        parts = (f"{name}.{part}" for part in _modules(inside.get(name, ())))
        yield from (_row(part) for part in parts if _path(part).is_dir())


def _modules(layers: Iterable[str]) -> list[str]:
    return [name for layer in layers for name in layer.split(" | ")]


def _path(name: str) -> Path:
    return ROOT / name.replace(".", "/")


def _row(name: str) -> str:
    path = _path(name)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    said = ast.get_docstring(ast.parse(file.read_text())) or ""
    first = " ".join(said.partition("\n\n")[0].split()).replace("|", "&#124;")
    return f"| `{name.partition('.')[2]}` | {first} |\n"
