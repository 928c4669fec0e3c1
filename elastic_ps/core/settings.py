"""The parts of an optimizer that are sent: the name of its class and plain hyperparameters, never code.

The classes of `torch.optim` that may run on the parameter server treat every element separately, so that any
division of the parameters into buckets and shards gives the same result; or they look at one tensor at a
time, which is then not divided. A new value of a hyperparameter,
from a scheduler or set by hand, is sent with the step that first uses it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from elastic_ps.errors import InvalidModel

ALLOWED = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
)
"""Classes of torch.optim that treat every element separately."""

WHOLE_TENSORS = ("Muon", "Adafactor")
"""Classes of torch.optim whose step looks at a whole tensor in its shape."""

OF_TABLES = ("SparseAdam",)
"""Classes of torch.optim that take sparse gradients alone."""

OUTER = ("DelayedNesterov",)
"""Own classes that treat every element separately: outer rules of mode `local`."""

NOT_SENT = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "param_names"})
"""Keys of a parameter group that only change how the worker's device computes."""

CLAMP = "clamp"
"""The key of a parameter group for limits of its values after each step: [low, high]."""

MAX_NORM = "max_norm"
"""The key of a parameter group for the largest 2-norm of a row, to which rows are scaled after a step."""

MAX_GRAD_NORM = "max_grad_norm"
"""The key of all parameter groups for the largest 2-norm of a version's gradient."""

KEEP_ZEROS = "keep_zeros"
"""The key of a parameter group that keeps elements at zero which were exactly zero before a step."""

LIMITS = (CLAMP, MAX_NORM)
"""The constraints that change values even without a gradient."""

CONSTRAINTS = (*LIMITS, KEEP_ZEROS, MAX_GRAD_NORM)
"""All constraints, which torch's optimizers do not know."""

CONSTRUCTED = frozenset({"initial_accumulator_value"})
"""Hyperparameters that torch reads only from the constructor, not from parameter groups (Adagrad)."""


MORE_STATE = ("amsgrad", "centered", "momentum")
"""Hyperparameters of torch's optimizers that need more state unless they are False or zero. All but SGD
create their state in the first step, so a later value lacks it. RMSprop is recognised by its `centered`."""


class Position(NamedTuple):
    """The position of training at a version, by which learning-rate schedules advance."""

    steps: int = 0
    """The number of optimizer steps: the version, minus versions from assigned values."""
    samples: int = 0
    """The number of records that are trained or skipped, in all epochs together."""
    epochs: int = 0
    """The number of complete epochs."""


START = Position()
"""The position of version 0."""


class Made(NamedTuple):
    """The contributions to a version."""

    workers: int = 0
    """The workers whose steps are in it."""
    samples: int = 0
    """The records in all these steps."""


NOTHING = Made()
"""What made version 0."""


class Divisors(NamedTuple):
    """What the staleness of a step divides learning rates by.

    Attributes:
        plain: the divisor of most optimizers.
        adaptive: that of optimizers which divide a gradient by its size, as Adam does. They have an `eps`.
    """

    plain: float = 1.0
    adaptive: float = 1.0

    def of(self, options: Container[str]) -> float:
        """The divisor of an optimizer with these options."""
        return self.adaptive if "eps" in options else self.plain


FRESH = Divisors()
"""Those of a step that is not stale."""


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of each parameter group, and the states of learning-rate schedulers.

    Attributes:
        groups: the names and plain values of each parameter group.
        schedulers: for each scheduler given to `session.scheduler`, its number of steps ("steps"), how many
            evaluations it has heeded ("heeds"), the epoch of the last one ("heeded"; -1: none), the plain
            values of its `state_dict` ("state"), and in mode `local` what it sets in the parameter groups of
            the worker's optimizer ("groups").
        position: the position of the version with these settings. The parameter server sets it.
        made: the contributions to that version. The parameter server sets it.
        first: the groups at the beginning of the job. The parameter server sets them.
    """

    groups: tuple[Mapping[str, Any], ...]
    schedulers: tuple[Mapping[str, Any], ...] = ()
    position: Position = START
    first: tuple[Mapping[str, Any], ...] = ()
    made: Made = NOTHING

    def to_json(self) -> str:
        return self._json

    @cached_property
    def _json(self) -> str:
        """With sorted keys. Those of whole numbers change with each version, the others hardly ever."""
        first, groups, schedulers = self._lasting
        return (
            f'{{"first": {first}, "groups": {groups}, "made": {[*self.made]}, '
            f'"position": {[*self.position]}, "schedulers": {schedulers}}}'
        )

    @cached_property
    def _lasting(self) -> tuple[str, str, str]:
        """`first`, `groups` and `schedulers` as JSON."""
        first, groups, schedulers = (
            json.dumps(each, sort_keys=True) for each in (self.first, self.groups, self.schedulers)
        )
        return first, groups, schedulers

    def of_version(self, position: Position, made: Made, before: Settings) -> Settings:
        """A copy for a version.

        Args:
            before: the settings of the previous version of the same job.
        """
        settings = Settings(self.groups, self.schedulers, position, before.first, made)
        lasting = (before._lasting[0], *self._lasting[1:])
        vars(settings)["_lasting"] = lasting  # otherwise each version would encode it again
        return settings

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read the output of `to_json`. Raises ValueError, KeyError or TypeError if it is something else."""
        data = json.loads(text)
        position = Position(*(int(number) for number in data["position"]))
        made = Made(*(int(number) for number in data["made"]))
        schedulers = tuple(data["schedulers"])
        counts = ({**each}.get(key, 0) for each in schedulers for key in ("steps", "heeds"))
        if not all(isinstance(count, int | float) for count in counts):
            raise TypeError("expected numbers of steps and heeds")
        return cls(tuple(data["groups"]), schedulers, position, tuple(data["first"]), made)

    @property
    def heeds(self) -> int:
        """How many evaluations schedulers have heeded that step by one, such as ReduceLROnPlateau."""
        return sum(each.get("heeds", 0) for each in self.schedulers)

    @property
    def steps(self) -> int:
        """How many steps the schedulers have made together."""
        return sum(each.get("steps", 0) for each in self.schedulers)

    @property
    def max_grad_norm(self) -> float | None:
        """The limit of the norm of a version's gradient; None if there is none."""
        return next((group[MAX_GRAD_NORM] for group in self.groups if group.get(MAX_GRAD_NORM)), None)

    def unclipped(self) -> Settings:
        """A copy without the limit of the gradient's norm."""
        groups = [{key: value for key, value in g.items() if key != MAX_GRAD_NORM} for g in self.groups]
        return replace(self, groups=tuple(groups))

    def slowed(self, divisors: Divisors) -> Settings:
        """A copy with the learning rate of each group divided."""
        return self._each("lr", lambda rate, group: rate / divisors.of(group))

    def with_momentum(self, momentum: Callable[[float, Mapping[str, Any]], float]) -> Settings:
        """A copy with another momentum in each group that has one.

        Args:
            momentum: gives the new momentum from the present one and the group. It must not be 0: torch's
                optimizers would then neither create nor update the state of the momentum.
        """
        return self._each("momentum", momentum)

    def _each(self, key: str, change: Callable[[float, Mapping[str, Any]], float]) -> Settings:
        groups = [{**g, key: change(g[key], g)} if g.get(key) else g for g in self.groups]
        return replace(self, groups=tuple(groups))

    def check_follows(self, later: Settings) -> None:
        """Raise InvalidModel unless an optimizer that was built with these settings can step with `later`.

        A hyperparameter may change its value but not its type, and after the first step not to a value that
        needs more state. A missing one keeps its value, and schedulers may add keys of their own.
        """
        if later.groups == self.groups:
            return
        if len(later.groups) != len(self.groups):
            raise InvalidModel(
                f"there are {len(later.groups)} parameter groups, but the model has {len(self.groups)}"
            )
        for index, (ours, theirs) in enumerate(zip(self.groups, later.groups, strict=True)):
            for key in sorted(NOT_SENT & theirs.keys()):
                raise InvalidModel(f"param_groups[{index}]: {key} is not a hyperparameter that can be sent")
            check_constraints(theirs, index)
            if ours.get(MAX_NORM) is None and theirs.get(MAX_NORM) is not None:
                raise InvalidModel(
                    f"{MAX_NORM} was added to param_groups[{index}] after session.optimizer(...), which "
                    "divides the model among the parameter servers; set it before that"
                )
            if ours.get(MAX_GRAD_NORM) is None and theirs.get(MAX_GRAD_NORM) is not None:
                raise InvalidModel(
                    f"{MAX_GRAD_NORM} was added to param_groups[{index}] after session.optimizer(...), which "
                    "checks whether this job can clip; pass it to session.optimizer, and change it later"
                )
            for key, value in ours.items():
                if key in theirs and _kind(value) != _kind(theirs[key]):
                    raise InvalidModel(
                        f"param_groups[{index}]: {key} is {theirs[key]!r}, which is not of the same type as "
                        f"{value!r}"
                    )
        if self.position.steps:
            self.check_state(later)
        check_one_limit(later.groups)

    def check_state(self, later: Settings) -> None:
        """Raise InvalidModel if an optimizer that has state already needs more of it with `later`."""
        for index, (ours, theirs) in enumerate(zip(self.groups, later.groups, strict=False)):
            _check_state(ours, theirs, index)


def _check_state(before: Mapping[str, Any], later: Mapping[str, Any], index: int) -> None:
    """Raise InvalidModel if a group needs state `later` that it may not have `before`; see `MORE_STATE`."""
    for key in MORE_STATE:
        lazy = key == "momentum" and "centered" not in before
        if not lazy and key in before and not before[key] and later.get(key):
            raise InvalidModel(
                f"param_groups[{index}]: {key} is {later[key]!r}, and was {before[key]!r} before. The "
                "optimizer creates the state for it in its first step; set it before that"
            )


def clip_divisor(norm: float, limit: float) -> float:
    """The divisor that limits a gradient of this norm to `limit`.

    The formula is that of `torch.nn.utils.clip_grad_norm_`: a norm that overflows gives zeros.
    """
    return max(1.0, (norm + 1e-6) / limit)


@lru_cache(maxsize=64)
def read_settings(text: str) -> Settings:
    """`Settings.from_json` with a cache, since workers send the same text again. Do not change the result."""
    return Settings.from_json(text)


def check_one_limit(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidModel if parameter groups have different limits of the gradient's norm."""
    limits = [group.get(MAX_GRAD_NORM) for group in groups]
    if any(limit != limits[0] for limit in limits):
        raise InvalidModel(
            f"{MAX_GRAD_NORM} limits the norm of the whole gradient, so all parameter groups need the same "
            f"value; got {', '.join(str(limit) for limit in limits)}"
        )


def check_constraints(group: Mapping[str, Any], index: int) -> None:
    """Raise InvalidModel for an invalid constraint of a parameter group."""
    limits, norm, keep = (group.get(key) for key in (CLAMP, MAX_NORM, KEEP_ZEROS))
    clip = group.get(MAX_GRAD_NORM)
    if clip is not None and not (_kind(clip) == "number" and clip > 0):
        raise InvalidModel(f"{MAX_GRAD_NORM} is {clip!r}; expected a number above 0")
    numbers = isinstance(limits, Sequence) and [float(x) for x in limits if isinstance(x, int | float)]
    if limits is not None and not (numbers and len(numbers) == 2 and numbers[0] <= numbers[1]):
        raise InvalidModel(
            f"param_groups[{index}] has {CLAMP}={limits!r}; expected two numbers, the lowest and the highest"
        )
    if norm is not None and not (_kind(norm) == "number" and norm > 0):
        raise InvalidModel(f"param_groups[{index}] has {MAX_NORM}={norm!r}; expected a number above 0")
    if keep is not None and not isinstance(keep, bool):
        raise InvalidModel(f"param_groups[{index}] has {KEEP_ZEROS}={keep!r}; expected True or False")


def _kind(value: object) -> object:
    """Equal for values that can take each other's place as a hyperparameter; NaN takes no place."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number" if math.isfinite(value) else str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_kind(item) for item in value]
    return type(value)


def check_optimizer(name: str) -> None:
    """Raise InvalidModel unless the class may run on the parameter server."""
    known = ALLOWED + WHOLE_TENSORS + OF_TABLES
    if name not in known + OUTER:
        raise InvalidModel(
            f"the optimizer {name} cannot run on the parameter server; use one of torch.optim's "
            f"{', '.join(known)} (those that step each parameter by itself), or consistency: "
            "{mode: local}, where the worker runs any optimizer itself"
        )


_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types whose values need no conversion: those of most hyperparameters, which are checked in each step."""


def plain(value: object, *, where: str) -> Any:
    """`value` as JSON data: numbers, strings, booleans, None, and lists and tuples of them.

    A tensor of one element becomes its number.

    Raises:
        InvalidModel: it is something else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [plain(item, where=where) for item in value]
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "numel", lambda: 1)() == 1:
        return item()
    raise InvalidModel(f"{where} is a {type(value).__name__}; only plain numbers and strings can be sent")


def plain_group(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The hyperparameters of a parameter group of a torch optimizer."""
    return {
        key: value if type(value) in _PLAIN else plain(value, where=f"param_groups[{index}][{key!r}]")
        for key, value in group.items()
        if key not in NOT_SENT
    }


@dataclass(frozen=True)
class Application:
    """The contributions that become the next version, and the settings of its step.

    `assigns`: the sums are the version's values, and the optimizer makes no step.
    `elsewhere`: the workers make the step, and the shard, which is the only one, counts it.
    `divisors`: what the staleness of the steps divides learning rates by, as it did those in `settings`.
    `time`: when the version was decided, in seconds of shard 0's monotonic clock.
    `norm`: the norm of the mean gradient on all shards, if it is clipped; None if there is one shard.
    """

    attempt: int
    contributors: Collection[tuple[int, int, int]]
    weight: float
    settings: Settings
    assigns: bool = False
    elsewhere: bool = False
    norm: float | None = None
    divisors: Divisors = FRESH
    time: float = 0.0

    @property
    def clips(self) -> float | None:
        """The limit of the gradient's norm, if it has one."""
        return None if self.assigns else self.settings.max_grad_norm
