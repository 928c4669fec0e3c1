"""Injects each kind of fault, and waits until the job has recovered.

Each function waits until the fault can happen, strikes, and returns once the job has recovered. They raise
`Unavailable`, `NotRecovered` or `JobOver`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from elastic_ps.api.status import MemberStatus
from elastic_ps.contract.env import inherited
from elastic_ps.drill import disk
from elastic_ps.drill.faults import Fault, Kind
from elastic_ps.drill.target import LocalTarget, NotRecovered, Target, Unavailable
from elastic_ps.drill.wire import Wires
from elastic_ps.local.plan import Start
from elastic_ps.local.poller import fetch_status
from elastic_ps.local.processes import Child, Lifeline, free_addresses, with_threads

BEYOND = timedelta(seconds=1)
"""How much longer than a lease a process stays frozen."""


def inflict(target: Target, fault: Fault) -> str:
    """Inject a fault and wait for the recovery; returns a description."""
    return _INFLICT[fault.kind](target, fault)


def _kill_worker(target: Target, fault: Fault) -> str:
    index = fault.worker % target.workers
    target.settled()
    before = target.until(lambda: target.member(index), f"worker {index} is a member")
    process = target.process("worker", index)
    target.strike(lambda: target.kill("worker", index))
    target.until(target.replaced(before), f"another process trains as worker {index}")
    target.until(target.moved_on(), "a new version is made")
    if target.process("worker", index) == process:
        raise NotRecovered(f"worker {index} is still the process that was killed: {process}")
    return f"worker {index}, {process}"


def _stop_worker(target: Target, _fault: Fault) -> str:
    workers = target.workers
    index = workers - 1
    if workers < 2:
        raise Unavailable("the job has only one worker, so none can leave")
    target.settled()
    before = target.until(lambda: target.member(index), f"worker {index} is a member")
    target.strike(lambda: target.scale(workers - 1))
    try:
        gone = target.until(lambda: _departed(target.member(index)), f"worker {index} leaves")
        if gone.state != "left":
            raise NotRecovered(f"worker {index} was {gone.state} when asked to leave")
    finally:
        target.scale(workers)
    target.until(target.replaced(before), f"worker {index} is back")
    return f"worker {index} left at version {gone.left_version}"


def _freeze_worker(anywhere: Target, fault: Fault) -> str:
    target = _here(anywhere)
    return _silence(target, fault.worker % target.workers, lambda _, pid: _frozen(target, pid))


def _cut(anywhere: Target, fault: Fault) -> str:
    target = _here(anywhere)
    return _silence(target, fault.worker % target.workers, lambda index, _: _disconnected(target, index))


def _reset(anywhere: Target, fault: Fault) -> str:
    target = _here(anywhere)
    index = fault.worker % target.workers
    target.settled()
    pid, wires = target.process("worker", index), _wires(target)
    ended = 0

    def strike() -> None:
        nonlocal ended
        ended = wires.reset(index)

    target.strike(strike)
    target.until(target.moved_on(), "a new version is made")
    if not ended or target.process("worker", index) != pid:
        raise NotRecovered(
            f"{ended} connections of worker {index}, pid {pid}, were reset; it did not continue"
        )
    return f"{ended} connections of worker {index}, pid {pid}"


def _silence(target: LocalTarget, index: int, how: Callable[[int, int], AbstractContextManager[None]]) -> str:
    """Silence a worker for longer than its lease. `how` gets its index and pid."""
    target.settled()
    pid = target.process("worker", index)
    before = target.until(lambda: target.member(index), f"worker {index} is a member")
    with how(index, pid):
        target.until(
            lambda: (m := target.member(index)) is not None and m.state == "lost",
            f"worker {index} is declared lost",
            target.lease + timedelta(seconds=20),
        )
        others_go_on = not target.launcher.job.spec.consistency.deterministic
        if others_go_on and target.training():
            target.until(target.moved_on(), "the others make a version")
    target.until(
        lambda: any(m.pid == pid and m.incarnation > before.incarnation for m in target.training()),
        f"worker {index} has joined again, without a restart",
    )
    return f"worker {index}, pid {pid}"


def _kill_ps(target: Target, fault: Fault) -> str:
    server = target.settled()
    shard = fault.worker % server.shards
    if server.standbys:
        target.until(lambda: all(_settled_standbys(target)), "the standbys have every version")
    process = target.process("ps", shard)
    target.strike(lambda: target.kill("ps", shard))
    target.until(target.moved_on(term=server.term), "the version passes the one before")
    return f"shard {shard}, {process}"


def _kill_standby(target: Target, fault: Fault) -> str:
    server = target.settled()
    if not server.standbys:
        raise Unavailable("the job has no standbys; set parameterServer.durability to standby")
    shard = fault.worker % server.shards
    target.until(lambda: _settled_standbys(target)[shard], "the standby has every version")
    process = target.process("standby", shard)
    target.strike(lambda: target.kill("standby", shard))
    target.until(lambda: not _settled_standbys(target)[shard], "the standby is left behind")
    target.until(target.moved_on(), "training continues without it")
    target.until(lambda: _settled_standbys(target)[shard], "another standby has every version")
    return f"standby of shard {shard}, {process}"


def _kill_evaluator(target: Target, _fault: Fault) -> str:
    server = target.settled()
    if server.progress.evaluation is None:
        raise Unavailable("the job has no evaluator; set spec.evaluator")
    process = target.process("evaluator", 0)
    target.strike(lambda: target.kill("evaluator", 0))
    target.until(target.moved_on(term=server.term - 1), "training continues without it")
    target.until(lambda: target.process("evaluator", 0) != process, "another evaluator runs")
    target.until(lambda: _evaluated(target) > server.progress.version, "it evaluates a later version")
    return f"evaluator, {process}"


def _evaluated(target: Target) -> int:
    """The version that was evaluated last; 0 if there is none."""
    server = target.server()
    evaluation = server.progress.evaluation if server else None
    return 0 if evaluation is None else evaluation.version or 0


def _settled_standbys(target: Target) -> list[bool]:
    """Whether the standby of each shard has every round."""
    return target.until(target.server, "the parameter server answers").standbys


def _freeze_ps(anywhere: Target, _fault: Fault) -> str:
    target = _here(anywhere)
    target.settled()
    pid = target.process("ps", 0)
    with _frozen(target, pid):
        target.over(target.lease + BEYOND)
    target.until(target.moved_on(), "the version passes the one before")
    return f"pid {pid}"


def _rival_ps(anywhere: Target, _fault: Fault) -> str:
    target = _here(anywhere)
    term = target.settled().term
    pid = target.process("ps", 0)
    # Frozen while completing a checkpoint, it would keep the directory locked, and the second one waiting.
    with _frozen(target, pid, unless=lambda: disk.locked(target.checkpoints)), _rival(target) as address:
        rival = target.until(lambda: fetch_status(address), "the second parameter server answers")
        if rival.term <= term:
            raise NotRecovered(f"the second parameter server began term {rival.term}, not above {term}")
    target.until(
        target.moved_on(term=rival.term), f"a parameter server continues in a term above {rival.term}"
    )
    return f"term {rival.term} took over from term {term}"


def _corrupt_checkpoint(anywhere: Target, fault: Fault) -> str:
    target = _here(anywhere)
    term = target.settled().term
    target.until(lambda: len(_versions(target.checkpoints)) >= 2, "there are two checkpoints")
    pid = target.process("ps", 0)
    position, file = 0, Path()

    def corrupt() -> None:
        nonlocal position, file
        os.kill(pid, signal.SIGSTOP)  # so that no newer checkpoint is written
        file = max(_versions(target.checkpoints)[-1].glob("*.safetensors"))
        position = disk.flip(file, fault.place)
        os.kill(pid, signal.SIGKILL)

    target.strike(corrupt)
    target.until(target.moved_on(term=term), "the version passes the one before")
    if not list(target.checkpoints.glob("corrupt-*")):
        raise NotRecovered("the broken checkpoint was not set aside")
    return f"byte {position} of {file.parent.name}/{file.name}"


def _fill_disk(anywhere: Target, _fault: Fault) -> str:
    target = _here(anywhere)
    if isinstance(target.disk, str):
        raise Unavailable(target.disk)
    directory = target.disk
    target.settled()
    filler = directory / "filler"
    try:
        target.strike(lambda: disk.fill(filler))
        problem = target.until(lambda: s.problem if (s := target.server()) else None, "a checkpoint fails")
        target.struck_version = target.settled().progress.version
        target.until(target.moved_on(), "training continues with a full disk")
    finally:
        filler.unlink(missing_ok=True)
    durable = target.settled().progress.durable_version or 0
    target.until(
        lambda: (
            (s := target.server()) is not None
            and not s.problem
            and (s.progress.durable_version or 0) > durable
        ),
        "a checkpoint is written again",
    )
    return problem.splitlines()[0]


def _here(target: Target) -> LocalTarget:
    """The job, for a fault that needs its local processes and files."""
    if not isinstance(target, LocalTarget):
        raise Unavailable("it is possible only with a job on this machine")
    return target


_INFLICT: Mapping[Kind, Callable[[Target, Fault], str]] = {
    "kill-worker": _kill_worker,
    "stop-worker": _stop_worker,
    "freeze-worker": _freeze_worker,
    "kill-ps": _kill_ps,
    "kill-standby": _kill_standby,
    "kill-evaluator": _kill_evaluator,
    "freeze-ps": _freeze_ps,
    "rival-ps": _rival_ps,
    "corrupt-checkpoint": _corrupt_checkpoint,
    "fill-disk": _fill_disk,
    "cut": _cut,
    "reset": _reset,
}


@contextmanager
def _frozen(target: LocalTarget, pid: int, *, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        while unless():
            os.kill(pid, signal.SIGCONT)
            target.over(timedelta(milliseconds=20))
            os.kill(pid, signal.SIGSTOP)

    target.strike(freeze)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _disconnected(target: LocalTarget, worker: int) -> Iterator[None]:
    with _wires(target).cut(worker):
        target.strike(lambda: None)
        yield


def _wires(target: LocalTarget) -> Wires:
    if target.wires is None:
        raise Unavailable("the job was started without relays between workers and parameter servers")
    return target.wires


@contextmanager
def _rival(target: LocalTarget) -> Iterator[str]:
    """Run a second parameter server on the job's checkpoints; yields its HTTP address."""
    launcher = target.launcher
    bind, http = free_addresses(2)
    lifeline = Lifeline()
    first = launcher.environment(Start("ps", 0, "a second one takes over"))
    environment = replace(first, bind=bind, http=http, resume="require", lifeline=lifeline.fd)
    with tempfile.TemporaryDirectory() as logs:
        child = Child(
            launcher.options.programs.server,
            variables=with_threads({**inherited(), **environment.to_variables()}, processes=4),
            log=Path(logs) / "rival.log",
            lifeline=lifeline,
        )
        try:
            yield http
        finally:
            child.kill()
            while child.poll() is None:
                target.over(timedelta(milliseconds=20))
            lifeline.close()


def _departed(member: MemberStatus | None) -> MemberStatus | None:
    return member if member is not None and member.state in ("left", "lost") else None


def _versions(checkpoints: Path) -> list[Path]:
    return sorted(path.parent for path in checkpoints.glob("version-*/manifest.json"))
