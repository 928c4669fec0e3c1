"""MNIST (LeCun et al., "Gradient-based learning applied to document recognition", 1998), from its files."""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from elastic_ps.contrib.datasets.files import Source
from elastic_ps.contrib.datasets.images import Images
from elastic_ps.contrib.zoo.catalog import MNIST_PAGE

SOURCE = Source(name="MNIST", page=MNIST_PAGE)
NAMES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
FOLDERS = ("", "MNIST/raw", "raw")
"""Folders of the directory in which the files may be; torchvision puts them into MNIST/raw."""
SIZE, CLASSES = 28, 10


def mnist(directory: Path) -> tuple[Images, Images]:
    """MNIST as (training set, test set). Blocks for reading the files.

    Args:
        directory: has train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, each as it is or packed by gzip (.gz).

    Raises:
        InvalidModel: a file is missing, truncated or of another kind. The message names it.
    """
    SOURCE.check_directory(directory)
    return _read(directory, "train"), _read(directory, "t10k")


def _read(directory: Path, part: str) -> Images:
    images_path = _find(directory, f"{part}-images-idx3-ubyte")
    images = _idx(images_path, (SIZE, SIZE))
    labels_path = _find(directory, f"{part}-labels-idx1-ubyte")
    labels = _idx(labels_path, ())
    if len(images) != len(labels):
        raise SOURCE.wrong(
            labels_path, f"it has {len(labels):,} labels, and {images_path.name} has {len(images):,} images"
        )
    if int(labels.max()) >= CLASSES:
        raise SOURCE.wrong(labels_path, f"it has the label {int(labels.max())}; expected 0 to {CLASSES - 1}")
    # The mean and the standard deviation of the training set.
    return Images(images.unsqueeze(1), labels.long(), mean=[0.1307 * 255], deviation=[0.3081 * 255])


def _find(directory: Path, name: str) -> Path:
    places = [directory / folder for folder in FOLDERS]
    for path in (place / each for place in places for each in _forms(name)):
        if path.is_file():
            return path
    raise SOURCE.missing(name, places, known=[form for each in NAMES for form in _forms(each)])


def _forms(name: str) -> tuple[str, ...]:
    """The names under which a file is handed round."""
    return name, f"{name}.gz", name.replace("-idx", ".idx")


def _idx(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """An IDX file of bytes: uint8 of shape (records, *shape).

    The file begins with two zeros, the type (8: unsigned bytes) and the number of dimensions. Then come the
    sizes of the dimensions, as four bytes each, most significant first, and the values.
    """
    data = SOURCE.read(path)
    head = 4 * (2 + len(shape))
    magic = bytes((0, 0, 8, 1 + len(shape)))
    if not data.startswith(magic):
        kind = "images" if shape else "labels"
        raise SOURCE.wrong(
            path,
            f"it begins with {data[:4].hex(' ') or 'nothing'}; a file of {kind} begins with {magic.hex(' ')}",
        )
    if len(data) < head:
        raise SOURCE.wrong(path, f"it is truncated: it has {len(data)} bytes, but its header has {head}")
    records, *sizes = struct.unpack(f">{1 + len(shape)}I", data[4:head])
    if tuple(sizes) != shape:
        given, wanted = " x ".join(map(str, sizes)), " x ".join(map(str, shape))
        raise SOURCE.wrong(path, f"its images have {given} pixels; expected {wanted}")
    expected = head + records * SIZE ** len(shape)
    if len(data) != expected or not records:
        cut = "it is truncated: " if len(data) < expected else ""
        given = f"{len(data):,} bytes; {records:,} records, as its header says, take {expected:,}"
        raise SOURCE.wrong(path, f"{cut}it has {given}")
    return torch.frombuffer(bytearray(data[head:]), dtype=torch.uint8).view(records, *shape)
