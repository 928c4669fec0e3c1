"""The blocks of docs/tutorial.md, so that tests do what the page has the reader do."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"


def blocks(language: str) -> list[str]:
    """All blocks of a language, in the page's order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.S | re.M)


def commands(word: str) -> str:
    """The one block of shell commands that has this word."""
    (found,) = (block for block in blocks("sh") if word in block)
    return found
