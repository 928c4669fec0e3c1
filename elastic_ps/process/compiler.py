"""Delays the import of torch's compiler from the first optimizer to its first use.

`torch.optim` imports `torch._dynamo` to tell the compiler what not to trace. That takes two seconds of CPU
time and 70 MiB in each worker and parameter server, and hardly any of them compiles. Until the module is used
for something else, a stand-in remembers these calls.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch  # noqa: F401 (while it is imported itself, nothing may stand in)

NAME = "torch._dynamo"
_TOLD = "__dynamo_disable"
"""The attribute of a function in which `torch._compile` keeps the compiled one."""


def defer() -> None:
    """Let the compiler be imported when it is needed. Does nothing if it is imported already."""
    sys.modules.setdefault(NAME, _StandIn(NAME))


class _StandIn(ModuleType):
    """Answers the two calls of `torch.optim`, and loads the real module for anything else."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._told: list[Callable[..., Any]] = []

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Postpone calls of `torch._compile` until the compiler is loaded; answer others."""
        if fn is None or options != {"wrapping": False}:
            return _make_way(self).disable(fn, recursive, **options)
        self._told.append(fn)
        return fn

    def graph_break(self) -> None:
        """Has no effect where nothing is compiled."""

    def __getattr__(self, name: str) -> Any:
        # Code that inspects all modules reads __file__ and the like; imports of submodules need __path__.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_make_way(self), name)


def _make_way(stand_in: _StandIn) -> Any:
    """Import the module, and repeat the postponed calls."""
    if sys.modules.get(NAME) is stand_in:
        del sys.modules[NAME]
        for fn in stand_in._told:  # noqa: SLF001 (a class of this module)
            with contextlib.suppress(AttributeError):
                delattr(fn, _TOLD)
    return importlib.import_module(NAME)
