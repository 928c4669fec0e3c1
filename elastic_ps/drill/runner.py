"""Runs a job on this machine, injects the faults of a schedule, and judges the results."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

from elastic_ps.api.job import TrainingJob
from elastic_ps.drill.disk import NoDisk, small_disk
from elastic_ps.drill.faults import Fault
from elastic_ps.drill.history import Data, Histories, Violation, check, fate
from elastic_ps.drill.inflict import inflict
from elastic_ps.drill.recorded import read
from elastic_ps.drill.target import JobOver, LocalTarget, NotRecovered, Result, Target, Unavailable
from elastic_ps.drill.wire import Wires
from elastic_ps.local import JobDirectory, Launcher, Options

LIMIT = timedelta(seconds=90)

PROGRESS = timedelta(minutes=20)
"""How long a job may make no progress, or have no pods, before a drill stops it."""


def limit_of(job: TrainingJob) -> timedelta:
    """How long a recovery may take: a job repeats what it did since its last checkpoint."""
    return LIMIT + 2 * job.spec.parameter_server.checkpoint.interval


State = Literal["recovered", "not recovered", "not injected", "unavailable"]


@dataclass(frozen=True, kw_only=True)
class Injection:
    """The result of a fault.

    Attributes:
        fault: the planned fault.
        state: whether it happened, and the job recovered.
        detail: what exactly was done, or what was missing.
        at: the time from the job's start, in seconds.
        version: the model's version at that time.
        seconds: the time to recover, in seconds.
        redone: the number of versions that were undone and repeated.
        lost, twice: the numbers of records that are missing in the model, or in it more than once, since
            then.
    """

    fault: Fault
    state: State
    detail: str
    at: float | None = None
    version: int | None = None
    seconds: float | None = None
    redone: int = 0
    lost: int = 0
    twice: int = 0
    struck: float | None = None


@dataclass
class Drill:
    """The result of a drill.

    Attributes:
        result: the end of the job.
        injections: the results of the faults, in the order of the schedule.
        violations: the violations in the histories.
        commits: the number of committed rounds, undone ones included.
        records: the number of records in the model at the end.
    """

    result: Result
    injections: list[Injection] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    commits: int = 0
    records: int = 0

    @property
    def passed(self) -> bool:
        """Whether the job succeeded without a violation, and every fault that is possible here happened.

        A drill in which nothing was committed, or none of the faults is possible, has shown nothing.
        """
        states = {each.state for each in self.injections}
        happened = states <= {"recovered", "unavailable"} and states != {"unavailable"} and self.commits > 0
        return happened and self.result.phase == "Succeeded" and not self.violations


def run(
    job: TrainingJob,
    faults: Sequence[Fault],
    *,
    options: Options | None = None,
    history: Path | None = None,
    tell: Callable[[str], None] | None = None,
    limit: timedelta | None = None,
) -> Drill:
    """Run the job to its end with these faults. Blocks.

    Args:
        options: the options of the run; its `history` is replaced.
        history: the directory of histories; None for one that is deleted if the drill passes.
        tell: called with a line for each event.
        limit: how long a recovery may take before the job is stopped; None: as `limit_of`.
    """
    tell, options = tell or _silent, options or Options()
    checkpoints = JobDirectory(job.name, root=options.root).path / "drill"
    with ExitStack() as stack:
        if history is None:
            history = Path(tempfile.mkdtemp(prefix="elastic-ps-drill-"))
            stack.callback(shutil.rmtree, history)
        history.mkdir(parents=True, exist_ok=True)
        for old in history.glob("*.jsonl"):
            old.unlink()
        with (
            _disk(_with_checkpoints(job, checkpoints), faults) as (job_here, disk),
            _wires(faults) as wires,
            Launcher(
                job_here,
                replace(options, history=history, route=wires.route if wires else None),
            ) as launcher,
        ):
            # This launcher has the job's name, so nobody uses them.
            shutil.rmtree(checkpoints, ignore_errors=True)
            launcher.start()
            target = LocalTarget(launcher, disk=disk, wires=wires, limit=limit or limit_of(job))
            injections = train(target, faults, tell)
            result = target.result()
        drill = judge(job, result, injections, read(history))
        if drill.passed:
            shutil.rmtree(checkpoints, ignore_errors=True)
        else:
            stack.pop_all()
            tell(f"the histories are in {history}")
    return drill


def _silent(_text: str) -> None:
    """Ignore a line."""


def train(
    target: Target, faults: Sequence[Fault], tell: Callable[[str], None], *, patience: timedelta = PROGRESS
) -> list[Injection]:
    """Inject the faults in sequence, and wait for the job's end. Blocks.

    The job is stopped if it does not recover, or makes no progress for as long as `patience` says.
    """
    began = time.monotonic()
    injections: list[Injection] = []
    for fault in faults:
        injections.append(_one(target, fault, began, tell, patience))
        last = injections[-1]
        if last.state not in ("recovered", "unavailable") and not target.over():
            what = "recovered from" if last.state == "not recovered" else "come to"
            target.stop(f"the job has not {what} {fault}: {last.detail}")
    while not target.over(timedelta(seconds=1)):
        pass
    return injections


def _with_checkpoints(job: TrainingJob, directory: Path) -> TrainingJob:
    """The job, with a checkpoint directory for this drill if it names none, so that no run is displaced."""
    if job.spec.parameter_server.checkpoint.path is not None:
        return job
    changed = job.model_copy(deep=True)
    changed.spec.parameter_server.checkpoint.path = str(directory)
    return changed


@contextmanager
def _disk(job: TrainingJob, faults: Sequence[Fault]) -> Iterator[tuple[TrainingJob, Path | str]]:
    """The job, on a small disk if one is needed and possible; and the disk, or why there is none."""
    if not any(fault.kind == "fill-disk" for fault in faults):
        yield job, "no small disk was asked for"
        return
    mount = Path(tempfile.mkdtemp(prefix="elastic-ps-disk-"))
    try:
        with small_disk(mount):
            changed = job.model_copy(deep=True)
            changed.spec.parameter_server.checkpoint.path = str(mount / "checkpoints")
            (mount / "checkpoints").mkdir()
            yield changed, mount
    except NoDisk as error:
        yield job, str(error)
    finally:
        mount.rmdir()


@contextmanager
def _wires(faults: Sequence[Fault]) -> Iterator[Wires | None]:
    """The relays between workers and parameter servers, if one is to be cut; they cost throughput."""
    if not any(fault.kind in ("cut", "reset") for fault in faults):
        yield None
        return
    wires = Wires()
    try:
        yield wires
    finally:
        wires.close()


def _one(
    target: Target, fault: Fault, began: float, tell: Callable[[str], None], patience: timedelta
) -> Injection:
    """Wait for a fault's time, inject it, and wait for the recovery."""
    target.struck = None
    state: State = "not injected"
    try:
        while (percent := _percent(target)) < fault.at:
            target.until(partial(_further, target, percent), f"progress to {fault.at:.0f} %", patience)
        detail, state = inflict(target, fault), "recovered"
    except Unavailable as error:
        detail, state = str(error), "unavailable"
    except (NotRecovered, JobOver) as error:
        detail, state = str(error), "not recovered" if target.struck is not None else "not injected"
    now = time.monotonic()
    injection = Injection(fault=fault, state=state, detail=detail, struck=target.struck)
    if target.struck is not None:
        injection = replace(
            injection,
            at=target.struck - began,
            version=target.struck_version,
            seconds=now - target.struck if state == "recovered" else None,
        )
    took = f" after {injection.seconds:.1f} s" if injection.seconds is not None else ""
    tell(f"{now - began:7.1f} s  {fault}: {state}{took} ({detail})")
    return injection


def _further(target: Target, percent: float) -> bool:
    return _percent(target) > percent


def _percent(target: Target) -> float:
    server = target.server()
    if server is None or not server.progress.records_expected:
        return -1.0
    return 100 * server.progress.records_applied / server.progress.records_expected


def judge(job: TrainingJob, result: Result, injections: Sequence[Injection], histories: Histories) -> Drill:
    """Check the histories, and assign violations to the last fault before them."""
    progress, data = result.progress, None
    whole = result.phase == "Succeeded" and progress is not None and not progress.stopped
    if whole and progress and progress.records_expected and progress.epochs:
        data = Data(progress.records_expected // progress.epochs, progress.epochs)
    consistency = job.spec.consistency
    violations = check(
        histories, data, max_staleness=consistency.most_stale, batch=consistency.global_batch_size
    )
    undone = fate(histories).undone
    judged = list(injections)
    struck = [(each.struck, i) for i, each in enumerate(judged) if each.struck is not None]
    ends = [*(time for time, _ in struck[1:]), float("inf")]
    for (start, i), end in zip(struck, ends, strict=bool(struck)):
        # Violations without a time, such as missing records, belong to the last fault.
        within = [v for v in violations if start <= v.time < end or (v.time == end == float("inf"))]
        terms = [restored.term for restored in histories.restored if start <= restored.time < end]
        judged[i] = replace(
            judged[i],
            redone=sum(len(undone.get(term, ())) for term in terms),
            lost=sum(v.records for v in within if v.kind == "record missing"),
            twice=sum(v.records for v in within if v.kind == "record twice"),
        )
    records = progress.records_applied if progress else 0
    return Drill(result, judged, violations, len(histories.committed), records)
