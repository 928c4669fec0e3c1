"""The settings of a version: those that its workers ask for, at the current position of training."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ps.api.consistency import Consistency
from elastic_ps.core import damping, scales
from elastic_ps.core.consistency import Contribution
from elastic_ps.core.fixed_schedule import FixedSchedule
from elastic_ps.core.ledger import Ledger
from elastic_ps.core.membership import Members, eldest
from elastic_ps.core.settings import FRESH, Made, Position, Settings, read_settings


def after(
    settings: Settings,
    contributions: Sequence[Contribution],
    members: Members,
    ledger: Ledger | FixedSchedule | None,
    *,
    may_be_stale: bool,
) -> Settings:
    """The settings for the next step, after `settings`. They are in force until the next version.

    Args:
        may_be_stale: see `wanted`.
    """
    if any(c.assigns for c in contributions):
        return settings  # no step is made, so schedules do not advance
    sent = wanted(settings, contributions, members, may_be_stale=may_be_stale)
    made = Made(len({c.worker for c in contributions}), sum(c.samples for c in contributions))
    position = _position(settings.position.steps + 1, contributions, ledger)
    return (read_settings(sent) if sent else settings).of_version(position, made, settings)


def _position(
    steps: int, contributions: Sequence[Contribution], ledger: Ledger | FixedSchedule | None
) -> Position:
    if ledger is None:
        return Position(steps)
    then = ledger.copy()
    for c in contributions:
        then.apply(c.incarnation, c.records)
        then.skip(c.incarnation, c.skipped)
    return Position(steps, then.applied + then.skipped, then.complete_epochs)


def wanted(
    settings: Settings, contributions: Sequence[Contribution], members: Members, *, may_be_stale: bool
) -> str:
    """The settings that the contributors ask for, as JSON; "" for those in force.

    The contributor with the most steps decides, among those that have heeded the most evaluations. With
    bounded staleness, where most versions lack most workers, schedulers do not go back unless one has heeded
    another evaluation; and settings with as many steps of schedulers change only if no member has made more
    steps. So a slow worker's step takes nothing back, and nothing stops while the fastest worker is away.
    """
    heeds = {c.incarnation: _heeds(c.settings, settings) for c in contributions}
    furthest = max(heeds.values())
    if furthest < settings.heeds:
        return ""
    sent = {c.incarnation: c.settings for c in contributions if heeds[c.incarnation] == furthest}
    found = [members.find(c.worker, c.incarnation) for c in contributions if c.incarnation in sent]
    if not (known := [member for member in found if member is not None]):
        return ""  # they have ended, and so many others since that they are not remembered
    first = eldest(known)
    most = max((member.steps for member in members.live.values()), default=0)
    text = sent[first.incarnation]
    ahead = _steps(text, settings) - settings.steps
    stale = ahead < 0 or (not ahead and first.steps < most)
    return "" if may_be_stale and stale and furthest == settings.heeds else text


def _steps(sent: str, in_force: Settings) -> int:
    """See `Settings.steps`; those in force if the script has no schedulers, as it may after a resume."""
    return read_settings(sent).steps if '"steps"' in sent else in_force.steps


def _heeds(sent: str, in_force: Settings) -> int:
    """See `Settings.heeds`; those in force if the script has no schedulers, as it may after a resume."""
    return read_settings(sent).heeds if '"heeds"' in sent else in_force.heeds


def to_step_with(settings: Settings, consistency: Consistency, *, stalest: int, steps: int) -> Settings:
    """The settings in force. A stale step may have another learning rate and momentum.

    So may an exchange; see `Consistency.scale` and `Consistency.warms_momentum`.

    Args:
        stalest: the staleness of the stalest step.
        steps: the optimizer steps of the version that the round continues from.
    """
    if (divisors := scales.divisors(consistency.scale, stalest)) != FRESH:
        settings = settings.slowed(divisors)
    if consistency.scale == "damped" and stalest:
        settings = settings.with_momentum(lambda momentum, _: damping.when_stale(momentum, stalest))
    return damping.warmed(settings, consistency, steps)
