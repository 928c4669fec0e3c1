"""Decides which pods to replace after an edit, or because a user asks for a restart. Pure.

A pod is outdated if it was made from another image or template. A pod that cannot run is replaced at once, so
that an edit repairs the job. Running workers are replaced one at a time, each when all others take part or
fit on no node. A running parameter server holds the model, so it is replaced only if the job's annotation
`elastic-ps.dev/restartedAt` asks for it. The annotation also restarts a failed job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from elastic_operator.desired import Desired
from elastic_operator.plan import Action, DeletePod, Observed, Options
from elastic_operator.pods import Pod, Problem, parse_time
from elastic_operator.status import condition, holds, member_statuses, with_condition
from elastic_operator.timing import ZERO, asked_restart
from elastic_ps.api.status import TrainingJobStatus, WorkerStatus

MENDED = "it does not run, and its image or template has changed"


def is_corrected(status: TrainingJobStatus, generation: int | None) -> bool:
    """Whether a spec that was refused has been edited since."""
    failed = condition(status, "Failed")
    return (
        failed is not None
        and failed.status == "True"
        and failed.reason == "InvalidSpec"
        and status.observed_generation != generation
    )


def is_restarted(job: Mapping[str, Any], status: TrainingJobStatus, now: datetime) -> bool:
    """Whether somebody has asked for a restart after the job failed."""
    completed, asked = parse_time(status.completion_time), asked_restart(job)
    return (
        holds(status, "Failed") and asked is not None and completed is not None and completed <= asked <= now
    )


def begins_again(job: Mapping[str, Any], status: TrainingJobStatus, now: datetime) -> bool:
    """Return True if a job that has ended starts again."""
    return is_corrected(status, job["metadata"].get("generation")) or is_restarted(job, status, now)


def begun_again(status: TrainingJobStatus, now: datetime) -> TrainingJobStatus:
    """The status of a failed job that starts again: counts are reset, the progress stays."""
    worker = WorkerStatus(counted_pods=status.worker.counted_pods)
    progress = status.progress.model_copy(update={"diverged": None})
    update = {"phase": "Pending", "worker": worker, "start_time": None, "completion_time": None}
    update["progress"] = progress
    again = Problem("StartedAgain", "the job was corrected or restarted, and starts again")
    return with_condition(status.model_copy(update=update), "Failed", False, again, now=now)


def left_over(desired: Desired, observed: Observed) -> tuple[Action, ...]:
    """Delete the pods that had ended before a restart was asked for: they belong to the failed run."""
    asked = "somebody has asked for a restart"
    ended = [pod for pod in observed.pods if pod.ending is not None and pod.deleting is None]
    return tuple(DeletePod.of(pod, asked) for pod in ended if pod.older_than(desired.restart))


def server_to_renew(server: Pod, desired: Desired, observed: Observed, *, safe: bool) -> str:
    """Why to replace a server that has not ended; "" if it stays. A standby is replaced after the shards.

    `safe`: no checkpoint is lost with its pod.
    """
    if server.stuck and desired.renewable(server) and (safe or server.unbegun):
        return MENDED
    if not server.older_than(desired.restart):
        return ""
    leaders = observed.of("ps")
    settled = all(pod.active and pod.ready and not pod.older_than(desired.restart) for pod in leaders)
    leads = server.role == "ps"
    return "somebody has asked for a restart" if leads or (settled and leaders) else ""


def workers_to_renew(
    desired: Desired, status: TrainingJobStatus, observed: Observed, now: datetime, options: Options
) -> Iterator[Action]:
    """Replace workers with an older image or template, one at a time, when all others take part.

    Those that have not joined take no part, so they are replaced at once, unless that is not known.
    """
    there = {pod.index: pod for pod in observed.of("worker")}
    wanted = [there.get(index) for index in desired.workers(observed)]
    if status.progress.finished:
        return
    absent = [
        pod
        for pod in wanted
        if pod is None or not pod.active or not any(m.present for m in member_statuses(pod, observed, now))
    ]
    for pod in absent:
        if pod is not None and pod.unjoined and observed.server is not None and desired.renewable(pod):
            yield DeletePod.of(pod, "it has not joined, and its image or template has changed")
    present = [pod for pod in wanted if pod is not None and pod not in absent]
    if absent and not _only_wait(absent, present, desired, now, options):
        return
    for pod in reversed(wanted):
        if pod is not None and desired.renewable(pod):
            yield DeletePod.of(pod, "its image or template has changed, or somebody has asked for a restart")
            return


def _only_wait(
    absent: Sequence[Pod | None], present: Sequence[Pod], desired: Desired, now: datetime, options: Options
) -> bool:
    """Return True if the absent workers fit on no node, and need not hold up the renewal of the others.

    A renewed worker may fit on no node either. So no more may wait than one, or than take part with the new
    template, and minReplicas workers stay.
    """
    waiting = [
        pod
        for pod in absent
        if pod is not None
        and pod.active
        and not desired.outdated(pod)
        and (pod.unplaced(now) or ZERO) >= options.place_limit
    ]
    fitting = sum(not desired.changed(pod) for pod in present)
    few = len(waiting) == len(absent) <= max(1, fitting)
    return few and len(present) > desired.spec.worker.min_replicas
