"""Small data sets in the formats of the large ones, byte for byte as their authors have written them."""

from __future__ import annotations

import gzip
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_mnist(directory: Path, *, training: int = 20, test: int = 10, packed: bool = False) -> Path:
    """MNIST's four files; the images of a class are all the same. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for part, records in (("train", training), ("t10k", test)):
        labels = [number % 10 for number in range(records)]
        images = b"".join(_drawn(label, 28 * 28) for label in labels)
        files = {
            f"{part}-images-idx3-ubyte": struct.pack(">4B3I", 0, 0, 8, 3, records, 28, 28) + images,
            f"{part}-labels-idx1-ubyte": struct.pack(">4BI", 0, 0, 8, 1, records) + bytes(labels),
        }
        for name, data in files.items():
            path = directory / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(data) if packed else data)
    return directory


def write_cifar10(directory: Path, *, records: int = 10, binary: bool = False) -> Path:
    """CIFAR-10's files, of so many records each, in their archive's folder. Returns `directory`."""
    folder = directory / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = [number % 10 for number in range(records)]
        images = [_drawn(label, 3 * 32 * 32) for label in labels]
        if binary:
            rows = (bytes([label]) + image for label, image in zip(labels, images, strict=True))
            (folder / f"{name}.bin").write_bytes(b"".join(rows))
        else:
            batch = {"batch_label": name, "labels": labels, "data": images, "filenames": ["a.png"] * records}
            (folder / name).write_bytes(python2_pickle(batch))
    return directory


def write_cifar100(directory: Path, *, records: int = 10, binary: bool = False) -> Path:
    """CIFAR-100's files, likewise."""
    folder = directory / ("cifar-100-binary" if binary else "cifar-100-python")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        labels = [number * 7 % 100 for number in range(records)]
        images = [_drawn(label, 3 * 32 * 32) for label in labels]
        if binary:
            rows = (bytes([label // 5, label]) + image for label, image in zip(labels, images, strict=True))
            (folder / f"{name}.bin").write_bytes(b"".join(rows))
        else:
            coarse = [label // 5 for label in labels]
            batch = {"fine_labels": labels, "coarse_labels": coarse, "data": images}
            (folder / name).write_bytes(python2_pickle(batch))
    return directory


def python2_pickle(batch: Mapping[str, Any]) -> bytes:
    """A dictionary as Python 2 pickles it with protocol 2; "data", a list of rows, becomes an array of numpy.

    Python 3 cannot write such a file: its text is unicode, and its numpy has other names.
    """
    items = b"".join(_text(key) + (_array(v) if key == "data" else _value(v)) for key, v in batch.items())
    return b"\x80\x02}(" + items + b"u."


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        return b"](" + b"".join(map(_value, value)) + b"e"
    return b"K" + bytes([value]) if isinstance(value, int) else _text(value)


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + struct.pack("<i", len(data)) + data


def _array(rows: Sequence[bytes]) -> bytes:
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    shape = b"J" + struct.pack("<i", len(rows)) + b"J" + struct.pack("<i", len(rows[0])) + b"\x86"
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return made + b"(K\x01" + shape + kind + b"\x89" + _text(b"".join(rows)) + b"tb"


def _drawn(label: int, pixels: int) -> bytes:
    """An image of a class: always the same."""
    return random.Random(label).randbytes(pixels)
