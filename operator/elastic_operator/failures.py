"""Decides what the end of a pod means: whether it counts, whether the job fails, which nodes to avoid. Pure.

A disruption does not count. Everything else counts against `runPolicy.backoffLimit`, unless a rule of
`runPolicy.podFailurePolicy` says otherwise.

A process that ends with exit status 78 reports that the job cannot run as specified. Before the first step,
the job then fails. Later, a bad node may be the cause: the pod is replaced, on another node if possible. The
job fails when a second node reports the same, or when the limit is exceeded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime
from typing import Literal, TypeAlias

from elastic_operator import builders
from elastic_operator.desired import Desired
from elastic_operator.plan import Note, Observed
from elastic_operator.pods import LAST_OUTPUT, LOST, Pod, Problem, parse_time
from elastic_operator.status import member_statuses
from elastic_ps.api.policies import FailureRule, PodFailurePolicy
from elastic_ps.api.status import TrainingJobStatus
from elastic_ps.contract import exits

Consequence: TypeAlias = Literal["FailJob", "Ignore", "Count"]

_NODES = 16
"""The number of nodes that are remembered."""


def describe(pod: Pod) -> Problem:
    """Why a pod has ended, or is being deleted."""
    if pod.ending is None and pod.deleting is not None:
        return Problem(pod.disruption, f"{pod.name} is being deleted ({pod.disruption})")
    return pod.problem or Problem("Lost", f"{pod.name} ended; its exit status is not known")


def consequence(pod: Pod, policy: PodFailurePolicy | None) -> Consequence:
    """The consequence of the end of a worker that failed or was disrupted."""
    rule = _rule(pod, policy)
    if rule is not None:
        return rule.action
    return "Ignore" if pod.ending == "disrupted" else "Count"


def _rule(pod: Pod, policy: PodFailurePolicy | None) -> FailureRule | None:
    rules = policy.rules if policy is not None and pod.role == "worker" else []
    return next((rule for rule in rules if _fits(rule, pod)), None)


def _fits(rule: FailureRule, pod: Pod) -> bool:
    if rule.on_exit_codes is not None:
        listed = pod.exit in rule.on_exit_codes.values
        return bool(pod.exit) and listed == (rule.on_exit_codes.operator == "In")
    return any((c.type, c.status) in pod.conditions for c in rule.on_pod_conditions or [])


def given_up(
    pod: Pod, desired: Desired, status: TrainingJobStatus, observed: Observed, now: datetime
) -> Problem | None:
    """Why to delete a pod whose process the PS has declared hung or lost; None if there is no reason."""
    latest = max(member_statuses(pod, observed, now), key=lambda member: member.incarnation, default=None)
    if latest is None:
        return None
    why = latest.to_be_killed(desired.spec.worker.progress_timeout, finished=status.progress.finished)
    return Problem("WorkerHung" if latest.state == "hung" else "Lost", why) if why else None


def _over(status: TrainingJobStatus, desired: Desired, observed: Observed, now: datetime) -> list[Pod]:
    """The pods that failed or were disrupted, but for the evaluator's.

    A worker that is drained or preempted may be gone as soon as it has ended. So it belongs to them while it
    is being deleted, if a rule is for one of its conditions, and the job still wants it. A hung worker that
    has to be deleted, since it does not end itself, is as if it had.
    """
    members = observed.server.members if observed.server is not None else []
    hung = {member.host for member in members if member.state == "hung"}
    policy, begun = desired.spec.run_policy.pod_failure_policy, parse_time(status.start_time)
    wanted = desired.workers(observed) if policy is not None else []
    suspended = begun is None or desired.spec.run_policy.suspend
    found = []
    for pod in observed.of("worker", "ps", "standby"):
        if pod.over:
            found.append(pod)
        elif suspended or pod.older_than(begun) or pod.ending == "done":
            continue
        elif pod.deleting and pod.disruption and pod.index in wanted:
            rule = _rule(pod, policy)
            if rule is not None and rule.on_pod_conditions is not None:
                found.append(pod)
        elif pod.name in hung and (why := given_up(pod, desired, status, observed, now)) is not None:
            problem = Problem(why.reason, f"{pod.name} is deleted: {why.message}")
            found.append(replace(pod, ending="failed", exit=exits.HUNG, problem=problem))
    return found


def has_to_be_counted(pod: Pod) -> bool:
    """Whether the end of a pod is counted.

    It is for a worker, and for a server that reports an invalid job or was evicted for a limit of its own.
    The kubelet restarts other servers in place. An evaluator's end never counts.
    """
    return pod.role == "worker" or (pod.role != "evaluator" and pod.ending in ("invalid", "failed"))


def deaths(observed: Observed) -> list[Problem]:
    """Why the pods have ended that are counted, so that each has an Event."""
    return [describe(pod) for pod in observed.pods if pod.over and has_to_be_counted(pod)]


def counted(
    status: TrainingJobStatus, desired: Desired, observed: Observed, now: datetime
) -> tuple[TrainingJobStatus, list[Note]]:
    """The status with the pods counted that have ended since the last pass, and an Event for each of them."""
    worker, policy = status.worker, desired.spec.run_policy.pod_failure_policy
    ended = [pod for pod in _over(status, desired, observed, now) if has_to_be_counted(pod)]
    fresh = [pod for pod in ended if pod.uid not in worker.counted_pods]
    there = {pod.uid for pod in observed.pods}
    kept = [uid for uid in worker.counted_pods if uid in there]
    invalid = {pod.node: pod.said or describe(pod).reason for pod in fresh if pod.ending == "invalid"}
    update = {
        "counted_pods": [*kept, *(pod.uid for pod in fresh)],
        "failures": worker.failures + sum(consequence(pod, policy) == "Count" for pod in fresh),
        "restarts": worker.restarts + sum(pod.role == "worker" for pod in fresh),
        "invalid_on": dict([*worker.invalid_on.items(), *invalid.items()][-_NODES:]),
    }
    if fresh:
        update["last_failure"] = describe(fresh[-1]).message[:1000]
    notes = [
        Note(pod.uid, "Warning", describe(pod).reason, describe(pod).message)
        for pod in fresh
        if describe(pod).reason != LOST  # `status.model_lost` reports it once for all pods
    ]
    return status.model_copy(update={"worker": worker.model_copy(update=update)}), notes


def fatal(status: TrainingJobStatus, desired: Desired, observed: Observed, now: datetime) -> Problem | None:
    """Why the end of a pod ends the job; None if none does. `status` has this pass's counts.

    The end of the evaluator never ends the job.
    """
    policy = desired.spec.run_policy.pod_failure_policy
    ended = _over(status, desired, observed, now)
    for pod in ended:
        if (rule := _rule(pod, policy)) is not None and rule.action == "FailJob":
            then = "A rule of runPolicy.podFailurePolicy ends the job"
            return Problem("PodFailurePolicy", _ends(describe(pod).message, then))
    invalid = [pod for pod in ended if pod.ending == "invalid" and _rule(pod, policy) is None]
    for pod in invalid:
        if status.progress.version == 0 or (pod.role != "worker" and not _may_move(desired)):
            return describe(pod)
    said = Counter(status.worker.invalid_on.values())
    for pod in invalid:
        if said[status.worker.invalid_on.get(pod.node, "")] > 1:
            return describe(pod)
    limit = desired.spec.run_policy.backoff_limit
    if status.worker.failures > limit:
        times = "once" if status.worker.failures == 1 else f"{status.worker.failures} times"
        then = (
            f"Processes have failed {times}, more than backoffLimit {limit} allows. Correct the cause, and "
            f"{desired.advice}"
        )
        return Problem("BackoffLimitExceeded", _ends(status.worker.last_failure or "", then))
    return None


def _ends(failure: str, then: str) -> str:
    """The message of a job that ends over a failure: its cause, what follows, and the last output."""
    cause, marker, output = failure.partition(LAST_OUTPUT)
    return f"{cause.rstrip(' .')}. {then}{marker}{output}"


def _may_move(desired: Desired) -> bool:
    """Whether a server that moves to another node finds its checkpoints there."""
    return builders.claim_name(desired.name, desired.spec) is not None
