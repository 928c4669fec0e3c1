"""The decisions: (job, observed, now) -> what to do, what to report, when to look again. Pure.

They are level-triggered: they depend on the objects that exist, not on the event that led here. After a plan
has been carried out, the next one is empty. An ended worker takes three passes: it is counted in the status,
its pod is deleted, a new one is created. The end of a job takes two: the verdict is written to the status,
and then a job with such a status is cleaned up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from elastic_operator import builders, certificates, names, network, wiring
from elastic_operator.desired import (
    Desired,
    read_desired,
    read_last_valid,
    spec_text,
    started,
    tuning_to_tell,
)
from elastic_operator.documents import read_status
from elastic_operator.failures import counted, deaths, given_up, has_to_be_counted
from elastic_operator.plan import (
    Action,
    Create,
    DeleteJob,
    DeletePod,
    Kind,
    Note,
    Observed,
    Options,
    Plan,
    Remember,
    ShareClaim,
    TellPod,
    stamp,
)
from elastic_operator.pods import Pod, Problem, parse_time
from elastic_operator.renewal import (
    MENDED,
    begins_again,
    begun_again,
    left_over,
    server_to_renew,
    workers_to_renew,
)
from elastic_operator.status import (
    condition,
    ended,
    explained,
    judged,
    member_statuses,
    model_lost,
    turned,
    with_condition,
    with_counts,
)
from elastic_operator.timing import ZERO, asked_restart, next_look, pause, restart_in
from elastic_operator.verdict import Verdict, checkpoints_gone, health, verdict
from elastic_ps.api.fields import MOST_SECONDS
from elastic_ps.api.status import FINISHED_GRACE, STAYED_OUT, TrainingJobStatus
from elastic_ps.contract.env import Role
from elastic_ps.contract.words import amount
from elastic_ps.errors import InvalidJob

_NEED: dict[Role, str] = {
    "ps": "every shard needs its parameter server",
    "standby": "every shard needs its standby",
}

_ENDED = "it has ended, and makes room for a new one"

_MOST_KEPT = 200 * 1024
"""The longest spec that is written to the Service's annotation, in characters.

Kubernetes refuses an object with more than 256 KiB of annotations.
"""


def reconcile(job: Mapping[str, Any], observed: Observed, now: datetime, options: Options) -> Plan:
    """One pass over one job."""
    plan = _plan(job, observed, now, options)
    return replace(plan, status=explained(plan.status)) if plan.status is not None else plan


def _plan(job: Mapping[str, Any], observed: Observed, now: datetime, options: Options) -> Plan:
    if job["metadata"].get("deletionTimestamp"):
        return Plan()
    old = read_status(job)
    generation = job["metadata"].get("generation")
    status = old.model_copy(update={"observed_generation": generation})
    if ended(old):
        if not begins_again(job, old, now):
            return _finished(job, observed, old, now, options)
        status = begun_again(status, now)
    try:
        desired = read_desired(job, observed, options.policy, secured=options.secured)
        if observed.rejected:
            raise InvalidJob(observed.rejected)
    except InvalidJob as error:
        last = read_last_valid(job, observed, options.policy, str(error), secured=options.secured)
        lacks = last is not None and (last.withheld or observed.rejected)
        if last is None or (lacks and ended(old)):  # a job that begins again needs all its pods, as edited
            goes_on = last is None and started(job, observed)
            return _invalid(old, status, str(error), started=goes_on, now=now)
        desired = last
    if desired.restart is not None and desired.restart > now:
        desired = replace(desired, restart=None)
    if any(pod.older_than(desired.restart) for pod in observed.pods):
        status = status.model_copy(
            update={"worker": status.worker.model_copy(update={"completed_indexes": []})}
        )
    if left := left_over(desired, observed):
        return Plan(actions=left, status=status, requeue=options.retry if observed.refusals else ZERO)
    observed = desired.with_completed(observed, status)
    status, notes = counted(status, desired, observed, now)
    status = judged(_with_counts(status, observed, desired), now)
    notes += model_lost(old, status, observed)
    if desired.spec.run_policy.suspend:
        return _suspended(job, old, status, desired, observed, notes, now, options)
    status = _resumed(status, now)
    end = verdict(status, desired, observed, now)
    if end is not None:
        return _conclude(old, status, end, notes, now)
    actions = [*_shared(desired, observed), *_network(job, desired, observed, options)]
    actions += _service(job, desired, observed)
    certify = certificates.due(desired, status, observed, now, options)
    status = certificates.renewed(status, certify, observed, now)
    actions += [certify] if certify is not None else []
    if checkpoints_gone(status, desired, observed) is None:
        actions += _servers(job, desired, old, status, observed, now, options)
        actions += _workers(job, desired, old, status, observed, now, options)
        actions += _evaluator(job, desired, status, observed, now, options)
    status = health(status, desired, observed, now=now, options=options)
    return Plan(
        actions=tuple(actions),
        status=status,
        notes=(*notes, *turned(old, status, dead=deaths(observed))),
        requeue=next_look(job, status, desired, observed, now, options),
    )


def _with_counts(status: TrainingJobStatus, observed: Observed, desired: Desired) -> TrainingJobStatus:
    shards = desired.spec.parameter_server.replicas
    status = with_counts(status, observed, job=desired.name, replicas=desired.replicas, shards=shards)

    def outdated(*roles: Role) -> int | None:
        return sum(pod.active and desired.outdated(pod) for pod in observed.of(*roles)) or None

    wanted = desired.workers(observed)
    done = [pod.index for pod in observed.of("worker") if pod.ending == "done" and pod.deleting is None]
    update = {
        "outdated": outdated("worker"),
        "completed_indexes": [index for index in done if index in wanted],
    }
    worker = status.worker.model_copy(update=update)
    server = status.parameter_server.model_copy(update={"outdated": outdated("ps", "standby")})
    return status.model_copy(update={"worker": worker, "parameter_server": server})


def _invalid(
    old: TrainingJobStatus, status: TrainingJobStatus, message: str, *, started: bool, now: datetime
) -> Plan:
    """The plan for an invalid spec: a job that has not started fails, a running one is left alone.

    Its last valid spec is not known, too long to be kept, or not valid for this version of the operator.
    """
    why = Problem("InvalidSpec", message)
    if started:
        text = "the operator knows no valid spec of the job, and leaves it alone until you correct this: "
        alone = Problem("InvalidSpec", f"{text}{message}")
        status = with_condition(status, "Degraded", True, alone, now=now)
        return Plan(status=status, notes=tuple(turned(old, status)))
    return _conclude(old, status, Verdict("Failed", why), [], now)


def _conclude(
    old: TrainingJobStatus, status: TrainingJobStatus, end: Verdict, notes: list[Note], now: datetime
) -> Plan:
    """Write the verdict to the status; the next pass cleans up."""
    why = end.why
    if why.reason == "InvalidSpec":  # see `is_corrected`
        why = replace(why, message=f"{why.message.rstrip('.')}. Correct the spec, and the job starts")
    status = status.model_copy(update={"phase": end.phase, "completion_time": stamp(now)})
    status = with_condition(status, end.phase, True, why, now=now)
    over = Problem(end.phase, "the job is over")
    for kind in ("Running", "Degraded"):
        if condition(status, kind) is not None:
            status = with_condition(status, kind, False, over, now=now)
    return Plan(status=status, notes=(*notes, *turned(old, status)), requeue=ZERO)


def _finished(
    job: Mapping[str, Any], observed: Observed, old: TrainingJobStatus, now: datetime, options: Options
) -> Plan:
    """The plan for a job that is over: clean up by its policies, and change nothing else."""
    policy = (job.get("spec") or {}).get("runPolicy") or {}
    clean = policy.get("cleanPodPolicy") or "Running"
    reason = f"the job is over, and cleanPodPolicy is {clean}"
    actions: list[Action] = []
    for pod in observed.pods:
        if pod.deleting is None and (clean == "All" or (clean == "Running" and pod.live)):
            actions.append(DeletePod.of(pod, reason))
    requeue = options.retry if observed.refusals else None
    restart = asked_restart(job)
    if restart is not None and restart > now:
        requeue = restart - now if requeue is None else min(restart - now, requeue)
    ttl, completed = policy.get("ttlSecondsAfterFinished"), parse_time(old.completion_time)
    if ttl is not None and completed is not None:
        left = max(ZERO, completed + timedelta(seconds=min(ttl, MOST_SECONDS)) - now)
        requeue = left if requeue is None else min(left, requeue)
        if left == ZERO:
            why = f"ttlSecondsAfterFinished ({ttl} s) has passed"
            return Plan(actions=(DeleteJob(job["metadata"]["uid"], why),))
    workers, servers = observed.of("worker"), observed.of("ps")
    joined = sum(pod.active and pod.ready for pod in workers)
    counts = {
        "replicas": sum(pod.active for pod in workers),
        "ready": joined,
        "counted_pods": [uid for uid in old.worker.counted_pods if uid in {pod.uid for pod in workers}],
    }
    ready = {"ready": sum(pod.active and pod.ready for pod in servers), "standbys": None}
    wanted = old.summary.workers.partition("/")[2]
    shown = {"workers": f"{joined + old.worker.completed}/{wanted}"} if wanted else {}
    status = old.model_copy(
        update={
            "observed_generation": job["metadata"].get("generation"),
            "summary": old.summary.model_copy(update=shown),
            "worker": old.worker.model_copy(update=counts),
            "parameter_server": old.parameter_server.model_copy(update=ready),
        }
    )
    return Plan(actions=tuple(actions), status=status, requeue=requeue)


def _suspended(
    job: Mapping[str, Any],
    old: TrainingJobStatus,
    status: TrainingJobStatus,
    desired: Desired,
    observed: Observed,
    notes: list[Note],
    now: datetime,
    options: Options,
) -> Plan:
    """The plan for a suspended job: workers and evaluator leave, then the servers save and end."""
    reason = "the job is suspended"
    actions = [*_shared(desired, observed)]
    actions += [a for a in _service(job, desired, observed) if isinstance(a, Remember)]
    # A pod that only a finalizer keeps has ended.
    observed = replace(observed, pods=tuple(pod for pod in observed.pods if not pod.held_by))
    workers = [pod for pod in observed.of("worker") if pod.ending != "done" or pod.live]
    deletable = [pod for pod in workers if not pod.over or pod.uid in old.worker.counted_pods]
    # The evaluator has nothing to save, so it need not be counted first.
    evaluators = [pod for pod in observed.of("evaluator") if pod.ending != "done" or pod.live]
    leaving = [*deletable, *evaluators] if workers or evaluators else observed.of("ps", "standby")
    actions += [DeletePod.of(p, reason) for p in leaving if p.deleting is None]
    actions += _lingering(observed, now, options)
    rest = [*workers, *evaluators, *observed.of("ps", "standby")]
    if rest:
        said = "; ".join(
            [f"waiting for {amount(len(rest), 'pod')} to end", *(r.message for r in observed.refusals[:1])]
        )
        why = Problem("Stopping", said)
        status = with_condition(status, "Suspended", False, why, now=now)
    else:
        kept = builders.claim_name(desired.name, desired.spec) is not None
        words = (
            "when the job is resumed, it continues from the last checkpoint"
            if kept
            else (
                "parameterServer.checkpoint.volumeClaim is not set, so the checkpoints are gone; when the "
                "job is resumed, it starts from scratch"
            )
        )
        why = checkpoints_gone(status, desired, observed) or Problem("Suspended", words)
        status = with_condition(status, "Suspended", True, why, now=now)
        status = status.model_copy(update={"phase": "Suspended", "start_time": None})
    off = Problem("Suspended", reason)
    status = with_condition(status, "Running", False, off, now=now)
    if desired.invalid:
        status = with_condition(status, "Degraded", True, Problem("InvalidSpec", desired.invalid), now=now)
    elif condition(status, "Degraded") is not None:
        status = with_condition(status, "Degraded", False, off, now=now)
    return Plan(
        actions=tuple(actions),
        status=status,
        notes=(*notes, *turned(old, status)),
        requeue=options.poll if rest else None,
    )


def _resumed(status: TrainingJobStatus, now: datetime) -> TrainingJobStatus:
    if condition(status, "Suspended") is not None:
        status = with_condition(status, "Suspended", False, Problem("Resumed", "the job runs again"), now=now)
    if status.start_time is None:
        status = status.model_copy(update={"start_time": stamp(now)})
    return status


def _network(
    job: Mapping[str, Any], desired: Desired, observed: Observed, options: Options
) -> Iterator[Action]:
    """Create the NetworkPolicies before any pod exists."""
    if options.http_from is None:
        return
    wanted = network.policies(job, desired.spec, options.http_from, secured=desired.secured)
    for name, manifest in wanted.items():
        if name not in observed.policies:
            yield Create("NetworkPolicy", name, manifest, "it says who may reach the job's pods")


def _shared(desired: Desired, observed: Observed) -> Iterator[Action]:
    """Keep the volume claim of another job, with the checkpoints that the job continues from."""
    if observed.lent and (claim := builders.claim_name(desired.name, desired.spec)) is not None:
        yield ShareClaim(claim, "it would be deleted with the job that created it")


def _service(job: Mapping[str, Any], desired: Desired, observed: Observed) -> Iterator[Action]:
    """Create the Service before the other objects: it records the spec, and whether the job uses TLS."""
    name = names.service(desired.name)
    valid = "" if desired.invalid else spec_text(job)
    if len(valid) > _MOST_KEPT:
        valid = ""  # none rather than an older one
    if not observed.service:
        manifest = wiring.service(job, secured=desired.secured)
        if valid:
            manifest["metadata"]["annotations"][names.VALID_ANNOTATION] = valid
        yield Create("Service", name, manifest, "it gives the job's servers their addresses")
    elif not desired.invalid and observed.valid_spec != valid:
        yield Remember(name, valid, "the job keeps this spec if a later one is invalid")


def _servers(
    job: Mapping[str, Any],
    desired: Desired,
    old: TrainingJobStatus,
    status: TrainingJobStatus,
    observed: Observed,
    now: datetime,
    options: Options,
) -> Iterator[Action]:
    """The volume claim and the pods of the parameter servers and their standbys."""
    spec, name = desired.spec, desired.name
    if spec.parameter_server.checkpoint.volume_claim is not None and names.claim(name) not in observed.claims:
        claim = builders.claim(job, spec)
        yield Create("PersistentVolumeClaim", names.claim(name), claim, "it holds the checkpoints")
    mounted = builders.claim_name(name, spec) is not None
    safe = mounted or status.progress.durable_version is None
    there = {(pod.role, pod.index): pod for pod in observed.of("ps", "standby")}
    for role, shard in builders.servers(spec):
        pod = there.get((role, shard))
        if pod is None:
            yield from _create(job, desired, status, role, shard, _NEED[role])
        elif pod.ending is not None and pod.deleting is None and _is_counted(pod, old):
            if pause(pod, status, now, options) == ZERO:
                yield DeletePod.of(pod, _ENDED)
        elif pod.active and (why := server_to_renew(pod, desired, observed, safe=safe or role != "ps")):
            yield DeletePod.of(pod, why)
        elif pod.active and pod.tuning:
            if wanted := tuning_to_tell(desired, pod):
                told = "the spec asks for another consistency, compression or checkpoint policy"
                yield TellPod(pod.name, pod.uid, {names.TUNING_ANNOTATION: wanted}, told)
            if not pod.durable and (version := _durable(desired, status)) is not None:
                told = "a version is on disk, so a restart must continue from it"
                yield TellPod(pod.name, pod.uid, builders.durable_annotation(version), told)


def _durable(desired: Desired, status: TrainingJobStatus) -> int | None:
    """A version whose checkpoint outlives the pods; None if none is known."""
    kept = builders.claim_name(desired.name, desired.spec) is not None
    return status.progress.durable_version if kept else None


def _evaluator(
    job: Mapping[str, Any],
    desired: Desired,
    status: TrainingJobStatus,
    observed: Observed,
    now: datetime,
    options: Options,
) -> Iterator[Action]:
    """The evaluator's pod. The kubelet restarts its container in place, and its end never counts.

    It is created once there is a model. If the parameter server continues from a finished job, a worker first
    has to find out whether anything is left to train: otherwise the evaluator would end at once.
    """
    if desired.spec.evaluator is None:
        return
    pod = next(iter(observed.of("evaluator")), None)
    if pod is None:
        ready = observed.word is not None and observed.word.ready
        done = any(worker.ending == "done" for worker in observed.of("worker"))
        if ready and (done or not status.progress.finished):
            yield from _create(job, desired, status, "evaluator", 0, "the job has an evaluator")
    elif pod.over and pod.finished:
        if pause(pod, status, now, options) == ZERO:
            yield DeletePod.of(pod, _ENDED)
    elif pod.deleting is None and pod.ending != "done" and desired.renewable(pod):
        yield DeletePod.of(pod, "its image or template has changed, or somebody has asked for a restart")


def _is_counted(server: Pod, old: TrainingJobStatus) -> bool:
    """Whether the end of a server is counted, or need not be."""
    return not has_to_be_counted(server) or server.uid in old.worker.counted_pods


def _workers(
    job: Mapping[str, Any],
    desired: Desired,
    old: TrainingJobStatus,
    status: TrainingJobStatus,
    observed: Observed,
    now: datetime,
    options: Options,
) -> Iterator[Action]:
    there = {pod.index: pod for pod in observed.of("worker")}
    # If a finished job is resumed, one worker has to find out that nothing is left.
    finished = status.progress.finished and any(pod.ending == "done" for pod in there.values())
    wanted, servers = desired.workers(observed), desired.spec.parameter_server.replicas
    # The chief's replacement evaluates and saves.
    needless = {*wanted} - {status.progress.chief} if finished else frozenset[int]()
    # Without its servers, a worker would wait in vain, and fail.
    stranded = "ps" in desired.withheld and len(observed.of("ps")) < servers
    for index in wanted:
        if index not in there and index not in needless and not stranded:
            reason = f"the job asks for {amount(desired.replicas, 'worker')}"
            yield from _create(job, desired, status, "worker", index, reason)
    for index, pod in sorted(there.items(), reverse=True):
        if pod.deleting is not None or not pod.uid:
            continue
        if pod.over:
            restart = restart_in(pod, status, desired, now, options)
            if pod.uid in old.worker.counted_pods and restart == ZERO:
                yield DeletePod.of(pod, _ENDED)
        elif pod.active and (why := given_up(pod, desired, status, observed, now)) is not None:
            # A hung worker is counted, and has an Event.
            yield DeletePod.of(pod, why.message, told=pod.uid in status.worker.counted_pods)
        elif index not in wanted:
            yield DeletePod.of(pod, f"the job is scaled down to {amount(desired.replicas, 'worker')}")
        elif pod.active and index in needless and pod.unbegun:
            yield DeletePod.of(pod, "the training is finished, and its container has not started")
        elif pod.active and index in needless and _stays_out(pod, observed, now):
            yield DeletePod.of(pod, f"the training is finished, and {STAYED_OUT}")
        elif pod.stuck and desired.renewable(pod):
            yield DeletePod.of(pod, MENDED)
    yield from workers_to_renew(desired, status, observed, now, options)
    yield from _lingering(observed, now, options)


def _stays_out(pod: Pod, observed: Observed, now: datetime) -> bool:
    """Whether a process has not joined the job for a while after the first worker was done."""
    if observed.server is None or pod.ready or pod.started is None or member_statuses(pod, observed, now):
        return False
    done = min((each.ended for each in observed.of("worker") if each.ended), default=now)
    return now - max(pod.started, done) > FINISHED_GRACE


def _create(
    job: Mapping[str, Any],
    desired: Desired,
    status: TrainingJobStatus,
    role: Role,
    index: int,
    reason: str,
) -> Iterator[Create]:
    """The pod, unless its template is no longer permitted."""
    if role in desired.withheld:
        return
    avoid = sorted(filter(None, status.worker.invalid_on))
    manifest = builders.pod(
        job,
        desired.spec,
        role,
        index,
        avoid=avoid,
        secured=desired.secured,
        durable=_durable(desired, status),
    )
    # If another job has a claim of this name, its checkpoints are not ours.
    needs: Kind | None = "PersistentVolumeClaim" if role in builders.SERVERS else None
    yield Create("Pod", names.pod(desired.name, role, index), manifest, reason, needs=needs)


def _lingering(observed: Observed, now: datetime, options: Options) -> Iterator[Action]:
    """Delete terminating pods by force that nobody has to wait for, to free their names.

    Either their processes have ended, and the kubelet cleans up only in its next round, up to a minute later.
    Or their node does not answer; the PS then fences off processes that may still run.
    """
    for pod in observed.pods:
        if pod.held_by:
            continue
        if pod.deleting is not None and pod.stopped:
            # Nobody has told of one that is drained or preempted.
            yield DeletePod.of(pod, "the processes have ended", force=True, told=not pod.disruption)
        elif pod.unheard or (pod.deleting is not None and now - pod.deleting > options.force_after):
            yield DeletePod.of(pod, "its node does not confirm that it ended", force=True)
