"""The parts of a TrainingJob that say when it stops, gives up and cleans up."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from elastic_ps.api.fields import MOST_SECONDS, CamelModel


class OnExitCodes(CamelModel):
    """The exit statuses of a worker's container that a rule applies to."""

    operator: Literal["In", "NotIn"] = Field(
        default="In",
        description="In: the rule applies to these exit statuses. NotIn: it applies to all others except 0.",
    )
    values: list[Annotated[int, Field(ge=1, le=255)]] = Field(description="Exit statuses from 1 to 255.")


class OnPodCondition(CamelModel):
    """The condition of a worker's pod that a rule applies to."""

    type: str = Field(description="The type of the condition, as in DisruptionTarget.")
    status: Literal["True", "False", "Unknown"] = Field(
        default="True", description="The status that the condition must have."
    )


class FailureRule(CamelModel):
    """What follows from a worker's end. The first rule that fits decides."""

    action: Literal["FailJob", "Ignore", "Count"] = Field(
        description="FailJob ends the job. Count replaces the worker and counts against backoffLimit. Ignore "
        "only replaces the worker."
    )
    on_exit_codes: OnExitCodes | None = Field(
        default=None, description="The rule applies to workers with these exit statuses."
    )
    on_pod_conditions: list[OnPodCondition] | None = Field(
        default=None, description="The rule applies to pods that have one of these conditions."
    )

    @model_validator(mode="after")
    def _check_one(self) -> FailureRule:
        if (self.on_exit_codes is None) == (self.on_pod_conditions is None):
            raise ValueError("a rule needs either onExitCodes or onPodConditions, and not both")
        return self


class PodFailurePolicy(CamelModel):
    """What follows from a worker's end, in the manner of a Kubernetes Job."""

    rules: list[FailureRule] = Field(
        description="The rules, in the order in which they are tried. The first one that fits decides. If "
        "none fits, every exit status other than 0 counts, except after disruptions."
    )


class RunPolicy(CamelModel):
    """When to stop, give up, and clean up."""

    suspend: bool = Field(
        default=False,
        description="Set it to true to suspend the job: the job writes a checkpoint, and all of its pods are "
        "deleted. Set it to false again, and the job continues from that checkpoint.",
    )
    backoff_limit: int = Field(
        default=3,
        ge=0,
        description="The job fails when its workers have failed more often than this; on one machine, its "
        "parameter servers count, too. On a cluster, each exit status of a worker other than 0 counts, and "
        "so do signals and a lack of memory. Disruptions do not: eviction, preemption, deletion, a lost "
        "node. On one machine, scripts that fail count. A crash, such as a segmentation fault or a lack of "
        "memory, counts if the same worker's last crash had the same cause and the worker has trained "
        "nothing since. A worker that is killed from outside does not count.",
    )
    pod_failure_policy: PodFailurePolicy | None = Field(
        default=None,
        description="Rules for a cluster: which ends of a worker count against backoffLimit, which do not, "
        "and which end the job.",
    )
    on_divergence: Literal["warn", "stop"] = Field(
        default="warn",
        description="What happens when the job learns nothing: its loss or a gradient is not finite; or "
        "the loss is far above its best for a tenth of the job; or in the second half of the "
        "job the loss is no better than at the start. With warn, the condition Diverged says "
        "so, and what to change. With stop, the job also fails, and no worker is started "
        "again. The loss is the value that scripts pass to session.report(loss=...).",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SECONDS,
        description="The job fails when it has run for this many seconds.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=MOST_SECONDS,
        description="The job is deleted this many seconds after it has finished, and its volumeClaim with it "
        "unless that has retain.",
    )
    clean_pod_policy: Literal["Running", "None", "All"] = Field(
        default="Running",
        description="The pods to delete when the job has finished: those that still run, none, or all.",
    )
