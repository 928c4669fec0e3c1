"""A data set that is read block by block: a batch reads the blocks that its records are in, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from elastic_ps.data.files import File
from elastic_ps.errors import UsageError

Transform = Callable[[Any], Any]


class BlockDataset(Dataset[Any]):
    """The records of some files. The last few blocks are kept in memory. Not thread-safe.

    Args:
        files: that the records are in.
        sizes: how many records each block has.
        digests: what identifies the files.
        transform: makes of a record what the script gets.
    """

    def __init__(
        self, files: Sequence[File], sizes: Sequence[int], digests: Sequence[str], transform: Transform | None
    ) -> None:
        if not sum(sizes):
            raise UsageError(f"there is no record in {', '.join(file.url for file in files)[:300]}")
        self._files, self._sizes, self._digests, self._transform = (
            list(files),
            list(sizes),
            digests,
            transform,
        )
        self._ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
        self._most = 2
        self._opened: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int | slice) -> Any:
        """A record; for a slice, a list of them."""
        if isinstance(index, slice):
            return self.__getitems__(range(len(self))[index])
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """The records with these indexes, in this order. A block that is not in memory is read at once.

        Raises:
            UsageError: a file has changed.
        """
        places: dict[int, list[int]] = {}
        for place, block in enumerate(np.searchsorted(self._ends, indexes, side="right").tolist()):
            places.setdefault(block, []).append(place)
        result: list[Any] = [None] * len(indexes)
        for block, among in places.items():
            start = int(self._ends[block]) - self._sizes[block]
            found = self._records(self._open(block), block, [indexes[place] - start for place in among])
            for place, record in zip(among, found, strict=True):
                result[place] = record if self._transform is None else self._transform(record)
        return result

    def block_sizes(self) -> list[int]:
        """How many records each block has; see Blocks in docs/guides/files.md."""
        return self._sizes

    def block_digests(self) -> list[str]:
        """Digests that identify the files, so that a worker with other ones is refused."""
        return list(self._digests)

    def keep_blocks(self, most: int) -> None:
        """Keep so many blocks in memory, rather than 2."""
        self._most = max(1, most)

    @property
    def bytes_read(self) -> int:
        """How many bytes this object has read from the files."""
        return sum(file.bytes_read for file in self._files)

    def _open(self, block: int) -> Any:
        opened = self._opened.pop(block, None)
        if opened is None:
            while len(self._opened) >= self._most:
                del self._opened[next(iter(self._opened))]  # the one that was used longest ago
            opened = self._read(block)
        self._opened[block] = opened
        return opened

    def _read(self, block: int) -> Any:
        """Read a block, for `_records`."""
        raise NotImplementedError

    def _records(self, opened: Any, block: int, places: Sequence[int], /) -> list[Any]:
        """Some records of a block, by their places in it."""
        raise NotImplementedError

    def __getstate__(self) -> Mapping[str, Any]:
        return self.__dict__ | {"_opened": {}}
