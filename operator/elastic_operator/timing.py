"""Decides when to look at a job again without a change, and when to replace an ended worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from elastic_operator import builders, certificates
from elastic_operator.desired import Desired, restart_of
from elastic_operator.failures import consequence
from elastic_operator.plan import Observed, Options
from elastic_operator.pods import Pod, parse_time
from elastic_operator.status import condition, member_statuses
from elastic_operator.verdict import checkpoints_gone
from elastic_ps.api.status import TrainingJobStatus

ZERO = timedelta(0)


def restart_in(
    pod: Pod, status: TrainingJobStatus, desired: Desired, now: datetime, options: Options
) -> timedelta:
    """The time until an ended worker may be replaced."""
    if consequence(pod, desired.spec.run_policy.pod_failure_policy) != "Count":
        return pause(pod, status, now, options)
    exponent = min(16, max(0, status.worker.failures - 1))  # mutant: equal
    doubled = options.restart_base * 2**exponent
    delay: timedelta = min(options.restart_limit, doubled)
    return _left(delay, pod, pod.ended or now - delay, now)


def pause(pod: Pod, status: TrainingJobStatus, now: datetime, options: Options) -> timedelta:
    """The time until a pod may be replaced that has lived only for a moment.

    A pod that its node refused to run, for example for a broken device, has a lifetime of 0: otherwise it
    would be recreated again and again without a pause. The pause grows with the time for which the job has
    been Degraded, as it is while such a pod is missing.
    """
    started, ended = pod.started or pod.created, pod.ended or pod.created
    if started is None or ended is None or ended - started >= options.short_life:
        return ZERO
    known = condition(status, "Degraded")
    since = parse_time(known.last_transition_time) if known is not None and known.status == "True" else None
    grown = (ended - since) / 2 if since is not None else ZERO
    return _left(min(options.restart_limit, max(options.short_life_delay, grown)), pod, ended, now)


def _left(delay: timedelta, pod: Pod, ended: datetime, now: datetime) -> timedelta:
    """The rest of a delay after a pod's end. If its node's clock is ahead, after its creation."""
    if ended > now:
        ended = pod.created or now - delay
    return max(ZERO, delay - (now - ended))


def next_look(
    job: Mapping[str, Any],
    status: TrainingJobStatus,
    desired: Desired,
    observed: Observed,
    now: datetime,
    options: Options,
) -> timedelta:
    """The time until a pass is needed although nothing has changed. A change asks for a pass by itself."""
    times = [options.look]
    if observed.keeping_back or observed.rejected:
        times = [options.retry]
    workers = observed.of("worker")
    times += [restart_in(pod, status, desired, now, options) for pod in workers if pod.over]
    servers = [pod for pod in observed.of("ps", "standby") if pod.ending is not None and pod.deleting is None]
    evaluators = [pod for pod in observed.of("evaluator") if pod.over and pod.finished]
    times += [pause(pod, status, now, options) for pod in (*servers, *evaluators)]
    unplaced = [waits for pod in observed.pods if (waits := pod.unplaced(now)) is not None]
    times += [options.place_limit - waits for waits in unplaced if waits < options.place_limit]
    unstarted = [waits for pod in observed.pods if (waits := pod.unstarted(now)) is not None]
    times += [options.start_limit - waits for waits in unstarted if waits < options.start_limit]
    if observed.unanswered is not None and observed.unanswered < options.answer_limit:
        times.append(options.answer_limit - observed.unanswered)
    ends = [pod.deleting for pod in observed.pods if pod.deleting is not None]
    times += [max(options.retry, end + options.force_after - now) for end in ends]
    done = [pod for pod in workers if pod.ending == "done"]
    if done:
        last = max((pod.ended for pod in done if pod.ended), default=now)
        times.append(timedelta(seconds=2) if now - last < options.answer_limit * 2 else options.poll)
    if any(
        member.state in ("hung", "lost")
        for pod in workers
        if pod.active
        for member in member_statuses(pod, observed, now)
    ):
        times.append(options.poll)
    if builders.has_standbys(desired.spec):
        times.append(options.poll)
    restart = asked_restart(job)
    if restart is not None and restart > now:
        times.append(restart - now)
    times += certificates.next_look(status, now, options)
    deadline, start = desired.spec.run_policy.active_deadline_seconds, parse_time(status.start_time)
    if deadline is not None and start is not None:
        times.append(max(ZERO, start + timedelta(seconds=deadline) - now))
    if observed.refusals or checkpoints_gone(status, desired, observed) is not None:
        # This pass has tried what is due now, or makes nothing until the claim is there.
        times = [time for time in times if time > ZERO]
    return min(times)


def asked_restart(job: Mapping[str, Any]) -> datetime | None:
    """The time at which somebody has asked for a restart; None if nobody has, or not with a valid time."""
    try:
        return restart_of(job)
    except ValueError:
        return None
