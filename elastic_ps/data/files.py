"""Files of a data set, local or remote, through fsspec: ranges of bytes, and an index of each file.

The index says where the records of a file are. It is made once, by reading the file, and kept: in a cache of
this host, or beside the file, where all workers find it.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic_ps.errors import UsageError

logger = logging.getLogger(__name__)

Index: TypeAlias = dict[str, npt.NDArray[Any]]
"""Arrays by name."""

BESIDE = "beside"
"""Keep a file's index beside it."""

_NUMBERED = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NAMED = re.compile(r"\{([^{}]*,[^{}]*)\}")
_PATTERN = re.compile(r"[*?[]")
_INDEX = re.compile(r"\.[0-9a-f]{16}\.index$")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_EXPECTED = (
    "Expected paths or URLs of files that fsspec opens, or patterns such as data/*.tar and "
    "s3://bucket/{000..099}.tar. Commands (pipe:...) are not run"
)
_VERSIONS = ("ETag", "etag", "mtime", "Last-Modified", "LastModified", "last_modified", "blob_id", "created")
"""Names that filesystems have for the version of a file. The first one that there is counts."""


class File:
    """A file that is read in ranges. Not thread-safe. A copy in another process opens it by itself.

    Args:
        url: anything that fsspec opens, such as a path, `s3://...` or `https://...`.
        options: for fsspec's filesystem.

    Attributes:
        bytes_read: by this object so far.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url, self._options = url, dict(options)
        self.bytes_read = 0
        self._opened: tuple[Any, str, dict[str, Any]] | None = None
        self._stamp: dict[str, str] = {}  # when it was found; copies in other processes have it, too
        self._process = os.getpid()

    @property
    def _place(self) -> tuple[Any, str, dict[str, Any]]:
        """The filesystem, the path within it, and what the filesystem says of the file."""
        if self._opened is None or self._process != os.getpid():  # fsspec's filesystems do not survive a fork
            self._process = os.getpid()
            filesystem, path = _fsspec().core.url_to_fs(self.url, **self._options)
            self._opened = filesystem, path, filesystem.info(path)
        return self._opened

    @property
    def size(self) -> int:
        """In bytes. Raises UsageError: it is a stream, which has none."""
        size = self._place[2].get("size")
        if size is None:
            raise UsageError(
                f"{self.url} is a stream: its server does not say how long it is, so its records cannot be "
                "found by their offsets. Copy it to a file, or to a server that supports byte ranges"
            )
        return int(size)

    @property
    def version(self) -> str:
        """A text that changes when the file does, as far as its filesystem says so."""
        info = self._place[2]
        return str(next((info[name] for name in _VERSIONS if info.get(name)), ""))

    @property
    def local(self) -> bool:
        """Whether it is on this host, or in memory."""
        return type(self._place[0]).__name__ in ("LocalFileSystem", "MemoryFileSystem")

    def _stamp_now(self) -> dict[str, str]:
        """Return its size, and its version in the words of its filesystem."""
        info = self._place[2]
        return {name: str(info[name]) for name in (*_VERSIONS, "size") if info.get(name)}

    def require_unchanged(self) -> bool:
        """Ask the filesystem for the version again. Returns whether it is known.

        Raises:
            UsageError: the file was written since `require`.
        """
        if not {*_VERSIONS} & {*self._stamp}:
            return False
        filesystem, path, _ = self._place
        filesystem.invalidate_cache(path)
        self._opened = None
        now = self._stamp_now()
        both = [name for name in _VERSIONS if name in now and name in self._stamp]
        if any(now.get(name) != self._stamp.get(name) for name in (*both[:1], "size")):
            raise changed(self.url)
        return bool(both)

    def require(self) -> None:
        """Raise UsageError if there is no such file."""
        try:
            kind = self._place[2].get("type")
        except (FileNotFoundError, ValueError) as error:  # ValueError: fsspec does not know the protocol
            raise UsageError(
                f"there is no file {self.url[:300]} ({str(error)[:300]}). {_EXPECTED}"
            ) from error
        if kind == "directory":
            raise UsageError(f"{self.url} is a folder. Add a pattern, such as {self.url.rstrip('/')}/*")
        self._stamp = self._stamp_now()

    def read(self, start: int, stop: int) -> bytes:
        """Some bytes. Raises UsageError: the file is shorter, or its server does not know ranges."""
        filesystem, path, _ = self._place
        if start >= stop:
            return b""
        found = bytes(filesystem.cat_file(path, start=start, end=stop))
        self.bytes_read += len(found)
        if len(found) > stop - start:
            raise UsageError(
                f"{self.url} is a stream: bytes {start} to {stop} were asked for, and its server sent "
                f"{len(found)} bytes. Copy it to a file, or to a server that supports byte ranges"
            )
        if len(found) < stop - start:
            raise changed(self.url)
        return found

    def beside(self, suffix: str) -> File:
        """The file with this suffix in addition, which goes before the query of a URL."""
        path, mark, query = self.url.partition("?") if _is_of_http(self.url) else (self.url, "", "")
        return File(path + suffix + mark + query, self._options)

    def exists(self) -> bool:
        """Whether there is such a file."""
        with suppress(OSError):
            return self.size >= 0
        return False

    def write(self, content: bytes) -> None:
        """Write the whole file. Raises OSError, or what else its filesystem raises."""
        filesystem, path = _fsspec().core.url_to_fs(self.url, **self._options)
        if type(filesystem).__name__ == "LocalFileSystem":
            _replace(Path(path), content)
        else:
            filesystem.pipe_file(path, content)
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}


class RangeFile(io.RawIOBase):
    """A `File` as Python's file object, for libraries that read from one."""

    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._file.read(self._at, min(self._file.size, self._at + len(buffer)))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def files_of(urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: Any) -> list[File]:
    """The files of some URLs, in this order; those of a pattern in the order of their names.

    Patterns are fsspec's (`*`, `a?.tar`, `[ab].tar`), `{000..012}` for numbers and `{train,test}` for names.

    Raises:
        UsageError: there is none for one of them, or what is given is not a file.
    """
    given = [os.fspath(urls)] if isinstance(urls, str | os.PathLike) else [os.fspath(url) for url in urls]
    found: list[str] = []
    if not given:
        raise UsageError(f"the list of files is empty. {_EXPECTED}")
    for url in (each for one in given for each in _expanded(one)):
        matching = _matching(url, options) if _PATTERN.search(url) else [url]
        if not matching:
            raise UsageError(f"no file matches {url[:300]}. {_EXPECTED}")
        found += matching
    files = [File(url, options) for url in found]
    for file in files:
        file.require()
    return files


def index_of(file: File, kind: str, build: Callable[[], Index], keep: str | os.PathLike[str] | None) -> Index:
    """The index of a file: the one beside it, one of the cache, or a new one, which is kept.

    Args:
        kind: what kind of index it is, with everything that it depends on but the file.
        build: makes it.
        keep: `BESIDE`, or the folder of the cache; None: `elastic-ps/index` in the user's cache.
    """
    beside = file.beside(f".{key_of(kind.encode())}.index")
    with suppress(UsageError):  # another process replaces it
        if beside.exists() and (found := _loaded(beside.read(0, beside.size), str(file.size))) is not None:
            return found
    cached = _cache(keep) / f"{key_of(f'{file.url}/{kind}'.encode())}.index"
    stamp = f"{file.size}/{file.version}"
    with suppress(OSError):
        if (found := _loaded(cached.read_bytes(), stamp)) is not None:
            return found
    made = build()
    if keep == BESIDE:
        beside.write(_saved(made, str(file.size)))
        return made
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _replace(cached, _saved(made, stamp))
    except OSError as error:
        logger.warning("the index of %s is not stored, so each process builds it: %s", file.url, error)
    return made


def digest_of(index: Index, size: int) -> str:
    """A digest that identifies the content of a file, by its index."""
    sums = [zlib.crc32(np.ascontiguousarray(index[name]).tobytes()) for name in sorted(index)]
    return f"{size}/{sums}"


def refuse_compressed(file: File) -> None:
    """Raise UsageError if a file is compressed as a whole."""
    begin = file.read(0, min(6, file.size))
    for magic, name in _COMPRESSED.items():
        if begin.startswith(magic):
            raise UsageError(
                f"{file.url} is compressed with {name}, so it can only be read as a stream, and its records "
                "have no offsets. Decompress it, or compress the records in it"
            )


def changed(url: str) -> UsageError:
    """The error for a file that is not what its index says."""
    return UsageError(
        f"{url} has changed since its index was made. The records of a job must stay as they are. Write the "
        "changed data to files with other names, and start a new job with them"
    )


def _expanded(url: str) -> list[str]:
    """A URL for each of the numbers and names in braces."""
    if found := _NUMBERED.search(url):
        first, last = found.groups()
        if int(first) > int(last):
            raise UsageError(f"{url[:300]} names no file: {first} is more than {last}")
        inside = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    elif found := _NAMED.search(url):
        inside = found.group(1).split(",")
    else:
        return [url]
    return [each for one in inside for each in _expanded(url[: found.start()] + one + url[found.end() :])]


def _matching(url: str, options: Any) -> list[str]:
    """The files of a pattern; the URL itself if it is a query, or the name of a file."""
    if "*" not in url and _is_of_http(url):
        return [url]
    try:
        filesystem, path = _fsspec().core.url_to_fs(url, **options)
    except ValueError as error:
        raise UsageError(f"{url[:300]} is not a URL of files: {error}. {_EXPECTED}") from error
    if "*" not in url and filesystem.exists(path):
        return [url]
    found = (each for each in sorted(filesystem.glob(path)) if not _INDEX.search(each))
    return [filesystem.unstrip_protocol(each) for each in found]


def _is_of_http(url: str) -> bool:
    return "://" in url and url.rpartition("::")[2].startswith("http")


def _cache(keep: str | os.PathLike[str] | None) -> Path:
    if keep is None or keep == BESIDE:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-ps" / "index"
    return Path(keep)


def key_of(content: bytes) -> str:
    """A short name for something that is identified by these bytes."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Write a file, so that nobody reads a part of it. Its suffix is that of an index."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.name)
    with os.fdopen(handle, "wb") as unfinished:
        unfinished.write(content)
        os.fchmod(handle, 0o644)  # other users train on the files, too
    Path(temporary).replace(path)


def _saved(index: Index, stamp: str) -> bytes:
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {"stamp": np.array(stamp), **index}
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _loaded(content: bytes, stamp: str) -> Index | None:
    """The index, if it is one of a file with this stamp."""
    with suppress(ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile):
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        if str(arrays.pop("stamp")) == stamp:
            return arrays
    return None


def _fsspec() -> Any:
    try:
        import fsspec.core
    except ImportError as error:
        raise UsageError("reading files of records needs fsspec: pip install 'elastic-ps[data]'") from error
    return fsspec
