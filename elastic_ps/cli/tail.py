"""What a job's processes print, as it comes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path


class Tail:
    """The lines that are added to log files.

    Args:
        directory: where the files are. Some may come later.
        pattern: which of them, as for `Path.glob`. Of several, each line begins with its file's name.
    """

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory, self._pattern = directory, pattern
        self._places: dict[Path, tuple[int, int]] = {}  # where a line begins, and how far it was read

    def new(self, *, last: bool) -> Iterator[str]:
        """The lines that were added since the previous call. Raises OSError.

        Args:
            last: also a line that has no end yet.
        """
        for path in sorted(self._directory.glob(self._pattern), key=_natural):
            with path.open("rb") as file:
                begin, read = self._places.get(path, (0, 0))
                file.seek(read)
                more = file.readline()
                if not (more.endswith(b"\n") or last):  # a progress bar's line may have no end for hours
                    self._places[path] = begin, read + len(more)
                    continue
                file.seek(begin)
                for line in file:
                    if not (line.endswith(b"\n") or last):
                        self._places[path] = begin, begin + len(line)
                        break
                    begin += len(line)
                    self._places[path] = begin, begin
                    prefix = "" if self._pattern == path.name else f"{path.stem:<10}| "
                    yield prefix + line.decode(errors="replace").rstrip("\n")

    def shown(self, *, last: bool = False) -> list[str]:
        """`new`, of which a progress bar's line is as it was at its end; empty if a file cannot be read."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines.extend(self.new(last=last))
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def _natural(path: Path) -> tuple[str, int]:
    name, _, number = path.stem.rpartition("-")
    return name, int(number) if re.fullmatch(r"\d+", number) else 0
