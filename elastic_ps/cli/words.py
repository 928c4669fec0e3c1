"""Formats numbers for messages, and the summary at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from elastic_ps.api.status import EvaluationStatus, MemberStatus, Progress, ServerStatus
from elastic_ps.api.tables import TableStatus
from elastic_ps.api.traffic import Traffic
from elastic_ps.contract.words import amount
from elastic_ps.local import LocalStatus, Outcome
from elastic_ps.local.plan import WAS_FINISHED, name_of
from elastic_ps.local.state import KEEP_RUNS, being_written, is_of_run


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def eta(progress: Progress) -> str | None:
    """The remaining time, rounded to its precision: `40 s`, `14 min`, `2 h 07 min`."""
    seconds = progress.eta_seconds
    if seconds is None or progress.finished:
        return None
    if seconds < 60:
        return f"{seconds} s"
    return f"{round(seconds / 60)} min" if seconds < 3600 else duration(seconds)


def epoch(progress: Progress) -> str:
    """`epoch 3 of 20`, counting the one that is being trained from 1."""
    if progress.epochs is None:
        return f"epoch {progress.epoch + 1}"
    return f"epoch {min(progress.epoch + 1, progress.epochs)} of {progress.epochs}"


def metric(name: str, value: float) -> str:
    """A metric's value; accuracies between 0 and 1 as per cent."""
    return f"{100 * value:.2f} %" if "accuracy" in name and 0 <= value <= 1 else f"{value:.4g}"


SLOW = 1.5
"""The ratio of a worker's step time to the median from which on it is shown."""


def pace(server: ServerStatus) -> str | None:
    """`1,200 samples/s`, or for slow steps `3.1 s/step  1,200 samples/s`."""
    times = sorted(m.step_seconds for m in server.members if m.present and m.step_seconds is not None)
    long = [f"{times[len(times) // 2]:.1f} s/step"] if times and times[len(times) // 2] > 1 else []
    rate = server.progress.samples_per_second
    if not rate:  # also after the first version, when the rate is unknown
        return "  ".join(long) or None
    return "  ".join([*long, f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.1f} samples/s"])


def step_time(member: MemberStatus) -> str:
    """`0.120 s`, or for a slow worker `0.480 s 4.0x` (times the median); empty while it is unknown."""
    if member.step_seconds is None:
        return ""
    slow = member.slowness is not None and member.slowness >= SLOW
    return f"{member.step_seconds:.3f} s" + (f" {member.slowness:.1f}x" if slow else "")


def on_disk(status: LocalStatus) -> str | None:
    """`version 120 on disk, 4 s old`; without the age if the job is over; None without a checkpoint."""
    server = status.server
    if server is None or server.progress.durable_version is None:
        return None
    text = f"version {server.progress.durable_version:,} on disk"
    running = status.phase == "Running" and server.durable_age_seconds is not None
    return f"{text}, {server.durable_age_seconds:.0f} s old" if running else text


ONLY_TENSORS = "the scripts use only session.server, so their progress is not known"
"""The text for a job without versions and records."""


NOTHING_TRAINED = "no worker has joined: the script calls neither session.optimizer(...) nor session.server"
"""The text for a job that has succeeded without a model and without tensors."""


def waits_for(status: LocalStatus) -> str:
    """Say what a job waits for before it trains, or at its end; empty if it trains."""
    server = status.server
    if server is None or not (server.ready or server.members):
        starting = [name_of(each.role, each.index) for each in status.processes if each.state == "starting"]
        return f"waiting for {', '.join(starting) or 'the processes'} to start"
    progress = server.progress
    trains = server.ready and progress.version > 0 and progress.percent < 100
    if not trains and (written := being_written(Path(status.checkpoints))):
        version, nbytes = written
        return f"writing version {version}, {size(nbytes)}"
    return "" if server.ready else "waiting for the first values of the model"


def progress_line(status: LocalStatus) -> str:
    """One line about a running job."""
    server = status.server
    if waiting := waits_for(status):
        problem = f"; problem: {server.problem}" if server is not None and server.problem else ""
        return f"{waiting}{problem}"
    assert server is not None
    if server.only_tensors:
        running = sum(process.role == "worker" and process.exit is None for process in status.processes)
        return f"{ONLY_TENSORS}  {amount(running, 'worker')}"
    progress = server.progress
    parts = [f"version {progress.version}", epoch(progress), f"{progress.percent} %"]
    if (speed := pace(server)) is not None:
        parts.append(speed)
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    parts.append(amount(sum(member.state == "training" for member in server.members), "worker"))
    remaining = eta(progress)
    return "  ".join([*parts, f"{remaining} left"] if remaining else parts)


def summary(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """The rows (name, value) of the summary. A row with an empty name continues the previous one."""
    server = outcome.record.last
    succeeded = outcome.verdict.phase == "Succeeded"
    if outcome.verdict.phase == "Failed":
        first_line = outcome.verdict.message.partition("\n")[0]
        yield "cause", first_line.partition(". The last output of ")[0]
    if server is None or not server.ready:
        if succeeded:
            yield "warning", NOTHING_TRAINED
        return
    progress = server.progress
    if progress.stopped:
        yield "stopped early", progress.stopped
    for name, value in sorted(progress.metrics.items()):
        yield name.replace("_", " "), metric(name, value)
    if server.only_tensors:
        yield "note", "the scripts have used session.server only, so there are neither versions nor records"
        return
    if (evaluation := progress.evaluation) is not None:
        yield from _evaluated(evaluation)
    if progress.diverged is not None and outcome.verdict.reason != "Diverged":  # else it is the verdict
        yield "warning", f"the training has diverged: {progress.diverged.message}"
    curve = outcome.record.loss_curve()
    if curve:
        yield "loss", f"{curve[-1][1]:.4f}"
    expected = "" if progress.records_expected is None else f" of {progress.records_expected:,}"
    yield "records", f"{progress.records_applied:,}{expected} in the model"
    if progress.records_skipped:
        yield "skipped", f"{progress.records_skipped:,} records"
    if outcome.verdict.message == WAS_FINISHED:
        yield "note", WAS_FINISHED
    yield "version", f"{progress.version:,}"
    if stale := progress.staleness:
        yield "staleness", f"p50 {stale.p50:,}, p99 {stale.p99:,}, max {stale.max:,} versions"
    if outcome.record.samples_per_second is not None:
        seconds = duration(outcome.record.training_seconds)
        yield "speed", f"{outcome.record.samples_per_second:,.0f} samples/s over {seconds} of training"
    if transports := {member.transport for member in server.members} - {""}:
        yield "transport", ", ".join(sorted(transports))
    if network := traffic(server.traffic):
        yield "network", network
    if server.traffic.overlap:
        yield "overlap", server.traffic.overlap
    for table in server.tables:
        yield "table", table_line(table)
    name = "workers"
    for member in sorted(server.members, key=lambda each: (each.worker, each.joined_version)):
        yield name, member_line(member)
        name = ""
    if succeeded and progress.durable_version is not None:
        kept = outcome.status.checkpoints
        left = f" (kept for {KEEP_RUNS - 1} more runs)" if is_of_run(Path(kept)) else ""
        yield "checkpoints", f"{kept}{left}"
    for at in outcome.unreached:
        yield "warning", f"--scale {at.version}:{at.workers} had no effect: the job ended before that version"


def _evaluated(evaluation: EvaluationStatus) -> Iterator[tuple[str, str]]:
    """The rows of the summary for the evaluator's results."""
    if evaluation.version is not None:
        yield "evaluated", str(evaluation)
    if evaluation.best_version not in (None, evaluation.version):
        yield "best", f"version {evaluation.best_version} with {evaluation.best:.4g}; its checkpoint is kept"
    if left := evaluation.missed + evaluation.waiting:
        yield "warning", f"{left} of {left + evaluation.evaluated} checkpoints were not evaluated"


def traffic(counts: Traffic) -> str:
    """`310.2 MB of gradients (26.1% of the uncompressed size), 1.2 GB of values`; "" if nothing was sent."""
    ways = [
        ("gradients", counts.pushed_bytes, counts.pushed_plain_bytes),
        ("values", counts.pulled_bytes, counts.pulled_plain_bytes),
    ]
    shares = {
        name: "" if sent == plain else f" ({sent / plain:.1%} of the uncompressed size)"
        for name, sent, plain in ways
    }
    said = [f"{size(sent)} of {name}{shares[name]}" for name, sent, plain in ways if plain]
    if said and counts.codec:
        said.append(f"sent as {counts.codec}")
    if said and counts.hidden_share is not None:
        said.append(f"{counts.hidden_share:.0%} of the sending of gradients overlapped with backward")
    seconds = counts.encode_seconds + counts.decode_seconds
    return ", ".join([*said, f"{seconds:.1f} s to encode and decode"] if seconds else said)


def table_line(table: TableStatus) -> str:
    """`user: 1,200 rows, 0.2 MB, 1,300 admitted, 100 expired, 96% of look-ups hit`."""
    said = [f"{table.name}: {table.rows:,} rows", size(table.size_bytes), f"{table.admitted:,} admitted"]
    events = {"expired": table.expired, "refused": table.refused, "waiting": table.waiting}
    said += [f"{count:,} {event}" for event, count in events.items() if count]
    if (rate := table.hit_rate) is not None:
        said.append(f"{rate:.0%} of look-ups hit")
    if table.used_ahead:
        said.append(f"{table.used_ahead / table.used:.0%} of the rows used came from prefetch")
    return ", ".join(said)


def size(nbytes: int) -> str:
    """`512 B`, `310.2 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def member_line(member: MemberStatus) -> str:
    """One line about a member: ` 2  version    150 to    412     260 steps    8,320 records`."""
    end = "end" if member.left_version is None else str(member.left_version)
    lost = f"  {member.state}" if member.state in ("lost", "hung") and not member.joins_again else ""
    span = f"version {member.joined_version:>6} to {end:>6}"
    return f"{member.worker:>2}  {span} {member.steps:>7,} steps {member.records:>9,} records{lost}"
