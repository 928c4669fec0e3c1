"""Builds the status of a job from its old status and the existing objects. Pure.

The status itself has the number of failures, with the uids of the counted pods. A failed pod is deleted only
after its uid has been written there, so an operator that is killed at any point neither forgets a failure nor
counts one twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

from elastic_operator import names
from elastic_operator.plan import Note, Observed, stamp
from elastic_operator.pods import LOST, MODEL_LOST, Pod, Problem
from elastic_ps.api.status import (
    Condition,
    EvaluationStatus,
    MemberStatus,
    Progress,
    Summary,
    TrainingJobStatus,
    WorkerStatus,
)
from elastic_ps.api.tables import TableRows
from elastic_ps.api.traffic import TrafficStatus
from elastic_ps.contract.words import amount

RECOVERING = "Recovering"
"""The reason of Degraded while the job still has less than it asks for, after the last problem is gone."""

ConditionType: TypeAlias = Literal[
    "Created", "Running", "Degraded", "Diverged", "Suspended", "Succeeded", "Failed"
]


def dump_status(status: TrainingJobStatus) -> dict[str, Any]:
    """The status as a document, without unset fields, empty texts and numbers that are not finite."""
    return dict(_stored(status.model_dump(mode="json", by_alias=True, exclude_none=True)))


def _stored(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = ((key, _stored(item)) for key, item in value.items())
        return {key: item for key, item in pairs if item != "" and not _is_odd(item)}
    if isinstance(value, list):
        return [_stored(item) for item in value]
    return value


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def condition(status: TrainingJobStatus, kind: ConditionType) -> Condition | None:
    return next((c for c in status.conditions if c.type == kind), None)


def holds(status: TrainingJobStatus, kind: ConditionType) -> bool:
    """Whether the job has the condition, and it is True."""
    found = condition(status, kind)
    return found is not None and found.status == "True"


def ended(status: TrainingJobStatus) -> bool:
    """Whether the job is over, perhaps with a condition that only a newer operator knows."""
    return holds(status, "Succeeded") or holds(status, "Failed") or status.completion_time is not None


def with_condition(
    status: TrainingJobStatus,
    kind: ConditionType,
    value: bool,
    why: Problem,
    *,
    now: datetime,
) -> TrainingJobStatus:
    """The status with that condition. Its transition time changes only with its status."""
    old = condition(status, kind)
    text: Literal["True", "False"] = "True" if value else "False"
    turned = old is None or old.status != text
    new = Condition(
        type=kind,
        status=text,
        reason=why.reason,
        message=why.message[:2000],
        last_transition_time=stamp(now) if turned or old is None else old.last_transition_time,
        observed_generation=status.observed_generation,
    )
    conditions = [new if c.type == kind else c for c in status.conditions]
    return status.model_copy(update={"conditions": conditions if old is not None else [*conditions, new]})


def member_statuses(pod: Pod, observed: Observed, now: datetime) -> list[MemberStatus]:
    """The parameter server's members that were the process of this pod.

    Earlier pods had the same name. Their members are left out: they ended before this pod started, or in an
    earlier term.
    """
    members = observed.server.members if observed.server is not None else []
    return [
        member
        for member in members
        if (member.worker, member.host) == (pod.index, pod.name)
        and pod.started is not None
        and _last_seen(member, now) >= pod.started
    ]


def _last_seen(member: MemberStatus, now: datetime) -> datetime:
    if member.gone_seconds is not None:
        return now - timedelta(seconds=member.gone_seconds)
    return now if member.present else datetime.min.replace(tzinfo=UTC)


def with_counts(
    status: TrainingJobStatus, observed: Observed, *, job: str, replicas: int, shards: int
) -> TrainingJobStatus:
    """The status with the numbers of pods, the progress and the summary for `kubectl get`."""
    workers = observed.of("worker")
    ready = sum(pod.active and pod.ready for pod in workers)
    completed = min(replicas, sum(pod.ending == "done" for pod in workers))
    worker: WorkerStatus = status.worker.model_copy(
        update={
            "replicas": sum(pod.active for pod in workers),
            "ready": ready,
            "completed": max(completed, status.worker.completed if status.completion_time else 0),
            "selector": names.worker_selector(job),
        }
    )
    progress, traffic, tables = status.progress, status.traffic, status.tables
    term = status.parameter_server.term
    told = observed.word
    if told is not None:
        term = told.term or term
        if told.ready and not status.completion_time:
            # The status that an ended server leaves has no metrics.
            progress = told.progress.model_copy(update={"metrics": told.progress.metrics or progress.metrics})
            traffic = TrafficStatus.of(told.traffic, bucket_bytes=told.bucket_bytes) or traffic
            tables = TableRows.of(told.tables) or tables
    server = status.parameter_server.model_copy(
        update={
            "ready": sum(p.active and p.ready and p.index < shards for p in observed.of("ps")),
            "term": term,
            "consistency": (told.tuning.consistency if told else "") or status.parameter_server.consistency,
            "compression": (told.tuning.compression if told else "") or status.parameter_server.compression,
            "standbys": None if told is None or not told.standbys else sum(told.standbys),
        }
    )
    return status.model_copy(
        update={
            "worker": worker,
            "parameter_server": server,
            "progress": progress,
            "traffic": traffic,
            "tables": tables,
            "summary": _summary(worker, progress, replicas),
        }
    )


def judged(status: TrainingJobStatus, now: datetime) -> TrainingJobStatus:
    """The status with the condition Diverged, as the progress says."""
    found = status.progress.diverged
    if found is not None:
        return with_condition(status, "Diverged", True, Problem(found.reason, found.message), now=now)
    if condition(status, "Diverged") is None:
        return status
    over = Problem("NotFound", "the loss is finite and shows no problem")
    return with_condition(status, "Diverged", False, over, now=now)


def explained(status: TrainingJobStatus) -> TrainingJobStatus:
    """The status with the summary's reason: that of the most important condition."""
    kinds: tuple[ConditionType, ...] = ("Succeeded", "Failed", "Suspended", "Degraded", "Diverged")
    why = next((condition(status, kind) for kind in kinds if holds(status, kind)), None)
    if why is None and not holds(status, "Running"):
        why = condition(status, "Running")
    summary = status.summary.model_copy(update={"reason": why.reason if why is not None else ""})
    return status.model_copy(update={"summary": summary})


def _summary(worker: WorkerStatus, progress: Progress, replicas: int) -> Summary:
    known = progress.records_expected is not None
    return Summary(
        workers=f"{worker.ready + worker.completed}/{replicas}",
        progress=f"{progress.percent}%" if known else "",
        loss="" if progress.loss is None else f"{progress.loss:.4g}",
    )


def turned(old: TrainingJobStatus, new: TrainingJobStatus, *, dead: Sequence[Problem] = ()) -> list[Note]:
    """An Event for each condition that has turned True since `old`, and for the end of Degraded.

    Also for new results of the evaluator, for checkpoints that it missed, and for a change of consistency or
    compression. Ends of pods that have Events of their own are `dead`.
    """
    notes = list(_evaluated(old.progress.evaluation or EvaluationStatus(), new.progress.evaluation))
    was, now = old.parameter_server, new.parameter_server
    if was.consistency and now.consistency != was.consistency:
        text = f"consistency has changed from ({was.consistency}) to ({now.consistency})"
        notes.append(Note(f"Changed/{now.term}/{now.consistency}", "Normal", "ConsistencyChanged", text))
    if was.compression and now.compression != was.compression:
        text = f"compression has changed from ({was.compression}) to ({now.compression})"
        notes.append(Note(f"Encoded/{now.term}/{now.compression}", "Normal", "CompressionChanged", text))
    for after in new.conditions:
        before = condition(old, after.type)
        since = "first"
        if before is not None:
            alike = after.reason in (before.reason, RECOVERING) or after.status != "True"
            if before.status == after.status and alike:
                continue
            since = before.last_transition_time
        key = f"{after.type}/{after.status}/{after.reason}/{since}"
        about = [end for end in dead if end.reason == after.reason]
        if after.type == "Degraded" and any(after.message.startswith(end.message[:2000]) for end in about):
            continue
        if after.status == "True" and after.type != "Created":
            bad = after.type in ("Degraded", "Diverged", "Failed")
            plain = after.reason in (after.type, "Finished")
            reason = after.type if plain else f"{after.type}{after.reason}"
            notes.append(Note(key, "Warning" if bad else "Normal", reason, after.message))
        elif after.type == "Degraded" and before is not None and new.phase == "Running":
            notes.append(Note(key, "Normal", "Recovered", after.message))
    return notes


def model_lost(old: TrainingJobStatus, new: TrainingJobStatus, observed: Observed) -> Iterator[Note]:
    """An Event if the model or some versions are lost, as the version or the end of a worker shows.

    There is one Event for all workers: its key is the parameter server that started after the loss.
    """
    was, now = old.parameter_server, new.parameter_server
    version, new_term = old.progress.version, (now.term or 0) > (was.term or 0)
    to_nothing = new.progress.version == 0 and (old.progress.durable_version or 0) > 0
    counted = old.worker.counted_pods
    said = [pod.problem for pod in observed.of("worker") if pod.over and pod.uid not in counted]
    lost = [problem.message for problem in said if problem is not None and problem.reason == LOST]
    if new.progress.version < version and (to_nothing or not new_term):
        lost = [f"version {version} is gone: {MODEL_LOST}"]
    elif new.progress.version < version:
        text = f"training has gone back to version {new.progress.version}: at least "
        text += f"{version - new.progress.version} later versions are trained again"
        yield Note(f"Back/{now.term}", "Warning", "RolledBack", text)
    if lost:
        leader = next((pod.uid for pod in observed.of("ps")), "")
        yield Note(f"{LOST}/{leader}", "Warning", LOST, lost[0])


def _evaluated(old: EvaluationStatus, new: EvaluationStatus | None) -> Iterator[Note]:
    if new is None:
        return
    if new.version is not None and new.evaluated > old.evaluated:
        yield Note(f"Evaluated/{new.version}", "Normal", "Evaluated", str(new))
    if new.missed > old.missed:
        text = f"the evaluator is too slow or keeps failing: it missed {amount(new.missed, 'checkpoint')} "
        text += "in total. Speed it up, or set a larger evaluator.backlog in the next job"
        yield Note(f"Missed/{new.missed}", "Warning", "EvaluationMissed", text)
