"""The input and the output of a reconcile: plain data, no decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

from elastic_operator.permissions import Policy
from elastic_operator.pods import Pod, Problem
from elastic_ps.api.status import ServerStatus, TrainingJobStatus
from elastic_ps.contract.env import Role

ROLE_TOO_OLD = "RoleTooOld"
"""The reason of a refusal that lasts until the operator's Role changes. Nothing else waits for it."""

Kind: TypeAlias = Literal["Pod", "Service", "PersistentVolumeClaim", "NetworkPolicy"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings for decisions, the same for all jobs.

    Attributes:
        policy: what jobs' templates may hold, by namespace.
        secured: whether a job that starts now uses TLS.
        certificate_lifetime: how long a certificate is valid. A new one is issued in the last third.
        http_from: the peers of a job's NetworkPolicy that may read its status; None: jobs get no policy.
        poll: the shortest time between two questions to a job's parameter server.
        look: the longest time between two passes over a job.
        retry: how long to wait after the API server refused to create something.
        answer_limit: how long the PS may be silent when it is ready, or when all workers are done, before
            it is a problem.
        restart_base, restart_limit: the delay before a failed worker is replaced doubles with each failure.
        place_limit: how long a pod may fit on no node, before it is a problem; its volume may be on its way.
        start_limit: how long a pod with a node may start no container, before it is a problem. Its status
            does not say whether it lacks a volume, a Secret or a ConfigMap.
        short_life: a pod that was killed at a younger age is replaced after `short_life_delay`, or later, see
            `timing.pause`.
        follow_limit: how long a job may be Running before a standby that does not follow is a problem.
        force_after: a pod that outlives its grace period by this time (its node is gone) is removed.
    """

    policy: Policy = field(default_factory=Policy)
    secured: bool = False
    certificate_lifetime: timedelta = timedelta(days=90)
    http_from: Sequence[Mapping[str, Any]] | None = None
    poll: timedelta = timedelta(seconds=10)
    look: timedelta = timedelta(minutes=10)
    retry: timedelta = timedelta(seconds=15)
    answer_limit: timedelta = timedelta(seconds=30)
    restart_base: timedelta = timedelta(seconds=1)
    restart_limit: timedelta = timedelta(seconds=60)
    place_limit: timedelta = timedelta(seconds=10)
    start_limit: timedelta = timedelta(seconds=90)
    short_life: timedelta = timedelta(seconds=60)
    short_life_delay: timedelta = timedelta(seconds=5)
    follow_limit: timedelta = timedelta(seconds=30)
    force_after: timedelta = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The existing objects of the job.

    Attributes:
        pods: its pods.
        service: whether the job's Service exists.
        valid_spec: the last valid spec, as JSON, from the Service; "" if it has none.
        rejected: why the API server refuses pods of the spec, see `desired.untried`; "" if it does not.
        secured: whether the Service says that the job uses TLS.
        claims: the names of the volume claims.
        lent: whether the job mounts a volume claim that belongs to other jobs, and not to it.
        policies: the names of the NetworkPolicies; empty if the operator makes none.
        server: the answer of shard 0; None if it did not answer.
        unanswered: how long shard 0 has not answered although it is ready; None if it has, or is not.
        refusals: what the API server has refused in this pass.
        certified: the end of the certificates that were issued in this pass; None if none were.
    """

    pods: tuple[Pod, ...] = ()
    service: bool = False
    valid_spec: str = ""
    rejected: str = ""
    secured: bool = False
    claims: frozenset[str] = frozenset()
    lent: bool = False
    policies: frozenset[str] = frozenset()
    server: ServerStatus | None = None
    unanswered: timedelta | None = None
    refusals: tuple[Problem, ...] = ()
    certified: datetime | None = None

    @property
    def word(self) -> ServerStatus | None:
        """The answer of shard 0; if there is none, the status that it left when it ended."""
        if self.server is not None:
            return self.server
        return next((pod.last_words for pod in self.of("ps") if pod.index == 0 and pod.last_words), None)

    @property
    def keeping_back(self) -> tuple[Problem, ...]:
        """The refusals that leave the job without an object, and may be over soon."""
        return tuple(each for each in self.refusals if each.reason != ROLE_TOO_OLD)

    def with_outcome(self, outcome: Outcome) -> Observed:
        """A copy with the outcome of the pass's actions."""
        return replace(self, refusals=outcome.refusals, certified=outcome.certified)

    def of(self, *roles: Role) -> list[Pod]:
        """The pods of these roles, role by role, by index."""
        found = (pod for pod in self.pods if pod.role in roles)
        return sorted(found, key=lambda pod: (roles.index(pod.role), pod.index))


@dataclass(frozen=True)
class Create:
    """Create an object; an existing one of the job is as good.

    `needs`: a kind of object that it uses. If such an object of the job is refused, this one is not created.
    """

    kind: Kind
    name: str
    manifest: Mapping[str, Any]
    reason: str
    needs: Kind | None = None


@dataclass(frozen=True)
class Certify:
    """Issue new certificates for all processes of the job, into its Secrets.

    `processes`: the number of each role's processes. `first`: there are no Secrets yet. `needs`: see
    `Create`; if the Service belongs to an earlier, orphaned job, so do the Secrets of these names.
    """

    processes: Mapping[Role, int]
    lifetime: timedelta
    reason: str
    first: bool = False
    needs: Kind | None = "Service"


@dataclass(frozen=True)
class DeletePod:
    """Delete exactly this pod (by uid).

    `force`: without waiting for its node. `version`: the version that was seen; if the pod has changed, the
    deletion fails and another pass looks at it first. `told`: another Event tells of the removal.
    """

    name: str
    uid: str
    reason: str
    force: bool = False
    version: str = ""
    told: bool = False

    @classmethod
    def of(cls, pod: Pod, reason: str, *, force: bool = False, told: bool = False) -> DeletePod:
        return cls(pod.name, pod.uid, reason, force=force, version=pod.version, told=told)


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself; the garbage collector removes its objects."""

    uid: str
    reason: str


@dataclass(frozen=True)
class TellPod:
    """Write annotations to exactly this pod (by uid), which reads them."""

    name: str
    uid: str
    annotations: Mapping[str, str]
    reason: str


@dataclass(frozen=True)
class Remember:
    """Write the valid spec, as JSON, to the job's Service of this name."""

    name: str
    spec: str
    reason: str


@dataclass(frozen=True)
class ShareClaim:
    """Make the job one more owner of this volume claim, which is then kept as long as any of them."""

    name: str
    reason: str


Action: TypeAlias = Create | Certify | DeletePod | DeleteJob | TellPod | Remember | ShareClaim


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a plan's actions. The attributes are those of `Observed`."""

    refusals: tuple[Problem, ...] = ()
    certified: datetime | None = None


@dataclass(frozen=True)
class Note:
    """An Event to record. Notes with the same `key` make one Event, however often they are posted."""

    key: str
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do, what to report, and when to look again (None: only when something changes)."""

    actions: tuple[Action, ...] = ()
    status: TrainingJobStatus | None = None
    notes: tuple[Note, ...] = ()
    requeue: timedelta | None = None


def stamp(now: datetime) -> str:
    """A time as metav1.Time writes it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
