"""Torch's compiler is imported when it is used, not when the first optimizer is made.

`torch.optim` imports `torch._dynamo` to tell the compiler what not to trace. That takes two seconds of
processor time and 70 MiB, in a parameter server that comes back as in a worker that joins, and hardly any of
them compiles. Until something else is asked of that module, a stand-in remembers what it was told.
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
"""Where `torch._compile` keeps, on a function, what the compiler has made of it."""


def defer() -> None:
    """From now on the compiler is imported when it is needed. Nothing happens if it is there already."""
    sys.modules.setdefault(NAME, _StandIn(NAME))


class _StandIn(ModuleType):
    """Answers the two calls of `torch.optim`; for all else it makes way for the module itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._told: list[Callable[..., Any]] = []

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """What `torch._compile` asks is put off until the compiler is there; others want an answer."""
        if fn is None or options != {"wrapping": False}:
            return _make_way(self).disable(fn, recursive, **options)
        self._told.append(fn)
        return fn

    def graph_break(self) -> None:
        """Means nothing where nothing is compiled."""

    def __getattr__(self, name: str) -> Any:
        # Who looks through all modules asks for __file__ and the like; a submodule's import needs __path__.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_make_way(self), name)


def _make_way(stand_in: _StandIn) -> Any:
    """Import the module itself, which is then asked again about the functions that were put off."""
    if sys.modules.get(NAME) is stand_in:
        del sys.modules[NAME]
        for fn in stand_in._told:  # noqa: SLF001 (a class of this module)
            with contextlib.suppress(AttributeError):
                delattr(fn, _TOLD)
    return importlib.import_module(NAME)
