"""What jobs report: the parameter server's answer to `GET /status`, and a TrainingJob's status."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PlainSerializer

from elastic_ps.api.fields import CamelModel


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


Reported: TypeAlias = Annotated[dict[str, float], PlainSerializer(_finite, when_used="json")]
"""Values by their names. JSON has no NaN and no Inf: they are left out, since Kubernetes takes no null."""


class Staleness(CamelModel):
    """How stale the steps in the model were, in versions. From 100 on, p50 and p99 have two digits."""

    p50: int = Field(description="Half of the steps were at most this stale.")
    p99: int = Field(description="99 of 100 steps were at most this stale.")
    max: int = Field(description="The largest staleness of any step.")


class EvaluationStatus(CamelModel):
    """What the job's evaluator has found so far."""

    version: int | None = Field(default=None, description="The version that was evaluated last.")
    metrics: Reported = Field(
        default_factory=dict, description="What the evaluator reported about that version."
    )
    best_version: int | None = Field(
        default=None, description="With evaluator.best: the best version so far. Its checkpoint is kept."
    )
    best: float | None = Field(default=None, description="The metric's value at the best version.")
    evaluated: int = Field(default=0, description="How many checkpoints have been evaluated.")
    waiting: int = Field(default=0, description="How many checkpoints wait for the evaluator.")
    missed: int = Field(
        default=0,
        description="How many checkpoints were given up, because more than evaluator.backlog were waiting or "
        "the evaluator kept failing on one.",
    )

    def __str__(self) -> str:
        """The newest result, for a person."""
        values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(self.metrics.items()))
        best = " (the best so far)" if self.version == self.best_version else ""
        return f"version {self.version} was evaluated: {values or 'nothing was reported'}{best}"


class Divergence(CamelModel):
    """That the job learns nothing, as far as its loss says."""

    reason: str = Field(
        description="LossNotFinite; LossFarAboveBest, for a tenth of the job; or LossNoBetter than at the "
        "start, "
        "in the second half of the job."
    )
    message: str = Field(description="What was found, and what to change in this mode.")


class Progress(CamelModel):
    """How far training is, as the parameter server sees it."""

    version: int = Field(default=0, description="The number of optimizer steps that the model has taken.")
    epoch: int = Field(default=0, description="The number of epochs that are complete.")
    epochs: int | None = Field(
        default=None,
        description="The number of epochs to train. Unset until a worker has opened its data set.",
    )
    percent: int = Field(
        default=0, ge=0, le=100, description="The share of all records that is trained, in percent."
    )
    samples_per_second: float | None = Field(
        default=None, description="How many records the whole job trains per second."
    )
    loss: float | None = Field(
        default=None,
        description="The training loss that the scripts reported last: the mean over the workers whose steps "
        "are in one version, weighted by their samples.",
    )
    diverged: Divergence | None = Field(
        default=None, description="Why the job learns nothing, judged by its loss. Unset while it learns."
    )
    eta_seconds: int | None = Field(
        default=None, description="The expected time until the end of training, in seconds."
    )
    records_applied: int = Field(default=0, description="How many records are in the model.")
    records_skipped: int = Field(
        default=0,
        description="How many records the scripts left out, for example because a loss was not finite.",
    )
    records_expected: int | None = Field(
        default=None, description="How many records there are to train, all epochs together."
    )
    durable_version: int | None = Field(
        default=None, description="The version of the newest complete checkpoint."
    )
    durable_time: str | None = Field(
        default=None, description="When the newest complete checkpoint was written."
    )
    metrics: Reported = Field(
        default_factory=dict,
        description="The values that scripts reported last, for example test_accuracy. A value that was "
        "reported "
        "with a step is the mean, sum or maximum over the steps of the last version that had any.",
    )
    evaluation: EvaluationStatus | None = Field(
        default=None, description="With an evaluator: what it has found so far."
    )
    staleness: Staleness | None = Field(
        default=None,
        description="How many versions the others made while a worker computed a step, over all steps that "
        "are "
        "in the model. Only in modes bounded and async, and in mode local with a quorum or with outer "
        "delayed, downpour or easgd, where an exchange counts as a step.",
    )
    finished: bool = Field(
        default=False,
        description="Whether training is over: every record of every epoch is in the model or was skipped, "
        "or a script has stopped the training (see stopped).",
    )
    stopped: str = Field(
        default="",
        description="The reason that a script gave to session.stop. Empty if no script has stopped the "
        "training.",
    )

    @property
    def all_done(self) -> str:
        """What has become of all records."""
        if self.records_skipped:
            skipped = self.records_skipped
            return f"every record of every epoch is in the model, except {skipped} that were skipped"
        return "every record of every epoch is in the model"

    @property
    def why_stopped(self) -> str:
        """How far training came before a script ended it, and why."""
        return (
            f"a script stopped the training at version {self.version}, with {self.records_applied} of "
            f"{self.records_expected} records in the model: {self.stopped}"
        )

    @property
    def unwritten(self) -> bool:
        """Whether there are versions on disk, but not the last one."""
        return self.durable_version is not None and self.durable_version < self.version

    def not_on_disk(self, problem: str) -> str:
        """That training is done and `unwritten`, because of a `problem` if one is known."""
        return (
            f"the training is done, but its last version {self.version} is not on disk: "
            f"{problem or 'it was not written in time'}. The newest one on disk is "
            f"version {self.durable_version}. Make room, and continue from it"
        )


LEFT_EARLY = (
    "To stop early, a script must call session.stop(reason) before it leaves the loop over its loader; "
    "the job then succeeds. A script that makes a step of several batches has to make one for the last "
    "batches, too: call optimizer.step() for them after the loop, or optimizer.skip()"
)
"""What to do if all scripts have ended without an error, but records are left."""

HUNG_GRACE = timedelta(seconds=15)
"""How long a worker that was declared hung has time to end by itself."""

FINISHED_GRACE = timedelta(minutes=1)
"""How long a worker that does not answer, or has not joined, may keep a job open whose training is done."""

STAYED_OUT = (
    f"it has not joined within {FINISHED_GRACE.total_seconds():g} s after another worker was done: its "
    "script has not called elastic_ps.connect(), and nothing is left for it to train"
)
"""Why it is ended then, in words."""


class Traffic(CamelModel):
    """Bodies of gradients and values that workers have sent and received, and what their codecs cost them."""

    pushed_bytes: int = Field(default=0, description="Bytes of gradients that workers sent.")
    pushed_plain_bytes: int = Field(default=0, description="The size of the same gradients without a codec.")
    pulled_bytes: int = Field(default=0, description="Bytes of values that workers received.")
    pulled_plain_bytes: int = Field(default=0, description="The size of the same values without a codec.")
    encode_seconds: float = Field(
        default=0.0, description="How many seconds workers took to encode gradients."
    )
    decode_seconds: float = Field(default=0.0, description="How many seconds workers took to decode values.")
    push_seconds: float = Field(
        default=0.0, description="For how many seconds any gradient was being encoded or sent."
    )
    codec: str = Field(default="", description="With codec auto: the codecs that workers have chosen.")

    @classmethod
    def counts(cls) -> list[str]:
        """The fields that are numbers."""
        return [name for name in cls.model_fields if name != "codec"]

    def __add__(self, other: Traffic) -> Traffic:
        sums = {name: getattr(self, name) + getattr(other, name) for name in Traffic.counts()}
        codecs = {*self.codec.split(", "), *other.codec.split(", ")} - {""}
        return Traffic(**sums, codec=", ".join(sorted(codecs)))


class TrafficStatus(CamelModel):
    """What all workers together have sent and received, and what their codecs cost them."""

    pushed_bytes: int = Field(default=0, description="Bytes of gradients that workers sent.")
    pushed_ratio: float = Field(
        default=1.0, description="pushedBytes divided by the size of the same gradients without a codec."
    )
    pulled_bytes: int = Field(default=0, description="Bytes of values that workers received.")
    pulled_ratio: float = Field(
        default=1.0, description="pulledBytes divided by the size of the same values without a codec."
    )
    codec_seconds: float = Field(
        default=0.0, description="How many seconds workers took to encode gradients and to decode values."
    )
    codec: str = Field(default="", description="With codec auto: the codecs that workers have chosen.")
    bucket_bytes: int | None = Field(
        default=None,
        description="The size of buckets that was chosen, if parameterServer.bucketBytes is 0.",
    )

    @classmethod
    def of(cls, counts: Traffic, *, bucket_bytes: int = 0) -> TrafficStatus | None:
        """None if nothing was sent."""
        if not (counts.pushed_plain_bytes or counts.pulled_plain_bytes):
            return None
        return cls(
            pushed_bytes=counts.pushed_bytes,
            pushed_ratio=round(counts.pushed_bytes / max(1, counts.pushed_plain_bytes), 4),
            pulled_bytes=counts.pulled_bytes,
            pulled_ratio=round(counts.pulled_bytes / max(1, counts.pulled_plain_bytes), 4),
            codec_seconds=round(counts.encode_seconds + counts.decode_seconds, 3),
            codec=counts.codec,
            bucket_bytes=bucket_bytes or None,
        )


class MemberStatus(CamelModel):
    """A member of the job, as the parameter server sees it."""

    worker: int = Field(description="The worker's index.")
    incarnation: int = Field(description="The number of this stay in the job; it only grows.")
    pid: int = Field(description="The process id of the worker.")
    host: str = Field(description="The host or pod of the worker.")
    transport: str = Field(
        default="",
        description="How this worker was connected when it joined: shm (shared memory on one host), tcp, "
        "grpc, or "
        "mpi (through the ranks of an mpirun).",
    )
    state: Literal["joining", "idle", "training", "left", "lost", "hung"] = Field(
        description="Whether the worker is a member (joining, idle, training), or how it ceased to be one."
    )
    reason: str = Field(default="", description="Why the worker was declared lost or hung, in words.")
    gone_seconds: float | None = Field(
        default=None, description="How many seconds ago it ceased to be a member. Unset while it is a member."
    )
    joined_version: int = Field(description="The version that the worker joined at.")
    left_version: int | None = Field(default=None, description="The version that the worker left at.")
    steps: int = Field(default=0, description="How many of this member's steps are in the model.")
    records: int = Field(default=0, description="How many of this member's records are in the model.")
    late: int = Field(
        default=0,
        description="With backupWorkers and in mode accumulate: how many of this member's steps came late "
        "and were dropped.",
    )
    staleness: int = Field(
        default=0,
        description="How many versions the others made while this member computed its last step, in the "
        "modes of "
        "progress.staleness. Otherwise 0.",
    )
    step_seconds: float | None = Field(
        default=None,
        description="How many seconds this member takes for a step, from the new version to its complete "
        "gradients; a moving average.",
    )
    records_per_second: float | None = Field(
        default=None,
        description="How many records this member computes per second, without the time that it waits for "
        "others; "
        "a moving average.",
    )
    slowness: float | None = Field(
        default=None, description="This member's stepSeconds divided by the median of all workers."
    )
    traffic: Traffic = Field(
        default_factory=Traffic,
        description="What this member had sent and received at the end of its last step.",
    )

    @property
    def present(self) -> bool:
        """Whether it is still a member."""
        return self.state in ("joining", "idle", "training")

    def to_be_killed(self, progress_timeout: timedelta, *, finished: bool) -> str:
        """Why its process, should it be alive, has to be ended from outside; "" if it has not.

        One that was declared hung is told to end by its next heartbeat, which fails if all of it is frozen.
        One that is lost may come back, for as long as a step may take. When the training is `finished`, it
        has no step to make, and the job waits for it alone.
        """
        gone = self.gone_seconds or 0.0
        if self.state == "hung" and gone > HUNG_GRACE.total_seconds():
            return f"it was declared hung ({self.reason}) and has not ended by itself for {gone:.0f} s"
        if self.state == "lost" and progress_timeout and gone > progress_timeout.total_seconds():
            return f"it was declared lost ({self.reason}) and has not come back for {gone:.0f} s"
        if self.state == "lost" and finished and gone > FINISHED_GRACE.total_seconds():
            return f"the training is done, and it has not answered for {gone:.0f} s ({self.reason})"
        return ""


class TuningStatus(CamelModel):
    """What of the running job may change, as it is now."""

    generation: int = Field(default=0, description="The number of the change that is in force.")
    consistency: str = Field(default="", description="The consistency that is in force, in words.")
    compression: str = Field(default="", description="The compression that is in force, in words.")
    since: int = Field(default=0, description="The version after which both are in force.")
    asked: int = Field(default=0, description="The number of the newest change that was requested.")
    problem: str = Field(default="", description="Why the newest change is not in force. Empty if it is.")


class ServerStatus(CamelModel):
    """What a parameter server answers on `GET /status`."""

    job: str = Field(description="The job's name.")
    shard: int = Field(description="The index of this parameter server.")
    shards: int = Field(description="The number of parameter servers.")
    term: int = Field(
        description="How often the parameter server has started. 0 while it waits for its storage."
    )
    ready: bool = Field(
        description="Whether the model has its first values, or a script has asked for a tensor of "
        "session.server."
    )
    tensor_bytes: int = Field(
        default=0,
        description="How many bytes the tensors of session.server take on this parameter server.",
    )
    progress: Progress = Field(default_factory=Progress)
    durable_age_seconds: float | None = Field(
        default=None, description="How many seconds ago the newest complete checkpoint was written."
    )
    problem: str = Field(
        default="",
        description="A problem that somebody should solve, for example a full disk. The job keeps running, "
        "or "
        "continues as soon as it can.",
    )
    checkpoint_pause_seconds: float = Field(
        default=0.0,
        description="How many seconds training has paused for checkpoints since the server's start.",
    )
    tuning: TuningStatus = Field(
        default_factory=TuningStatus, description="The consistency and compression in force."
    )
    standbys: list[bool] = Field(
        default_factory=list,
        description="With durability standby: whether each shard's standby has every round.",
    )
    bucket_bytes: int = Field(
        default=0,
        description="The size of buckets that was chosen, if parameterServer.bucketBytes is 0. 0: none was "
        "chosen.",
    )
    members: list[MemberStatus] = Field(
        default_factory=list,
        description="All workers that have ever joined, in the order of joining.",
    )

    @property
    def only_tensors(self) -> bool:
        """Whether scripts use `session.server`, and no model so far: there is no progress to tell."""
        nothing = self.progress.records_expected is None and not self.progress.version
        return self.ready and not self.members and nothing

    @property
    def traffic(self) -> Traffic:
        """What all workers have sent and received, as far as this parameter server knows."""
        return sum((member.traffic for member in self.members), Traffic())

    @property
    def begun(self) -> bool:
        """Whether it knows of the job: one that still waits for its storage tells of nothing but that."""
        return self.term > 0

    def last_words(self) -> str:
        """This as JSON for whoever looks after the process when it has ended.

        Kubernetes takes at most 4096 bytes of it, so the members and what scripts reported are left out.
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
        short = self.model_copy(update={"members": [], "problem": "", "progress": shortened})
        return short.model_dump_json(by_alias=True, exclude_defaults=True)


class Condition(CamelModel):
    """A metav1.Condition."""

    type: Literal["Created", "Running", "Degraded", "Diverged", "Suspended", "Succeeded", "Failed"] = Field(
        description="What the condition is about: Created, Running, Degraded, Diverged, Suspended, Succeeded "
        "or Failed."
    )
    status: Literal["True", "False", "Unknown"] = Field(
        description="Whether the condition holds: True or False."
    )
    reason: str = Field(description="The reason, in one word.")
    message: str = Field(default="", description="The reason, in a sentence.")
    last_transition_time: str = Field(description="When the status of the condition last changed.")
    observed_generation: int | None = Field(
        default=None, description="The metadata.generation of the spec when the condition was written."
    )


class WorkerStatus(CamelModel):
    """The job's workers."""

    replicas: int = Field(default=0, description="How many workers' pods exist.")
    ready: int = Field(default=0, description="How many workers have joined the job, and train.")
    completed: int = Field(default=0, description="How many workers have come to the end of their script.")
    failures: int = Field(default=0, description="How many failures count against backoffLimit.")
    restarts: int = Field(default=0, description="How many workers have been replaced, for any reason.")
    last_failure: str | None = Field(
        default=None, description="The worker that was replaced last, and the reason."
    )
    invalid_on: dict[str, str] = Field(
        default_factory=dict,
        description="For each node, the last output of a process that ended there with exit status 78: the "
        "job "
        "cannot run as specified. The job fails when a second node has the same output.",
    )
    counted_pods: list[str] = Field(
        default_factory=list,
        description="The UIDs of pods that have ended, still exist, and are counted above. The operator "
        "keeps them so that it counts no pod twice.",
    )
    outdated: int | None = Field(
        default=None,
        description="How many workers run with an older image or template. They are replaced one by one.",
    )
    selector: str = Field(
        default="", description="The label selector of the workers' pods. An autoscaler reads it."
    )


class ParameterServerStatus(CamelModel):
    """The job's parameter servers."""

    ready: int = Field(default=0, description="How many parameter servers are ready.")
    term: int | None = Field(
        default=None, description="How often the parameter server has started. Each start is a term."
    )
    consistency: str = Field(default="", description="The consistency that is in force, in words.")
    compression: str = Field(
        default="",
        description="The compression that is in force, in words.",
    )
    standbys: int | None = Field(
        default=None,
        description="With durability standby: how many standbys have every round. Unset while shard 0 does "
        "not answer.",
    )
    outdated: int | None = Field(
        default=None,
        description="How many parameter servers and standbys run with an older image or template. They are "
        "replaced when the job's annotation elastic-ps.dev/restartedAt asks for it.",
    )


Phase: TypeAlias = Literal["Pending", "Running", "Suspended", "Succeeded", "Failed"]


class Summary(CamelModel):
    """The columns of `kubectl get`, as text."""

    workers: str = Field(
        default="",
        description="How many workers have joined or are done, and how many the job wants, as in 2/4.",
    )
    progress: str = Field(default="", description="The share of all records that is trained, as in 15%.")
    loss: str = Field(default="", description="The last reported training loss.")
    reason: str = Field(
        default="",
        description="Why the job does not run as its spec asks, or how it ended: the reason of a condition. "
        "Empty "
        "if all is well.",
    )


class CertificatesStatus(CamelModel):
    """The certificates of the job's processes, as they were issued last."""

    issued: str = Field(default="", description="When the certificates were issued.")
    expires: str = Field(
        default="", description="When the certificates expire. New ones are issued before that."
    )
    workers: int = Field(default=0, description="For how many workers there are certificates.")


class TrainingJobStatus(CamelModel):
    """What the operator reports on the resource."""

    phase: Phase = Field(
        default="Pending",
        description="Where the job is: Pending, Running, Suspended, Succeeded or Failed.",
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
        description="What all workers have sent and received since the last start of the parameter server.",
    )
    summary: Summary = Field(default_factory=Summary)
    certificates: CertificatesStatus | None = Field(
        default=None, description="The certificates of a job that uses TLS."
    )
    start_time: str | None = Field(
        default=None, description="When the job began, or when it was last resumed."
    )
    completion_time: str | None = Field(default=None, description="When the job ended.")
