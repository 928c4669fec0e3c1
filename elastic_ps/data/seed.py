"""Seeds: another one on each worker, or the same on all, and the same when a step is computed again."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_everything(base: int, *, worker: int, version: int, local: int = 0, process: int = 0) -> int:
    """Seed torch (all devices), `random`, and numpy if it is loaded; returns the seed.

    The seed is a hash of the numbers, so that it differs between workers and versions.

    Args:
        local: the steps that the worker has made by itself since that version.
        process: the rank of the worker's process.
    """
    text = f"{base}/{worker}/{version}" + (f"/{local}" if local else "") + (f"/p{process}" if process else "")
    seed = seed_of(text)
    torch.manual_seed(seed)
    _seed_python(seed)
    return seed


class OwnRandom:
    """A separate state of torch's CPU generator, of `random`, and of numpy's if it is loaded.

    Code within `in_force` and other code draw from the same generators without influence on each other. Not
    thread-safe: the generators are those of the whole process.
    """

    def __init__(self) -> None:
        self._state: tuple[Any, ...] | None = None  # None: it was never in force

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within this, the generators go on from where they were at the end of the last time."""
        others = _state()
        if self._state is not None:
            _restore(self._state)
        try:
            yield
        finally:
            self._state = _state()
            _restore(others)

    def seed(self, text: str) -> None:
        """Begin with the numbers that follow from `text`. To be called within `in_force`."""
        seed = seed_of(text)
        torch.default_generator.manual_seed(seed)
        _seed_python(seed)


def seed_of(text: str) -> int:
    """A seed of 63 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _seed_python(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _state() -> tuple[Any, ...]:
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return torch.default_generator.get_state(), random.getstate(), numpy


def _restore(state: tuple[Any, ...]) -> None:
    of_torch, of_python, of_numpy = state
    torch.default_generator.set_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
