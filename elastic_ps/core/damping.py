"""Chooses the momentum of a version, if the job leaves it open.

Asynchronous steps act like a momentum of their own (Mitliagkas et al. 2016, "Asynchrony begets Momentum, with
an Application to Deep Learning"), so that the script's own is too much. An outer momentum overshoots if it
remembers about as many exchanges as the job makes, or if it starts at its final value while changes are
largest (Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", where it
rises with the number of steps).

A momentum m remembers m / (1 - m) steps, the mean age of the gradients in it.
"""

from __future__ import annotations

from elastic_ps.api.consistency import Consistency
from elastic_ps.core.settings import Settings

SHARE = 20
"""The outer momentum remembers at most one in this many of the job's exchanges: 0.9 needs 180 of them."""


def when_stale(momentum: float, staleness: int) -> float:
    """The momentum of a stale step: it remembers as many steps, divided by one more than the staleness.

    It is never 0 unless `momentum` is.
    """
    return momentum / (momentum + (1 - momentum) * (1 + staleness))


def of_exchange(momentum: float, number: int) -> float:
    """The outer momentum of the `number`-th exchange of all workers and of the whole model, from 0.

    It is never 0 unless `momentum` is.
    """
    return min(momentum, (number + 1) / (number + 1 + SHARE))


def warmed(settings: Settings, consistency: Consistency, version: int) -> Settings:
    """The settings of the exchange on this version, in mode `local`."""
    if not consistency.warms_momentum:
        return settings
    fragments = consistency.fragments or 1
    return settings.with_momentum(
        lambda momentum, group: of_exchange(momentum, version // (fragments * group.get("every", 1)))
    )
