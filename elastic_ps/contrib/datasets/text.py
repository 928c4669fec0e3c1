"""Text as bytes, in pieces, for a language model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset

from elastic_ps.errors import InvalidModel

CONTEXT = 128
"""The bytes of a piece."""
HELD_OUT = 10
"""The last of this many parts is the test set."""


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Records are (bytes, next bytes): int64 of shape (context,) each, from 0 to 255.

    Args:
        data: uint8 of shape (bytes,), more than `context` of them.
        context: the bytes of a record. A rest that does not fill a record is left out.
    """

    def __init__(self, data: torch.Tensor, context: int = CONTEXT) -> None:
        self._data, self._context = data, context

    def __len__(self) -> int:
        return (len(self._data) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        piece = self._data[index * self._context :][: self._context + 1].long()
        return piece[:-1], piece[1:]


def text(path: Path) -> tuple[Text, Text]:
    """A text as (training set, test set); the test set is the last tenth. Blocks for reading.

    Args:
        path: a file, or a directory whose files `*.txt` are read in the order of their names.

    Raises:
        InvalidModel: there is no such file, it cannot be read, or it is too short.
    """
    paths = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not paths:
        raise InvalidModel(f"the directory {path} has no file *.txt; expected a text, or the name of a file")
    try:
        data = b"\n".join(each.read_bytes() for each in paths)
    except OSError as error:
        raise InvalidModel(
            f"cannot read the text {error.filename}: {error.strerror}; expected a file, or a directory with "
            "files *.txt"
        ) from error
    needed = HELD_OUT * (CONTEXT + 1)
    if len(data) < needed:
        raise InvalidModel(f"the text {path} has {len(data):,} bytes; expected {needed:,} or more")
    training = len(data) - len(data) // HELD_OUT
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Text(tensor[:training]), Text(tensor[training:])
