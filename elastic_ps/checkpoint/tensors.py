"""The tensors of a checkpoint: a safetensors file for each shard, which is read in parts.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a header, the
header in JSON, and the tensors' bytes. Files are written and read by plain calls instead of memory maps, for
two reasons: a map turns a read error into a signal that kills the process, and a shard that needs a part of a
tensor reads only that part.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.manifest import BASE, Manifest, ShardFile, is_count
from elastic_ps.codec import as_bytes, dtype_of, name_of
from elastic_ps.codec.optimizers import VALUE
from elastic_ps.codec.state import Stored
from elastic_ps.core.partition import ITEM_SIZE, Rule
from elastic_ps.errors import CheckpointCorrupt

LARGE = 1 << 20
"""The bytes whose digest is worth a thread, and after which the disk begins to write."""

CHUNK = 1 << 24
"""The bytes to read at a time for a digest, and the elements to check at a time for NaN."""

MOST_HEADER = 100_000_000
"""The largest header, in bytes: the limit of the safetensors library."""

DTYPES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}
"""The format's names of dtypes, with torch's."""

_CODES = {name: code for code, name in DTYPES.items()}
_ROWS = re.compile(r"rows/(\d{1,6})/(\w{1,100})", re.ASCII)
_NAME = re.compile(r"(\d{1,9})/(\d{1,15})/(\w{1,100})/(elements|scalar|whole)", re.ASCII)


def write(path: Path, described: Sequence[Stored], tensors: Iterable[Stored]) -> ShardFile:
    """Write and flush a new file. The digest is that of what was to be written. Raises OSError.

    Args:
        described: `tensors`, of which only names, dtypes and shapes are used.
        tensors: read in sequence. All of them may share the same memory, and one may come in parts.
    """
    header: dict[str, Any] = {}
    end = 0
    for stored in described:
        start, end = end, end + stored.value.nbytes
        code, shape = _CODES[name_of(stored.value.dtype)], list(stored.value.shape)
        header[stored.name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size, begun = hashlib.sha256(), 0, 0
    with files.create(path) as file:
        for part in _parts(text, tensors):
            with _digesting(digest, part):
                file.write(part)
                size += len(part)
                if size - begun >= LARGE:
                    files.begin_to_flush(file, begun, size)
                    begun = size
    assert size == 8 + len(text) + end, "the tensors are not those that were described"
    files.flush(path)
    return ShardFile(path.name, digest.hexdigest(), size)


@contextmanager
def _digesting(digest: hashlib._Hash, part: bytes | memoryview) -> Iterator[None]:
    """Add `part` to the digest, on a thread beside the block if it is large."""
    beside = threading.Thread(target=digest.update, args=(part,), name="digest")
    try:
        if len(part) >= LARGE:
            beside.start()
    except RuntimeError:  # the system allows no more threads
        pass
    if beside.ident is None:
        digest.update(part)
    try:
        yield
    finally:
        if beside.ident is not None:
            beside.join()


def _parts(header: bytes, tensors: Iterable[Stored]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for stored in tensors:
        yield as_bytes(stored.value.contiguous())


@dataclass(frozen=True)
class Entry:
    """The place of a tensor in a file: `offset` in bytes, `length` in elements.

    `rows`: it is a column of the file's embedding table number `tensor`.
    """

    file: str
    tensor: int
    start: int
    key: str
    scalar: bool
    dtype: str
    length: int
    offset: int
    rows: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.length


class Reader:
    """A checkpoint that is open for reading. Use it in a `with` block. Not thread-safe.

    Opening it reads the files' headers, and checks that they hold every element of every tensor exactly once.
    So no claim of the manifest takes more memory than the files' sizes. A file is compared with its digest
    before its first element is returned.

    Raises:
        CheckpointCorrupt: the files differ from the manifest. All methods may raise it.
        StorageUnavailable: they cannot be read at the moment. All methods may raise it.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files: dict[str, BinaryIO] = {}
        self._described = {file.file: file for file in manifest.files}
        self._verified: set[str] = set()
        self._places: defaultdict[tuple[int, str], list[Entry]] = defaultdict(list)
        self._rows: defaultdict[tuple[str, int], list[Entry]] = defaultdict(list)
        try:
            for file in manifest.files:
                self._files[file.file] = opened = files.open_to_read(directory / file.file)
                for entry in _entries(opened, file):
                    if entry.rows:
                        self._rows[entry.file, entry.tensor].append(entry)
                    elif not entry.file.startswith(BASE):
                        self._places[entry.tensor, entry.key].append(entry)
            self._check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        """Check that the files hold every tensor, and the optimizer's state completely or not at all."""
        specs = self.manifest.specs
        for (tensor, key), entries in self._places.items():
            where = f"tensor {tensor}, {key}"
            if tensor >= len(specs):
                raise CheckpointCorrupt(f"{where}: the model has {len(specs)} tensors")
            entries.sort(key=lambda entry: entry.start)
            if len({(entry.dtype, entry.scalar) for entry in entries}) > 1:
                raise CheckpointCorrupt(f"{where} is stored in several ways")
            alone = len(entries) == 1 or all(entry.length == 1 for entry in entries)
            if entries[0].scalar and key != VALUE and alone:
                continue
            reached = 0
            for entry in entries:
                if entry.scalar or entry.start != reached:
                    raise CheckpointCorrupt(f"{where}: element {reached} is missing or stored twice")
                reached = entry.stop
            if reached != specs[tensor].elements:
                raise CheckpointCorrupt(
                    f"{where}: the checkpoint has {reached} of {specs[tensor].elements} elements"
                )
            if key == VALUE and entries[0].dtype != specs[tensor].dtype:
                raise CheckpointCorrupt(f"{where} is stored as {entries[0].dtype}")
        for tensor, spec in enumerate(specs):
            if spec.elements and (tensor, VALUE) not in self._places:
                raise CheckpointCorrupt(f"the checkpoint holds no values for tensor {tensor} ({spec.name})")

    def keys(self, tensor: int) -> dict[str, tuple[str, bool]]:
        """The entries of the optimizer's state for a tensor: key -> (dtype, whether it is a scalar)."""
        return {
            key: (entries[0].dtype, entries[0].scalar)
            for (number, key), entries in self._places.items()
            if number == tensor and key != VALUE
        }

    def verify(self) -> None:
        """Compare all files with their digests. Blocks for reading them."""
        for file in self._files:
            self._require_digest(file)

    def not_finite(self) -> dict[str, int]:
        """The number of NaN and Inf in each trained parameter and its optimizer's state, by name."""
        found: dict[str, int] = {}
        for (tensor, key), entries in sorted(self._places.items()):
            spec = self.manifest.specs[tensor]
            if spec.rule is not Rule.GRADIENT or not dtype_of(entries[0].dtype).is_floating_point:
                continue
            bad = 0
            for entry in entries:
                for first in range(0, entry.length, CHUNK):
                    part = self._read(entry, first, min(entry.length, first + CHUNK))
                    bad += part.numel() - int(torch.isfinite(part).sum())
            if bad:
                found[spec.name if key == VALUE else f"{spec.name} ({key})"] = bad
        return found

    def rows(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """The flattened columns of each embedding table of each file, one after the other, by their names.

        Those of bases come first. A column is read when it is asked for.
        """
        for _, columns in sorted(self._rows.items(), key=lambda part: not part[0][0].startswith(BASE)):
            yield _Columns(self, {entry.key: entry for entry in columns})

    def read(self, entry: Entry) -> torch.Tensor:
        """All elements of an entry."""
        return self._read(entry, 0, entry.length)

    def value(self, tensor: int, start: int, length: int) -> torch.Tensor:
        """See `Source`."""
        if not length:  # no file has an empty tensor
            return torch.empty(0, dtype=dtype_of(self.manifest.specs[tensor].dtype), device="cpu")
        return self._elements(self._places[tensor, VALUE], start, length)

    def state(self, tensor: int, start: int, length: int) -> dict[str, torch.Tensor]:
        """See `Source`."""
        state: dict[str, torch.Tensor] = {}
        for key, (_, scalar) in self.keys(tensor).items():
            entries = self._places[tensor, key]
            if scalar:
                value = self._read(entries[0], 0, entries[0].length)
                state[key] = value.reshape(()) if value.numel() == 1 else value
            else:
                state[key] = self._elements(entries, start, length)
        return state

    def _elements(self, entries: Sequence[Entry], start: int, length: int) -> torch.Tensor:
        stop = start + length
        inside = [entry for entry in entries if entry.start < stop and entry.stop > start]
        parts = [
            self._read(entry, max(start, entry.start) - entry.start, min(stop, entry.stop) - entry.start)
            for entry in inside
        ]
        found = torch.cat(parts) if len(parts) != 1 else parts[0]
        assert found.numel() == length, f"elements {start} to {stop} are not in the checkpoint"
        return found

    def _read(self, entry: Entry, first: int, last: int) -> torch.Tensor:
        """Read elements of an entry, counted from its beginning."""
        self._require_digest(entry.file)
        part = torch.empty(last - first, dtype=dtype_of(entry.dtype), device="cpu")
        item = ITEM_SIZE[entry.dtype]
        _read_into(self._files[entry.file], as_bytes(part), entry.offset + first * item)
        return part

    def _require_digest(self, name: str) -> None:
        if name in self._verified:
            return
        file, size, digest = self._files[name], self._described[name].size, hashlib.sha256()
        two = [bytearray(min(CHUNK, size - at)) for at in range(0, size, CHUNK)[:2]]
        buffers, before = itertools.cycle(two), memoryview(b"")
        for at in range(0, size, CHUNK):
            part = memoryview(next(buffers))[: size - at]
            with _digesting(digest, before):
                _read_into(file, part, at)
            before = part
        digest.update(before)
        if digest.hexdigest() != self._described[name].sha256:
            raise CheckpointCorrupt(
                f"{file.name} has been changed since it was written (its SHA-256 differs)"
            )
        self._verified.add(name)


class _Columns(Mapping[str, torch.Tensor]):
    """The columns of a table, which are read when they are asked for."""

    def __init__(self, reader: Reader, entries: Mapping[str, Entry]) -> None:
        self._reader, self._entries = reader, entries

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._reader.read(self._entries[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _entries(file: BinaryIO, described: ShardFile) -> Iterator[Entry]:
    """The entries in the header of a file, checked against its size."""
    where, size = Path(file.name), 0
    with files.reading(where):
        size = os.fstat(file.fileno()).st_size
    if size != described.size:
        raise CheckpointCorrupt(f"{where} has been changed since it was written: it has {size} bytes")
    try:
        yield from _parsed(file, described)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where} is not a file of tensors: {error!r}") from error


def _parsed(file: BinaryIO, described: ShardFile) -> Iterator[Entry]:
    """Parse a header. Raises ValueError, KeyError, TypeError or AttributeError if it is invalid."""
    prefix = bytearray(8)
    _read_into(file, memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > min(MOST_HEADER, described.size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {described.size}")
    text = bytearray(length)
    _read_into(file, memoryview(text), 8)
    data = 8 + length
    header: Mapping[str, Any] = json.loads(text)
    for name, about in header.items():
        if name == "__metadata__":
            continue
        match = _NAME.fullmatch(name) or _ROWS.fullmatch(name)
        if match is None:
            raise ValueError(f"the name {name!r}")
        tensor, start, key, how = match.groups() if match.re is _NAME else (match[1], "0", match[2], "rows")
        dtype, shape, (first, last) = DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
        if not all(is_count(n, below=1 << 63) for n in (*shape, first, last)):
            raise ValueError(f"{name}: shape {shape}, from {first} to {last}")
        elements = math.prod(shape)
        if not (first <= last <= described.size - data and last - first == elements * ITEM_SIZE[dtype]):
            raise ValueError(f"{name}: shape {shape} from byte {first} to {last} of {described.size - data}")
        if how == "scalar" and elements != 1:
            raise ValueError(f"{name}: shape {shape}")
        yield Entry(
            file=described.file,
            tensor=int(tensor),
            start=int(start),
            key=key,
            scalar=how in ("scalar", "whole"),
            dtype=dtype,
            length=elements,
            offset=data + first,
            rows=how == "rows",
        )


def _read_into(file: BinaryIO, target: memoryview, offset: int) -> None:
    """Fill `target` from an offset in a file. Raises CheckpointCorrupt if the file is too short."""
    done, where = 0, Path(file.name)
    while done < len(target):
        with files.reading(where):
            count = os.preadv(file.fileno(), [target[done:]], offset + done)
        if count == 0:
            raise CheckpointCorrupt(f"{where} ends at byte {offset + done}")
        done += count
