"""Hyperparameters and learning-rate schedulers, stepped by the job's progress.

A version's learning rates follow from the job's progress, which comes with its values. So all workers have
the same ones, whenever they joined, and a step that was lost or came too late moves no schedule. If scripts
set hyperparameters by hand, those of the longest-serving worker count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from elastic_ps.core.settings import Position, Settings, plain
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.model.description import ModelDescription

logger = logging.getLogger(__name__)

Ended: TypeAlias = Callable[[], int | None]
"""Gives the last epoch that is over for the script; None within a loop."""

Interval: TypeAlias = Literal["step", "epoch", "sample"] | Callable[[int], float]
"""A scheduler makes a step for each version of the model, each epoch, or each record.

Or as many whole steps as a function gives for the number of records that are trained or skipped.
"""

OTHER_GROUPS = (
    "the parameter groups are no longer those that session.optimizer(...) got, because param_groups or the "
    "params of a group were changed, or add_param_group() or load_state_dict() of the torch optimizer was "
    "called. The job trains with the first groups. Change them before session.optimizer(...). To begin with "
    "an optimizer's state, pass it as session.optimizer(..., state=...), or in mode local load it before"
)

_NAMED = ("step", "epoch", "sample")

_JUMPING = (LambdaLR, OneCycleLR, CyclicLR)
"""Schedulers whose learning rate follows from the number of steps alone, so that many are as quick as one."""

_SCHEDULED = ("lr", "momentum", "betas")
"""The hyperparameters that schedulers set."""


def check_interval(scheduler: LRScheduler, interval: object) -> None:
    """Raise UsageError unless the scheduler can be stepped so."""
    if not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        raise UsageError(
            "session.scheduler(...) takes a learning-rate scheduler, such as those of "
            f"torch.optim.lr_scheduler; got {type(scheduler).__name__}"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        if interval is not None:
            raise UsageError(
                f"interval is {interval!r}, but ReduceLROnPlateau needs a value that only the script has: "
                "leave interval out, and call scheduler.step(value) in the script"
            )
    elif not callable(interval) and interval not in _NAMED:
        raise UsageError(
            f"interval is {interval!r}; expected 'step', 'epoch' or 'sample', or a function of the number "
            "of samples. The session steps the scheduler by the job's progress, so the script must not call "
            "scheduler.step()"
        )


class _Scheduler:
    """One that the session steps for the script, or whose state it keeps. `own`: see `Schedule`."""

    def __init__(self, scheduler: LRScheduler, interval: Interval | None, ended: Ended, *, own: bool) -> None:
        self.scheduler, self.interval, self._own = scheduler, interval, own
        self.steps, self.heeds, self.heeded = 0, 0, -1
        if interval is None:
            self._heed_once(ended)
        self._initial = self.state()
        self._left = self._seen()

    def state(self) -> dict[str, Any]:
        counts = {"steps": self.steps, "heeds": self.heeds, "heeded": self.heeded}
        groups = self.groups() if self._own else []
        return {**counts, "state": _plain(self.scheduler.state_dict()), "groups": groups}

    def groups(self) -> list[dict[str, Any]]:
        """What it sets in the parameter groups of its optimizer, as it is now."""
        groups = self.scheduler.optimizer.param_groups
        return [{key: plain(group[key], where=key) for key in _SCHEDULED if key in group} for group in groups]

    def _heed_once(self, ended: Ended) -> None:
        """Let a ReduceLROnPlateau count one evaluation after each epoch, though each worker makes one.

        Within a loop, all count.
        """
        kind: Any = type(self.scheduler)

        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            epoch = ended()
            if epoch is None or epoch > self.heeded:
                kind.step(scheduler, *args, **kwargs)
                self.heeds, self.heeded = self.heeds + 1, self.heeded if epoch is None else epoch

        methods = {"step": step, "__reduce__": lambda own: (object.__new__, (kind,), vars(own))}
        self.scheduler.__class__ = type(kind.__name__, (kind,), methods)

    def load(self, stored: Mapping[str, Any] | None) -> None:
        """Go to a state of the job's, or to the first one."""
        stored = {**self._initial, **(stored or {})}
        self.scheduler.load_state_dict(_completed(stored["state"], self.scheduler.state_dict()))
        self.steps, self.heeds, self.heeded = (int(stored[key]) for key in ("steps", "heeds", "heeded"))
        _set(self.scheduler.optimizer.param_groups, stored["groups"])
        self._left = self._seen()

    def go_to(self, position: Position) -> None:
        """Make the steps that are missing. Raises UsageError if the scheduler does not."""
        if self.interval is None:
            return
        self.check()
        made = {"step": position.steps, "epoch": position.epochs, "sample": position.samples}
        wanted = int(self.interval(position.samples)) if callable(self.interval) else made[self.interval]
        while self.steps < wanted:
            if isinstance(self.scheduler, _JUMPING):
                self.scheduler.last_epoch += wanted - self.steps - 1
                self.steps = wanted - 1
            self.steps += 1
            # For torch's warning: the optimizer has made a step, on the parameter server.
            vars(self.scheduler.optimizer)["_opt_called"] = True
            try:
                self.scheduler.step()
            except ValueError as error:
                raise UsageError(
                    f"{type(self.scheduler).__name__} cannot make step {self.steps}: {error}. The number of "
                    "steps in an epoch depends on the number of workers. Use interval='sample' instead: the "
                    "scheduler then makes one step for each record, so the total is len(dataset) * epochs"
                ) from error
        self._left = self._seen()

    def check(self) -> None:
        """Raise UsageError if the script has stepped it."""
        if self.interval is not None and self._seen() != self._left:
            raise UsageError(
                f"the script has stepped the {type(self.scheduler).__name__} that it passed to "
                f"session.scheduler(..., interval={self.interval!r}). The session steps it by the job's "
                "progress; remove scheduler.step()"
            )

    def _seen(self) -> object:
        return getattr(self.scheduler, "last_epoch", None)


class Schedule:
    """Settings of one optimizer. Belongs to the training thread.

    Args:
        wrapped: the optimizer that the parameter server runs; its `param_groups` are what schedulers change.
        own: schedulers change an optimizer that runs on this worker, and not `wrapped`. Their states are sent
            with the values that they have set there.
        has_state: the optimizer begins with one, which was made with the hyperparameters as they are now.
    """

    def __init__(self, wrapped: torch.optim.Optimizer, *, own: bool = False, has_state: bool = False) -> None:
        self._wrapped, self._own = wrapped, own
        self._schedulers: list[_Scheduler] = []
        self.evaluates = self._steps = False  # a scheduler by evaluations of epochs; by the job's progress
        self._first: tuple[Mapping[str, Any], ...] = ()  # groups as the schedulers' constructors made them
        self._in_force: Settings | None = None
        self._found: Sequence[Mapping[str, Any]] = ()  # groups as the script has found them
        self._current: Settings = Settings(groups=())
        # What the state that the script has brought was made with.
        self._stepped = self.current() if has_state else None

    def current(self) -> Settings:
        """Hyperparameters and scheduler states as they are now."""
        groups = ModelDescription.settings(self._wrapped).groups
        now = Settings(groups, tuple(each.state() for each in self._schedulers))
        if now != self._current:  # else its JSON is known already
            self._current = now
        return self._current

    def joined(self, settings: Settings) -> None:
        """This worker has joined a job that had begun. Warns if its script has other hyperparameters."""
        groups = ModelDescription.settings(self._wrapped).groups
        for index, (ours, first) in enumerate(zip(groups, settings.first, strict=False)):
            for key in sorted(ours.keys() & first.keys()):
                # In mode local, what the parameter server steps with comes from the job's file.
                if ours[key] != first[key] and not self._own:
                    values = index, key, ours[key], first[key], index, key
                    logger.warning(
                        "param_groups[%d] has %s=%r, but the job began with %r and keeps that value. To "
                        "change it now, set optimizer.param_groups[%d][%r] after session.optimizer(...) and "
                        "session.scheduler(...)",
                        *values,
                    )
        self.take_over(settings, keeps=False)

    def add(self, scheduler: LRScheduler, interval: Interval | None, ended: Ended) -> None:
        """Keep a scheduler, and step it to the job's progress. `ended`: see `_heed_once`."""
        self._schedulers.append(_Scheduler(scheduler, interval, ended, own=self._own))
        self.evaluates |= interval is None
        self._steps |= interval is not None
        self._first = ModelDescription.settings(self._wrapped).groups
        if self._in_force is not None:
            for stored in self._in_force.schedulers[len(self._schedulers) - 1 :][:1]:
                ours, first = ({**each}.get("base_lrs") for each in (scheduler.state_dict(), stored["state"]))
                if self._own and ours != first:
                    text = "the job's scheduler began with the rates %s and goes on from them, not from %s"
                    logger.warning(text, first, ours)
            # A constructor of torch's own has set rates and momenta, and no other hyperparameters.
            torchs = type(scheduler).__module__ == LRScheduler.__module__
            changed = self._changed(self._in_force) if torchs else []
            self.take_over(self._in_force, keeps=False)
            for group, key, value in changed:
                if key.endswith("_decay") or not any(name in key for name in _SCHEDULED):
                    group[key] = value

    def take_over(self, settings: Settings, *, keeps: bool = True) -> None:
        """Take over the settings of the version that this worker has got.

        Args:
            keeps: what the script has changed, and this worker has not sent yet, stays.

        Raises:
            UsageError: the script has stepped a scheduler or changed the groups, or one makes no more steps.
        """
        changed = self._changed(settings) if keeps else []
        if not self._own:
            # Settings of version 0 were made before there was a scheduler.
            groups = settings.groups if len(settings.schedulers) >= len(self._schedulers) else self._first
            if len(self._wrapped.param_groups) != len(groups):
                raise UsageError(OTHER_GROUPS)
            _set(self._wrapped.param_groups, groups)
        goes_back = self._in_force is not None and settings.position < self._in_force.position
        for each, stored in zip_longest(self._schedulers, settings.schedulers[: len(self._schedulers)]):
            must_load = each.interval or each.heeds < (stored or {}).get("heeds", 0) + (not keeps)
            if must_load and (stored or goes_back or not self._own):
                each.load(stored)
        self._go_on(settings)
        for group, key, value in changed:
            group[key] = value

    def _changed(self, settings: Settings) -> list[tuple[dict[str, Any], str, Any]]:
        """The groups, keys and values that the script has changed since this worker last got settings.

        If the job goes back to a checkpoint, the script does not. So all of its values count as changed,
        except those that schedulers set by the job's progress.
        """
        if self._in_force is None:
            return []
        goes_back = settings.position < self._in_force.position
        behind = self.evaluates and self.current().heeds < settings.heeds
        scheduled = _SCHEDULED if behind or (goes_back and self._steps) else ()
        mine = self._schedulers[0].scheduler.optimizer if self._own and self._schedulers else self._wrapped
        return [
            (group, key, group[key])
            for group, now, found in zip(mine.param_groups, self._now(), self._found, strict=False)
            for key in now
            if key not in scheduled and (goes_back or now[key] != found.get(key))
        ]

    def _now(self) -> Sequence[Mapping[str, Any]]:
        """The hyperparameters that the script and its schedulers set, as they are now."""
        if self._own and self._schedulers:
            return self._schedulers[0].groups()
        return ModelDescription.settings(self._wrapped).groups

    def step_made(self, sent: Settings, in_force: Settings) -> None:
        """A step was made with the settings `sent`; others may be in force. Raises as `take_over`."""
        if (sent.groups, sent.schedulers) == (in_force.groups, in_force.schedulers):
            self._go_on(in_force)
        else:
            self.take_over(in_force, keeps=False)

    def check(self) -> None:
        """Raise UsageError if the script has stepped a scheduler that the session steps.

        Raise InvalidModel if a hyperparameter needs optimizer state that the script has not brought.
        """
        if self._stepped is not None:
            self._stepped.check_state(self.current())
        for each in self._schedulers:
            each.check()

    def _go_on(self, settings: Settings) -> None:
        self._in_force, self._found = settings, settings.groups
        for each in self._schedulers:
            each.go_to(settings.position)
        if self._own or self._steps or not settings.groups:
            self._found = self._now()


def _set(groups: Sequence[dict[str, Any]], to: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(groups, to, strict=False):
        for key, value in values.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _completed(plain: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A state that was sent, with the rest of this worker's, such as the objects that a LambdaLR calls."""
    result = {**own, **plain}
    if "_schedulers" in plain:
        inner = zip(plain["_schedulers"], own["_schedulers"], strict=True)
        result["_schedulers"] = [_completed(*pair) for pair in inner]
    return result


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a scheduler's state that changes and can be sent."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        with suppress(InvalidModel):  # "_schedulers": what SequentialLR and ChainedScheduler are made of
            result[key] = [*map(_plain, value)] if key == "_schedulers" else plain(value, where=key)
    return result
