"""The divisor of a stale step's learning rate: `Consistency.scale`.

A user's own function is called once for every relevant staleness, when the job begins or is changed. So it
does not run while a version is made, and its errors show before training begins.
"""

from __future__ import annotations

import contextlib
import math
from functools import cache

from elastic_ps.api.consistency import STALENESS_SCALES
from elastic_ps.core.settings import Divisors
from elastic_ps.errors import InvalidJob
from elastic_ps.process.lifecycle import import_own

TRIED = 1000
"""The largest staleness for which a function is called. Staler steps have the same rate."""


def divisor(scale: str, staleness: int) -> float:
    """The divisor of a step's learning rate.

    `inverse` is after Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning", who
    divide by the staleness. Here it is one more, so that a fresh step has the whole rate. `damped` has the
    same rate, and less momentum: see `core.damping`. Adaptive optimizers have the square root of it then: a
    step of one worker's batch instead of all workers' (Malladi et al. 2022, "On the SDEs and Scaling Rules
    for Adaptive Gradient Algorithms"). Measured in docs/reports/2026-11-modes.md.

    Args:
        scale: `Consistency.scale` of the job.
        staleness: the step's staleness, in versions.

    Raises:
        InvalidJob: see `check`, after which it is not raised.
    """
    if scale == "none":
        return 1.0
    if scale in STALENESS_SCALES:
        return 1.0 + staleness
    return _of(scale)[min(staleness, TRIED)]


def divisors(scale: str, staleness: int) -> Divisors:
    """The divisors of a step's learning rates; see `divisor`."""
    plain = divisor(scale, staleness)
    return Divisors(plain, math.sqrt(plain) if scale == "damped" else plain)


def check(scale: str | None) -> None:
    """Import the user's function, if `scale` names one, and try it.

    Raises:
        InvalidJob: it cannot be imported or called, or does not return a positive finite number.
    """
    if scale is not None and scale not in STALENESS_SCALES:
        _of(scale)


@cache
def _of(name: str) -> tuple[float, ...]:
    """The divisors for each staleness from 0."""
    whose = "the parameter server, which calls it"
    function = import_own(name, what="consistency.stalenessScale", whose=whose)
    if not callable(function):
        raise InvalidJob(
            f"consistency.stalenessScale {name} is of type {type(function).__name__}; expected a function"
        )
    return tuple(_asked(name, function, staleness) for staleness in range(TRIED + 1))


def _asked(name: str, function: object, staleness: int) -> float:
    assert callable(function)
    try:
        factor = function(staleness)
    except (Exception, SystemExit) as error:
        raise InvalidJob(
            f"consistency.stalenessScale: {name}({staleness}) raises {type(error).__name__}: {error}. It "
            "takes the staleness of a step, a number of versions from 0, and returns what the learning rate "
            "is multiplied by"
        ) from error
    number = math.nan
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        with contextlib.suppress(OverflowError):  # an int that is larger than any float
            number = float(factor)
    if not (math.isfinite(number) and number > 0):
        raise InvalidJob(
            f"consistency.stalenessScale: {name}({staleness}) returns {factor!r}; expected a positive finite "
            "number, which the learning rate is multiplied by"
        )
    return 1.0 / number
