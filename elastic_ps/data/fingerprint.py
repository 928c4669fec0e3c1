"""Identifies the records of a data set, so that workers notice if theirs differ.

The job counts records by their positions. If each worker draws its records at random, as by `random_split`,
some would be trained several times and others never, and nothing else would look wrong.

No record is asked for: a data set may load, decode or augment in `__getitem__`. The fingerprint is of its
attributes with one entry for each record, whatever their names (`indices` of a Subset, `samples` of an
ImageFolder, `data`, `targets`, a table of Arrow), of those of the data sets within it, of a stream's lists of
names, and of what a stream of Hugging Face's `datasets` shuffles with.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from elastic_ps.core.fingerprint import MOST, ORDER, SHUFFLE, Mark, to_text

PARTS = 64
"""How many parts a fingerprint has at most, and how many entries a list of parts."""

DEPTH = 8
"""How deep data sets within data sets are looked at."""

ENTRIES, FEW = 1024, 64
"""How many entries of a part are looked at, evenly spread; few of one above `LARGE`, which may be on disk."""

LARGE = 64 << 20
"""Bytes."""

VALUES = 16
"""How many values of an entry are looked at, evenly spread."""

CHARACTERS = 1024
"""How many characters of a text are looked at."""

_REVISION = re.compile(r"@[^/]+/")
"""The commit of a repository on Hugging Face's hub, in a file's URL. A new one may have the same records."""

_WEIGHTS = (2654435761, 2246822519)  # multipliers that scatter positions over 32 bits


def fingerprint(dataset: Any, records: int, order: str = "", *, shuffle: bool | None = None) -> str:
    """A text that identifies its `records`, for `core.fingerprint.differing`; "" if nothing does.

    Args:
        order: which blocks of them stay together; see `data.order.Order.to_text`.
        shuffle: whether their order is random; None: it is not compared.
    """
    looked = _Looked()
    if shuffle is not None:
        looked.marks[SHUFFLE] = Mark(str(shuffle))
    if order:
        looked.marks[ORDER] = Mark(hashlib.blake2b(order.encode(), digest_size=8).hexdigest())
    with suppress(Exception):  # it may be made of anything
        looked.at(type(dataset).__name__, dataset, records)
        if callable(digests := getattr(dataset, "block_digests", None)):
            every = hashlib.blake2b("\0".join(digests()).encode(), digest_size=8)
            looked.note(f"{type(dataset).__name__}.block_digests()", [every.hexdigest()])
    text = to_text(looked.marks)
    return text if len(text) <= MOST else ""


class _Looked:
    """The findings so far."""

    def __init__(self) -> None:
        self.marks: dict[str, Mark] = {}
        self._seen: dict[tuple[int, int | None], Any] = {}  # kept, so that no id is another one's later

    def at(self, name: str, value: Any, records: int | None, depth: int = 0) -> None:
        """Look at a data set, or at a part of one with so many records; None: of a stream."""
        is_data_set = _is_data_set(value)
        seen = id(value), None if is_data_set else records
        if depth > DEPTH or len(self.marks) >= PARTS or seen in self._seen:
            return
        self._seen[seen] = value
        if is_data_set:
            length = None if isinstance(value, IterableDataset) else _length(value)
            for key, each in vars(value).items():
                if key == "blocks" and _has(value, "table"):
                    continue  # how a table of Hugging Face's is cut into files, which may differ
                if key == "_indices" and _has(each, "column"):  # Hugging Face's, after select or shuffle
                    each = np.asarray(each.column(0))
                self.at(f"{name}.{key}", each, length, depth + 1)
            if (last := vars(value).get("_ex_iterable")) is not None:
                for key, found in _of_hugging_face(last).items():
                    self.note(f"{name}.{key}", found)
        elif _length(value) == records or (records is None and _are_names(value)):
            with suppress(Exception):  # it may be made of anything
                self.note(name, value)
        elif isinstance(value, list | tuple | dict) and len(value) <= PARTS:
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                self.at(f"{name}.{key}"[:CHARACTERS], each, records, depth + 1)

    def note(self, name: str, value: Any) -> None:
        """Note the entries of a part."""
        exact: list[str] = []
        floats: list[float] = []
        entries = _entries(value)
        if any(entry is None for entry in entries):
            return  # a cache, of which each process may have filled another part
        for entry in entries:
            _flatten(entry, exact, floats)
        if not (exact or floats):
            return
        paths = [text for text in exact if text.startswith("/")]
        root = os.path.commonpath(paths) if paths else ""  # a worker may have a directory of its own
        digest = hashlib.blake2b(f"{len(floats)}\0".encode(), digest_size=8)
        for text in exact:
            digest.update(text.removeprefix(root).encode(errors="replace") + b"\0")
        self.marks[name] = Mark(digest.hexdigest(), _sums(floats))


def _of_hugging_face(last: Any) -> dict[str, list[Any]]:
    """The states of the generators of a stream's steps, and the order of its shards, by their names.

    Args:
        last: of its steps. Each step iterates over others.
    """
    found: dict[str, list[Any]] = {}
    steps = [last]
    for step in steps:
        steps += [step.ex_iterable] if _has(step, "ex_iterable") else getattr(step, "ex_iterables", ())
        if _has(step, "generator"):  # a copy, which iterating does not change
            found.setdefault("generator", []).append(step.generator.bit_generator.state)
        for key, shards in (getattr(step, "kwargs", None) or {}).items():
            if isinstance(shards, list):
                found.setdefault(f"shards.{key}", []).extend(map(_shard, shards))
    return found


def _shard(value: Any) -> Any:
    """A value that tells a shard from others: a file's name, or which rows of a table it has."""
    if isinstance(value, str):
        return _REVISION.sub("/", value)
    indices = getattr(value, "_indices", None)
    return value if indices is None else np.asarray(indices.column(0))


def _is_data_set(value: Any) -> bool:
    """Whether it may hold records among its attributes."""
    if isinstance(value, torch.Tensor | np.ndarray | type) or not _has(value, "__dict__"):
        return False
    readable = _has(value, "__getitem__") and _has(value, "__len__") and not _has(value, "iloc")
    return readable or isinstance(value, IterableDataset)


def _has(value: Any, name: str) -> bool:
    """Act like `hasattr`. A `__getattr__` of the script's may raise anything, such as KeyError."""
    with suppress(Exception):
        return hasattr(value, name)
    return False


def _length(value: Any) -> int:
    """0 if it has none."""
    with suppress(Exception):  # it may be any object
        return len(value)
    return 0


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str | PurePath) for each in value)


def _spread(length: int, most: int) -> list[int]:
    """At most so many indexes, evenly spread, with the first and the last one."""
    return list(range(length)) if length <= most else [i * (length - 1) // (most - 1) for i in range(most)]


def _entries(value: Any) -> Sequence[Any]:
    """Some entries of an object with one for each record; none of another kind of object."""
    if isinstance(value, torch.Tensor):
        return _of_array(value.detach(), value.nbytes) if value.layout is torch.strided else ()
    if isinstance(value, np.ndarray):
        return _of_array(value, value.nbytes)
    if isinstance(value, list | tuple | range):
        return [value[i] for i in _spread(len(value), ENTRIES)]
    if _has(value, "iloc"):  # pandas'
        rows: list[Any] = value.iloc[_spread(len(value), ENTRIES)].to_numpy(dtype=object).tolist()
        return rows
    if _has(value, "column_names") and _has(value, "combine_chunks"):  # Arrow's, and no single chunk
        columns = [value.column(i) for i in _spread(value.num_columns, VALUES)]
        places = _spread(len(value), FEW if value.nbytes <= LARGE else VALUES)
        return [[_of_arrow(column[place]) for column in columns] for place in places]
    return ()


def _of_arrow(value: Any) -> Any:
    """A value of an Arrow table; of a list, some entries."""
    entries = getattr(value, "values", None)
    if entries is None or callable(entries):  # a struct has a method of that name
        return value.as_py()
    return [_of_arrow(entries[i]) for i in _spread(len(entries), VALUES)]


def _of_array(value: Any, nbytes: int) -> list[Any]:
    """The values of some entries, without a copy of whole entries, which may be large."""
    if not (nbytes and value.ndim):
        return []
    rows = np.array(_spread(len(value), ENTRIES if nbytes <= LARGE else FEW))
    shape = tuple(value.shape[1:])
    if not shape:
        chosen = value[rows]
    else:
        places = np.unravel_index(_spread(int(np.prod(shape)), VALUES), shape)
        chosen = value[(rows[:, None], *places)]
    result: list[Any] = chosen.tolist()
    return result


def _flatten(entry: Any, exact: list[str], floats: list[float], depth: int = 0) -> None:
    """Sort the plain values of an entry. Others are passed over."""
    if isinstance(entry, float):
        floats.append(entry)
    elif isinstance(entry, str | PurePath):
        exact.append(str(entry)[:CHARACTERS])
    elif isinstance(entry, bytes):
        exact.append(entry[:CHARACTERS].hex())
    elif isinstance(entry, int):
        exact.append(f"{entry:x}")
    elif isinstance(entry, np.generic):
        _flatten(entry.item(), exact, floats)
    elif depth < DEPTH:
        entries = list(entry.values())[:VALUES] if isinstance(entry, dict) else _entries(entry)
        for i in _spread(len(entries), VALUES):
            _flatten(entries[i], exact, floats, depth + 1)


def _sums(floats: Sequence[float]) -> tuple[float, float]:
    """Two sums with a different weight for each place, relative to the values' size."""
    values = np.nan_to_num(np.asarray(floats, dtype=np.float64), posinf=0.0, neginf=0.0)
    size = float(np.abs(values).sum()) or 1.0
    places = np.arange(1, len(values) + 1, dtype=np.uint64)
    first, second = (
        float(values @ (places * np.uint64(by) % np.uint64(1 << 32) / float(1 << 31) - 1.0)) / size
        for by in _WEIGHTS
    )
    return round(first, 6), round(second, 6)
