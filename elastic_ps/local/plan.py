"""Decides what to do next for a job on this machine. Pure; each decision has its reason.

`plan` compares the wanted state with all processes so far, and returns which processes to start and to stop,
and whether the job is over. It keeps no state: counts of failures and delays follow from the processes that
have ended. Times are seconds of one monotonic clock. `supervisor` carries the decisions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from typing import Literal, TypeAlias

from elastic_ps.api.status import FINISHED_GRACE, LEFT_EARLY, NOT_EVALUATED, STAYED_OUT, Phase, Progress
from elastic_ps.contract import deaths, exits
from elastic_ps.contract.deaths import Death, Kind, cause_of, describe_exit, kind_of
from elastic_ps.contract.env import Role
from elastic_ps.contract.words import amount

LEAVE_GRACE = timedelta(minutes=1)
_FIXED_GRACE = timedelta(seconds=5)
"""The time to leave of workers whose step may wait for one that has left, since they have fixed shares."""

Ending: TypeAlias = Literal["done", "left", "killed", "failed", "invalid"]


def name_of(role: Role, index: int) -> str:
    """The name of a process in messages."""
    if role == "evaluator":
        return "the evaluator"
    return f"parameter server {index}" if role == "ps" else f"{role} {index}"


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of the job, from its start on.

    Attributes:
        role: `ps`, `standby`, `worker` or `evaluator`.
        index: the shard's or the worker's index; the evaluator's is 0. At most one process with it is alive
            at a time.
        pid: its process id.
        started: when it was started.
        ready: whether it answers requests (parameter servers only).
        asked: when it was asked to end, if it was.
        killed: whether it was killed because it did not end when asked.
        ended: when it was seen to have ended.
        exit: its exit status; negative: the signal that killed it. None while it is alive.
        starved: whether the kernel killed it, it seems, because the host had no memory left.
        output: the last lines of its output, if it failed.
        useful: whether it has done anything for the job: a step in the model, or an answer with values.
        joined: whether it is or was a member of the job (workers only).
        stuck: why to kill a worker that the parameter server has given up; "" for others.
        overstays: why to kill a worker that keeps a finished job open; "" for others.
        stopped: since when a signal (SIGSTOP) has stopped it, in a job whose training is done.
    """

    role: Role
    index: int
    pid: int
    started: float
    ready: bool = False
    asked: float | None = None
    killed: bool = False
    ended: float | None = None
    exit: int | None = None
    starved: bool = False
    output: str = ""
    useful: bool = False
    joined: bool = False
    stuck: str = ""
    overstays: str = ""
    stopped: float | None = None

    @property
    def alive(self) -> bool:
        return self.exit is None

    @property
    def name(self) -> str:
        return name_of(self.role, self.index)

    @property
    def ending(self) -> Ending | None:
        """The meaning of its end for the job; None while it is alive.

        `done`: it finished. `left`: it ended because it was asked to, by the launcher or by someone else
        (then `asked` is None). `killed`: from outside. `failed`: its program failed. `invalid`: the job
        cannot work as specified.
        """
        if self.exit is None:
            return None
        if self.stuck:
            return "failed"
        if self.overstays:
            return "killed"
        if self.asked is not None or self.exit == exits.LEFT:
            return "left"
        if self.exit == 0:
            return "done"
        if self.exit == exits.INVALID:
            return "invalid"
        return "failed" if kind_of(self.exit) == "failed" else "killed"

    @property
    def how(self) -> str:
        """Its end in words: `exited with 1`."""
        words = describe_exit(self.exit or 0)
        return f"{words}, probably because there was no memory left" if self.starved else words

    @property
    def death(self) -> Death | None:
        """Its death; None if it is alive or ended as expected."""
        if self.exit is None or self.ending not in ("failed", "killed"):
            return None
        kind: Kind = "crashed" if self.starved else kind_of(self.exit)
        return Death("failed" if self.ending == "failed" else kind, self.how, self.useful)


@dataclass(frozen=True, order=True)
class ScaleAt:
    """Scale to `workers` workers once the model has reached `version`."""

    version: int
    workers: int


def cores_of(worker: int, *, workers: int, cores: Iterable[int]) -> tuple[int, ...]:
    """The cores of one of `workers` that divide these cores: adjacent ones, each core in one share.

    If there are fewer cores than workers, some workers have the same core. A worker with a higher index
    shares the cores of another one.
    """
    every = sorted(cores)
    worker %= workers
    if workers > len(every):
        return (every[worker % len(every)],)
    return tuple(every[worker * len(every) // workers : (worker + 1) * len(every) // workers])


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The wanted state.

    Attributes:
        shards: the number of parameter servers.
        standbys: whether each of them has a standby.
        workers: the number of workers.
        backoff_limit: the number of failures that the job survives.
        deadline: the job fails after this time; None never.
        stop_diverged: whether the job fails when it does not learn.
        schedule: changes of the number of workers that have not been made yet.
        start_limit: time for the parameter servers to answer.
        leave_grace: time for a worker to finish its step and leave.
        checkpoint_grace: time for a parameter server to write its last checkpoint.
        answer_limit: time to wait, after the last worker has ended, for the final state of training.
        write_limit: time to wait, after that, for the last version to be on disk.
        problem_limit: the same, if the parameter server has a problem.
        evaluator_grace: time for the evaluator to end after the last worker has ended; None: there is none.
        finished_grace: time for a worker to join when another one was done.
    """

    shards: int
    workers: int
    standbys: bool = False
    backoff_limit: int
    deadline: timedelta | None = None
    stop_diverged: bool = False
    schedule: tuple[ScaleAt, ...] = ()
    start_limit: timedelta = timedelta(seconds=120)
    leave_grace: timedelta = LEAVE_GRACE
    checkpoint_grace: timedelta = timedelta(minutes=2)
    answer_limit: timedelta = timedelta(seconds=10)
    write_limit: timedelta = timedelta(minutes=10)
    problem_limit: timedelta = timedelta(seconds=20)
    evaluator_grace: timedelta | None = None
    finished_grace: timedelta = FINISHED_GRACE


@dataclass(frozen=True)
class Verdict:
    """How the job ends. `reason` is one word, as in a condition; `message` is for a person."""

    phase: Phase
    reason: str
    message: str


@dataclass(frozen=True)
class StopRequest:
    """A request to end the job. `at_once`: kill instead of asking."""

    why: str
    at_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The observed state.

    Attributes:
        started: when the job was started.
        processes: every process so far, in the order of their start.
        progress: the progress in the parameter server's last answer.
        problem: the problem in that answer; "" if there is none.
        asked_at: when that answer was requested; None before the first one.
        was_finished: whether the job continues from a finished one, and has trained nothing since.
        stop: a request to stop.
        verdict: how the job ends, once that has been concluded.
    """

    started: float
    processes: Sequence[Process] = ()
    progress: Progress = field(default_factory=Progress)
    problem: str = ""
    asked_at: float | None = None
    was_finished: bool = False
    stop: StopRequest | None = None
    verdict: Verdict | None = None

    def of(self, role: Role) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    def latest(self, role: Role) -> dict[int, Process]:
        """The newest process of each index."""
        return {process.index: process for process in self.of(role)}


WAS_FINISHED = (
    "the job had finished before: every record of every epoch is in its checkpoint, and the script asks for "
    "no more epochs"
)


@dataclass(frozen=True)
class Start:
    """Start a process. `replaces`: the pid of the process that it replaces."""

    role: Role
    index: int
    reason: str
    replaces: int | None = None

    @property
    def name(self) -> str:
        return name_of(self.role, self.index)


@dataclass(frozen=True)
class Terminate:
    """Ask a process to end (SIGTERM). `warns`: whether to warn the user."""

    pid: int
    reason: str
    warns: bool = False


@dataclass(frozen=True)
class Kill:
    """Kill a process with all that it has started (SIGKILL)."""

    pid: int
    reason: str


@dataclass(frozen=True)
class Scale:
    """Change the number of workers by the schedule."""

    at: ScaleAt
    reason: str


@dataclass(frozen=True)
class Conclude:
    """Conclude that the job is over, and close the processes that still run."""

    verdict: Verdict


Action: TypeAlias = Start | Terminate | Kill | Scale | Conclude


def plan(desired: Desired, observed: Observed, now: float) -> list[Action]:
    """The actions that bring the observed state closer to the wanted one; empty if there are none."""
    if observed.verdict is not None:
        return list(_close(desired, observed, observed.verdict, now))
    verdict = _verdict(desired, observed, now)
    if verdict is not None:
        return [Conclude(verdict)]
    due = [at for at in sorted(desired.schedule) if observed.progress.version >= at.version]
    if due:
        return [Scale(at, f"version {observed.progress.version} is reached") for at in due]
    servers = list(_start_servers("ps", desired, observed, now))
    if desired.standbys:
        servers += _start_servers("standby", desired, observed, now)
    if servers or not _servers_alive(desired, observed):
        return [*servers]
    return [*_workers(desired, observed, now), *_evaluator(desired, observed, now)]


def restart_delay(attempts: Iterable[Process]) -> timedelta:
    """How long to wait before a process is replaced, given all earlier ones with its index.

    The first replacement comes at once. After each process that lived for less than a minute, the delay
    doubles, up to 30 s. A process that was killed from outside after it had done something for the job does
    not count: it says nothing about the next one.
    """

    def died_soon(process: Process) -> bool:
        lived = (process.ended or process.started) - process.started
        from_outside = process.death is not None and process.death.kind == "killed" and process.useful
        return process.ending in ("killed", "failed") and lived < 60.0 and not from_outside

    streak = sum(1 for _ in takewhile(died_soon, reversed(list(attempts))))
    return timedelta(seconds=min(30.0, 0.5 * 2 ** (streak - 2)) if streak > 1 else 0.0)


def failures(observed: Observed) -> list[Process]:
    """The processes whose ends count against `backoffLimit` (see `contract.deaths`), by time of end.

    The evaluator never counts.
    """
    trains = [process for process in observed.processes if process.role != "evaluator"]
    ended = sorted(trains, key=lambda process: process.ended or 0.0)
    dead = [(process, death) for process in ended if (death := process.death) is not None]
    counted = deaths.failures(((process.role, process.index), death) for process, death in dead)
    return [process for (process, _), counts in zip(dead, counted, strict=True) if counts]


def _verdict(desired: Desired, observed: Observed, now: float) -> Verdict | None:
    """How the job ends, if it is to end now."""
    if observed.stop is not None:
        return Verdict("Suspended", "Stopped", observed.stop.why)
    for process in observed.processes:
        if process.ending == "invalid" and process.role != "evaluator":
            message = cause_of(process.output) or process.output or f"{process.name} refused the job"
            return Verdict("Failed", "InvalidJob", message)
    if desired.stop_diverged and (found := observed.progress.diverged) is not None:
        return Verdict("Failed", "Diverged", found.message)
    return (
        _deadline_exceeded(desired, observed, now)
        or _parameter_server_silent(desired, observed, now)
        or _failed_too_often(desired, observed)
        or _workers_done(desired, observed, now)
        or _share_left(observed)
    )


def _deadline_exceeded(desired: Desired, observed: Observed, now: float) -> Verdict | None:
    if desired.deadline is None or now - observed.started <= desired.deadline.total_seconds():
        return None
    seconds = desired.deadline.total_seconds()
    message = f"the job did not finish within activeDeadlineSeconds ({seconds:g} s). Raise the limit"
    return Verdict("Failed", "DeadlineExceeded", message)


def _parameter_server_silent(desired: Desired, observed: Observed, now: float) -> Verdict | None:
    for process in observed.latest("ps").values():
        if (
            process.alive
            and not process.ready
            and now - process.started > desired.start_limit.total_seconds()
        ):
            seconds = desired.start_limit.total_seconds()
            message = f"{process.name} (pid {process.pid}) has not answered within {seconds:g} s of its start"
            return Verdict("Failed", "ParameterServerSilent", message)
    return None


def _failed_too_often(desired: Desired, observed: Observed) -> Verdict | None:
    failed = failures(observed)
    count = len(failed)
    if count <= desired.backoff_limit:
        return None
    last = failed[-1]
    times = "once" if count == 1 else f"{count} times"
    ended = f"{last.name} {last.how}"
    cause = cause_of(last.output)
    message = (
        f"{f'{cause.splitlines()[0]} ({ended})' if cause else ended}. Processes have failed {times}, more "
        f"than backoffLimit {desired.backoff_limit} allows"
    )
    if last.output:
        message += f". The last output of {last.name}:\n{last.output}"
    return Verdict("Failed", "BackoffLimitExceeded", message)


def _workers_done(desired: Desired, observed: Observed, now: float) -> Verdict | None:
    """The verdict once no worker is left to run."""
    workers, latest, progress = observed.of("worker"), observed.latest("worker"), observed.progress
    if not workers or any(process.alive for process in workers):
        return None
    for index in range(desired.workers):
        ending = latest[index].ending if index in latest else None
        gone_for_good = ending == "done" or (ending in (None, "left") and progress.finished)
        if not gone_for_good:
            return None
    last_end = max(process.ended or 0.0 for process in workers)
    if observed.asked_at is None or observed.asked_at <= last_end:
        if now - last_end <= desired.answer_limit.total_seconds():
            return None
        return Verdict(
            "Failed",
            "NoAnswer",
            "the parameter server does not answer, so it is not known whether all records are in the model. "
            "Every worker has ended. Read the parameter server's output",
        )
    if progress.finished:
        if _evaluates(desired, observed) and now - last_end <= _grace(desired).total_seconds():
            return None
        if progress.unwritten:
            limit = desired.problem_limit if observed.problem else desired.write_limit
            if now - last_end <= limit.total_seconds():
                return None
            return Verdict("Failed", "NotOnDisk", progress.not_on_disk(observed.problem))
        reason = "StoppedEarly" if progress.stopped else "Finished"
        message = WAS_FINISHED if observed.was_finished else progress.all_done
        message = progress.why_stopped if progress.stopped else message
        if _evaluates(desired, observed):
            message += NOT_EVALUATED.format(_grace(desired).total_seconds())
        return Verdict("Succeeded", reason, message)
    if progress.records_expected is None:
        return Verdict("Succeeded", "Finished", "every worker has ended its script")
    return Verdict(
        "Failed",
        "RecordsLeft",
        f"every worker has ended its script, but only {progress.records_applied} of "
        f"{progress.records_expected} records are in the model. {LEFT_EARLY}",
    )


def _share_left(observed: Observed) -> Verdict | None:
    """The verdict once a worker is done, but has left records that no other worker trains."""
    for index, worker in observed.latest("worker").items():
        ended = worker.ending == "done" and (worker.ended or 0.0) < (observed.asked_at or 0.0)
        if ended and index in observed.progress.open_shares:
            return Verdict("Failed", "RecordsLeft", observed.progress.share_left(worker.name))
    return None


def _start_servers(role: Role, desired: Desired, observed: Observed, now: float) -> Iterator[Start]:
    latest = observed.latest(role)
    for shard in range(desired.shards):
        before = latest.get(shard)
        if before is None:
            yield Start(role, shard, "the job starts")
        elif before.exit is not None and _may_replace(observed, before, now):
            yield Start(role, shard, f"the previous process {before.how}", before.pid)


def _may_replace(observed: Observed, before: Process, now: float) -> bool:
    """Whether the pause after a process's end is over."""
    attempts = [process for process in observed.of(before.role) if process.index == before.index]
    return now - (before.ended or now) >= restart_delay(attempts).total_seconds()


def _servers_alive(desired: Desired, observed: Observed) -> bool:
    """Whether all parameter servers run. Workers start before these answer: both first import torch."""
    latest = observed.latest("ps")
    return all(shard in latest and latest[shard].alive for shard in range(desired.shards))


def _workers(desired: Desired, observed: Observed, now: float) -> Iterator[Action]:
    """Actions for the workers of a job that goes on."""
    latest, finished = observed.latest("worker"), observed.progress.finished
    if observed.was_finished and not latest:
        finished = False  # only a worker can tell whether the script trains more epochs than before
    wanted = f"the job asks for {amount(desired.workers, 'worker')}"
    for index in range(desired.workers):
        before = latest.get(index)
        if before is None or before.ending == "left":
            if not finished:
                elsewhere = before is not None and before.asked is None  # somebody else asked
                yield Start("worker", index, wanted, before.pid if before and elsewhere else None)
        elif before.ending in ("killed", "failed") and _may_replace(observed, before, now):
            yield Start("worker", index, f"pid {before.pid} {before.how}", before.pid)
    for process in latest.values():
        if process.alive and (process.stuck or process.overstays) and not process.killed:
            yield Kill(process.pid, process.stuck or process.overstays)
        elif process.alive and (process.index >= desired.workers or process.asked is not None):
            yield from _end(process, desired.leave_grace, wanted, now)
        elif process.alive and finished and _stays_out(process, observed, desired.finished_grace, now):
            reason = f"the training is finished, and {STAYED_OUT}"
            yield Terminate(process.pid, reason, warns=True)


def _stays_out(process: Process, observed: Observed, grace: timedelta, now: float) -> bool:
    """Whether a worker has not joined the job for a while after the first one was done.

    A worker that replaces a member may have to save the results of that.
    """
    workers = observed.of("worker")
    done = [each.ended or now for each in workers if each.ending == "done"]
    if not done or any(each.joined for each in workers if each.index == process.index):
        return False
    return now - max(process.started, min(done)) > grace.total_seconds()


def _grace(desired: Desired) -> timedelta:
    return desired.evaluator_grace or timedelta(0)


def _evaluates(desired: Desired, observed: Observed) -> bool:
    """Whether the evaluator may still evaluate a checkpoint."""
    latest = observed.latest("evaluator").get(0)
    over = latest is not None and latest.ending in ("done", "invalid")
    return desired.evaluator_grace is not None and not over


def _evaluator(desired: Desired, observed: Observed, now: float) -> Iterator[Start]:
    """Start the evaluator of a job that goes on, once the parameter server has answered.

    If the job continues from a finished one, a worker first has to find out whether anything is left to
    train: otherwise the evaluator would end at once.
    """
    if desired.evaluator_grace is None or observed.asked_at is None:
        return
    before = observed.latest("evaluator").get(0)
    if before is None:
        if not observed.progress.finished or any(w.ending == "done" for w in observed.of("worker")):
            yield Start("evaluator", 0, "the job has an evaluator")
    elif before.ending in ("killed", "failed", "left") and _may_replace(observed, before, now):
        yield Start("evaluator", 0, f"pid {before.pid} {before.how}", before.pid)


def _close(desired: Desired, observed: Observed, verdict: Verdict, now: float) -> Iterator[Action]:
    """End the running processes: workers and evaluator first, then the parameter servers."""
    alive = [process for process in observed.processes if process.alive]
    if observed.stop is not None and observed.stop.at_once:
        yield from (Kill(process.pid, observed.stop.why) for process in alive if not process.killed)
        return
    workers = [process for process in alive if process.role in ("worker", "evaluator")]
    grace = desired.leave_grace if workers else desired.checkpoint_grace
    if workers and len(observed.progress.open_shares) > 1:
        grace = min(grace, _FIXED_GRACE)
    for process in workers or alive:
        yield from _end(process, grace, f"the job is over: {verdict.reason}", now)


def _end(process: Process, grace: timedelta, reason: str, now: float) -> Iterator[Action]:
    """Ask first, kill when the grace period is over."""
    if process.asked is None:
        yield Terminate(process.pid, reason)
    elif not process.killed and now - process.asked > grace.total_seconds():
        yield Kill(process.pid, f"it did not end within {grace.total_seconds():g} s after SIGTERM")
