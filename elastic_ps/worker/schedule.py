"""The hyperparameters as they are now, and learning-rate schedulers: the script's own, and the job's.

The script changes hyperparameters by hand or steps schedulers; the settings of the longest-serving worker
count, and the others take them over. A worker that joins, or whose step was not made, finds out here where
the schedule stands.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ps.core.settings import Settings, plain
from elastic_ps.errors import InvalidModel
from elastic_ps.worker.model import Described

Interval: TypeAlias = Literal["step", "epoch"]
"""When a script steps a scheduler: after every optimizer step, or after every epoch."""


class Schedule:
    """Settings of one optimizer. Belongs to the training thread.

    Args:
        wrapped: the script's optimizer, whose `param_groups` schedulers change.
    """

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self._wrapped = wrapped
        self._schedulers: list[LRScheduler] = []
        self._intervals: list[Interval | None] = []
        self._initial: list[dict[str, Any]] = []
        self._positions_at_step: tuple[int, ...] = ()
        self._in_force = Settings(groups=())
        self._adopted = (self._in_force, False)
        self._dropped = False  # the last step was not made; the script does not know
        self._keeps_own = False  # a late step does not end an epoch: the script's own schedule is right
        self._behind: int | None = None  # since that step: are schedulers stepped after every step?

    def current(self) -> Settings:
        """Hyperparameters and scheduler states as they are now."""
        return Settings(
            Described.settings(self._wrapped).groups,
            tuple(_plain_state(scheduler) for scheduler in self._schedulers),
            stepped=self.stepped,
        )

    @property
    def stepped(self) -> bool:
        """Whether the script has stepped a scheduler since its last optimizer step."""
        return self._positions() != self._positions_at_step

    # --- what happens to this worker

    def joined(self, settings: Settings, *, initialises: bool) -> None:
        """This worker has become a member, and these are the job's settings."""
        self._in_force = settings
        if not initialises:
            self._adopt(settings)

    def add(
        self, scheduler: LRScheduler, interval: Interval | None, in_force: str, *, version: int, step: int
    ) -> None:
        """Keep a scheduler's state on the parameter server; take over the state in force, if there is one."""
        self._schedulers.append(scheduler)
        self._intervals.append(interval)
        self._initial.append(_plain_state(scheduler))
        self._positions_at_step = self._positions()
        if in_force:
            settings = Settings.from_json(in_force)
            self._adopt(settings, catch_up=settings.stepped)
            self._watch_script(version, known=settings.stepped, step=step)

    def step_begins(self, step: int) -> None:
        """The first gradient of the worker's step of this number is there."""
        if self._dropped:
            self._dropped = False
            self._set(*self._adopted)
        if self._behind is not None and step > self._behind:
            self._behind = None
            if self.stepped:
                self._step_schedulers(otherwise=True)

    def step_made(self, sent: str, in_force: str) -> None:
        """The step was made with the settings `sent`; others may be in force."""
        if in_force and in_force != sent:
            self._behind = None
            self._adopt(Settings.from_json(in_force))

    def step_ended(self) -> None:
        """The script's call of `optimizer.step` returns."""
        self._positions_at_step = self._positions()

    def step_late(self, in_force: str) -> None:
        """The step came too late for its round, and was not made."""
        if in_force:
            self._in_force = Settings.from_json(in_force)
        self._keeps_own = bool(self._intervals) and set(self._intervals) == {"epoch"}
        self._step_not_made()

    def step_lost(self, settings: Settings) -> None:
        """This worker had to join again in its step; `settings` are what it was told then."""
        self._in_force = settings
        self._step_not_made()

    def _step_not_made(self) -> None:
        if not self._keeps_own:
            self._dropped = True
            self._set(self._in_force, self.stepped)

    def joined_again(self, settings: Settings) -> None:
        """This worker had to join again between two steps."""
        self._in_force = settings
        self._set(settings, self.stepped)

    def went_on(self, in_force: str, *, version: int, step: int) -> None:
        """This worker takes part again, at a version that others have made."""
        if self._keeps_own:
            self._keeps_own = False
            return
        settings = Settings.from_json(in_force)
        # Nothing comes before the first step; there, what this worker's own script does must do.
        known = settings.stepped or (version <= 2 and self.stepped)
        self._set(settings, known)
        self._watch_script(version, known=known, step=step)

    # --- how

    def _watch_script(self, version: int, *, known: bool, step: int) -> None:
        """Settings of the first step do not tell whether schedulers are stepped after every step."""
        self._behind = step if version == 1 and not known and None in self._intervals else None

    def _set(self, settings: Settings, stepped: bool) -> None:
        """Take over the settings of the last step, one scheduler step later if `stepped`.

        After a step that was dropped the script goes on as if it had been made, and may step its schedulers;
        so they are set once more before the next step.
        """
        self._adopt(settings, catch_up=stepped)
        self._adopted, self._behind = (settings, stepped), None

    def _adopt(self, settings: Settings, *, catch_up: bool | None = None) -> None:
        """Take over the settings of the longest-serving worker, those of the last step.

        Args:
            catch_up: None: the step was this worker's too, so the script is about to step its schedulers if
                it does so after every step. Else that has been done: make up for it, where the script has
                said how often it steps a scheduler, or else if this is true. (Not for ReduceLROnPlateau:
                what it would be stepped with is not known here.)
        """
        for group, values in zip(self._wrapped.param_groups, settings.groups, strict=True):
            group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in values.items()})
        if not settings.schedulers:  # of version 0, before the first step
            for scheduler, initial in zip(self._schedulers, self._initial, strict=True):
                scheduler.load_state_dict(dict(initial))
            return
        for scheduler, state in zip(self._schedulers, settings.schedulers, strict=False):
            scheduler.load_state_dict(dict(state))
        self._positions_at_step = self._positions()
        if catch_up is not None:
            self._step_schedulers(otherwise=catch_up)

    def _step_schedulers(self, *, otherwise: bool) -> None:
        """Step those that the script steps after every step, or has not told of if `otherwise`."""
        for scheduler, interval in zip(self._schedulers, self._intervals, strict=True):
            every_step = interval == "step" or (interval is None and otherwise)
            if every_step and not isinstance(scheduler, ReduceLROnPlateau):
                # For torch's warning: the optimizer has made a step, on the parameter server.
                vars(scheduler.optimizer)["_opt_called"] = True
                scheduler.step()

    def _positions(self) -> tuple[int, ...]:
        return tuple(scheduler.last_epoch for scheduler in self._schedulers)


def _plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    """The part of a scheduler's state that changes and can be sent."""
    state = {}
    for key, value in scheduler.state_dict().items():
        try:
            state[key] = plain(value, where=key)
        except InvalidModel:
            continue
    return state
