"""Decides whether a job is over, and how well one that is not over is doing. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from elastic_operator import builders, names
from elastic_operator.desired import Desired
from elastic_operator.failures import fatal
from elastic_operator.plan import Observed, Options
from elastic_operator.pods import Pod, Problem, parse_time
from elastic_operator.status import RECOVERING, condition, holds, member_statuses, with_condition
from elastic_ps.api.status import LEFT_EARLY, NOT_EVALUATED, Progress, TrainingJobStatus
from elastic_ps.contract.env import DEFAULT_HTTP_PORT

WRITE_LIMIT = timedelta(minutes=10)
"""The time that the parameter server has to write the last version after the last worker has ended."""

_BEFORE = "Before that: "

TROUBLED_WRITE_LIMIT = timedelta(seconds=20)
"""The limit if the parameter server has a problem, for which the workers have waited already."""


@dataclass(frozen=True)
class Verdict:
    """How a job ends."""

    phase: Literal["Succeeded", "Failed"]
    why: Problem


def verdict(status: TrainingJobStatus, desired: Desired, observed: Observed, now: datetime) -> Verdict | None:
    """How the job ends; None if it goes on. `status` has this pass's counts and progress."""
    for refusal in observed.refusals:
        trained = status.progress.version > 0  # a trained job waits until the spec is corrected
        if refusal.reason == "InvalidSpec" and not (trained or holds(status, "Running")):
            return Verdict("Failed", refusal)
    policy = desired.spec.run_policy
    if policy.on_divergence == "stop" and (why := _diverged(desired, observed)) is not None:
        return Verdict("Failed", why)
    if (why := fatal(status, desired, observed, now)) is not None:
        return Verdict("Failed", why)
    deadline, start = policy.active_deadline_seconds, parse_time(status.start_time)
    if deadline is not None and start is not None and now - start >= timedelta(seconds=deadline):
        message = (
            f"the job did not finish within activeDeadlineSeconds ({deadline} s). Raise the limit, and "
            f"{desired.advice}"
        )
        return Verdict("Failed", Problem("DeadlineExceeded", message))
    return _workers_done(status, desired, observed, now) or _share_left(observed)


def _diverged(desired: Desired, observed: Observed) -> Problem | None:
    """The problem that the job does not learn; None while a restart is to end that parameter server."""
    found = observed.word.progress.diverged if observed.word is not None else None
    if found is None or any(pod.older_than(desired.restart) for pod in observed.of("ps")):
        return None
    return Problem("Diverged", found.message)


def _workers_done(
    status: TrainingJobStatus, desired: Desired, observed: Observed, now: datetime
) -> Verdict | None:
    """How the job ends when every worker has ended its script, as the parameter server reports."""
    progress, workers = status.progress, _begun(observed)
    if not workers or any(pod.ending != "done" for pod in workers):
        return None
    if progress.finished:
        if progress.chief in {*desired.workers(observed)} - {pod.index for pod in workers}:
            return None  # its replacement comes, to evaluate and save
        evaluator = desired.spec.evaluator
        left = timedelta(0)
        if evaluator is not None and _evaluates(observed):
            last = max((pod.ended for pod in workers if pod.ended), default=now - evaluator.finish_timeout)
            left = last + evaluator.finish_timeout - now
        if left > timedelta(0):
            return None
        if progress.unwritten:
            return _without_last_version(status, desired, observed, now)
        message = progress.why_stopped if progress.stopped else progress.all_done
        if evaluator is not None and _evaluates(observed):
            message += NOT_EVALUATED.format(evaluator.finish_timeout.total_seconds())
        return Verdict("Succeeded", Problem("StoppedEarly" if progress.stopped else "Finished", message))
    # A report from before the last worker's end does not tell how the job ended.
    if not _all_done(desired, observed) or observed.word is None or not observed.word.begun:
        return None
    if progress.records_expected is None:
        return Verdict("Succeeded", Problem("Finished", "every worker has ended its script"))
    if not observed.word.ready:
        return Verdict("Failed", Problem("ModelLost", _lost(status)))
    return Verdict(
        "Failed",
        Problem(
            "RecordsLeft",
            f"every worker has ended its script, but only {progress.records_applied} of "
            f"{progress.records_expected} records are in the model. {LEFT_EARLY}",
        ),
    )


def _share_left(observed: Observed) -> Verdict | None:
    """How the job ends when a worker is done, but has left records that no other worker trains."""
    progress = observed.server.progress if observed.server is not None else Progress()
    for pod in observed.of("worker"):
        if pod.ending == "done" and pod.deleting is None and pod.index in progress.open_shares:
            return Verdict("Failed", Problem("RecordsLeft", progress.share_left(pod.name)))
    return None


def _without_last_version(
    status: TrainingJobStatus, desired: Desired, observed: Observed, now: datetime
) -> Verdict | None:
    """How a job ends whose last version is not on disk; None while there is time to write it."""
    problem = observed.word.problem if observed.word is not None else ""
    limit = TROUBLED_WRITE_LIMIT if problem else WRITE_LIMIT
    last = max((pod.ended for pod in observed.of("worker") if pod.ended), default=now)
    if now - last <= limit:
        return None
    return Verdict("Failed", Problem("NotOnDisk", status.progress.not_on_disk(problem, desired.advice)))


def _evaluates(observed: Observed) -> bool:
    """Whether the evaluator may still evaluate a checkpoint."""
    return not any(pod.ending in ("done", "invalid") for pod in observed.of("evaluator"))


def _begun(observed: Observed) -> list[Pod]:
    """The workers that count for the end of the job.

    Left out are pods that are deleted before they have started, and those of which only a finalizer keeps the
    object.
    """
    return [
        pod
        for pod in observed.of("worker")
        if pod.ending == "done" or not (pod.held_by or (pod.deleting is not None and pod.unbegun))
    ]


def _all_done(desired: Desired, observed: Observed) -> bool:
    """Whether each worker that the job asks for has ended its script."""
    workers = _begun(observed)
    done = sum(pod.ending == "done" for pod in workers)
    return done >= desired.replicas and all(pod.ending == "done" for pod in workers)


def _lost(status: TrainingJobStatus) -> str:
    applied, expected = status.progress.records_applied, status.progress.records_expected
    return (
        "the parameter server was lost with the model, and there is no checkpoint. Every worker has ended "
        f"its script; at the last report, {applied} of {expected} records were in the model. To keep the "
        "model when a pod is lost, set parameterServer.checkpoint.volumeClaim in the next job"
    )


def _silence(
    status: TrainingJobStatus, desired: Desired, observed: Observed, now: datetime, options: Options
) -> Iterator[Problem]:
    """The problem that the parameter server does not answer, although it is ready or the workers are done."""
    if status.progress.finished:
        return
    waits = observed.unanswered or timedelta(0)
    if _all_done(desired, observed) and (observed.word is None or not observed.word.begun):
        last = max((pod.ended for pod in observed.of("worker") if pod.ended), default=now)
        waits = max(waits, now - last)
    known = condition(status, "Degraded")
    # An operator that was started again has just begun to ask.
    told = known is not None and known.status == "True" and known.reason == "NoAnswer"
    if waits >= options.answer_limit or (told and observed.unanswered is not None):
        message = (
            "the parameter server does not answer, so the operator cannot tell how far the training is, or "
            "whether all records are in the model. See `kubectl describe pod "
            f"{names.pod(desired.name, 'ps', 0)}`. If the pod is ready, check that no NetworkPolicy or "
            f"service mesh keeps the operator from its port {DEFAULT_HTTP_PORT}"
        )
        yield Problem("NoAnswer", message)


def health(
    status: TrainingJobStatus,
    desired: Desired,
    observed: Observed,
    *,
    now: datetime,
    options: Options,
) -> TrainingJobStatus:
    """The status of a job that goes on, with its phase and conditions."""
    present = status.worker.ready + status.worker.completed
    servers, shards = status.parameter_server.ready, desired.spec.parameter_server.replicas
    needed = min(desired.spec.worker.min_replicas, desired.replicas)
    running = servers >= shards and present >= needed
    # A worker that is done ceases to be ready some time before its node reports how it ended.
    running = running or (status.progress.finished and holds(status, "Running"))
    gone = checkpoints_gone(status, desired, observed)
    problems = [gone] if gone is not None else []
    problems += _problems(desired, observed, now, options)
    problems += _silence(status, desired, observed, now, options)
    made = Problem("Created", "the operator has created the job's pods, Services and volume claims")
    refusal = next(iter(observed.keeping_back), gone)
    status = with_condition(status, "Created", refusal is None, refusal or made, now=now)
    counts = f"{present} of {desired.replicas} workers and {servers} of {shards} parameter servers are ready"
    if running:
        why = Problem("Running", counts)
    elif problems:
        why = Problem(problems[0].reason, f"{counts}; {problems[0].message}")
    else:
        server = observed.server
        lacks_model = server is not None and server.begun and not server.ready  # a worker has to bring it
        begun = sum(pod.active and pod.started is not None for pod in observed.of("ps"))
        for_workers = servers >= shards or (lacks_model and begun >= shards)
        why = Problem("WaitingForWorkers" if for_workers else "WaitingForParameterServer", counts)
    status = with_condition(status, "Running", running, why, now=now)
    status = status.model_copy(update={"phase": "Running" if running else "Pending"})
    problems += _unprotected(observed, settled=_running_for(status, now) >= options.follow_limit)
    settled = running and present >= desired.replicas
    return _degraded(status, desired, problems, counts="" if settled else counts, now=now)


def _degraded(
    status: TrainingJobStatus,
    desired: Desired,
    problems: list[Problem],
    *,
    counts: str,
    now: datetime,
) -> TrainingJobStatus:
    """The status with the condition Degraded: the job has less than its spec asks for, for a reason.

    `counts`: what the job has, in words, if that is less than it asks for; else "". While it is less, the job
    stays Degraded after the last problem is gone.
    """
    old = condition(status, "Degraded")
    if problems:
        why = problems[0]
        if len(problems) > 1:
            why = Problem(why.reason, "; ".join(problem.message for problem in problems[:3]))
    elif desired.ignored:
        why = Problem("SpecNotFollowed", "; ".join(desired.ignored))
    elif old is not None and holds(status, "Degraded") and counts:
        last = old.message.rpartition(_BEFORE)[2]
        why = Problem(RECOVERING, f"{counts}; the others are starting. {_BEFORE}{last}")
    else:
        ok = Problem("AsAsked", "everything that the spec asks for exists or is starting")
        return with_condition(status, "Degraded", False, ok, now=now)
    return with_condition(status, "Degraded", True, why, now=now)


def _problems(desired: Desired, observed: Observed, now: datetime, options: Options) -> list[Problem]:
    """The problems of parameter servers, workers and the evaluator, the most important first."""
    problems = [Problem("InvalidSpec", desired.invalid)] if desired.invalid else []
    problems += observed.refusals
    wanted = desired.workers(observed)
    for pod in observed.of("ps", "worker", "evaluator"):
        unplaced = pod.unplaced(now)
        settled = unplaced is None or unplaced >= options.place_limit
        if pod.deleting is None and pod.problem is not None and settled:
            problems.append(_with_claim(pod.problem, desired) if pod.role == "ps" else pod.problem)
        if pod.active and (why := _unheard(pod, observed, now)):
            problems.append(why)
        held = pod.held_by and (pod.role != "worker" or pod.index in wanted)
        if held and pod.deleting and now - pod.deleting > options.force_after:
            text = f"{pod.name} is deleted, but its finalizers ({pod.held_by}) keep it, so it is not replaced"
            problems.append(Problem("FinalizerRemains", f"{text}. Find out what set them"))
        waits = pod.unstarted(now)
        if waits is not None and waits >= options.start_limit:
            text = f"{pod.name} has a node, but none of its containers has started"
            seconds = options.start_limit.total_seconds()
            hint = f"`kubectl describe pod {pod.name}` says why"
            problems.append(Problem("NotStarting", f"{text} for {seconds:g} s; {hint}"))
    if observed.server is not None and observed.server.problem:
        problems.append(Problem("ParameterServerProblem", observed.server.problem))
    if observed.server is not None and observed.server.tuning.problem:
        problems.append(Problem("ChangeRefused", observed.server.tuning.problem))
    return problems


def checkpoints_gone(status: TrainingJobStatus, desired: Desired, observed: Observed) -> Problem | None:
    """The problem that the job's own claim is gone, with the checkpoints to continue from.

    The operator then creates nothing for the job: a parameter server on a new, empty claim would wait for the
    checkpoints for ever.
    """
    durable, claim = status.progress.durable_version, names.claim(desired.name)
    own = desired.spec.parameter_server.checkpoint.volume_claim is not None
    if not own or durable is None or claim in observed.claims:
        return None
    return Problem(
        "CheckpointsGone",
        f"the volume claim {claim} is gone, and the checkpoint of version {durable} was on it. Delete the "
        "job, and create it again. To continue from a copy of the claim, such as a snapshot, set "
        "parameterServer.checkpoint.existingClaim; otherwise it trains from scratch",
    )


def _with_claim(problem: Problem, desired: Desired) -> Problem:
    """Add what claim to name, or the claim and its storage class, to a scheduler's message about a claim."""
    checkpoint = desired.spec.parameter_server.checkpoint
    claim, earlier = builders.claim_name(desired.name, desired.spec), checkpoint.resume_from
    if (
        earlier is not None
        and earlier.job
        and f'persistentvolumeclaim "{claim}" not found' in problem.message
    ):
        hint = (
            f"The job {earlier.job} has no claim of its own, or it was deleted. If that job used another "
            "claim, create this job again with parameterServer.checkpoint.resumeFrom: {claim: NAME}, which "
            "names it"
        )
        return Problem(problem.reason, f"{problem.message} {hint}")
    if claim is None or "PersistentVolumeClaim" not in problem.message:
        return problem
    asks = ""
    if checkpoint.volume_claim is not None:
        named = checkpoint.volume_claim.storage_class_name
        asks = f", which asks for the storage class {named!r}" if named else ", which names no storage class"
    hint = f"`kubectl describe pvc {claim}` says why"
    return Problem(problem.reason, f"{problem.message} The claim is {claim}{asks}; {hint}")


def _unheard(pod: Pod, observed: Observed, now: datetime) -> Problem | None:
    """Why a pod that seems to run takes no part in the training, which may go on without it."""
    if pod.silent:
        return Problem("NodeNotAnswering", f"the node {pod.node} of {pod.name} does not answer")
    latest = max(member_statuses(pod, observed, now), key=lambda member: member.incarnation, default=None)
    if latest is None or latest.state not in ("lost", "hung"):
        return None
    return Problem("WorkerNotAnswering", f"{pod.name} no longer takes part: {latest.reason}")


def _running_for(status: TrainingJobStatus, now: datetime) -> timedelta:
    """How long the job has been Running without a break; negative if it is not."""
    running = condition(status, "Running")
    since = parse_time(running.last_transition_time) if running and running.status == "True" else None
    return now - since if since is not None else timedelta(-1)


def _unprotected(observed: Observed, *, settled: bool) -> Iterator[Problem]:
    """The problems of shards whose loss would now take the job back to the last checkpoint.

    Before the job is `settled`, a standby that does not follow yet is not a problem.
    """
    known = {pod.index: pod.problem for pod in observed.of("standby") if pod.deleting is None and pod.problem}
    yield from known.values()
    told = observed.server.standbys if settled and observed.server and observed.server.ready else []
    for shard, following in enumerate(told):
        if not following and shard not in known:
            yield Problem(
                "StandbyNotFollowing",
                f"the standby of shard {shard} does not have every version yet; if the parameter server is "
                "lost now, the job goes back to the last checkpoint",
            )
