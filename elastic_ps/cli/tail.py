"""Follows the output of a job's processes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path


class Tail:
    """The new lines of log files.

    Args:
        directory: the directory of the files, some of which may appear later.
        pattern: selects files, as for `Path.glob`. With several, each line begins with its file's name.
    """

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory, self._pattern = directory, pattern
        self._places: dict[Path, tuple[int, int]] = {}  # the beginning of a line, and how far it was read

    def new(self, *, last: bool, final: bool = False) -> Iterator[str]:
        """The lines that were added since the previous call. Raises OSError.

        Args:
            last: also return a line without an end.
            final: return only the final state of a progress bar's line.
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
                    text = line.decode(errors="replace").rstrip("\n")
                    yield prefix + (text.rstrip("\r").rpartition("\r")[2] if final else text)

    def shown(self, *, last: bool = False) -> list[str]:
        """`new`, with only the final state of a progress bar's line; empty if a file cannot be read."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines.extend(self.new(last=last, final=True))
        return lines


def _natural(path: Path) -> tuple[str, int]:
    name, _, number = path.stem.rpartition("-")
    return name, int(number) if re.fullmatch(r"\d+", number) else 0
