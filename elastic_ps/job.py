"""The TrainingJob: what a person writes, and what is reported back.

These models are the single source of the resource's shape. The local launcher reads job files with
them, the operator reads custom resources with them and generates the CRD from them. The module loads
neither torch nor anything of Kubernetes.

Field names are snake_case in Python and camelCase in YAML. Unknown fields are errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

from elastic_ps.errors import InvalidJob

GROUP = "elastic-ps.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"

_DURATION = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(value: object) -> timedelta:
    """Read a duration as Kubernetes writes it: `30s`, `1m30s`, `500ms`.

    Raises:
        ValueError: `value` is not such a string (nor already a timedelta).
    """
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str) or not re.match(_DURATION, value):
        raise ValueError(f"{value!r} is not a duration; write it like 30s, 1m30s or 500ms")
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", value)
    return timedelta(seconds=sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts))


def format_duration(value: timedelta) -> str:
    """Write a duration so that `parse_duration` reads it back."""
    milliseconds = round(value.total_seconds() * 1000)
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


Duration: TypeAlias = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration),
    WithJsonSchema({"type": "string", "pattern": _DURATION}),
]
PodTemplate: TypeAlias = dict[str, JsonValue]
_M = TypeVar("_M", bound=BaseModel)


class CamelModel(BaseModel):
    """Fields in camel case, as in YAML and JSON; unknown ones are refused."""

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, alias_generator=to_camel, validate_default=True
    )


class VolumeClaim(CamelModel):
    """The volume that holds the checkpoints on a cluster."""

    storage: str = Field(default="1Gi", pattern=r"^[0-9]+(\.[0-9]+)?([EPTGM]i?|Ki|k)?$")
    storage_class_name: str | None = Field(default=None, description="The cluster's default if unset.")
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] | None = Field(
        default=None,
        description="ReadWriteOnce if unset; ReadWriteMany lets a standby have a node of its own.",
    )


class Checkpoint(CamelModel):
    """When the parameter server writes its state to disk, and where."""

    interval: Duration = Field(default=timedelta(seconds=30), description="Time between two checkpoints.")
    every_versions: int | None = Field(
        default=None, ge=1, description="Also write one when this many versions have passed since the last."
    )
    keep: int = Field(default=3, ge=1, description="How many checkpoints stay on disk.")
    path: str | None = Field(
        default=None, description="A directory, for local runs; on a cluster the volume is used."
    )
    volume_claim: VolumeClaim | None = Field(
        default=None,
        description=(
            "On a cluster: the claim to create, which all servers mount. With one server it may be left out: "
            "then an emptyDir is used, which is lost with the pod."
        ),
    )


Durability: TypeAlias = Literal["checkpoint", "standby"]


class ParameterServer(CamelModel):
    """The processes that hold the model."""

    replicas: int = Field(default=1, ge=1, le=64, description="Shards: the buckets are shared out over them.")
    bucket_bytes: int = Field(
        default=4 * 1024 * 1024,
        ge=1024,
        le=256 * 1024 * 1024,
        description="Target size of a bucket, the unit of push, optimizer step and pull, in bytes.",
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    durability: Durability = Field(
        default="checkpoint",
        description=(
            "What a lost parameter server costs: checkpoint, the rounds since the last checkpoint, which are "
            "trained again; standby, none: a second process for each shard has every round before it counts."
        ),
    )
    template: PodTemplate = Field(
        default_factory=dict, description="PodTemplateSpec, merged over the default one."
    )


class Worker(CamelModel):
    """The processes that compute gradients."""

    replicas: int = Field(default=1, ge=1, description="How many; may change while the job runs.")
    min_replicas: int = Field(default=1, ge=1, description="The job runs on, Degraded, with this many.")
    max_replicas: int | None = Field(default=None, ge=1, description="An upper bound on replicas.")
    lease_duration: Duration = Field(
        default=timedelta(seconds=10),
        description="A worker that is silent for this long is declared gone.",
    )
    progress_timeout: Duration = Field(
        default=timedelta(minutes=30),
        description="A worker for whose step the others have waited for this long is declared hung and "
        "replaced, which counts against backoffLimit. Longer than the longest step, the first one (which may "
        "compile or download) included. 0s: never.",
    )
    template: PodTemplate = Field(
        default_factory=dict, description="PodTemplateSpec, merged over the default one."
    )

    @model_validator(mode="after")
    def _within_bounds(self) -> Worker:
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(f"minReplicas {self.min_replicas} is above maxReplicas {self.max_replicas}")
        self.check_replicas(self.replicas)
        return self

    def check_replicas(self, replicas: int) -> None:
        """Raise ValueError, with the bounds, where `replicas` is not a possible number of workers."""
        if replicas < self.min_replicas:
            raise ValueError(f"replicas {replicas} is below minReplicas {self.min_replicas}")
        if self.max_replicas is not None and replicas > self.max_replicas:
            raise ValueError(f"replicas {replicas} is above maxReplicas {self.max_replicas}")


class Consistency(CamelModel):
    """When gradients become a new version of the model."""

    mode: Literal["sync", "bounded"] = Field(
        default="sync",
        description="sync: a version is made when every worker that computes has pushed its step, of all of "
        "them; bounded: as soon as somebody has, and who is slow does so later, with bounded staleness.",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=1,
        description="With mode bounded: the most versions that may be made between the one that a gradient "
        "is computed on and the one that it goes into. Who would make one more waits for the slowest. Each "
        "worker makes versions: for a worker that takes as long as n steps of m others, about n times m.",
    )
    deterministic: bool = Field(
        default=False,
        description="Runs agree to the bit: worker.replicas workers each have a fixed share of the records, "
        "contributions are added in the order of worker index, and a round waits for a lost worker's "
        "replacement. Scaling has no effect.",
    )
    backup_workers: int = Field(
        default=0,
        ge=0,
        description="How many of the workers a round does without: those that are last to begin sending "
        "their gradients. Their records go to others.",
    )

    @property
    def waits_for_all(self) -> bool:
        """Whether each version is made of the steps of all workers that compute."""
        return self.mode == "sync" and not self.backup_workers

    @model_validator(mode="after")
    def _check_staleness(self) -> Consistency:
        if self.mode == "bounded" and self.max_staleness is None:
            raise ValueError(
                "mode bounded needs maxStaleness, a number of versions: about how many steps all the others "
                "make together while the slowest worker makes one"
            )
        if self.mode != "bounded" and self.max_staleness is not None:
            raise ValueError(
                f"maxStaleness {self.max_staleness} with mode {self.mode}, in which no gradient is stale; "
                "leave it out, or set mode: bounded"
            )
        other = "backupWorkers" if self.backup_workers else "deterministic" if self.deterministic else ""
        if self.mode == "bounded" and other:
            raise ValueError(f"{other} belongs to mode sync; leave it out, or set mode: sync")
        return self

    @model_validator(mode="after")
    def _check_backup_workers(self) -> Consistency:
        if self.deterministic and self.backup_workers:
            raise ValueError(
                f"backupWorkers {self.backup_workers} with deterministic: true; who is late differs from run "
                "to run, so leave one of the two out"
            )
        return self


class Compression(CamelModel):
    """What a gradient looks like on the wire."""

    codec: Literal["none"] = Field(default="none", description="none: the tensor's own bytes.")


class Data(CamelModel):
    """How records are handed out to the workers."""

    shard_records: int = Field(default=256, ge=1, description="Most records handed to a worker at a time.")
    shuffle: bool = Field(default=True, description="A new order of the records in each epoch.")
    seed: int = Field(default=0, ge=0, description="Seed of that order.")


class RunPolicy(CamelModel):
    """When to stop, give up, and clean up."""

    suspend: bool = Field(default=False, description="Stop all pods after a checkpoint; false goes on.")
    backoff_limit: int = Field(default=3, ge=0, description="Failures of workers that the job survives.")
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, description="The job fails after this time."
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, description="The finished job is deleted after this time."
    )
    clean_pod_policy: Literal["Running", "None", "All"] = Field(
        default="Running", description="Which pods are deleted when the job is finished."
    )


class TrainingJobSpec(CamelModel):
    """What to train, on how many workers, and by which rules."""

    entrypoint: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$",
        description="module.path:function, imported and called in every worker.",
    )
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="Plain values, passed to the entrypoint as keyword arguments."
    )
    image: str | None = Field(default=None, description="The container image, unless a template names one.")
    parameter_server: ParameterServer = Field(default_factory=ParameterServer)
    worker: Worker = Field(default_factory=Worker)
    consistency: Consistency = Field(default_factory=Consistency)
    compression: Compression = Field(default_factory=Compression)
    data: Data = Field(default_factory=Data)
    run_policy: RunPolicy = Field(default_factory=RunPolicy)


class ObjectMeta(BaseModel):
    """The part of Kubernetes' metadata that a job needs; the rest is kept but not looked at."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?$")


class TrainingJob(CamelModel):
    """A TrainingJob as in its YAML file."""

    api_version: Literal["elastic-ps.dev/v1alpha1"]
    kind: Literal["TrainingJob"]
    metadata: ObjectMeta
    spec: TrainingJobSpec
    status: dict[str, JsonValue] | None = Field(default=None, description="Ignored on input.")

    @property
    def name(self) -> str:
        return self.metadata.name


def parse_job(document: object, *, source: str) -> TrainingJob:
    """Validate a job given as plain data; `source` (a file's name) starts the error message.

    Raises:
        InvalidJob: with one line for each wrong field: where, what was given, what was expected.
    """
    if not isinstance(document, Mapping):
        raise InvalidJob(f"{source}: expected a TrainingJob (a mapping), got {type(document).__name__}")
    return _validate(TrainingJob, document, source)


def parse_spec(document: Mapping[str, Any], *, source: str) -> TrainingJobSpec:
    """Like `parse_job`, for the `spec` alone."""
    return _validate(TrainingJobSpec, document, source)


def load_job(path: Path) -> TrainingJob:
    """Read a job from a YAML file.

    Raises:
        InvalidJob: the file cannot be read, is not YAML, or is not a valid TrainingJob.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidJob(f"cannot read the job file {path}: {reason}") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidJob(f"{path} is not valid YAML: {error}") from error
    return parse_job(document, source=str(path))


def _validate(model: type[_M], document: Mapping[str, Any], source: str) -> _M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        lines = [_explain(model, item) for item in error.errors()]
        raise InvalidJob("\n".join(f"{source}: {line}" for line in lines)) from None


def _explain(model: type[BaseModel], item: Any) -> str:
    """One line for one pydantic error, in the words of the YAML file."""
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _field_names(model, item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"unknown field {location!r}; {hint}"
    if item["type"] == "missing":
        return f"{location} is missing"
    message = item["msg"].removeprefix("Value error, ")
    return f"{location or 'job'}: {message[0].lower()}{message[1:]}, got {item['input']!r}"[:500]


def _field_names(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The YAML names of the fields at `location`, for suggestions."""
    for part in location:
        for name, field in model.model_fields.items():
            if part in (name, field.alias):
                kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
                nested = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
                if not nested:
                    return []
                model = nested[0]
    return [field.alias or name for name, field in model.model_fields.items()]
