"""The order of the records of an epoch: a permutation by formula, not by a list.

A list of the order takes memory for every record of the data set, in every worker, and time before the
first batch. A cipher over the numbers 0 to `n - 1` is a permutation of them, too, and any part of it is
computed from the key alone. This one is the generalised Feistel network with cycle walking of Black and
Rogaway 2002, "Ciphers with Arbitrary Finite Domains": a position is written as two digits, each round adds
a keyed hash of one digit to the other, and a result that is not below `n` is put through again. It shuffles
and keeps no secret, so its hash is a cheap one.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import overload

import torch

ROUNDS = 8
"""Twice the four that make a Feistel network of random functions look random (Luby and Rackoff 1988)."""

MOST_RECORDS = 1 << 60
"""Up to here all numbers of the computation fit into 64 bits with a sign."""

_CHUNK = 1 << 16
_BLOCK = 1 << 11
"""Positions that are computed at a time for short slices: one batch alone would take nearly as long."""

_LOW_31_BITS = (1 << 31) - 1


def permutation(records: int, epoch: int, *, shuffle: bool, seed: int) -> Sequence[int]:
    """The index of the record at each position of an epoch; the same in every worker."""
    return _shuffled(records, seed, epoch) if shuffle else range(records)


class Shuffled(Sequence[int]):
    """A permutation of `range(records)` that looks random. It takes little memory. Thread-safe.

    A slice is computed at once and is a list; element by element takes far longer. The numbers of a short
    slice are kept for the next one.

    Args:
        records: how many there are; `MOST_RECORDS` at most.
        seed, epoch: each pair has a permutation of its own.
    """

    def __init__(self, records: int, *, seed: int | str, epoch: int) -> None:
        if not 0 <= records <= MOST_RECORDS:
            raise ValueError(f"{records} records; expected 0 to {MOST_RECORDS}")
        self._records = records
        self._low = math.isqrt(max(1, records) - 1) + 1  # the square root, rounded up
        self._high = -(-records // self._low)
        digest = hashlib.shake_128(f"{seed}/{epoch}".encode()).digest(4 * ROUNDS)
        self._keys = [key & _LOW_31_BITS for key in struct.unpack(f"<{ROUNDS}I", digest)]
        self._block: tuple[int, list[int]] = (-1, [])  # the one computed last, and its number

    def __len__(self) -> int:
        return self._records

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            start, stop, step = position.indices(self._records)
            length = len(range(start, stop, step))
            number, offset = divmod(start, _BLOCK)
            if step == 1 and 0 < length <= _BLOCK - offset:
                return self._of_block(number)[offset : offset + length]
            return self._records_at(start + step * torch.arange(length, device="cpu"))
        return self._records_at(torch.tensor([range(self._records)[position]], device="cpu"))[0]

    def _of_block(self, number: int) -> list[int]:
        known, records = self._block
        if known != number:
            start = number * _BLOCK
            end = min(start + _BLOCK, self._records)
            records = self._records_at(torch.arange(start, end, device="cpu"))
            self._block = number, records
        return records

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._records, _CHUNK):
            yield from self[start : start + _CHUNK]

    def _records_at(self, positions: torch.Tensor) -> list[int]:
        values = self._encipher(positions)
        while (outside := values >= self._records).any():
            values[outside] = self._encipher(values[outside])
        return values.tolist()

    def _encipher(self, values: torch.Tensor) -> torch.Tensor:
        """A permutation of the numbers below `low * high`. The digits change places in each round."""
        first, second = values % self._low, values // self._low
        for number, key in enumerate(self._keys):  # an even number of them: each digit ends in its own place
            base = self._high if number % 2 else self._low
            first, second = second, (first + _hash(second, key)) % base
        return second * self._low + first


@lru_cache(maxsize=4)
def _shuffled(records: int, seed: int, epoch: int) -> Shuffled:
    return Shuffled(records, seed=seed, epoch=epoch)


def _hash(values: torch.Tensor, key: int) -> torch.Tensor:
    """31 bits that look random, of each of the values below 2**31."""
    values = ((values ^ key) * 0x45D9F3B) & _LOW_31_BITS
    values = ((values ^ (values >> 15)) * 0x2C1B3C6D) & _LOW_31_BITS
    return values ^ (values >> 14)
