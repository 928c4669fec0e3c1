"""The reports of jobs: the parameter server's answer to `GET /status`, and a TrainingJob's status."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PlainSerializer

from elastic_ps.api.fields import CamelModel
from elastic_ps.api.tables import MOST_LISTED, TableRows, TableStatus
from elastic_ps.api.traffic import Traffic, TrafficStatus


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


Reported: TypeAlias = Annotated[dict[str, float], PlainSerializer(_finite, when_used="json")]
"""Values by name. NaN and infinities are left out: JSON cannot encode them, and Kubernetes refuses null."""


class Staleness(CamelModel):
    """The staleness of the steps in the model, in versions. p50 and p99 have two significant digits."""

    p50: int = Field(description="Half of the steps were at most this stale.")
    p99: int = Field(description="99 of 100 steps were at most this stale.")
    max: int = Field(description="The largest staleness of any step.")


class EvaluationStatus(CamelModel):
    """The results of the job's evaluator so far."""

    version: int | None = Field(default=None, description="The version that was evaluated last.")
    metrics: Reported = Field(
        default_factory=dict, description="The metrics that the evaluator reported for that version."
    )
    best_version: int | None = Field(
        default=None, description="The best version so far, if evaluator.best is set. Its checkpoint is kept."
    )
    best: float | None = Field(default=None, description="The metric's value at the best version.")
    evaluated: int = Field(default=0, description="The number of checkpoints that have been evaluated.")
    waiting: int = Field(default=0, description="The number of checkpoints that wait for the evaluator.")
    missed: int = Field(
        default=0,
        description="The number of checkpoints that were not evaluated because more than evaluator.backlog "
        "were waiting, or because the evaluator kept failing on them.",
    )

    def __str__(self) -> str:
        """The newest result, for a person."""
        values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(self.metrics.items()))
        best = " (the best so far)" if self.version == self.best_version else ""
        return f"version {self.version} was evaluated: {values or 'no finite number was reported'}{best}"


class Divergence(CamelModel):
    """Why the job does not learn, judged by its loss."""

    reason: str = Field(
        description="LossNotFinite; LossFarAboveBest, if the loss has been far above its best value for a "
        "tenth of the job; or LossNoBetter, if it is no better than at the start in the second half of the "
        "job."
    )
    message: str = Field(description="The finding, and what to change in this mode.")


class Progress(CamelModel):
    """How far training is, as the parameter server sees it."""

    version: int = Field(default=0, description="The number of optimizer steps that the model has taken.")
    epoch: int = Field(default=0, description="The number of epochs that are complete.")
    epochs: int | None = Field(
        default=None,
        description="The number of epochs to train. Unset until a worker has opened its data set.",
    )
    percent: int = Field(
        default=0, ge=0, le=100, description="The share of all records that have been trained, in percent."
    )
    samples_per_second: float | None = Field(
        default=None, description="The number of records that the whole job trains per second."
    )
    loss: float | None = Field(
        default=None,
        description="The training loss that the scripts reported last: the mean over the workers whose steps "
        "are in one version, weighted by their samples.",
    )
    diverged: Divergence | None = Field(
        default=None, description="Why the job does not learn, judged by its loss. Unset while it learns."
    )
    eta_seconds: int | None = Field(
        default=None, description="The estimated time until the end of training, in seconds."
    )
    records_applied: int = Field(default=0, description="The number of records in the model.")
    records_skipped: int = Field(
        default=0,
        description="The number of records that the scripts skipped, for example because a loss was not "
        "finite.",
    )
    records_expected: int | None = Field(
        default=None, description="The number of records to train, in all epochs together."
    )
    durable_version: int | None = Field(
        default=None, description="The version of the newest complete checkpoint."
    )
    durable_time: str | None = Field(
        default=None, description="The time when the newest complete checkpoint was written."
    )
    metrics: Reported = Field(
        default_factory=dict,
        description="The values that scripts reported last, for example test_accuracy. A value that was "
        "reported with a step is the mean, sum or maximum over the steps of the newest version that has it.",
    )
    evaluation: EvaluationStatus | None = Field(
        default=None, description="The results of the evaluator so far. Unset without an evaluator."
    )
    staleness: Staleness | None = Field(
        default=None,
        description="The number of versions that other workers made while a worker computed a step, over all "
        "steps in the model. Only in modes bounded and async, and in mode local with a quorum or with outer "
        "delayed, downpour or easgd, where an exchange counts as a step.",
    )
    finished: bool = Field(
        default=False,
        description="True once training is over: every record of every epoch is in the model or was skipped, "
        "or a script has stopped the training (see stopped).",
    )
    chief: int | None = Field(
        default=None,
        description="After the training, the worker that evaluates and saves, until its script has ended.",
    )
    open_shares: list[int] = Field(
        default_factory=list,
        description="With a fixed share of the records for each worker (consistency.deterministic without "
        "globalBatchSize): the workers that have records left.",
    )
    stopped: str = Field(
        default="",
        description="The reason that a script gave to session.stop. Empty if no script has stopped the "
        "training.",
    )

    @property
    def all_done(self) -> str:
        """The message of a job that has trained all records."""
        if self.records_skipped:
            skipped = self.records_skipped
            return f"every record of every epoch is in the model, except {skipped} that were skipped"
        return "every record of every epoch is in the model"

    @property
    def why_stopped(self) -> str:
        """The message of a job that a script has stopped: the progress, and the script's reason."""
        return (
            f"a script stopped the training at version {self.version}, with {self.records_applied} of "
            f"{self.records_expected} records in the model: {self.stopped}"
        )

    def share_left(self, worker: str) -> str:
        """The message of a job in which `worker` is done before its share, which no other worker trains."""
        return (
            f"{worker} has ended its script, but only {self.records_applied} of {self.records_expected} "
            "records are in the model, and with consistency.deterministic no other worker trains the rest of "
            f"its share. {LEFT_EARLY}"
        )

    @property
    def unwritten(self) -> bool:
        """Whether a checkpoint is on disk, but not of the last version."""
        return self.durable_version is not None and self.durable_version < self.version

    def not_on_disk(self, problem: str, advice: str = "restart the job, which continues from there") -> str:
        """The message of a job whose training is done but `unwritten`.

        `problem`: why, if that is known. `advice`: how to restart the job.
        """
        return (
            f"{problem or 'the last version was not written in time'}. The training is done, but its last "
            f"version {self.version} is not on disk; the newest one on disk is version "
            f"{self.durable_version}. Make room, and {advice}"
        )


LEFT_EARLY = (
    "To stop early, a script must call session.stop(reason) before it leaves the loop over its loader; "
    "the job then succeeds. A script that makes a step of several batches has to make one for the last "
    "batches, too: call optimizer.step() for them after the loop, or optimizer.skip()"
)
"""Advice for a job whose scripts have all ended without an error, though records are left."""

NOT_EVALUATED = (
    ". The evaluator was not done {:g} s later, so the last versions are not evaluated "
    "(spec.evaluator.finishTimeout)"
)
"""The end of the message of a job whose evaluator is not done; to be formatted with the seconds it had."""

HUNG_GRACE = timedelta(seconds=15)
"""The time that a worker has to end by itself after it was declared hung."""

FINISHED_GRACE = timedelta(minutes=1)
"""The time that a finished job waits for a worker that does not answer or has not joined."""

STAYED_OUT = (
    f"it has not joined within {FINISHED_GRACE.total_seconds():g} s after another worker was done: its "
    "script has not called elastic_ps.connect(), and nothing is left for it to train"
)
"""Why a worker that has not joined is ended then."""


JOINS_AGAIN = "it has to join again, since a parameter server was lost"
"""The reason of a member that was one when its parameter server was lost."""


class MemberStatus(CamelModel):
    """A member of the job, as the parameter server sees it."""

    worker: int = Field(description="The worker's index.")
    incarnation: int = Field(
        description="The number of this member's join, which is higher for each later join of any worker."
    )
    pid: int = Field(description="The process id of the worker.")
    host: str = Field(description="The host or pod of the worker.")
    transport: str = Field(
        default="",
        description="The transport of this worker when it joined: shm (shared memory on one host), tcp, "
        "grpc, or mpi (through the ranks of an mpirun).",
    )
    state: Literal["joining", "idle", "training", "left", "lost", "hung"] = Field(
        description="joining, idle or training while the worker is a member; left, lost or hung afterwards."
    )
    reason: str = Field(
        default="", description="The reason why the worker was declared lost or hung, in words."
    )
    gone_seconds: float | None = Field(
        default=None,
        description="The time since the worker ceased to be a member, in seconds. Unset while it is one.",
    )
    overdue_seconds: float | None = Field(
        default=None,
        description="The time since the lease of a worker that is gone ended, counted from its last call, "
        "in seconds. Negative while it still calls.",
    )
    joined_version: int = Field(description="The version that the worker joined at.")
    left_version: int | None = Field(default=None, description="The version that the worker left at.")
    steps: int = Field(default=0, description="The number of this member's steps in the model.")
    records: int = Field(default=0, description="The number of this member's records in the model.")
    late: int = Field(
        default=0,
        description="The number of this member's steps that came late and were dropped, with backupWorkers "
        "and in mode accumulate.",
    )
    staleness: int = Field(
        default=0,
        description="The number of versions that other workers made while this member computed its last "
        "step, in the modes of progress.staleness. Otherwise 0.",
    )
    step_seconds: float | None = Field(
        default=None,
        description="The time that this member takes for a step, from the new version to its complete "
        "gradients, in seconds. A moving average.",
    )
    records_per_second: float | None = Field(
        default=None,
        description="The number of records that this member computes per second, not counting the time that "
        "it waits for others. A moving average.",
    )
    slowness: float | None = Field(
        default=None, description="This member's stepSeconds divided by the median of all workers."
    )
    traffic: Traffic = Field(
        default_factory=Traffic,
        description="The traffic of this member at the end of its last step.",
    )

    @property
    def present(self) -> bool:
        """Whether it is still a member."""
        return self.state in ("joining", "idle", "training")

    @property
    def joins_again(self) -> bool:
        """Whether it is lost only because its parameter server was. If the worker lives, it joins again."""
        return self.state == "lost" and self.reason == JOINS_AGAIN

    def to_be_killed(self, progress_timeout: timedelta, *, finished: bool) -> str:
        """Why the worker's process has to be killed if it is still alive; "" if it need not be.

        A hung worker is told to end by its next heartbeat, which does not come if the whole process is
        frozen. A lost worker may come back for as long as a step may take. When the training is `finished`, a
        lost worker has no step left to make, and the job waits for it alone: as long as its process calls.
        """
        gone = self.gone_seconds or 0.0
        if self.state == "hung" and gone > HUNG_GRACE.total_seconds():
            return f"it was declared hung ({self.reason}) and has not ended by itself for {gone:.0f} s"
        limit = progress_timeout.total_seconds()
        if self.state == "lost" and limit and not finished and gone > limit:
            return f"it was declared lost ({self.reason}) and has not come back for {gone:.0f} s"
        silent = gone if self.overdue_seconds is None else self.overdue_seconds
        if self.state == "lost" and finished and silent > FINISHED_GRACE.total_seconds():
            return f"the training is done, and it has not answered for {silent:.0f} s ({self.reason})"
        return ""


class TuningStatus(CamelModel):
    """The settings in force of those that may change while the job runs."""

    generation: int = Field(default=0, description="The number of the change that is in force.")
    consistency: str = Field(default="", description="The consistency that is in force, in words.")
    compression: str = Field(default="", description="The compression that is in force, in words.")
    since: int = Field(default=0, description="The version since which both are in force.")
    asked: int = Field(default=0, description="The number of the newest change that was requested.")
    problem: str = Field(
        default="", description="The reason why the newest change is not in force. Empty if it is."
    )


class ServerStatus(CamelModel):
    """The answer of a parameter server to `GET /status`."""

    job: str = Field(description="The job's name.")
    shard: int = Field(description="The index of this parameter server.")
    shards: int = Field(description="The number of parameter servers.")
    term: int = Field(
        description="A number that grows when shard 0 starts or takes the job back to a checkpoint. 0 while "
        "the parameter server waits for its storage."
    )
    ready: bool = Field(
        description="True once the model has its first values, or a script has asked for a tensor of "
        "session.server."
    )
    tensor_bytes: int = Field(
        default=0,
        description="The size of the tensors of session.server on this parameter server, in bytes.",
    )
    progress: Progress = Field(default_factory=Progress)
    durable_age_seconds: float | None = Field(
        default=None, description="The age of the newest complete checkpoint, in seconds."
    )
    problem: str = Field(
        default="",
        description="A problem that somebody should solve, for example a full disk. The job keeps running, "
        "or continues as soon as it can.",
    )
    checkpoint_pause_seconds: float = Field(
        default=0.0,
        description="The time that training has paused for checkpoints since the server's start, in seconds.",
    )
    tuning: TuningStatus = Field(
        default_factory=TuningStatus, description="The consistency and compression in force."
    )
    standbys: list[bool] = Field(
        default_factory=list,
        description="For each shard, true if its standby has every version. Empty without standbys.",
    )
    bucket_bytes: int = Field(
        default=0,
        description="The bucket size that was chosen, in bytes, if parameterServer.bucketBytes is 0. 0 if "
        "none was chosen.",
    )
    traffic: Traffic = Field(
        default_factory=Traffic,
        description="The traffic of all workers since the last start of the parameter server.",
    )
    tables: list[TableStatus] = Field(
        default_factory=list, description="The tables that grow, with their rows on all parameter servers."
    )
    value_bytes: int = Field(
        default=0,
        description="The size of the model's parameters and buffers, in bytes. 0 before it is known.",
    )
    state_bytes: int = Field(
        default=0,
        description="The size of the optimizer's state once it has made a step, in bytes, with the float32 "
        "copies of parameters that have half precision.",
    )
    members: list[MemberStatus] = Field(
        default_factory=list,
        description="All workers that have ever joined, in the order of joining.",
    )

    @property
    def only_tensors(self) -> bool:
        """Whether scripts use `session.server` but no model so far, so that there is no progress to show."""
        nothing = self.progress.records_expected is None and not self.progress.version
        return self.ready and not self.members and nothing

    @property
    def begun(self) -> bool:
        """Whether it knows the job's state: a server that still waits for its storage does not."""
        return self.term > 0

    def last_words(self) -> str:
        """The status as JSON, which the process leaves for its starter when it ends.

        Kubernetes keeps at most 4096 bytes, so members and reported metrics are left out.
        """
        evaluation = self.progress.evaluation
        if evaluation is not None:
            evaluation = evaluation.model_copy(update={"metrics": {}})
        cut: dict[str, object] = {
            "metrics": {},
            "stopped": self.progress.stopped[:500],
            "evaluation": evaluation,
        }
        shortened = self.progress.model_copy(update=cut)
        short = self.model_copy(update={"members": [], "tables": [], "problem": "", "progress": shortened})
        return short.model_dump_json(by_alias=True, exclude_defaults=True)


class Condition(CamelModel):
    """A metav1.Condition."""

    type: Literal["Created", "Running", "Degraded", "Diverged", "Suspended", "Succeeded", "Failed"] = Field(
        description="Created, Running, Degraded, Diverged, Suspended, Succeeded or Failed."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="True or False.")
    reason: str = Field(description="The reason, in one word.")
    message: str = Field(default="", description="The reason, in a sentence.")
    last_transition_time: str = Field(description="The time when the status of the condition last changed.")
    observed_generation: int | None = Field(
        default=None, description="The metadata.generation of the spec when the condition was written."
    )


class WorkerStatus(CamelModel):
    """The job's workers."""

    replicas: int = Field(default=0, description="The number of workers' pods.")
    ready: int = Field(default=0, description="The number of workers that have joined the job.")
    completed: int = Field(
        default=0, description="The number of workers that have come to the end of their script."
    )
    completed_indexes: list[int] = Field(
        default_factory=list,
        description="The indexes of these workers. They do not run again if their pods are removed.",
    )
    failures: int = Field(default=0, description="The number of failures that count against backoffLimit.")
    restarts: int = Field(
        default=0,
        description="The number of workers that failed or were disrupted. Deleted ones do not count.",
    )
    last_failure: str | None = Field(
        default=None, description="The last process that ended before it was done, and the cause."
    )
    invalid_on: dict[str, str] = Field(
        default_factory=dict,
        description="For each node, the last output of a process that ended there with exit status 78, which "
        "says that the job cannot run as specified. The job fails when a second node has the same output.",
    )
    counted_pods: list[str] = Field(
        default_factory=list,
        description="The UIDs of pods that have ended and are counted above, but still exist. The operator "
        "keeps them so that it counts no pod twice.",
    )
    outdated: int | None = Field(
        default=None,
        description="The number of workers with an older image or template. They are replaced one by one.",
    )
    selector: str = Field(
        default="", description="The label selector of the workers' pods. An autoscaler reads it."
    )


class ParameterServerStatus(CamelModel):
    """The job's parameter servers."""

    ready: int = Field(default=0, description="The number of parameter servers that are ready.")
    term: int | None = Field(
        default=None,
        description="A number that grows when shard 0 starts or takes the job back to a checkpoint.",
    )
    consistency: str = Field(default="", description="The consistency that is in force, in words.")
    compression: str = Field(
        default="",
        description="The compression that is in force, in words.",
    )
    standbys: int | None = Field(
        default=None,
        description="The number of standbys that have every version, with durability standby. Unset while "
        "shard 0 does not answer.",
    )
    outdated: int | None = Field(
        default=None,
        description="The number of parameter servers and standbys with an older image or template. They are "
        "replaced when the job's annotation elastic-ps.dev/restartedAt asks for it.",
    )


Phase: TypeAlias = Literal["Pending", "Running", "Suspended", "Succeeded", "Failed"]


class Summary(CamelModel):
    """The columns of `kubectl get`, as text."""

    workers: str = Field(
        default="",
        description="The number of workers that have joined or are done, and the number that the job wants, "
        "as in 2/4.",
    )
    progress: str = Field(
        default="", description="The share of all records that have been trained, as in 15%."
    )
    loss: str = Field(default="", description="The last reported training loss.")
    reason: str = Field(
        default="",
        description="The reason of the condition that says why the job does not run as its spec asks, or how "
        "it ended. Empty if all is well.",
    )


class CertificatesStatus(CamelModel):
    """The certificates of the job's processes that were issued last."""

    issued: str = Field(default="", description="The time when the certificates were issued.")
    expires: str = Field(
        default="", description="The time when the certificates expire. New ones are issued before that."
    )
    workers: int = Field(default=0, description="The number of workers that have certificates.")


class TrainingJobStatus(CamelModel):
    """The status that the operator writes to the resource."""

    phase: Phase = Field(
        default="Pending",
        description="Pending, Running, Suspended, Succeeded or Failed.",
    )
    observed_generation: int | None = Field(
        default=None, description="The metadata.generation of the spec that the operator has seen last."
    )
    conditions: list[Condition] = Field(
        default_factory=list, description="The conditions of the job, each with its reason."
    )
    worker: WorkerStatus = Field(default_factory=WorkerStatus)
    parameter_server: ParameterServerStatus = Field(default_factory=ParameterServerStatus)
    progress: Progress = Field(default_factory=Progress)
    traffic: TrafficStatus | None = Field(
        default=None,
        description="The traffic of all workers since the last start of the parameter server.",
    )
    tables: list[TableRows] | None = Field(
        default=None,
        description=f"The tables that grow, with their rows on all parameter servers: the {MOST_LISTED} "
        "largest ones.",
    )
    summary: Summary = Field(default_factory=Summary)
    certificates: CertificatesStatus | None = Field(
        default=None, description="The certificates of a job that uses TLS."
    )
    start_time: str | None = Field(
        default=None, description="The time when the job started, or was last resumed."
    )
    completion_time: str | None = Field(default=None, description="The time when the job ended.")
