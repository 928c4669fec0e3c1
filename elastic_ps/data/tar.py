"""Records in tar files, in webdataset's form: consecutive members of one name are one record.

`0017.jpg` and `0017.cls` are the record `{"__key__": "0017", "jpg": b"...", "cls": b"..."}`. The part of a
file's name after the first dot is the name of a field.
"""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from elastic_ps.data.blocks import BlockDataset, Transform
from elastic_ps.data.files import (
    File,
    Index,
    RangeFile,
    changed,
    digest_of,
    files_of,
    index_of,
    refuse_compressed,
)
from elastic_ps.errors import UsageError

_HEADER = 512
"""The bytes before a member's content."""

_SUMMED = 1 << 20
"""How many bytes of a member's content are summed up, so that the index of a tar of videos is made soon."""


class TarDataset(BlockDataset):
    """The records of tar files. Making it reads the members' headers, unless there is an index.

    Args:
        urls: of the files; see `files_of`.
        transform: makes of a record what the script gets.
        block_bytes: how large a block is at most, unless one record is larger. Blocks are in one file.
        index: where the index is kept; see `index_of`.
        options: for fsspec's filesystem.

    Raises:
        UsageError: a file is not a tar, is compressed or cut off, or a record has two fields of one name.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        transform: Transform | None = None,
        block_bytes: int = 32 << 20,
        index: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        files = files_of(urls, options or {})
        sizes: list[int] = []
        self._blocks: list[tuple[int, int, int]] = []  # the file, and the first and last member but one
        self._indexes = [index_of(file, "tar/4", partial(_indexed, file), index) for file in files]
        for number, found in enumerate(self._indexes):
            firsts = np.append(np.flatnonzero(found["begins"]), len(found["begins"]))
            ends = (found["starts"] + found["sizes"])[firsts[1:] - 1]
            starts = found["starts"][firsts[:-1]] - _HEADER
            first = 0
            while first < len(starts):
                last = int(np.searchsorted(ends, starts[first] + block_bytes, side="right"))
                last = max(first + 1, last)
                self._blocks.append((number, int(firsts[first]), int(firsts[last])))
                sizes.append(last - first)
                first = last
        digests = [digest_of(each, file.size) for each, file in zip(self._indexes, files, strict=True)]
        super().__init__(files, sizes, digests, transform)

    def _read(self, block: int) -> bytes:
        number, first, last = self._blocks[block]
        file, index = self._files[number], self._indexes[number]
        begin, end = _bounds(index, first, last)
        content = file.read(begin, end)
        numbers = (index[name][first:last].tolist() for name in ("starts", "sizes", "crcs"))
        for start, size, crc in zip(*numbers, strict=True):
            at = start - begin
            if zlib.crc32(content[at - _HEADER : at + min(size, _SUMMED)]) != crc:
                raise changed(file.url)
        if index["sizes"][first:last].max() > _SUMMED:
            file.require_unchanged()
        return content

    def _records(self, opened: bytes, block: int, places: Sequence[int], /) -> list[Any]:
        number, first, last = self._blocks[block]
        index = self._indexes[number]
        begin, _ = _bounds(index, first, last)
        firsts = np.append(first + np.flatnonzero(index["begins"][first:last]), last).tolist()
        result: list[Any] = []
        for place in places:
            record: dict[str, Any] = {}
            for member in range(firsts[place], firsts[place + 1]):
                record["__key__"], field = str(index["names"][member]).split("\0")
                start = int(index["starts"][member]) - begin
                record[field] = opened[start : start + int(index["sizes"][member])]
            result.append(record)
        return result


def _bounds(index: Index, first: int, last: int) -> tuple[int, int]:
    """The bytes of some members, from the first one's header on."""
    return int(index["starts"][first]) - _HEADER, int(index["starts"][last - 1] + index["sizes"][last - 1])


def _indexed(file: File) -> Index:
    """Find where each member's content is, the sum of how it begins, and whether a record begins with it."""
    refuse_compressed(file)
    names: list[str] = []
    numbers: list[tuple[int, int, int, bool]] = []
    last, fields = None, set[str]()
    for name, start, size, crc in _members(file):
        folder, _, own = name.rpartition("/")
        stem, _, field = own.partition(".")
        field, key = field.lower(), f"{folder}/{stem}" if folder else stem
        if not stem or not field or own.startswith("__"):
            continue  # a folder's notes: webdataset's, or macOS's, whose tar puts ._x.jpg before x.jpg
        if key != last:
            last, fields = key, set()
        elif field in fields:
            raise UsageError(
                f"{file.url}: the record {key} has two files for the field {field}; their names must differ "
                "in more than case"
            )
        numbers.append((start, size, crc, not fields))
        fields.add(field)
        names.append(f"{key}\0{field}")
    starts, sizes, crcs, begins = zip(*numbers, strict=True) if numbers else ((), (), (), ())
    return {
        "names": np.array(names, dtype=np.str_),
        "starts": np.array(starts, dtype=np.int64),
        "sizes": np.array(sizes, dtype=np.int64),
        "crcs": np.array(crcs, dtype=np.uint32),
        "begins": np.array(begins, dtype=np.bool_),
    }


def _members(file: File) -> Iterator[tuple[str, int, int, int]]:
    """The name of each file in a tar, where its content begins, its size, and the sum of how it begins."""
    with io.BufferedReader(RangeFile(file), 1 << 16 if file.local else 1 << 23) as source:
        try:
            with tarfile.open(fileobj=source, mode="r:") as tar:
                for member in tar:
                    if not member.isreg():
                        continue
                    if member.issparse():
                        raise UsageError(
                            f"{member.name} in {file.url} is a sparse file, of which a tar has parts only. "
                            "Make the tar without --sparse"
                        )
                    if member.offset_data + member.size > file.size:
                        raise tarfile.ReadError("it is truncated")
                    source.seek(member.offset_data - _HEADER)
                    crc = zlib.crc32(source.read(_HEADER + min(member.size, _SUMMED)))
                    yield member.name, member.offset_data, member.size, crc
        except tarfile.TarError as error:
            raise UsageError(f"{file.url} is not a readable tar file: {error}") from error
