"""The pictures of `docs/design/ways.md` name modules, classes and functions that exist."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import elastic_ps

PAGE = (Path(__file__).parents[3] / "docs" / "design" / "ways.md").read_text()
PACKAGES = ("codec", "collectives", "worker", "server", "data", "transport")


@pytest.fixture(scope="module")
def modules() -> dict[str, list[ModuleType]]:
    """The modules of these packages by their last names."""
    found: dict[str, list[ModuleType]] = {}
    for package in PACKAGES:
        top = importlib.import_module(f"{elastic_ps.__name__}.{package}")
        found.setdefault(package, []).append(top)
        for each in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
            name = each.name.rpartition(".")[2]
            if name != "__main__":
                found.setdefault(name, []).append(importlib.import_module(each.name))
    return found


def test_participants_are_modules(modules: dict[str, list[ModuleType]]) -> None:
    participants = re.findall(r"^ *participant (?:\w+ as )?(?:server: )?(.+)$", PAGE, re.MULTILINE)
    named = {name for text in participants for name in re.split(r", | or ", text)}
    assert {"runtime", "push_pull", "shard_service", "all_reduce", "records"} <= named
    assert named - modules.keys() == set()


def test_what_is_named_with_a_dot_exists(modules: dict[str, list[ModuleType]]) -> None:
    classes = {
        name: value for each in modules.values() for module in each for name, value in vars(module).items()
    }
    named = set(re.findall(r"\b([A-Za-z_]+)\.([A-Za-z_]+)(?![\w/.])", PAGE))
    named -= {("optimizer", "step"), ("worker", "processes")}  # what a script and a job say
    assert {("Membership", "join_again"), ("flat", "publish"), ("strategy", "Queue")} <= named
    for owner, name in named:
        places = [*modules.get(owner, []), *([classes[owner]] if owner in classes else [])]
        for module in modules.get(owner, []):
            values = vars(module).values()
            places += [v for v in values if isinstance(v, type) and v.__module__ == module.__name__]
        assert any(hasattr(place, name) for place in places), f"{owner}.{name}"
