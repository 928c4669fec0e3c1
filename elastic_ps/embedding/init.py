"""The first values of a row: a pure function of the seed, the table's name and the id.

So they do not depend on when a row is made, beside which others, on which shard, or on the platform: only
integer arithmetic and correctly rounded operations of IEEE 754 are used.

The random words are those of SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number
Generators", OOPSLA), whose n-th output is a hash of its seed plus n times a constant, so that it counts, as
Philox does (Salmon et al. 2011), at a fifth of the cost without a 128-bit product. A row's seed is the hash
of its id and of the table's key.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic_ps.errors import UsageError

Ids: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Values: TypeAlias = npt.NDArray[np.float64]

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_QUANTILES = 1 << 16


def mixed(words: Words) -> Words:
    """SplitMix64's hash of each word: a bijection in which each bit depends on all."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words


def hashed(strings: Sequence[str]) -> Ids:
    """The ids of strings: the first 8 bytes of BLAKE2b of their UTF-8, as a little-endian signed integer.

    Of a million different strings, two have the same id with a probability of 3e-8; of a billion, of 3 %.

    Raises UsageError if UTF-8 cannot encode a string.
    """
    try:
        digests = [hashlib.blake2b(each.encode(), digest_size=8).digest() for each in strings]
    except UnicodeEncodeError as error:
        raise UsageError(f"the string {error.object!r} has no id, because UTF-8 cannot encode it") from None
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def key_of(seed: int, table: str) -> int:
    """The 64 bits that distinguish a table's rows from those of other tables and seeds."""
    digest = hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def words(key: int, ids: Ids, count: int) -> Words:
    """`count` random words for each id, of shape (ids, count)."""
    with np.errstate(over="ignore"):
        seeds = mixed(ids.view(np.uint64) + np.uint64(key)) ^ np.uint64(key)
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        return mixed(seeds[:, None] + steps)


def _parts(key: int, ids: Ids, count: int, bits: int) -> Values:
    """`count` random integers of `bits` bits for each id."""
    per_word = 64 // bits
    drawn = words(key, ids, -(-count // per_word)).astype("<u8", copy=False)
    return drawn.view(f"<u{bits // 8}")[:, :count].astype(np.float64)


def require_numbers(made: Any) -> None:
    """Raise UsageError if a field of type float of a dataclass is not a number."""
    for name in (each.name for each in fields(made) if each.type == "float"):
        value = getattr(made, name)
        if not isinstance(value, Real) or isinstance(value, bool):
            raise UsageError(f"{type(made).__name__}({name}={value!r}): expected a number")


@dataclass(frozen=True)
class Uniform:
    """Values between `low` and `high`, all equally likely. Raises UsageError if `low` is above `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        require_numbers(self)
        if not -math.inf < self.low <= self.high < math.inf:
            raise UsageError(
                f"uniform(low, high) takes two finite numbers in order; given: ({self.low}, {self.high})"
            )

    def first_values(self, key: int, ids: Ids, dim: int) -> Values:
        """The values of rows, of shape (ids, dim)."""
        unit = (_parts(key, ids, dim, 32) + 0.5) * 2.0**-32
        return self.low + unit * (self.high - self.low)


@dataclass(frozen=True)
class Normal:
    """Values of a normal distribution: 65,536 equally likely quantiles of it, up to 4.3 `std` from the mean.

    Raises UsageError if `std` is negative, or a number is not finite.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        require_numbers(self)
        if not (math.isfinite(self.mean) and 0 <= self.std < math.inf):
            raise UsageError(
                f"normal(mean, std) takes a mean and a std >= 0; given: ({self.mean}, {self.std})"
            )

    def first_values(self, key: int, ids: Ids, dim: int) -> Values:
        """The values of rows, of shape (ids, dim)."""
        drawn = _parts(key, ids, dim, 16).astype(np.int64)
        return self.mean + _quantiles()[drawn] * self.std


@dataclass(frozen=True)
class Constant:
    """The same number everywhere. Raises UsageError if it is not finite."""

    value: float = 0.0

    def __post_init__(self) -> None:
        require_numbers(self)
        if not math.isfinite(self.value):
            raise UsageError(f"constant(value) takes a finite number; given: {self.value}")

    def first_values(self, key: int, ids: Ids, dim: int) -> Values:  # noqa: ARG002 (as the others)
        """The values of rows, of shape (ids, dim)."""
        return np.full((len(ids), dim), self.value)


def uniform(low: float, high: float) -> Uniform:
    """First values between `low` and `high`, all equally likely. Raises UsageError if `low` is above."""
    return Uniform(low, high)


def normal(mean: float = 0.0, std: float = 1.0) -> Normal:
    """First values of a normal distribution, up to 4.3 `std` from the mean. Raises UsageError."""
    return Normal(mean, std)


def constant(value: float = 0.0) -> Constant:
    """The same first value everywhere. Raises UsageError if it is not finite."""
    return Constant(value)


Init: TypeAlias = Uniform | Normal | Constant


@functools.cache
def _quantiles() -> Values:
    """Those of the standard normal distribution, rounded to float32, where platforms do not differ."""
    import statistics  # takes a moment, and few tables need it

    normal = statistics.NormalDist()
    upper = [normal.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES // 2, _QUANTILES)]
    half = np.array(upper, dtype=np.float32).astype(np.float64)
    return np.concatenate([-half[::-1], half])
