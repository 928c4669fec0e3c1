"""Checks the options of built-in codecs, so that a job with a wrong one is refused before it starts.

Those of a user's own codec are checked where it can be imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

MOST_OF_INTEGERS = 1 << 16
"""The most elements that share a scale, with int8 and int4."""

AT_FIRST = 0.25
"""The share of the elements that topk sends for version 0, if it warms up."""

DTYPES = ("bfloat16", "float32")
"""The dtypes in which topk may send elements."""

_T = TypeVar("_T")


def plain() -> None:
    """Codecs without options."""


def integers(block: int = 256) -> None:
    """int8 and int4. Raises ValueError if an option is out of range, as the functions below do."""
    if not _is_whole(block) or not 2 <= block <= MOST_OF_INTEGERS or block % 2:
        raise ValueError(f"block is {block!r}; expected an even number from 2 to {MOST_OF_INTEGERS}")


def signs(block: int = 64) -> None:
    """signsgd."""
    if not _is_whole(block) or not 8 <= block <= 1 << 24 or block % 8:
        raise ValueError(f"block is {block!r}; expected a multiple of 8 from 8 to {1 << 24}")


def low_rank(rank: int = 4) -> None:
    """powersgd."""
    if not _is_whole(rank) or not 1 <= rank <= 1024:
        raise ValueError(f"rank is {rank!r}; expected a whole number from 1 to 1024")


def largest(ratio: float = 0.01, warmup: int = 0, momentum: float = 0.0, dtype: str = "bfloat16") -> None:
    """topk."""
    if not _is_number(ratio) or not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio!r}; expected a number above 0, at most 1")
    if not _is_whole(warmup) or warmup < 0:
        raise ValueError(f"warmup is {warmup!r}; expected a number of versions, 0 or more")
    if warmup and ratio >= AT_FIRST:
        raise ValueError(
            f"warmup is {warmup}, but it starts with a ratio of {AT_FIRST}, and ratio is {ratio}. Leave "
            "warmup out, or lower ratio"
        )
    if not _is_number(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum!r}; expected a number from 0 to below 1, such as 0.9")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")


CHECKS: Mapping[str, Callable[..., None]] = {
    "none": plain,
    "bf16": plain,
    "fp16": plain,
    "changed": plain,
    "int8": integers,
    "int4": integers,
    "topk": largest,
    "signsgd": signs,
    "powersgd": low_rank,
}
"""By the codec's name, a function that takes its options and raises ValueError if one is out of range."""


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the codec of that name is built in and does not take these options."""
    if name in CHECKS:
        with_options(CHECKS[name], name, options)


def with_options(make: Callable[..., _T], name: str, options: Mapping[str, Any]) -> _T:
    """Return `make(**options)`. Raises ValueError if that fails, which says why, or what the codec takes."""
    takes = inspect.signature(make)
    try:
        takes.bind(**options)
        return make(**options)
    except (TypeError, ValueError) as error:
        known = ", ".join(str(each).partition(":")[0] for each in takes.parameters.values())
        raise ValueError(
            f"the codec {name} does not take the options {dict(options)}: {error}. It takes: "
            f"{known or 'none'}"
        ) from error
    except Exception as error:  # (a class of the user's own)
        raise ValueError(f"the codec {name} cannot be made here: {type(error).__name__}: {error}") from error


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
