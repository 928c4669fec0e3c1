"""The status of a job, and the HTTP server that reports it to people, probes and the operator.

GET /status, /loss, /evaluations, /healthz, /readyz, /metrics. Read only.
The server has a thread, and one for each request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from datetime import UTC, datetime

from elastic_ps.api.compression import Compression
from elastic_ps.api.status import Divergence, MemberStatus, Progress, ServerStatus, Staleness
from elastic_ps.api.tables import TableStatus
from elastic_ps.api.traffic import Traffic
from elastic_ps.core.divergence import advice
from elastic_ps.core.membership import Member
from elastic_ps.evaluation.decisions import Evaluation
from elastic_ps.process.listening import Page, PageServer
from elastic_ps.server.job.state import JobState


class StatusServer(PageServer):
    """Serves the results of `status` and `loss`.

    Args:
        bind: `host:port`; see `listening.listen_address`.
        status, loss: return the parameter server's status, and the loss curve.

    Raises:
        CannotListen: the port is taken.
    """

    def __init__(
        self,
        bind: str,
        status: Callable[[], ServerStatus],
        loss: Callable[[], list[tuple[int, float]]],
    ) -> None:
        self.show(status, loss)
        plain, as_json = "text/plain", "application/json"
        pages: dict[str, Callable[[], Page]] = {
            "/status": lambda: (200, as_json, self._status().model_dump_json(by_alias=True)),
            "/loss": lambda: (200, as_json, json.dumps([p for p in self._loss() if math.isfinite(p[1])])),
            "/evaluations": lambda: (200, as_json, json.dumps([*map(asdict, self._evaluations())])),
            "/healthz": lambda: (200, plain, "ok\n"),
            "/readyz": lambda: (200, plain, "ok\n") if self._status().ready else (503, plain, "no\n"),
            "/metrics": lambda: (200, f"{plain}; version=0.0.4", metrics(self._status())),
        }

        host, _, port = bind.rpartition(":")
        super().__init__((host, int(port)), pages, name="http")

    def show(
        self,
        status: Callable[[], ServerStatus],
        loss: Callable[[], list[tuple[int, float]]],
        evaluations: Callable[[], list[Evaluation]] = list,
    ) -> None:
        """Serve the results of these functions from now on."""
        self._status, self._loss, self._evaluations = status, loss, evaluations


def metrics(status: ServerStatus) -> str:
    """The status in Prometheus' text format."""
    progress = status.progress
    values: dict[str, tuple[str, float | None]] = {
        "version": (
            "Optimizer steps in the model. Falls when the job goes back to a checkpoint.",
            progress.version,
        ),
        "records_applied": (
            "Records in the model. Falls when the job goes back to a checkpoint.",
            progress.records_applied,
        ),
        "workers": ("Workers in the job.", sum(member.present for member in status.members)),
        "samples_per_second": ("Records trained per second.", progress.samples_per_second),
        "loss": ("Training loss that scripts reported last.", progress.loss),
        "durable_version": ("Version of the newest checkpoint.", progress.durable_version),
        "durable_age_seconds": ("Age of the newest checkpoint.", status.durable_age_seconds),
        "term": ("Number that grows when shard 0 starts or takes the job back to a checkpoint.", status.term),
        "tensor_bytes": ("Size of the tensors of session.server.", status.tensor_bytes),
        "checkpoint_pause_seconds_total": (
            "Time that training has paused for checkpoints.",
            status.checkpoint_pause_seconds,
        ),
    }
    if status.bucket_bytes:
        values["bucket_bytes"] = ("Bucket size that was chosen.", status.bucket_bytes)
    if (stale := progress.staleness) is not None:
        of = "of the staleness of all steps, in versions."
        values |= {
            "staleness_p50": (f"Median {of}", stale.p50),
            "staleness_p99": (f"99th percentile {of}", stale.p99),
            "staleness_max": (f"Maximum {of}", stale.max),
        }
    if (evaluation := progress.evaluation) is not None:
        values |= {
            "evaluated_version": ("Newest version that was evaluated.", evaluation.version),
            "evaluations": ("Checkpoints that have been evaluated.", evaluation.evaluated),
            "evaluations_waiting": ("Checkpoints that wait for the evaluator.", evaluation.waiting),
            "evaluations_missed": ("Checkpoints that were not evaluated.", evaluation.missed),
        }
    values |= {
        f"{name}_total": (Traffic.model_fields[name].description or "", getattr(status.traffic, name))
        for name in Traffic.counts()
    }
    lines: list[str] = []
    for name, (text, value) in values.items():
        if value is not None:
            full, kind = f"elastic_ps_{name}", "counter" if name.endswith("_total") else "gauge"
            lines += [
                f"# HELP {full} {text}",
                f"# TYPE {full} {kind}",
                f'{full}{{job="{status.job}"}} {value}',
            ]
    for name in [each for each in TableStatus.model_fields if each != "name" and status.tables]:
        kind = "gauge" if name in ("rows", "waiting", "size_bytes") else "counter"
        full = f"elastic_ps_table_{name}" + "_total" * (kind == "counter")
        lines += [f"# HELP {full} {TableStatus.model_fields[name].description}", f"# TYPE {full} {kind}"]
        lines += [
            f'{full}{{job="{status.job}",table="{_escaped(table.name)}"}} {getattr(table, name)}'
            for table in status.tables
        ]
    if progress.metrics:
        full = "elastic_ps_reported"
        lines += [f"# HELP {full} Last value of each metric that scripts report.", f"# TYPE {full} gauge"]
        lines += [
            f'{full}{{job="{status.job}",name="{_escaped(name)}"}} {_number(value)}'
            for name, value in sorted(progress.metrics.items())
        ]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def progress(state: JobState, now: float, durable: tuple[int, float] | None) -> Progress:
    """The progress of the job. `durable`: the newest checkpoint's version and Unix time."""
    version, when = None, None
    if durable is not None:
        version, when = durable[0], datetime.fromtimestamp(durable[1], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    progress = Progress(
        version=state.version,
        loss=state.results.loss.points[-1][1] if state.results.loss.points else None,
        metrics=dict(state.results.metrics),
        staleness=_staleness(state),
        durable_version=version,
        durable_time=when,
    )
    if state.ledger is None:
        return progress
    done = state.ledger.applied + state.ledger.skipped
    left = state.ledger.total - done
    rate = state.results.rate.per_second(state.ledger.applied, now)
    steady = state.results.steady.per_second(done, now)
    return progress.model_copy(
        update={
            "epoch": state.ledger.complete_epochs,
            "epochs": state.ledger.epochs,
            "percent": 100 * done // max(1, state.ledger.total),
            "records_applied": state.ledger.applied,
            "records_skipped": state.ledger.skipped,
            "records_expected": state.ledger.total,
            "samples_per_second": rate,
            "eta_seconds": round(left / steady) if steady else None,
            "finished": state.finished,
            "stopped": state.stopped,
            "chief": state.chiefs.saves(state.ledger.epochs - 1) if state.finished else None,
            "open_shares": sorted(state.required),
        }
    )


def divergence(state: JobState, compression: Compression) -> Divergence | None:
    """Why the loss diverges, and what to change; None if it does not, or if that is unknown."""
    if (found := state.results.trend.found) is None:
        return None
    text = f"{found.text}. {advice(found, state.consistency, compression)}"
    return Divergence(reason=found.reason, message=text)


def _staleness(state: JobState) -> Staleness | None:
    staleness = state.results.staleness
    may_be = state.consistency.may_be_stale or staleness.largest  # it was, before the job has changed
    if not (may_be and staleness.counts):
        return None
    p50, p99 = (staleness.percentile(percent) for percent in (50, 99))
    return Staleness(p50=p50, p99=p99, max=staleness.largest)


def member_status(state: JobState, member: Member, now: float) -> MemberStatus:
    """The report of an incarnation."""
    computing = member.worker in state.rounds.expected or member.worker in state.rounds.waiting
    here = "joining" if state.initialiser == member.worker else "training" if computing else "idle"
    record = state.pace.of_a_record.get(member.incarnation)
    said = {each.name: getattr(member, each.name) for each in fields(Member)}
    return MemberStatus.model_validate(
        {name: value for name, value in said.items() if name in MemberStatus.model_fields}
        | {
            "state": member.outcome or here,
            "step_seconds": state.pace.seconds.get(member.incarnation),
            "records_per_second": None if record is None else 1 / record,
            "slowness": state.pace.slowness(member.incarnation),
            "gone_seconds": None if member.ended is None else now - member.ended,
            "overdue_seconds": None if member.ended is None else now - member.expires,
        }
    )
