"""The part of a TrainingJob that says when gradients become versions of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from elastic_ps.api.fields import CamelModel, DurationOrAuto, check_named
from elastic_ps.api.rules import NOT_LOCALLY, AtMost, Change, NotWith, OnlyWith, Rule

STALENESS_SCALES = ("damped", "inverse", "none")

STALENESS_SCALE = Annotated[
    str,
    AfterValidator(
        lambda name: check_named(name, STALENESS_SCALES, what="stalenessScale", own="module:function")
    ),
]


class OuterRule(NamedTuple):
    """How the parameter server makes a version from the changes that workers' local steps have made.

    It is a step of `torch.optim.SGD`. Its gradient is a worker's values before its local steps minus those
    after them, averaged over the workers of a version.

    Attributes:
        learning_rate, momentum: the defaults for that step.
        warms: the momentum rises with the number of exchanges; see `core.damping`.
        divided: the learning rate of a stale exchange is divided as that of a `damped` step.
        waits: a version waits for the exchanges of all workers; otherwise each exchange makes a version.
        delayed: the momentum is updated once per as many exchanges as the job has workers at first.
        elastic: a worker keeps its own values; they and the job's values move towards each other.
        nesterov: the momentum is Nesterov's.
        options: the settings that the job may change.
    """

    learning_rate: float
    momentum: float = 0.0
    warms: bool = False
    divided: bool = False
    waits: bool = True
    delayed: bool = False
    elastic: bool = False
    nesterov: bool = True
    options: tuple[str, ...] = ("outer_learning_rate",)


OUTER_RULES: Mapping[str, OuterRule] = {
    "diloco": OuterRule(
        0.7, 0.9, warms=True, options=("outer_learning_rate", "outer_momentum", "outer_nesterov")
    ),
    "delayed": OuterRule(
        0.7, 0.9, warms=True, waits=False, delayed=True, options=("outer_learning_rate", "outer_momentum")
    ),
    "average": OuterRule(1.0, options=()),
    "easgd": OuterRule(0.25, waits=False, elastic=True),
    "downpour": OuterRule(1.0, divided=True, waits=False),
}
"""The outer rules of mode `local`; diloco if the job names none.

diloco: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", with the
outer rates that they found best for 128 exchanges. delayed: Liu et al. 2024, "Asynchronous Local-SGD
Training for Language Modeling", the delayed Nesterov momentum. average: the mean of the workers' values, as
in McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data". easgd:
Zhang et al. 2015, "Deep learning with Elastic Averaging SGD", algorithm 1. downpour: Dean et al. 2012, "Large
Scale Distributed Deep Networks", with the delay-adaptive rate of Mishchenko et al. 2022, "Asynchronous SGD
Beats Minibatch SGD Under Arbitrary Delays".
"""


def _needed(mode: str, what: str) -> OnlyWith:
    return OnlyWith("mode", (mode,), needed=f"the number of {what}")


def _takes(option: str) -> OnlyWith:
    return OnlyWith("outer", tuple(name for name, rule in OUTER_RULES.items() if option in rule.options))


LOCALLY_FIXED = "in mode local, only consistency.steps can change; create a new job for that"
LOCAL_STAYS = "in mode local the optimizer runs on the workers, in other modes on the parameter server"
"""Why a job cannot enter or leave mode `local`."""

_SYNC, _LOCAL = OnlyWith("mode", ("sync",)), OnlyWith("mode", ("local",))
_WAITS = OnlyWith(
    "outer",
    tuple(name for name, rule in OUTER_RULES.items() if rule.waits),
    where="nobody waits for a slow worker",
)
_MEASURED = NotWith("deterministic", "measured speeds differ from run to run", value="speed")
_OBJECTIVE: list[OnlyWith | NotWith] = [
    OnlyWith("mode", ("async", "bounded", "sync")),
    *(
        NotWith(other, "no step is stale then, and the mode stays sync")
        for other in ("deterministic", "backup_workers", "global_batch_size")
    ),
]
_TURNS = AtMost(
    "steps",
    do=": each part is exchanged once in {bound} steps, one at a time. Set fragments to {bound} or less, or "
    "increase steps",
)
_STAYS_LOCAL = Rule(
    cel="(self.mode == 'local') == (oldSelf.mode == 'local')",
    message="consistency cannot change to or from mode local; create a new job for that",
)
_BALANCES = Rule(
    cel="!has(self.balance) || has(self.globalBatchSize) || self.mode == 'local'",
    message="consistency.balance works only with globalBatchSize or with mode local",
    holds=lambda c: c.balance is None or c.global_batch_size is not None or c.mode == "local",
    says=lambda c: (
        f"balance {c.balance} has no meaning without globalBatchSize; set that, or mode: local, or leave "
        "balance out"
    ),
)
_OWN_VALUES = Rule(
    cel="!has(self.overlap) || self.overlap == 0 || !has(self.outer) || self.outer != 'easgd'",
    message="consistency.overlap does not work with outer easgd",
    holds=lambda c: not (c.overlap and c.outer_rule.elastic),
    says=lambda c: (
        f"overlap {c.overlap} has no meaning with outer {c.outer}, where a worker goes on from its own "
        "values; leave it out, or set another outer"
    ),
)
_OVERLAPS = Rule(
    cel="!has(self.overlap) || !has(self.steps) || "
    "(self.overlap + 1) * (has(self.fragments) ? self.fragments : 1) <= self.steps",
    message="consistency.overlap has to be below the steps between two exchanges",
    holds=lambda c: not c.overlap or c.overlap < c.steps_between,
    says=lambda c: (
        f"overlap {c.overlap} is too large: there are {c.steps_between} steps between two exchanges, and an "
        f"exchange has to end before the next one begins. Set overlap to {c.steps_between - 1} or less, or "
        "increase steps"
    ),
)
_GRACE = Rule(
    cel="!has(self.grace) || has(self.quorum)",
    message="consistency.grace works only with quorum",
    holds=lambda c: c.grace is None or c.quorum is not None,
    says=lambda _: (
        "grace has no meaning without quorum, because a version then waits for all workers; leave it out, "
        "or set quorum, the least number of workers that a version waits for"
    ),
)
_PASSES = Rule(
    cel="!has(self.outer) || self.outer != 'easgd' || !has(self.outerLearningRate) || "
    "self.outerLearningRate <= 1.0",
    message="consistency.outerLearningRate must be at most 1 with outer easgd",
    holds=lambda c: not c.outer_rule.elastic or c.outer_rule.learning_rate <= 1,
    says=lambda c: (
        f"outerLearningRate is {c.outer_learning_rate:g}; expected at most 1 with outer easgd, or a worker "
        "and the job would overshoot each other's values"
    ),
)


class Consistency(CamelModel):
    """When gradients become a new version of the model."""

    mode: Annotated[Literal["sync", "bounded", "accumulate", "async", "local"], _STAYS_LOCAL] = Field(
        default="sync",
        description="With sync, each version is made of one step of every worker, so fast workers wait "
        "for slow ones. With bounded, a version is made as soon as one worker has finished a "
        "step. A slow worker's step goes into a later version, and maxStaleness limits how "
        "much later. With accumulate, each version is made of a fixed number of steps, from "
        "whichever workers have them; see gradients. With async, each step makes a version at "
        "once, even if it was computed on an old version. With local, workers make "
        "steps by themselves with the script's optimizer, and exchange the results now and "
        "then; see steps and outer.",
    )
    max_staleness: Annotated[
        int | None,
        _needed("bounded", "versions that others may make during a step"),
    ] = Field(
        default=None,
        ge=1,
        description="Only with mode bounded, and needed there: how many versions the other workers may make "
        "while one worker computes a step. After that they wait for it. Example: three workers make 5 steps "
        "each while a fourth makes one. They make up to 15 versions meanwhile, so with 16 they do not wait.",
    )
    gradients: Annotated[int | None, _needed("accumulate", "steps that a version is made of")] = Field(
        default=None,
        ge=1,
        description="Only with mode accumulate, and needed there: how many steps each version is made of, "
        "all computed on the version before. If there are fewer workers, some of them compute several steps "
        "for a version. If there are more, the steps that come last are dropped, and their records go to "
        "other workers. The last version of a job may be made of fewer.",
    )
    global_batch_size: Annotated[
        int | None,
        _SYNC,
        Change("no", "the records are handed out in versions of that size from the start"),
    ] = Field(
        default=None,
        ge=1,
        description="Only with mode sync: how many records each version is made of, whatever the number "
        "of workers. They are the next records in the order of the epoch. The parameter "
        "server gives each worker a part of them, and the records of a lost worker go to "
        "others in the same version. The last version of an epoch has the records that are "
        "left.",
    )
    balance: Annotated[Literal["even", "speed"] | None, _BALANCES, _WAITS, _MEASURED, NOT_LOCALLY] = Field(
        default=None,
        description="How work is divided among workers: evenly (the default), or in proportion to their "
        "measured speed. Only with globalBatchSize, or with mode local and outer diloco or average. With "
        "globalBatchSize, the records of each version are divided. In mode local with speed, the fastest "
        "worker makes consistency.steps local steps, and slower ones make fewer.",
    )
    reads: Annotated[Literal["consistent", "inconsistent"] | None, OnlyWith("mode", ("async",))] = Field(
        default=None,
        description="Only with mode async; consistent if unset. With consistent, a worker always reads a "
        "single version, and the next version waits until all workers have finished reading. "
        "With inconsistent, versions do not wait, so some of the parameters that a worker "
        "reads may be newer than others.",
    )
    staleness_scale: Annotated[STALENESS_SCALE | None, OnlyWith("mode", ("async", "bounded"))] = Field(
        default=None,
        description="Only with modes async and bounded; damped if unset. With inverse, the learning rate "
        "of a step is divided by 1 + its staleness: a step that is 3 versions old gets a quarter of the "
        "rate (delay-adaptive rates: Zhang et al. 2016, Mishchenko et al. 2022). With damped, a momentum "
        "is reduced as well, because stale steps act like a momentum of their own (Mitliagkas et al. "
        "2016): for the same step, 0.9 becomes 0.69. Rates of optimizers with eps, such as Adam, are "
        "divided by the square root then (Malladi et al. 2022). With none, a stale step gets the full "
        "rate. Name a function of your own as module:function: it takes the staleness in versions, and "
        "returns the factor for the rate. A version of several steps uses the rate of the stalest one.",
    )
    max_staleness_p99: Annotated[int | None, *_OBJECTIVE] = Field(
        default=None,
        ge=0,
        description="Only with modes async, bounded and sync: how stale 99 of 100 steps may be at most, "
        "in versions. The parameter server measures the staleness, and keeps to this limit by "
        "changing the mode while the job runs: from async to bounded with this bound, or to "
        "sync if it is 0. It changes back when steps have been at most half as stale for a "
        "long time. The field mode is the mode that the job begins with.",
    )
    steps: Annotated[int | None, _needed("local", "steps that a worker makes by itself")] = Field(
        default=None,
        ge=1,
        description="Only with mode local, and needed there: how many steps a worker makes by itself "
        "between two exchanges; with fragments, between two exchanges of the same fragment. The last "
        "exchange before the data runs out, or before the worker leaves, covers fewer steps.",
    )
    fragments: Annotated[int | None, _LOCAL, _TURNS, NOT_LOCALLY] = Field(
        default=None,
        ge=1,
        description="Only with mode local; 1 if unset: the number of parts of the model, which are "
        "exchanged in turn. Each part is exchanged once every consistency.steps steps, so exchanges "
        "are more frequent and smaller. A tensor is not divided, so "
        "there are at most as many parts as tensors.",
    )
    overlap: Annotated[int | None, _LOCAL, _OWN_VALUES, _OVERLAPS, NOT_LOCALLY] = Field(
        default=None,
        ge=0,
        description="Only with mode local, and not with outer easgd; 0 if unset: how many steps a worker "
        "makes while an exchange is under way. It then adds the changes of these steps to the "
        "result. The number must be smaller than the steps between two exchanges.",
    )
    quorum: Annotated[int | None, _LOCAL, _WAITS, NOT_LOCALLY] = Field(
        default=None,
        ge=1,
        description="Only with mode local and outer diloco or average: how many workers' exchanges are "
        "enough for a version; all if unset. Exchanges that come within the grace period "
        "after that join the same version, and later ones go into a later version. At most "
        "worker.minReplicas.",
    )
    grace: Annotated[DurationOrAuto | None, _LOCAL, _GRACE, NOT_LOCALLY] = Field(
        default=None,
        description="Only with quorum: how long a version waits for the other workers when it has its "
        "quorum. With auto, the default, it waits a quarter of the measured time between two "
        "exchanges of a worker.",
    )
    outer: Annotated[
        Literal["diloco", "delayed", "average", "easgd", "downpour"] | None,
        _LOCAL,
        NOT_LOCALLY,
    ] = Field(
        default=None,
        description="Only with mode local; diloco if unset: how the parameter server combines the "
        "workers' exchanges. With diloco, the mean of their changes is the gradient of a step "
        "with Nesterov momentum. With average, a version is the mean of their values. Both "
        "wait for all workers. With delayed, each worker's change is the gradient of such a "
        "step as soon as it comes, and the momentum changes once in worker.replicas exchanges. With "
        "downpour, each worker's change is added when it comes. With easgd, a worker keeps "
        "its own values, and each exchange moves them and the job's values towards each "
        "other.",
    )
    outer_learning_rate: Annotated[
        float | None, _LOCAL, _takes("outer_learning_rate"), _PASSES, NOT_LOCALLY
    ] = Field(
        default=None,
        ge=0.0001,
        le=100,
        description="Only with mode local, and not with outer average: the share of the workers' change "
        "that becomes part of the job's values. If unset, it is 0.7 with diloco and delayed (Douillard et "
        "al. 2023), and with downpour 1 / (1 + staleness of the exchange) (delay-adaptive rates: "
        "Mishchenko et al. 2022), or its square root if the script's optimizer has eps, as Adam does. With "
        "easgd, both sides move by this share of their distance: 0.25 if unset, and at most 1.",
    )
    outer_momentum: Annotated[float | None, _LOCAL, _takes("outer_momentum"), NOT_LOCALLY] = Field(
        default=None,
        ge=0,
        le=0.9999,
        description="Only with mode local and outer diloco or delayed: the Nesterov momentum of the outer "
        "step. If unset, it rises with the number of exchanges (a schedule as in Sutskever et "
        "al. 2013): 0.05 in the first one, 0.5 in the 20th, and 0.9 from the 180th on "
        "(Douillard et al. 2023). So it also fits a job with few exchanges.",
    )
    outer_nesterov: Annotated[bool | None, _LOCAL, _takes("outer_nesterov"), NOT_LOCALLY] = Field(
        default=None,
        description="Only with mode local and outer diloco; true if unset: whether the outer step looks "
        "ahead by its momentum, as Nesterov's does. With false the momentum is the classical one, as in "
        "FedAvgM (Hsu et al. 2019).",
    )
    deterministic: Annotated[
        bool,
        _SYNC,
        Change("no", "each worker would need a fixed share of the records from the start"),
    ] = Field(
        default=False,
        description="With true, two runs of the job give the same model, bit for bit. Each worker has a "
        "fixed share of the records, and gradients are added in the order of the workers' "
        "indexes. When a worker is lost, the others wait for its replacement. worker.replicas "
        "cannot change while the job runs. With globalBatchSize, worker.replicas may change, "
        "and nobody waits for a replacement: each version has the same records with any "
        "number of workers, and two runs agree up to round-off.",
    )
    backup_workers: Annotated[
        int,
        _SYNC,
        NotWith("deterministic", "which worker is late differs from run to run"),
        NotWith("global_batch_size", "a version without the slowest workers would have fewer records"),
    ] = Field(
        default=0,
        ge=0,
        description="How many slow workers each version leaves out. Example: with 4 workers and "
        "backupWorkers 1, a version is made of the first 3 steps. The fourth step is dropped, and its "
        "records go to other workers.",
    )

    @property
    def waits_for_all(self) -> bool:
        """Whether each version waits for a step of every worker that computes."""
        if self.mode == "local":
            return self.outer_rule.waits and self.quorum is None
        return self.mode == "sync" and not (self.backup_workers or self.global_batch_size)

    @property
    def fixed_workers(self) -> bool:
        """Whether each worker has a fixed share of the records, so that their number cannot change."""
        return self.deterministic and self.global_batch_size is None

    @property
    def several_steps(self) -> bool:
        """Whether a worker may make several steps for a version, and asks after each what to do next."""
        return self.mode == "accumulate" or self.global_batch_size is not None

    @property
    def each_alone(self) -> bool:
        """Whether each step or exchange makes a version of its own when it arrives."""
        return self.mode == "async" or (self.mode == "local" and not self.outer_rule.waits)

    @property
    def outer_rule(self) -> OuterRule:
        """In mode `local`, the outer rule, with the job's own settings."""
        rule = OUTER_RULES[self.outer or "diloco"]
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        return rule._replace(
            learning_rate=rule.learning_rate if rate is None else rate,
            divided=rule.divided and rate is None,
            momentum=rule.momentum if momentum is None else momentum,
            warms=rule.warms and momentum is None,
            nesterov=self.outer_nesterov is not False,
        )

    @property
    def steps_between(self) -> int:
        """In mode `local`, the number of steps between two exchanges of a worker."""
        return (self.steps or 1) // (self.fragments or 1)

    @property
    def scale(self) -> str:
        """How stale steps are scaled; see `staleness_scale`."""
        if self.mode == "local":
            return "damped" if self.outer_rule.divided else "none"
        return self.staleness_scale or ("damped" if self.may_be_stale else "none")

    @property
    def warms_momentum(self) -> bool:
        """Whether the momentum depends on the number of exchanges so far."""
        return self.mode == "local" and self.outer_rule.warms

    @property
    def may_be_late(self) -> bool:
        """Whether a version may be complete without a worker's step, which is then dropped."""
        return self.backup_workers > 0 or self.several_steps

    @property
    def may_be_stale(self) -> bool:
        """Whether a step may go into a later version than the one that follows its own."""
        return self.mode == "bounded" or self.each_alone or self.quorum is not None

    @property
    def most_stale(self) -> float:
        """The largest staleness of a step that goes into the model, in versions."""
        return math.inf if self.each_alone or self.quorum is not None else self.max_staleness or 0

    @property
    def reads_one_version(self) -> bool:
        """Whether a worker reads values of a single version, since none is made while it reads."""
        return self.waits_for_all or (self.each_alone and self.reads != "inconsistent")

    @property
    def may_assign(self) -> bool:
        """Whether a script may assign the model's values (`session.assign`)."""
        stays = not self.deterministic and self.max_staleness_p99 is None
        return self.mode == "sync" and self.waits_for_all and stays


MODES_OF: Mapping[str, tuple[str, ...]] = {
    name: mark.values
    for name, info in Consistency.model_fields.items()
    for mark in info.metadata
    if isinstance(mark, OnlyWith) and mark.other == "mode"
}
"""The fields that only some modes have, by Python name, with those modes."""
