"""CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning multiple layers of features from tiny images", 2009).

Both are read from their original files, of the version for Python (pickles) or of the binary version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from elastic_ps.contrib.datasets import pickles
from elastic_ps.contrib.datasets.files import Source
from elastic_ps.contrib.datasets.images import Images
from elastic_ps.contrib.zoo.catalog import CIFAR_PAGE

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class _Version:
    """One of the two formats of a data set's files.

    Attributes:
        folder: the folder in its archive.
        training, test: the names of the files.
        labels: the name of the labels in a pickle; None in the binary version.
        before: the number of bytes before an image in the binary version; the last one is the label.
    """

    folder: str
    training: Sequence[str]
    test: Sequence[str]
    labels: str | None = None
    before: int = 0


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEN = Source(name="CIFAR-10", page=CIFAR_PAGE, archives=("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"))
_TEN_VERSIONS = (
    _Version(folder="cifar-10-batches-py", training=_BATCHES, test=("test_batch",), labels="labels"),
    _Version(
        folder="cifar-10-batches-bin",
        training=tuple(f"{name}.bin" for name in _BATCHES),
        test=("test_batch.bin",),
        before=1,
    ),
)
_HUNDRED = Source(
    name="CIFAR-100", page=CIFAR_PAGE, archives=("cifar-100-python.tar.gz", "cifar-100-binary.tar.gz")
)
_HUNDRED_VERSIONS = (
    _Version(folder="cifar-100-python", training=("train",), test=("test",), labels="fine_labels"),
    _Version(folder="cifar-100-binary", training=("train.bin",), test=("test.bin",), before=2),
)


def cifar10(directory: Path) -> tuple[Images, Images]:
    """CIFAR-10 as (training set, test set). Blocks for reading the files.

    The images of the training set are moved and mirrored at random.

    Args:
        directory: has the files of one version, or the folder cifar-10-batches-py or cifar-10-batches-bin.

    Raises:
        InvalidModel: a file is missing, truncated or of another kind. The message names it.
    """
    return _read(
        _TEN, _TEN_VERSIONS, directory, classes=10, mean=(125.3, 123.0, 113.9), deviation=(63.0, 62.1, 66.7)
    )


def cifar100(directory: Path) -> tuple[Images, Images]:
    """CIFAR-100 with its hundred fine classes; else as `cifar10`.

    The folders are cifar-100-python and cifar-100-binary.
    """
    mean, deviation = (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)
    return _read(_HUNDRED, _HUNDRED_VERSIONS, directory, classes=100, mean=mean, deviation=deviation)


def _read(
    source: Source,
    versions: Sequence[_Version],
    directory: Path,
    *,
    classes: int,
    mean: Sequence[float],
    deviation: Sequence[float],
) -> tuple[Images, Images]:
    source.check_directory(directory)
    place, version = _place(versions, directory)
    sets = []
    for names in (version.training, version.test):
        parts = []
        for name in names:
            path = place / name
            if not path.is_file():
                raise source.missing(name, [place], known=(*version.training, *version.test))
            parts.append(_file(source, version, path, classes))
        images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        sets.append(Images(images, labels, mean=mean, deviation=deviation, augment=names is version.training))
    return sets[0], sets[1]


def _place(versions: Sequence[_Version], directory: Path) -> tuple[Path, _Version]:
    """The directory of the files, and their version; the default place if there are none."""
    for version in versions:
        for place in (directory, directory / version.folder):
            if any((place / name).is_file() for name in (*version.training, *version.test)):
                return place, version
    for version in versions:
        if (directory / version.folder).is_dir():
            return directory / version.folder, version
    return directory, versions[0]


def _file(source: Source, version: _Version, path: Path, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, labels) of one file: uint8 of shape (records, 3, 32, 32), int64 of shape (records,)."""
    data = source.read(path)
    if version.labels is not None:
        images, labels = _pickled(source, path, data, version.labels)
    else:
        images, labels = _binary(source, path, data, version.before)
    if not len(labels) or int(labels.max()) >= classes:
        found = f"the label {int(labels.max())}" if len(labels) else "no records"
        raise source.wrong(path, f"it has {found}; expected labels from 0 to {classes - 1}")
    return images, labels


def _pickled(source: Source, path: Path, data: bytes, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        batch = pickles.read(data)
    except pickles.NotReadable as error:
        raise source.wrong(path, str(error)) from error
    images, labels = batch.get("data"), batch.get(key)
    if not isinstance(images, pickles.Array) or not isinstance(labels, list):
        known = ", ".join(map(repr, sorted(batch))) or "nothing"
        raise source.wrong(path, f"it has {known}; expected 'data' and {key!r}")
    if not all(isinstance(label, int) and 0 <= label < 256 for label in labels):
        raise source.wrong(path, "its labels are not whole numbers from 0")
    records = len(labels)
    if images.shape != (records, PIXELS) or len(images.data) != records * PIXELS:
        raise source.wrong(
            path,
            f"its data has shape {list(images.shape)} and {len(images.data):,} bytes; {records:,} labels "
            f"need shape [{records}, {PIXELS}]",
        )
    return _tensor(images.data).view(records, *SHAPE), torch.tensor(labels, dtype=torch.int64)


def _binary(source: Source, path: Path, data: bytes, before: int) -> tuple[torch.Tensor, torch.Tensor]:
    record = before + PIXELS
    if not data or len(data) % record:
        raise source.wrong(
            path,
            f"it is truncated: it has {len(data):,} bytes, which is not a multiple of a record's {record:,}",
        )
    rows = _tensor(data).view(-1, record)
    return rows[:, before:].reshape(-1, *SHAPE), rows[:, before - 1].long()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
