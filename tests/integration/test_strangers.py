"""A server with certificates answers no stranger, however many calls it gets."""

from __future__ import annotations

from pathlib import Path

from benchmarks.strangers import measure


def test_no_stranger_is_answered(tmp_path: Path) -> None:
    """A small share of what `make soak` tries."""
    result = measure(tmp_path, 1000)
    assert result.calls >= 1000
    assert set(result.answered.values()) == {0}, result.answered
    assert result.reached == 0
