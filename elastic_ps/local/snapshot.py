"""The state of a running job for `status.json` and the live view. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import get_args

from elastic_ps.api.status import MemberStatus, Phase, ServerStatus
from elastic_ps.contract.env import Role
from elastic_ps.local.plan import Observed, Process
from elastic_ps.local.processes import PIDS
from elastic_ps.local.state import ProcessStatus


def process_statuses(
    observed: Observed, start_times: Mapping[int, int | None], server: ServerStatus | None
) -> list[ProcessStatus]:
    """The newest process of each role and index, parameter servers first."""
    starts = Counter((process.role, process.index) for process in observed.processes)
    newest = [process for role in get_args(Role) for _, process in sorted(observed.latest(role).items())]
    return [
        ProcessStatus(
            role=process.role,
            index=process.index,
            pid=process.pid,
            start_time=start_times.get(process.pid) if process.alive else None,
            state=state_of(process, server),
            exit=process.exit,
            restarts=starts[process.role, process.index] - 1,
        )
        for process in newest
    ]


def state_of(process: Process, server: ServerStatus | None) -> str:
    """The state of a process in one word."""
    if not process.alive:
        return "ended"
    if process.asked is not None:
        return "leaving"
    if process.role == "ps":
        return "serving" if process.ready else "starting"
    if process.role == "standby":
        following = server.standbys if server else []
        return "following" if process.index < len(following) and following[process.index] else "starting"
    if process.role == "evaluator":
        return "running"
    member = member_of(process.index, process.pid, server)
    if member is None:
        return "running" if server is not None and server.only_tensors else "starting"
    return member.state


def member_of(worker: int, pid: int, server: ServerStatus | None) -> MemberStatus | None:
    """The newest member of a worker process, if it has joined. `pid`: see `Started.pid`."""
    members = server.members if server else []
    return next((m for m in reversed(members) if m.worker == worker and m.pid == pid % PIDS), None)


def stuck(process: Process, server: ServerStatus | None, progress_timeout: timedelta) -> str:
    """Why to kill a worker that the parameter server has given up, while the job trains; "" if none."""
    if not _works(process) or (server is not None and server.progress.finished):
        return ""
    member = member_of(process.index, process.pid, server)
    return "" if member is None else member.to_be_killed(progress_timeout, finished=False)


def overstays(
    process: Process,
    server: ServerStatus | None,
    progress_timeout: timedelta,
    grace: timedelta,
    *,
    now: float,
) -> str:
    """Why to kill a worker that keeps a finished job open; "" if there is no reason.

    The parameter server has given it up, or it is stopped, perhaps before it joined or after it left.
    """
    if not _works(process) or server is None or not server.progress.finished:
        return ""
    stopped = 0.0 if process.stopped is None else now - process.stopped
    if stopped > grace.total_seconds():
        return f"the training is done, and it has been stopped by a signal (SIGSTOP) for {stopped:.0f} s"
    member = member_of(process.index, process.pid, server)
    return "" if member is None else member.to_be_killed(progress_timeout, finished=True)


def _works(process: Process) -> bool:
    """Whether it is a worker that nobody has asked to end."""
    return process.role == "worker" and process.alive and process.asked is None


def useful(process: Process, server: ServerStatus | None, ready: Container[int]) -> bool:
    """Whether a process has done anything for the job; `ready`: the shards that answer."""
    if process.role == "worker":
        member = member_of(process.index, process.pid, server)
        return member is not None and member.steps > 0
    serves = server is not None and server.ready and process.index in ready
    return process.alive and (process.role == "standby" or serves)


def with_answers(
    process: Process,
    server: ServerStatus | None,
    ready: Container[int],
    limits: tuple[timedelta, timedelta],
    *,
    stopped: float | None,
    now: float,
) -> Process:
    """A process, updated from parameter servers' answers. `ready`, `limits`: see `useful`, `overstays`."""
    joined = process.role == "worker" and member_of(process.index, process.pid, server) is not None
    return replace(
        process,
        ready=process.role == "ps" and process.index in ready,
        useful=process.useful or useful(process, server, ready),
        joined=process.joined or joined,
        stopped=stopped,
        stuck=process.stuck or stuck(process, server, limits[0]),
        overstays=process.overstays or overstays(process, server, *limits, now=now),
    )


def was_finished(status: ServerStatus, last: ServerStatus | None, was: bool, *, resumed: int | None) -> bool:
    """Whether a job continues from a finished one, and has trained nothing since.

    Args:
        last, was: the answer before `status`, and the result at that time.
        resumed: the version of that checkpoint; None for a job that starts from scratch, whose first answer
            may come when all is trained.
    """
    if last is None or not last.begun:
        return status.progress.finished and status.progress.version == resumed
    return was and status.progress.finished and status.progress.version == last.progress.version


def at_the_end(server: ServerStatus | None, newest: int | None) -> ServerStatus | None:
    """The status of a job without running processes: the last answer, and the newest checkpoint.

    Args:
        newest: the version of the newest checkpoint.
    """
    if server is None or newest is None or newest <= (server.progress.durable_version or 0):
        return server
    progress = server.progress.model_copy(update={"durable_version": newest})
    return server.model_copy(update={"progress": progress})


def phase_of(observed: Observed, server: ServerStatus | None, *, ended: bool) -> Phase:
    """The job's phase; the final one only when no process runs any more."""
    if ended and observed.verdict is not None:
        return observed.verdict.phase
    return "Running" if server is not None and server.ready else "Pending"
