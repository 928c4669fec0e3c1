"""The checkpoints of a job: when they are written, how many are kept, and where."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from elastic_ps.api import rules
from elastic_ps.api.fields import CamelModel, Duration

CLAIM = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
STORAGE = r"^[0-9]+(\.[0-9]+)?([EPTGM]i?|Ki|k)?$"


class VolumeClaim(CamelModel):
    """The volume that holds the checkpoints on a cluster."""

    storage: str = Field(
        default="1Gi",
        pattern=STORAGE,
        description="The size to request. It has to hold checkpoint.keep checkpoints and one more. With an "
        "evaluator, it also has to hold evaluator.backlog checkpoints, the best one and the one that is "
        "evaluated.",
    )
    storage_class_name: str | None = Field(
        default=None, description="The storage class. If unset, the cluster's default is used."
    )
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] | None = Field(
        default=None,
        description="ReadWriteOnce if unset. With ReadWriteMany, a standby and its parameter server may run "
        "on different nodes.",
    )
    retain: bool = Field(
        default=False,
        description="If true, the claim stays when the job is deleted. Another job can continue from it with "
        "checkpoint.resumeFrom. Delete it yourself when it is no longer needed.",
    )


_ONE_SOURCE = rules.Rule(
    cel="has(self.job) != has(self.claim)",
    message="checkpoint.resumeFrom needs either job or claim, and not both",
    holds=lambda resume: (resume.job is None) != (resume.claim is None),
    says=lambda _: "resumeFrom needs either job or claim, and not both",
)


class ResumeFrom(CamelModel):
    """The checkpoints of an earlier job, to continue from."""

    job: Annotated[str | None, _ONE_SOURCE] = Field(
        default=None,
        pattern=CLAIM,
        description="The earlier job, whose volumeClaim had retain: true. It must have ended. If it used the "
        "claim of another job, name that claim instead.",
    )
    claim: str | None = Field(default=None, pattern=CLAIM, description="The PersistentVolumeClaim itself.")


class Times(CamelModel):
    """When checkpoints are written, and how many are kept."""

    interval: Annotated[Duration, rules.SET] = Field(
        default=timedelta(seconds=30), description="The time between two checkpoints."
    )
    every_versions: Annotated[int | None, rules.SET] = Field(
        default=None,
        ge=1,
        description="Also write a checkpoint whenever this many versions have been made since the last one. "
        "Training does not wait for it, so versions that are made while one is being written get no "
        "checkpoint.",
    )
    keep: Annotated[int, rules.SET] = Field(
        default=3, ge=1, description="How many checkpoints to keep. Older ones are deleted."
    )


def _volumes(checkpoint: Checkpoint) -> list[str]:
    """The fields given that each name a volume."""
    given = {
        "volumeClaim": checkpoint.volume_claim,
        "existingClaim": checkpoint.existing_claim,
        "resumeFrom": checkpoint.resume_from,
    }
    return [name for name, value in given.items() if value is not None]


_ONE_VOLUME = rules.Rule(
    cel="!(has(self.volumeClaim) && has(self.existingClaim)) && "
    "!(has(self.resumeFrom) && (has(self.volumeClaim) || has(self.existingClaim)))",
    message="checkpoint.volumeClaim, existingClaim and resumeFrom cannot be combined: a job has one volume",
    holds=lambda checkpoint: len(_volumes(checkpoint)) < 2,
    says=lambda checkpoint: (
        f"{' and '.join(_volumes(checkpoint))} are given; a job has one volume, so keep one of them"
    ),
)


class Checkpoint(Times):
    """When the parameter server writes its state to disk, and where."""

    path: Annotated[Annotated[str, AfterValidator(os.path.expanduser)] | None, rules.IGNORED] = Field(
        default=None,
        description="The directory for checkpoints of local runs. On a cluster, the volume is used instead.",
    )
    volume_claim: Annotated[VolumeClaim | None, _ONE_VOLUME, rules.NEVER] = Field(
        default=None,
        description=(
            "The PersistentVolumeClaim to create on a cluster. All parameter servers mount it. A job with "
            "existingClaim or resumeFrom has a claim already. A job with one parameter server and no standby "
            "may do without any: its checkpoints are then in an emptyDir, and are lost with the pod."
        ),
    )
    existing_claim: Annotated[str | None, rules.NEVER] = Field(
        default=None,
        pattern=CLAIM,
        description="A PersistentVolumeClaim that exists already, to write checkpoints to. It is not deleted "
        "with the job. If another job created it, it is kept while either job exists. If it holds "
        "checkpoints of a job of the same name, this job continues from them.",
    )
    resume_from: Annotated[ResumeFrom | None, rules.NEVER] = Field(
        default=None,
        description="Continue from the checkpoints of an earlier job, on a cluster. This job takes the claim "
        "over and writes its own checkpoints to it. A claim without retain is deleted when neither job "
        "exists any more.",
    )
