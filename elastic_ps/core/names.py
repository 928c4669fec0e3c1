"""Checks the names that scripts give to tensors and reported values."""

from __future__ import annotations

LONGEST_NAME = 200
"""The longest name, in characters."""


def is_name(given: object) -> bool:
    """Whether a name is valid."""
    return isinstance(given, str) and 0 < len(given) <= LONGEST_NAME and given.isprintable()
