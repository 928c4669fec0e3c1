"""The names that scripts give to tensors and to values that they report."""

from __future__ import annotations

LONGEST_NAME = 200
"""Characters of a name."""


def is_name(given: object) -> bool:
    """Whether something can have this name."""
    return isinstance(given, str) and 0 < len(given) <= LONGEST_NAME and given.isprintable()
