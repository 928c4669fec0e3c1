"""Records in text files: each line is one, without its end."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from elastic_ps.data.blocks import BlockDataset, Transform
from elastic_ps.data.files import File, Index, changed, digest_of, files_of, index_of, refuse_compressed
from elastic_ps.errors import UsageError

_CHUNK = 8 << 20


class TextDataset(BlockDataset):
    """The lines of text files in UTF-8, as `str`. Making it reads the files, unless there is an index.

    Args:
        urls: of the files; see `files_of`.
        transform: makes of a line what the script gets, for example `json.loads`.
        block_bytes: how large a block is at most, unless one line is larger. Blocks are in one file.
        index: where the index is kept; see `index_of`.
        options: for fsspec's filesystem.

    Raises:
        UsageError: a file is compressed, or has no line.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        transform: Transform | None = None,
        block_bytes: int = 8 << 20,
        index: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        files, kind = files_of(urls, options or {}), f"lines/{block_bytes}"
        self._indexes = [index_of(file, kind, partial(_indexed, file, block_bytes), index) for file in files]
        self._blocks = [
            (number, block)
            for number, found in enumerate(self._indexes)
            for block in range(len(found["crcs"]))
        ]
        sizes = [int(size) for found in self._indexes for size in np.diff(found["firsts"])]
        digests = [digest_of(each, file.size) for each, file in zip(self._indexes, files, strict=True)]
        super().__init__(files, sizes, digests, transform)

    def _read(self, block: int) -> bytes:
        number, inside = self._blocks[block]
        file, index = self._files[number], self._indexes[number]
        first, last = index["firsts"][inside : inside + 2]
        content = file.read(int(index["starts"][first]), int(index["starts"][last]))
        if zlib.crc32(content) != index["crcs"][inside]:
            raise changed(file.url)
        return content

    def _records(self, opened: bytes, block: int, places: Sequence[int], /) -> list[Any]:
        number, inside = self._blocks[block]
        index = self._indexes[number]
        first = int(index["firsts"][inside])
        begin = int(index["starts"][first])
        result: list[Any] = []
        for place in places:
            start, stop = (int(each) - begin for each in index["starts"][first + place : first + place + 2])
            try:
                line = opened[start:stop].decode()
            except UnicodeDecodeError as error:
                url = self._files[number].url
                raise UsageError(
                    f"{url} has a line that is not in UTF-8: {error}. Convert the file"
                ) from error
            result.append(line.removesuffix("\n").removesuffix("\r"))
        return result


def _indexed(file: File, block_bytes: int) -> Index:
    """Find where lines start, which lines blocks begin with, and the sums of the blocks' bytes."""
    refuse_compressed(file)
    ends = [np.zeros(1, dtype=np.int64)]
    for at in range(0, file.size, _CHUNK):
        chunk = np.frombuffer(file.read(at, min(file.size, at + _CHUNK)), dtype=np.uint8)
        ends.append(np.flatnonzero(chunk == ord("\n")) + at + 1)
    starts = np.concatenate(ends)
    if starts[-1] != file.size:
        starts = np.append(starts, file.size)  # the last line has no end
    firsts, crcs = [0], []
    while firsts[-1] < len(starts) - 1:
        first = firsts[-1]
        last = int(np.searchsorted(starts, starts[first] + block_bytes, side="right")) - 1
        firsts.append(max(first + 1, last))
        crcs.append(zlib.crc32(file.read(int(starts[first]), int(starts[firsts[-1]]))))
    return {
        "starts": starts,
        "firsts": np.array(firsts, dtype=np.int64),
        "crcs": np.array(crcs, dtype=np.uint32),
    }
