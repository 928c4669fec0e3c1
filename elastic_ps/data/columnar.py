"""Records in Parquet and Arrow files: each row is one, as a dict. A row group or record batch is a block."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from elastic_ps.data.blocks import BlockDataset, Transform
from elastic_ps.data.files import File, Index, RangeFile, changed, digest_of, files_of, index_of, key_of
from elastic_ps.errors import UsageError

_TAIL = 4096
"""The bytes at the end of a file whose sum says whether it has changed: they tell where its parts are."""


class TableDataset(BlockDataset):
    """The rows of `ParquetDataset` and `ArrowDataset`.

    Args:
        urls: of the files; see `files_of`.
        columns: to read; None: all.
        where: which rows are records, as an expression of `pyarrow.compute`, or a list such as
            `[("year", ">", 2020)]`; None: all. Only its columns are read to count them, once.
        transform: makes of a row what the script gets.
        index: where the numbers of rows are kept; see `index_of`.
        options: for fsspec's filesystem.

    Raises:
        UsageError: there is no row, a file is of another kind or lacks a column, or pyarrow is not installed.
    """

    _expected = ""
    """The kind of file, for messages."""

    _sums_up = False
    """Whether counting reads the parts, so that each can have a sum."""

    _dotted = False
    """Whether `a.b` is a part of the column `a`."""

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        where: Any = None,
        transform: Transform | None = None,
        index: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if columns is not None and not columns:
            raise UsageError("columns is empty; expected names of columns to read, or None for all")
        files = files_of(urls, options or {})
        self._columns, self._where = None if columns is None else list(columns), _expression(where)
        self._sources: dict[int, Any] = {}
        kind = type(self).__name__
        self._files, self._tails = files, list[int]()
        # The text of an expression does not identify it, because it shortens long lists.
        where = "" if where is None else key_of(pickle.dumps(self._where))
        read = f"/{self._columns}" if self._sums_up else ""
        indexes = [
            index_of(file, f"{kind}/3/{where}{read}", partial(self._indexed, number), index)
            for number, file in enumerate(files)
        ]
        for file, found in zip(files, indexes, strict=True):
            self._require_columns(file, found.pop("names").tolist())
        self._tails = [int(found["tail"]) for found in indexes]
        rows = [found["rows"] for found in indexes]
        self._blocks = [(number, part) for number, each in enumerate(rows) for part in range(len(each))]
        self._sums = [int(crc) for found in indexes for crc in found["sums"]]
        digests = [f"{digest_of(each, file.size)}{where}" for each, file in zip(indexes, files, strict=True)]
        super().__init__(files, [int(count) for each in rows for count in each], digests, transform)

    def _indexed(self, number: int) -> Index:
        import pyarrow

        file = self._files[number]
        try:
            names = self._names(number)
            self._require_columns(file, names)
            parts = self._parts(number)
        except pyarrow.ArrowInvalid as error:
            raise UsageError(f"{file.url} is not {self._expected}: {_first_line(error)}") from error
        try:
            counts = [self._count(number, part) for part in range(parts)]
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            if self._where is None:
                raise
            raise UsageError(
                f"where={self._where} does not fit {file.url}: {_first_line(error)}. Its columns are "
                f"{', '.join(names)[:300]}"
            ) from error
        return {
            "rows": np.array([rows for rows, _ in counts], dtype=np.int64),
            "sums": np.array([crc for _, crc in counts], dtype=np.uint32),
            "tail": np.array(_tail(file)),
            "names": np.array(names, dtype=np.str_),
        }

    def _require_columns(self, file: File, names: Sequence[str]) -> None:
        there = {*names}
        for name in self._columns or ():
            column = name.removeprefix(".").partition(".")[0] if self._dotted else name
            if not {name, column} & there:
                raise UsageError(
                    f"there is no column {name!r} in {file.url}; its columns are {', '.join(names)[:300]}"
                )

    def _source(self, number: int) -> Any:
        """The reader of a file."""
        if number not in self._sources:
            self._require_unchanged(number, opens=True)
            self._sources[number] = self._opened_file(RangeFile(self._files[number]))
        return self._sources[number]

    def _require_unchanged(self, number: int, *, opens: bool = False) -> None:
        """Raise UsageError if a file has changed. The tail of a remote file is not read without need."""
        file = self._files[number]
        known = file.require_unchanged() and not opens and not file.local
        if not known and self._tails and _tail(file) != self._tails[number]:
            raise changed(file.url)

    def _opened_file(self, file: Any) -> Any:
        raise NotImplementedError

    def _parts(self, number: int) -> int:
        """How many row groups or record batches a file has."""
        raise NotImplementedError

    def _names(self, number: int) -> list[str]:
        """The names of a file's columns."""
        raise NotImplementedError

    def _count(self, number: int, part: int) -> tuple[int, int]:
        """How many rows of a part are records, and the sum that `_table` has."""
        raise NotImplementedError

    def _table(self, number: int, part: int) -> tuple[Any, int]:
        """The records of a part, and the sum of all that was read for them; 0 unless `_sums_up`."""
        raise NotImplementedError

    def _read(self, block: int) -> Any:
        number, part = self._blocks[block]
        try:
            table, crc = self._table(number, part)
        finally:  # a reader may say something else of a file that has changed, or nothing
            self._require_unchanged(number)
        if (table.num_rows, crc) != (self._sizes[block], self._sums[block]):
            raise changed(self._files[number].url)
        return table

    def _records(self, opened: Any, _: int, places: Sequence[int], /) -> list[Any]:
        rows: list[Any] = opened.take(list(places)).to_pylist()
        return rows

    def __getstate__(self) -> Mapping[str, Any]:
        return {**super().__getstate__(), "_sources": {}}


class ParquetDataset(TableDataset):
    """The rows of Parquet files; each row group is a block. For the arguments see `TableDataset`."""

    _expected, _dotted = "a Parquet file", True

    def _opened_file(self, file: Any) -> Any:
        import pyarrow.dataset

        return pyarrow.dataset.ParquetFileFormat().make_fragment(file)

    def _parts(self, number: int) -> int:
        return int(self._source(number).num_row_groups)

    def _names(self, number: int) -> list[str]:
        return list(self._source(number).physical_schema.names)

    def _part(self, number: int, part: int) -> Any:
        return self._source(number).subset(row_group_ids=[part])

    def _count(self, number: int, part: int) -> tuple[int, int]:
        found = self._part(number, part)
        if self._where is None:
            return int(found.row_groups[0].num_rows), 0
        return int(found.count_rows(filter=self._where)), 0

    def _table(self, number: int, part: int) -> tuple[Any, int]:
        return self._part(number, part).to_table(columns=self._columns, filter=self._where), 0


class ArrowDataset(TableDataset):
    """The rows of Arrow (IPC) files; each record batch is a block. For the arguments see `TableDataset`."""

    _sums_up = True
    _expected = "an Arrow file with an index (pyarrow.ipc.new_file writes one, and not new_stream)"

    def _opened_file(self, file: Any) -> Any:
        import pyarrow

        fields = None
        if self._columns is not None and self._where is None:
            schema = pyarrow.ipc.open_file(file).schema
            fields = [schema.get_field_index(name) for name in self._columns]
            file.seek(0)
        return pyarrow.ipc.open_file(file, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))

    def _parts(self, number: int) -> int:
        return int(self._source(number).num_record_batches)

    def _names(self, number: int) -> list[str]:
        import pyarrow

        return list(pyarrow.ipc.open_file(RangeFile(self._files[number])).schema.names)

    def _count(self, number: int, part: int) -> tuple[int, int]:
        table, crc = self._table(number, part)
        return int(table.num_rows), crc

    def _table(self, number: int, part: int) -> tuple[Any, int]:
        import pyarrow

        batch = self._source(number).get_batch(part)
        table = pyarrow.Table.from_batches([batch])
        table = table if self._where is None else table.filter(self._where)
        return table if self._columns is None else table.select(self._columns), _sum(batch)


def _expression(where: Any) -> Any:
    try:
        import pyarrow.dataset
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError("Parquet and Arrow files need pyarrow: pip install 'elastic-ps[data]'") from error
    return pyarrow.parquet.filters_to_expression(_sorted(where)) if isinstance(where, list) else where


def _sorted(where: Any) -> Any:
    """The filters with their sets as lists: the order of a set of strings is another one in each process."""
    if isinstance(where, list | tuple):
        return type(where)(map(_sorted, where))
    return sorted(where, key=repr) if isinstance(where, set | frozenset) else where


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _sum(batch: Any) -> int:
    """The sum of the columns of a record batch, decompressed."""
    dictionaries = [column.dictionary for column in batch.columns if hasattr(column, "dictionary")]
    crc = 0
    for buffer in (each for column in (*batch.columns, *dictionaries) for each in column.buffers()):
        crc = crc if buffer is None else zlib.crc32(buffer, crc)
    return crc


def _tail(file: File) -> int:
    return zlib.crc32(file.read(max(0, file.size - _TAIL), file.size))
