"""What of the job's state is reported."""

from __future__ import annotations

from datetime import UTC, datetime

from elastic_ps.api.compression import Compression
from elastic_ps.api.status import Divergence, Member, Progress, Staleness
from elastic_ps.core.divergence import advice
from elastic_ps.core.membership import Stay
from elastic_ps.server.state import JobState


def progress(state: JobState, now: float, durable: tuple[int, float] | None) -> Progress:
    """How far the job is. `durable`: the newest checkpoint's version and Unix time."""
    version, written = durable if durable is not None else (None, None)
    progress = Progress(
        version=state.version,
        loss=state.loss.points[-1][1] if state.loss.points else None,
        metrics=dict(state.metrics),
        staleness=_staleness(state),
        durable_version=version,
        durable_time=None if written is None else _utc(written),
    )
    if state.ledger is None:
        return progress
    done = state.ledger.applied + state.ledger.skipped
    left = state.ledger.expected - done
    rate = state.rate.per_second(state.ledger.applied, now)
    return progress.model_copy(
        update={
            "epoch": state.ledger.complete_epochs,
            "epochs": state.ledger.epochs,
            "percent": 100 * done // max(1, state.ledger.expected),
            "records_applied": state.ledger.applied,
            "records_skipped": state.ledger.skipped,
            "records_expected": state.ledger.expected,
            "samples_per_second": rate,
            "eta_seconds": round(left / rate) if rate else None,
            "finished": state.finished,
            "stopped": state.stopped,
        }
    )


def divergence(state: JobState, compression: Compression) -> Divergence | None:
    """Why the job learns nothing, and what to change; None if it learns, or if that cannot be said."""
    if (found := state.trend.found) is None:
        return None
    text = f"{found.text}. {advice(found, state.consistency, compression)}"
    return Divergence(reason=found.reason, message=text)


def _staleness(state: JobState) -> Staleness | None:
    may_be = state.consistency.may_be_stale or state.staleness.largest  # it was, before the job has changed
    if not (may_be and state.staleness.counts):
        return None
    p50, p99 = (state.staleness.percentile(percent) for percent in (50, 99))
    return Staleness(p50=p50, p99=p99, max=state.staleness.largest)


def member(state: JobState, stay: Stay, now: float) -> Member:
    """A stay as it is reported."""
    computing = stay.worker in state.rounds.expected or stay.worker in state.rounds.waiting
    here = "joining" if state.initialiser == stay.worker else "training" if computing else "idle"
    fields = {
        name: getattr(stay, name)
        for name in (
            "worker",
            "incarnation",
            "pid",
            "host",
            "transport",
            "joined_version",
            "left_version",
            "steps",
            "records",
            "late",
            "staleness",
            "traffic",
            "reason",
        )
    }
    fields["step_seconds"] = state.pace.seconds.get(stay.incarnation)
    record = state.pace.of_a_record.get(stay.incarnation)
    fields["records_per_second"] = None if record is None else 1 / record
    fields["slowness"] = state.pace.slowness(stay.incarnation)
    fields["gone_seconds"] = None if stay.ended is None else now - stay.ended
    return Member.model_validate({**fields, "state": stay.outcome or here})


def _utc(seconds: float) -> str:
    """A Unix time as metav1.Time writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
