"""Numbers of things in messages."""

from __future__ import annotations


def amount(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
