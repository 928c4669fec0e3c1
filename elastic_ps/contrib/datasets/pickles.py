"""Reads the pickles of CIFAR safely.

A pickle is a program that may import and call anything. This reader knows only the three names that an array
of numpy needs. Each stands for a class here that only stores its arguments; nothing of numpy is called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any


class NotReadable(ValueError):
    """The data is not a pickle, or needs more than arrays of bytes."""


class Array:
    """An array of bytes in a pickle.

    Attributes:
        shape: the shape of the array.
        data: its elements, row by row; one byte each.
    """

    def __init__(self, *_: object) -> None:
        self.shape: tuple[int, ...] = ()
        self.data = b""

    def __setstate__(self, state: object) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise NotReadable("an array in it is not pickled as numpy pickles arrays")
        _, shape, kind, by_column, data = state
        if not isinstance(kind, _Type) or kind.name != b"u1":
            raise NotReadable("an array in it is not of unsigned bytes")
        if not isinstance(data, bytes) or by_column or not isinstance(shape, tuple):
            raise NotReadable("an array in it is not stored row by row")
        self.shape, self.data = shape, data


class _Type:
    """numpy's dtype."""

    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which bytes do not have."""


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): _Type,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise NotReadable(f"it asks for {module}.{name}, which no file of this kind needs") from None


def read(data: bytes) -> dict[str, Any]:
    """The dictionary that was pickled, with its keys as text. Arrays are of class `Array`.

    Raises:
        NotReadable: it is not a pickle, is truncated, holds no dictionary, or needs more than arrays of
            bytes.
    """
    try:
        found = _Reader(io.BytesIO(data), encoding="bytes").load()
    except NotReadable:
        raise
    except EOFError as error:
        raise NotReadable("it is truncated, or empty") from error
    except (
        *(pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError),
        *(ImportError, OverflowError, MemoryError, RecursionError),
    ) as error:
        raise NotReadable(f"it is not a pickle, or is truncated or damaged ({error})") from error
    if not isinstance(found, dict):
        raise NotReadable(f"it holds a {type(found).__name__}; expected a dictionary")
    return {
        key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in found.items()
    }
