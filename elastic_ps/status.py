"""What jobs report: the parameter server's answer to `GET /status`, and a TrainingJob's status."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypeAlias

from pydantic import Field

from elastic_ps.job import CamelModel


class Progress(CamelModel):
    """How far training is, as the parameter server sees it."""

    version: int = Field(default=0, description="Optimizer steps taken.")
    epoch: int = Field(default=0, description="Epochs of the data that are in the model completely.")
    epochs: int | None = Field(default=None, description="Epochs to train, once a worker has said so.")
    percent: int = Field(default=0, ge=0, le=100)
    samples_per_second: float | None = None
    loss: float | None = Field(default=None, description="Last reported training loss, sample-weighted.")
    eta_seconds: int | None = None
    records_applied: int = Field(default=0, description="Records whose gradients are in the model.")
    records_expected: int | None = Field(default=None, description="Records of all epochs together.")
    durable_version: int | None = Field(default=None, description="Version of the newest whole checkpoint.")
    durable_time: str | None = Field(default=None, description="When that was written.")
    metrics: dict[str, float] = Field(
        default_factory=dict, description="What scripts reported, e.g. test_accuracy."
    )
    finished: bool = Field(default=False, description="Every record of every epoch is in the model.")


HUNG_GRACE = timedelta(seconds=15)
"""For how long a worker that was declared hung may end by itself."""


class Member(CamelModel):
    """One worker's stay in the job, as the parameter server sees it."""

    worker: int = Field(description="The worker's index.")
    incarnation: int
    pid: int
    host: str
    state: Literal["joining", "idle", "training", "left", "lost", "hung"]
    reason: str = Field(default="", description="Why it was declared gone, in words.")
    gone_seconds: float | None = Field(default=None, description="How long ago its stay ended, if it has.")
    joined_version: int
    left_version: int | None = None
    steps: int = Field(default=0, description="Steps of this member that are in the model.")
    records: int = Field(default=0, description="Records of this member that are in the model.")
    late: int = Field(default=0, description="Steps that came too late, with backupWorkers; see there.")
    staleness: int = Field(
        default=0,
        description="Versions that were made between the one that its last step was computed on and the one "
        "that it is in; always 0 with mode sync.",
    )
    step_seconds: float | None = Field(
        default=None,
        description="From when it may have a version until its step on it is complete; a mean.",
    )
    slowness: float | None = Field(default=None, description="stepSeconds over the median of the workers.")

    def to_be_killed(self, progress_timeout: timedelta) -> str:
        """Why its process, should it be alive, has to be ended from outside; "" if it has not.

        One that was declared hung is told to end by its next heartbeat, which fails if all of it is frozen.
        One that is lost may come back, for as long as a step may take.
        """
        gone = self.gone_seconds or 0.0
        if self.state == "hung" and gone > HUNG_GRACE.total_seconds():
            return f"declared hung ({self.reason}), it has not ended by itself for {gone:.0f} s"
        if self.state == "lost" and progress_timeout and gone > progress_timeout.total_seconds():
            return f"lost ({self.reason}), it has not come back for {gone:.0f} s"
        return ""


class ServerStatus(CamelModel):
    """What a parameter server answers on `GET /status`."""

    job: str
    shard: int
    shards: int
    term: int = Field(
        description="How often this parameter server has been started; 0 while it waits for its storage."
    )
    ready: bool = Field(description="Whether the model is initialised.")
    progress: Progress = Field(default_factory=Progress)
    durable_age_seconds: float | None = Field(default=None, description="Age of the newest whole checkpoint.")
    problem: str = Field(
        default="", description="What is wrong, though training goes on or will go on, e.g. a full disk."
    )
    checkpoint_pause_seconds: float = Field(
        default=0.0,
        description="Time that training stood still for checkpoints since this parameter server's start.",
    )
    standbys: list[bool] = Field(
        default_factory=list,
        description="With durability standby: for each shard, whether its standby has every round.",
    )
    members: list[Member] = Field(
        default_factory=list, description="Live members and those gone, in joining order."
    )

    @property
    def begun(self) -> bool:
        """Whether it knows of the job: one that still waits for its storage tells of nothing but that."""
        return self.term > 0


class Condition(CamelModel):
    """A metav1.Condition."""

    type: Literal["Created", "Running", "Degraded", "Suspended", "Succeeded", "Failed"]
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: str
    observed_generation: int | None = None


class WorkerStatus(CamelModel):
    replicas: int = 0
    ready: int = 0
    completed: int = Field(default=0, description="Workers that ended their script without an error.")
    failures: int = Field(default=0, description="Failures that count against backoffLimit.")
    restarts: int = Field(default=0, description="Workers replaced, for whatever reason.")
    last_failure: str | None = Field(default=None, description="Which worker was replaced last, and why.")
    counted_pods: list[str] = Field(
        default_factory=list,
        description="Uids of ended pods that are in these numbers and still exist; counted only once.",
    )
    selector: str = Field(default="", description="Label selector as a string, for the autoscaler.")


class ParameterServerStatus(CamelModel):
    ready: int = 0
    term: int | None = None
    standbys: int | None = Field(
        default=None,
        description="With durability standby: those that have every round; unset if shard 0 does not tell.",
    )


Phase: TypeAlias = Literal["Pending", "Running", "Suspended", "Succeeded", "Failed"]


class Summary(CamelModel):
    """What `kubectl get` shows, ready to read."""

    workers: str = Field(default="", description="Ready and wanted, as 2/4.")
    progress: str = Field(default="", description="Records in the model, as 15%.")
    loss: str = ""


class TrainingJobStatus(CamelModel):
    """What the operator reports on the resource."""

    phase: Phase = "Pending"
    observed_generation: int | None = None
    conditions: list[Condition] = Field(default_factory=list)
    worker: WorkerStatus = Field(default_factory=WorkerStatus)
    parameter_server: ParameterServerStatus = Field(default_factory=ParameterServerStatus)
    progress: Progress = Field(default_factory=Progress)
    summary: Summary = Field(default_factory=Summary)
    start_time: str | None = None
    completion_time: str | None = None
