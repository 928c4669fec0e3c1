"""What a pull is answered with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from elastic_ps.server.deltas import Delta


@dataclass(frozen=True)
class RestartedAs:
    """The answer to a pull when the round was started again: push everything for this attempt."""

    attempt: int


@dataclass(frozen=True)
class Pulled:
    """A bucket that has reached the version asked for.

    Attributes:
        unchanged: the caller has its values already.
        copied: `data` is a copy, which never changes.
        stands: the values are those of the draft that the caller has.
        draft: number of the draft that the bucket is; 0 for the version itself.
        delta: what the caller has to add to the values that it has, instead of `data`.
        last: all buckets are there, whatever becomes of the caller from now on.
    """

    bucket: int
    version: int
    data: memoryview
    unchanged: bool = False
    copied: bool = False
    stands: bool = False
    draft: int = 0
    delta: Delta | None = None
    last: bool = False


NO_DRAFTS: Mapping[int, int] = MappingProxyType({})
