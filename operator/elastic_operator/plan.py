"""What a reconcile looks at and what it answers with: plain data, no decisions."""

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
"""The reason of a refusal that holds until the operator's Role is another one. It keeps back nothing else."""

Kind: TypeAlias = Literal["Pod", "Service", "PersistentVolumeClaim", "NetworkPolicy"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decisions depend on beside the job.

    Attributes:
        policy: what jobs' templates may hold, by namespace.
        secured: whether the processes of a job that starts now talk to each other over TLS.
        certificate_lifetime: how long a certificate is valid; another one is issued in the last third.
        http_from: who may read a job's status, as peers of its NetworkPolicy; None: jobs get no policy.
        poll: how often the parameter server of a job is asked for its progress, at most.
        look: a job is looked at again after that time at the latest, though nothing has changed.
        retry: how long to wait after the API server refused to create something.
        answer_limit: how long the PS may stay silent after the last worker has ended, before that is told.
        restart_base, restart_limit: delay before a failed worker is replaced; doubles with each failure.
        place_limit: a pod that fits on no node is a problem after that time; its volume may be on its way.
        start_limit: a pod of which nothing has started after that time is a problem: it may lack a volume, a
            Secret or a ConfigMap, which its status does not say.
        short_life: a worker killed before it lived this long is replaced only after `short_life_delay`.
        follow_limit: a standby that does not follow is a problem once the job has been Running for this long.
        force_after: a pod that outlives its grace period by this much (its node is gone) is removed.
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
    """What belongs to the job and exists.

    Attributes:
        pods: its pods.
        service: whether it has its Service.
        valid_spec: the last spec that could be followed, as JSON, which its Service has; "" if it has none.
        secured: whether its Service says that the job's processes talk to each other over TLS.
        claims: names of its volume claims.
        policies: names of its network policies; looked for only if there is to be one.
        server: what shard 0 answered; None if it did not.
        refusals: what the API server refused a moment ago, in this same pass.
        certified: until when the certificates are valid that were issued in this same pass; None: none were.
    """

    pods: tuple[Pod, ...] = ()
    service: bool = False
    valid_spec: str = ""
    secured: bool = False
    claims: frozenset[str] = frozenset()
    policies: frozenset[str] = frozenset()
    server: ServerStatus | None = None
    refusals: tuple[Problem, ...] = ()
    certified: datetime | None = None

    @property
    def word(self) -> ServerStatus | None:
        """What is known of the training itself: what shard 0 answered, else what it left when it ended."""
        if self.server is not None:
            return self.server
        return next((pod.last_words for pod in self.of("ps") if pod.index == 0 and pod.last_words), None)

    @property
    def keeping_back(self) -> tuple[Problem, ...]:
        """The refusals over which the job lacks something, and which may be over soon."""
        return tuple(each for each in self.refusals if each.reason != ROLE_TOO_OLD)

    def with_outcome(self, outcome: Outcome) -> Observed:
        """The same, once the actions of a pass have been carried out."""
        return replace(self, refusals=outcome.refusals, certified=outcome.certified)

    def of(self, *roles: Role) -> list[Pod]:
        """The pods of these roles, role by role, by index."""
        found = (pod for pod in self.pods if pod.role in roles)
        return sorted(found, key=lambda pod: (roles.index(pod.role), pod.index))


@dataclass(frozen=True)
class Create:
    """Create an object; one that is there already and belongs to the job is as good.

    `needs`: a kind of object that it uses. While the job's own of that kind is refused, it is not created.
    """

    kind: Kind
    name: str
    manifest: Mapping[str, Any]
    reason: str
    needs: Kind | None = None


@dataclass(frozen=True)
class Certify:
    """Issue new certificates for all processes of the job, into its Secrets.

    `processes`: how many there are of each role. `first`: there are no Secrets yet. `needs`: see `Create`; if
    the job's Service belongs to another one, which was orphaned, so do the Secrets of these names.
    """

    processes: Mapping[Role, int]
    lifetime: timedelta
    reason: str
    first: bool = False
    needs: Kind | None = "Service"


@dataclass(frozen=True)
class DeletePod:
    """Delete exactly this pod (by uid).

    `force`: without waiting for its node. `version`: only as it was seen; if it has changed, another pass
    looks at it first.
    """

    name: str
    uid: str
    reason: str
    force: bool = False
    version: str = ""

    @classmethod
    def of(cls, pod: Pod, reason: str, *, force: bool = False) -> DeletePod:
        return cls(pod.name, pod.uid, reason, force=force, version=pod.version)


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself; garbage collection removes what it owns."""

    uid: str
    reason: str


@dataclass(frozen=True)
class TellPod:
    """Tell exactly this pod (by uid), in annotations, what has changed."""

    name: str
    uid: str
    annotations: Mapping[str, str]
    reason: str


@dataclass(frozen=True)
class Remember:
    """Write down on the job's Service of this name that its spec, which is JSON, can be followed."""

    name: str
    spec: str
    reason: str


Action: TypeAlias = Create | Certify | DeletePod | DeleteJob | TellPod | Remember


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a plan's actions. Attributes: see those of `Observed`."""

    refusals: tuple[Problem, ...] = ()
    certified: datetime | None = None


@dataclass(frozen=True)
class Note:
    """An Event to record. Notes with the same `key` are one Event, however often they are posted."""

    key: str
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer: what to do, what to report, when to look again (None: only when something changes)."""

    actions: tuple[Action, ...] = ()
    status: TrainingJobStatus | None = None
    notes: tuple[Note, ...] = ()
    requeue: timedelta | None = None


def stamp(now: datetime) -> str:
    """A time as metav1.Time writes it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
