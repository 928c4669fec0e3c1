"""Finds and reads the files of a data set. Errors name the file."""

from __future__ import annotations

import difflib
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ps.errors import InvalidModel

GZIP = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of a data set's files.

    Attributes:
        name: the name of the data set.
        page: the address of the page that offers them.
        archives: names of the archives that hold them.
    """

    name: str
    page: str
    archives: Sequence[str] = ()

    @property
    def hint(self) -> str:
        """A sentence for the end of a message."""
        return f"The files of {self.name} come from {self.page}"

    def check_directory(self, directory: Path) -> None:
        """Raise InvalidModel unless this is a directory."""
        if not directory.is_dir():
            found = "is a file" if directory.exists() else "does not exist"
            raise InvalidModel(
                f"{directory} {found}; expected the directory with the files of {self.name}. {self.hint}"
            )

    def missing(self, name: str, places: Sequence[Path], *, known: Sequence[str]) -> InvalidModel:
        """The exception if none of these directories, which need not exist, has a file of this name.

        Args:
            known: the names of all files of the data set. A file with another name may have been renamed.
        """
        there = {path.name: path for place in places if place.is_dir() for path in sorted(place.iterdir())}
        packed = [there[archive] for archive in self.archives if archive in there]
        near = difflib.get_close_matches(name, there.keys() - set(known), n=1, cutoff=0.75)
        if packed:
            advice = f"Unpack {packed[0]}"
        elif near:
            advice = f"There is {there[near[0]]}: if it is the same file, rename it to {name}"
        else:
            advice = self.hint
        searched = " or ".join(str(place) for place in places if place.is_dir())
        return InvalidModel(f"{self.name}: there is no file {name} in {searched}. {advice}")

    def wrong(self, path: Path, found: str) -> InvalidModel:
        """The exception for a wrong file. `found` says what it is and what was expected."""
        return InvalidModel(f"{path} is not a file of {self.name}: {found}. {self.hint}")

    def read(self, path: Path) -> bytes:
        """The content of a file, unpacked if it is packed by gzip.

        Raises:
            InvalidModel: it cannot be read, or the packed data is truncated or damaged.
        """
        try:
            data = path.read_bytes()
            return gzip.decompress(data) if data.startswith(GZIP) else data
        except EOFError as error:
            raise self.wrong(path, "it is truncated: the compressed data ends too early") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.wrong(path, f"its compressed data is damaged: {error}") from error
        except OSError as error:
            raise InvalidModel(f"cannot read {path}: {error.strerror}") from error
