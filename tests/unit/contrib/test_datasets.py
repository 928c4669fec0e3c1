"""Data sets are read from their original files, and a file that is missing or wrong is named."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastic_ps.contrib.datasets import cifar10, cifar100, digits, mnist, text
from elastic_ps.contrib.datasets.images import Images
from elastic_ps.contrib.zoo.catalog import find_dataset
from elastic_ps.errors import InvalidModel, UsageError, UserError
from tests.testing.datafiles import python2_pickle, write_cifar10, write_cifar100, write_mnist


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["", "MNIST/raw"])
def test_mnist_is_read_from_its_files(tmp_path: Path, packed: bool, folder: str) -> None:
    write_mnist(tmp_path / folder, packed=packed)
    training, test = mnist(tmp_path)
    assert (len(training), len(test)) == (20, 10)
    image, label = training[13]
    assert (image.shape, image.dtype, label) == ((1, 28, 28), torch.float32, 3)
    original = training.images[13].float() / 255
    assert torch.allclose(image, (original - 0.1307) / 0.3081, atol=1e-5)
    assert torch.equal(training[3][0], image), "the images of a class are alike in this file"


def test_mnist_is_found_under_the_name_with_a_dot(tmp_path: Path) -> None:
    for path in list(write_mnist(tmp_path).iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    assert len(mnist(tmp_path)[0]) == 20


@pytest.mark.parametrize("unpacked_into", ["", "cifar-10-batches-py"])
def test_cifar10_is_read_from_pickles_and_from_the_binary_version(tmp_path: Path, unpacked_into: str) -> None:
    training, test = cifar10(write_cifar10(tmp_path / "py") / unpacked_into)
    other, _ = cifar10(write_cifar10(tmp_path / "bin", binary=True))
    assert (len(training), len(test)) == (50, 10)
    assert torch.equal(training.images, other.images)
    assert torch.equal(training.labels, other.labels)
    assert training.labels.tolist() == list(range(10)) * 5
    assert (training.augment, test.augment) == (True, False)
    red = (test.images[4, 0].float() - 125.3) / 63.0
    assert torch.allclose(test[4][0][0], red, atol=1e-5)


def test_cifar100_has_its_fine_labels(tmp_path: Path) -> None:
    training, _ = cifar100(write_cifar100(tmp_path / "py"))
    other, test = cifar100(write_cifar100(tmp_path / "bin", binary=True))
    assert training.labels.tolist() == other.labels.tolist() == [number * 7 for number in range(10)]
    assert torch.equal(training.images, other.images)
    assert test[2][0].shape == (3, 32, 32)


def test_images_are_moved_and_mirrored() -> None:
    torch.manual_seed(0)
    image = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6) * 7
    images = Images(image, torch.tensor([1]), mean=[0.0], deviation=[1.0], augment=True)
    padded = torch.nn.functional.pad(image.float(), (4,) * 4, mode="reflect")[0]
    allowed = {
        tuple(seen.flatten().tolist())
        for down in range(9)
        for right in range(9)
        for seen in (padded[:, down : down + 6, right : right + 6],)
        for seen in (seen, seen.flip(2))
    }
    seen = {tuple(images[0][0].flatten().tolist()) for _ in range(200)}
    assert seen <= allowed
    assert len(seen) > 60, "of 162 places and mirrorings"


def test_text_is_cut_into_pieces(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "a.txt").write_bytes(b"first")
    training, test = text(tmp_path)
    given, wanted = training[0]
    assert bytes(given.tolist()).startswith(b"first\n\x00\x01")
    assert torch.equal(given[1:], wanted[:-1])
    assert (given.shape, given.dtype) == ((128,), torch.int64)
    assert len(training) == (2566 - 256 - 1) // 128
    assert len(test) == 1
    assert torch.equal(training[1][0][:1], training[0][1][-1:]), "each byte but the first is predicted once"
    with pytest.raises(IndexError):
        training[len(training)]


def test_a_data_set_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path / "cifar10_data")
    monkeypatch.chdir(tmp_path)
    training, _ = find_dataset("CIFAR-10").read(None)
    assert len(training) == 50
    with pytest.raises(
        UserError, match=r"mnist_data does not exist; .* four IDX files.* https://yann\.lecun"
    ):
        find_dataset("mnist").read(None)
    with pytest.raises(UserError, match=r"digits has no files to look for in .*scikit-learn ships them"):
        find_dataset("digits").read(tmp_path)


def test_the_digits_are_those_that_scikit_learn_reads() -> None:
    from sklearn.datasets import load_digits

    data, held_out = load_digits(), torch.arange(1797) % 5 == 0
    for read, kept in zip(digits(), (~held_out, held_out), strict=True):
        images, labels = read.tensors
        assert torch.equal(images, torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[kept] / 16)
        assert torch.equal(labels, torch.tensor(data.target, dtype=torch.int64)[kept])


def test_digits_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UsageError, match=r"not installed: pip install 'elastic-ps\[examples\]'"):
        digits()


def cut(path: Path, by: int = 100) -> Path:
    return first(path, path.stat().st_size - by)


def first(path: Path, size: int) -> Path:
    """Only so many bytes of the file."""
    return written(path, path.read_bytes()[:size])


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def removed(path: Path) -> Path:
    path.unlink()
    return path


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
MNIST: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda d: removed(d / LABELS), f"no file {LABELS} in .* https://yann.lecun.com"),
    "renamed": (
        lambda d: (d / LABELS).rename(d / "train-labels-idx1-ubyt"),
        f"idx1-ubyt: .* rename it to {LABELS}",
    ),
    "cut": (
        lambda d: cut(d / IMAGES),
        f"{IMAGES} .* it is truncated: it has 15,596 bytes; 20 records, .* take 15,696",
    ),
    "head": (lambda d: first(d / IMAGES, 6), f"{IMAGES} .* its header has 16"),
    "empty": (lambda d: first(d / IMAGES, 0), f"{IMAGES} .* it begins with nothing"),
    "swapped": (
        lambda d: (d / LABELS).rename(d / IMAGES),
        f"{IMAGES} .* with 00 00 08 01; .* with 00 00 08 03",
    ),
    "other": (
        lambda d: written(d / LABELS, b"<html>"),
        f"{LABELS} .* with 3c 68 74 6d; a file of labels",
    ),
    "longer": (
        lambda d: written(d / IMAGES, (d / IMAGES).read_bytes() + b"x"),
        f"{IMAGES} .* 15,697 bytes; 20 records",
    ),
    "size": (
        lambda d: written(d / IMAGES, struct.pack(">4B3I", 0, 0, 8, 3, 1, 27, 29) + bytes(27 * 29)),
        f"{IMAGES} .* 27 x 29 pixels; expected 28 x 28",
    ),
    "label": (
        lambda d: written(d / LABELS, struct.pack(">4BI", 0, 0, 8, 1, 20) + bytes([11] * 20)),
        f"{LABELS} .* label 11; expected 0 to 9",
    ),
    "counts": (
        lambda d: written(d / LABELS, struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes(3)),
        f"{LABELS} .* 3 labels, and {IMAGES} has 20 images",
    ),
    "none": (
        lambda d: written(d / IMAGES, struct.pack(">4B3I", 0, 0, 8, 3, 0, 28, 28)),
        f"{IMAGES} .* 0 records",
    ),
    "packed cut": (
        lambda d: (
            (write_mnist(d, packed=True) / f"{IMAGES}.gz"),
            removed(d / IMAGES),
            cut(d / f"{IMAGES}.gz"),
        ),
        "it is truncated: the compressed data ends too early",
    ),
    "packed damaged": (
        lambda d: written(d / LABELS, b"\x1f\x8b" + bytes(30)),
        "its compressed data is damaged",
    ),
    "directory": (
        lambda d: d.rename(d.with_name("elsewhere")),
        "does not exist; expected the directory with the",
    ),
}


@pytest.mark.parametrize("case", MNIST)
def test_a_file_of_mnist_that_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    spoil, message = MNIST[case]
    spoil(write_mnist(tmp_path / "data"))
    with pytest.raises(InvalidModel, match=message):
        mnist(tmp_path / "data")


def batch(**changes: object) -> bytes:
    whole = {"labels": [1, 2], "data": [bytes(3072)] * 2}
    return python2_pickle({k: v for k, v in (whole | changes).items() if v is not None})


PY, BIN = "cifar-10-batches-py/data_batch_3", "cifar-10-batches-bin/data_batch_3.bin"
CIFAR: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda d: removed(d / PY), "no file data_batch_3 in .*cifar-10-batches-py\\. The files"),
    "cut": (lambda d: cut(d / PY), "data_batch_3 .* it is not a pickle, or is truncated"),
    "empty": (lambda d: first(d / PY, 0), "data_batch_3 .* it is truncated, or empty"),
    "labels": (
        lambda d: written(d / PY, batch(labels=None)),
        "it has 'data'; expected 'data' and 'labels'",
    ),
    "text": (lambda d: written(d / PY, batch(labels=["a", "b"])), "labels are not whole numbers"),
    "label": (
        lambda d: written(d / PY, batch(labels=[3, 10])),
        "the label 10; expected labels from 0 to 9",
    ),
    "counts": (lambda d: written(d / PY, batch(labels=[1])), r"shape \[2, 3072\] .* 1 labels need"),
    "pixels": (
        lambda d: written(d / PY, batch(data=[bytes(9)] * 2)),
        r"\[2, 9\] .* need shape \[2, 3072\]",
    ),
    "list": (
        lambda d: written(d / PY, pickle.dumps([1], protocol=2)),
        "it holds a list; expected a dict",
    ),
    "program": (
        lambda d: written(d / PY, b"cos\nsystem\n(S'touch " + os.fsencode(d / "ran") + b"'\ntR."),
        "it asks for os.system",
    ),
    "binary cut": (
        lambda d: (cut(write_cifar10(d, binary=True) / BIN), (d / "cifar-10-batches-py").rename(d / "off")),
        "data_batch_3.bin .* it is truncated: it has 30,630 bytes, which is not a multiple of a record's",
    ),
    "packed": (
        lambda d: ((d / "cifar-10-batches-py").rename(d / "off"), written(d / "cifar-10-python.tar.gz", b"")),
        "no file data_batch_1 in .*/data. Unpack .*cifar-10-python.tar.gz",
    ),
    "other data set": (
        lambda d: ((d / "cifar-10-batches-py").rename(d / "off"), write_cifar100(d)),
        "no file data_batch_1 in .* from https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "file": (lambda d: (d.rename(d.with_name("off")), written(d, b"")), "is a file; expected the directory"),
}


@pytest.mark.parametrize("case", CIFAR)
def test_a_file_of_cifar_that_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    spoil, message = CIFAR[case]
    spoil(write_cifar10(tmp_path / "data"))
    with pytest.raises(InvalidModel, match=message):
        cifar10(tmp_path / "data")
    assert not (tmp_path / "data" / "ran").exists(), "nothing in a pickle is run"


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(N}tb.",
        b"cnumpy\nndarray\n(N}(U\x08__init__K\x01utb.",
        b"\x80\x02}q\x01(U\x04dataPid\nu.",
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n)R(K\x01)cnumpy\ndtype\n(U\x02O8tR\x89U\x00tbu.",
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n)RK\x07bu.",
    ],
)
def test_a_pickle_that_wants_more_than_bytes_is_refused(tmp_path: Path, program: bytes) -> None:
    path = write_cifar10(tmp_path) / PY
    path.write_bytes(program)
    with pytest.raises(InvalidModel, match="data_batch_3 is not a file of CIFAR-10"):
        cifar10(tmp_path)


def test_a_text_that_is_missing_or_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"cannot read the text .*nothing\.txt: No such file"):
        text(tmp_path / "nothing.txt")
    with pytest.raises(InvalidModel, match=r"the directory .* has no file \*\.txt"):
        text(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(InvalidModel, match="has 5 bytes; expected 1,290 or more"):
        text(tmp_path / "short.txt")
