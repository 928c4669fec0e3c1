"""What a benchmark found: our figure beside a competitor's, the same in each script's `--json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Figure(NamedTuple):
    """One comparison.

    Attributes:
        what: what was measured, for a reader who has not seen the script.
        ours, theirs: the medians, in `unit`.
        competitor: whose the second one is.
        more: more of it is better, as of a rate.
    """

    what: str
    ours: float
    theirs: float
    unit: str
    competitor: str
    more: bool = False

    @property
    def ratio(self) -> float:
        """Ours to theirs."""
        return self.ours / self.theirs


def write(path: Path | None, figures: Iterable[Figure]) -> None:
    """Write them as JSON; nothing if there is no `path`."""
    if path is not None:
        path.write_text(json.dumps([figure._asdict() for figure in figures], indent=1) + "\n")


def read(path: Path) -> list[Figure]:
    """What `write` has written."""
    return [Figure(**figure) for figure in json.loads(path.read_text())]
