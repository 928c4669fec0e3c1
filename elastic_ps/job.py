"""The spec of a TrainingJob. `elastic_ps.status` has its status.

These models are the single definition of the resource. The local launcher reads job files with them, the
operator reads custom resources with them, and the CRD is generated from them. The module imports neither
torch nor a Kubernetes client.

Field names are snake_case in Python and camelCase in YAML. Unknown fields are errors.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import yaml
from pydantic import (
    AfterValidator,
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
_CLAIM = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
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

    storage: str = Field(
        default="1Gi",
        pattern=r"^[0-9]+(\.[0-9]+)?([EPTGM]i?|Ki|k)?$",
        description="The size to request. It has to hold checkpoint.keep checkpoints and one more.",
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
        description="Whether the claim stays when the job is deleted. Another job can continue from it with "
        "checkpoint.resumeFrom. Delete it yourself when it is no longer needed.",
    )


class ResumeFrom(CamelModel):
    """The checkpoints of an earlier job, to continue from."""

    job: str | None = Field(
        default=None,
        pattern=_CLAIM,
        description="The earlier job, whose volumeClaim had retain. It must have ended.",
    )
    claim: str | None = Field(default=None, pattern=_CLAIM, description="The PersistentVolumeClaim itself.")

    @model_validator(mode="after")
    def _check_one(self) -> ResumeFrom:
        if (self.job is None) == (self.claim is None):
            raise ValueError("resumeFrom needs either job or claim, and not both")
        return self


class Checkpoint(CamelModel):
    """When the parameter server writes its state to disk, and where."""

    interval: Duration = Field(default=timedelta(seconds=30), description="The time between two checkpoints.")
    every_versions: int | None = Field(
        default=None,
        ge=1,
        description="Also write a checkpoint whenever this many versions have been made since the last one.",
    )
    keep: int = Field(default=3, ge=1, description="How many checkpoints to keep. Older ones are deleted.")
    path: str | None = Field(
        default=None,
        description="The directory for checkpoints of local runs. On a cluster, the volume is used instead.",
    )
    volume_claim: VolumeClaim | None = Field(
        default=None,
        description=(
            "The PersistentVolumeClaim to create on a cluster. All parameter servers mount it. A job with "
            "one parameter server and no standby may leave it out. Its checkpoints are then in an emptyDir, "
            "and are lost with the pod."
        ),
    )
    existing_claim: str | None = Field(
        default=None,
        pattern=_CLAIM,
        description="A PersistentVolumeClaim that exists already, to write checkpoints to. It is not deleted "
        "with the job. If it holds checkpoints of a job of the same name, this job continues from them.",
    )
    resume_from: ResumeFrom | None = Field(
        default=None,
        description="Continue from the checkpoints of an earlier job, on a cluster. This job takes the claim "
        "over and writes its own checkpoints to it.",
    )

    @model_validator(mode="after")
    def _check_one_volume(self) -> Checkpoint:
        given = {
            "volumeClaim": self.volume_claim,
            "existingClaim": self.existing_claim,
            "resumeFrom": self.resume_from,
        }
        if len(named := [name for name, value in given.items() if value is not None]) > 1:
            raise ValueError(f"{' and '.join(named)} are given; a job has one volume, so keep one of them")
        return self


Durability: TypeAlias = Literal["checkpoint", "standby"]


class ParameterServer(CamelModel):
    """The processes that hold the model."""

    replicas: int = Field(
        default=1, ge=1, le=64, description="The number of shards. Each holds a part of the model."
    )
    bucket_bytes: int = Field(
        default=4 * 1024 * 1024,
        ge=1024,
        le=256 * 1024 * 1024,
        description="The size of a bucket in bytes. Tensors are sent in buckets of about this size.",
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    durability: Durability = Field(
        default="checkpoint",
        description=(
            "What happens when a parameter server is lost. With checkpoint, the job goes back to the newest "
            "checkpoint, and the records since then are trained again. With standby, each shard has a second "
            "process that receives every round before it counts, so nothing is trained again."
        ),
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="A PodTemplateSpec. It is merged over the operator's default template.",
    )


class Worker(CamelModel):
    """The processes that compute gradients."""

    replicas: int = Field(
        default=1, ge=1, description="The number of workers. It may change while the job runs."
    )
    min_replicas: int = Field(
        default=1,
        ge=1,
        description="The smallest number of workers that replicas may be set to. The job is Running as soon "
        "as this many workers are ready.",
    )
    max_replicas: int | None = Field(
        default=None, ge=1, description="The largest number of workers that replicas may be set to."
    )
    lease_duration: Duration = Field(
        default=timedelta(seconds=10),
        description="If a worker sends nothing for this long, it is declared lost, and its records go to "
        "other workers.",
    )
    progress_timeout: Duration = Field(
        default=timedelta(minutes=30),
        description="If the other workers wait this long for one worker's step, that worker is declared hung "
        "and replaced. This counts against backoffLimit. Choose a longer time than the longest step takes; "
        "the first step may also compile or download something. With 0s no worker is ever declared hung.",
    )
    template: PodTemplate = Field(
        default_factory=dict,
        description="A PodTemplateSpec. It is merged over the operator's default template.",
    )

    @model_validator(mode="after")
    def _within_bounds(self) -> Worker:
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(f"minReplicas {self.min_replicas} is above maxReplicas {self.max_replicas}")
        self.check_replicas(self.replicas)
        return self

    def check_replicas(self, replicas: int) -> None:
        """Raise ValueError, which names the bound, if `replicas` is outside of the bounds."""
        if replicas < self.min_replicas:
            raise ValueError(f"replicas {replicas} is below minReplicas {self.min_replicas}")
        if self.max_replicas is not None and replicas > self.max_replicas:
            raise ValueError(f"replicas {replicas} is above maxReplicas {self.max_replicas}")


class ModeOption(NamedTuple):
    """A field of `Consistency` that one mode alone has.

    Attributes:
        field: its name in Python.
        mode: the mode.
        needed: what it says, if the mode needs it; "" if the mode can do without.
    """

    field: str
    mode: str
    needed: str = ""

    @property
    def name(self) -> str:
        """As in YAML."""
        return to_camel(self.field)


OPTIONS = (
    ModeOption(
        "max_staleness",
        "bounded",
        "the number of versions that the other workers may make while one worker computes a step",
    ),
    ModeOption("reads", "async"),
    ModeOption("staleness_scale", "async"),
    ModeOption("gradients", "accumulate", "the number of steps that each version is made of"),
)
"""The fields of `Consistency` that belong to one mode. The CRD has its rules from here."""


class Consistency(CamelModel):
    """When gradients become a new version of the model."""

    mode: Literal["sync", "bounded", "accumulate", "async"] = Field(
        default="sync",
        description="With sync, each version is made of one step of every worker, so fast workers wait for "
        "slow ones. With bounded, a version is made as soon as one worker has finished a step. A slow "
        "worker's step goes into a later version, and maxStaleness limits how much later. With accumulate, "
        "each version is made of a fixed number of steps, from whichever workers have them; see gradients. "
        "With async, each step makes a version as soon as it is there, however old the version is that it "
        "was computed on.",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=1,
        description="Only with mode bounded, and needed there: how many versions the other workers may make "
        "while one worker computes a step. After that they wait for it. Example: three workers make 5 steps "
        "each while a fourth makes one. They make up to 15 versions meanwhile, so with 16 they do not wait.",
    )
    gradients: int | None = Field(
        default=None,
        ge=1,
        description="Only with mode accumulate, and needed there: how many steps each version is made of, "
        "all computed on the version before. If there are fewer workers, some of them compute several steps "
        "for a version. If there are more, the steps that come last are dropped, and their records go to "
        "other workers. The last version of a job may be made of fewer.",
    )
    reads: Literal["consistent", "inconsistent"] | None = Field(
        default=None,
        description="Only with mode async; consistent if unset. With consistent, a worker reads one version "
        "wholly, and the next version is made when all that read have finished. With inconsistent, versions "
        "are made meanwhile, so some of the parameters that a worker reads may be newer than others.",
    )
    staleness_scale: Literal["none", "inverse"] | None = Field(
        default=None,
        description="Only with mode async; none if unset. With inverse, the learning rate of a step is "
        "divided by one more than its staleness: a step that is 3 versions old is made with a quarter of the "
        "rate.",
    )
    deterministic: bool = Field(
        default=False,
        description="With true, two runs of the job give the same model, bit for bit. Each worker has a "
        "fixed share of the records, and gradients are added in the order of the workers' indexes. When a "
        "worker is lost, the others wait for its replacement. worker.replicas cannot change while the job "
        "runs.",
    )
    backup_workers: int = Field(
        default=0,
        ge=0,
        description="How many slow workers each round leaves out. Example: with 4 workers and 1, a version "
        "is made of the first 3 steps. The fourth step is dropped, and its records go to other workers.",
    )

    @property
    def waits_for_all(self) -> bool:
        """Whether each version is made of the steps of all workers that compute."""
        return self.mode == "sync" and not self.backup_workers

    @property
    def may_be_late(self) -> bool:
        """Whether a version may be complete without a worker's step, which is then dropped."""
        return self.backup_workers > 0 or self.mode == "accumulate"

    @property
    def may_be_stale(self) -> bool:
        """Whether a step may go into a later version than the one after that it was computed on."""
        return self.mode in ("bounded", "async")

    @property
    def most_stale(self) -> float:
        """The most versions that may be made between the one of a step and the one that it goes into."""
        return math.inf if self.mode == "async" else self.max_staleness or 0

    @property
    def reads_one_version(self) -> bool:
        """Whether no version is made while a worker reads the one that it is to compute on."""
        return self.waits_for_all or (self.mode == "async" and self.reads != "inconsistent")

    @property
    def may_assign(self) -> bool:
        """Whether a script may assign the model's values (`session.assign`)."""
        return self.waits_for_all and not self.deterministic

    @model_validator(mode="after")
    def _check_options(self) -> Consistency:
        for option in OPTIONS:
            value = getattr(self, option.field)
            if self.mode == option.mode and option.needed and value is None:
                raise ValueError(f"mode {option.mode} needs {option.name}: {option.needed}")
            if self.mode != option.mode and value is not None:
                raise ValueError(
                    f"{option.name} {value} has no meaning with mode {self.mode}; leave it out, or set mode: "
                    f"{option.mode}"
                )
        other = "backupWorkers" if self.backup_workers else "deterministic" if self.deterministic else ""
        if self.mode != "sync" and other:
            raise ValueError(f"{other} works only with mode sync; leave it out, or set mode: sync")
        return self

    @model_validator(mode="after")
    def _check_backup_workers(self) -> Consistency:
        if self.deterministic and self.backup_workers:
            raise ValueError(
                f"backupWorkers {self.backup_workers} cannot be combined with deterministic: true, because "
                "which worker is late differs from run to run; leave one of the two out"
            )
        return self


CODECS = ("none", "bf16", "fp16", "int8", "int4", "topk", "signsgd")
"""Names of codecs; a codec of the user's own is named as module:Class."""

CODEC = Annotated[str, AfterValidator(lambda name: _check_codec(name))]


def _check_codec(name: str) -> str:
    own = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name)
    if name in CODECS or own:
        return name
    nearest = difflib.get_close_matches(name, CODECS, 1)
    hint = f"; {nearest[0]} is the nearest" if nearest else ""
    raise ValueError(
        f"there is no codec {name!r}; expected one of {', '.join(CODECS)}, or module:Class{hint}"
    )


class CompressionRule(CamelModel):
    """A codec for some of the parameters."""

    match: str = Field(
        min_length=1,
        description="A pattern of parameter names, as of files: *.bias matches layer1.bias. The first rule "
        "that matches a parameter counts.",
    )
    codec: CODEC = Field(description="As compression.codec.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="As compression.options.")


class Compression(CamelModel):
    """What a gradient looks like on the wire."""

    codec: CODEC = Field(
        default="none",
        description="How workers encode gradients. With none, they are sent as they are. bf16 and fp16 take "
        "half the bytes, int8 a quarter, int4 an eighth, signsgd a twentieth, and topk sends only the "
        "largest ones. With topk and signsgd, what a step does not send is added to the worker's next step. "
        "A codec of your own is named as module:Class.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Arguments of the codec: block, the number of elements that share a scale (int8, int4, "
        "signsgd), or ratio, the share of elements that is sent (topk).",
    )
    rules: list[CompressionRule] = Field(
        default_factory=list, description="Other codecs for some of the parameters, by their names."
    )


class Data(CamelModel):
    """How records are handed out to the workers."""

    shard_records: int = Field(
        default=256, ge=1, description="The largest number of records that a worker is given at once."
    )
    shuffle: bool = Field(default=True, description="Whether each epoch has the records in a new order.")
    seed: int = Field(default=0, ge=0, description="The seed of the records' order.")


class OnExitCodes(CamelModel):
    """Which exit statuses of a worker's container a rule is for."""

    operator: Literal["In", "NotIn"] = Field(
        default="In", description="Whether the rule is for these exit statuses, or for all others but 0."
    )
    values: list[Annotated[int, Field(ge=1, le=255)]] = Field(description="Exit statuses from 1 to 255.")


class OnPodCondition(CamelModel):
    """Which condition of a worker's pod a rule is for."""

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
        default=None, description="The rule is for workers with these exit statuses."
    )
    on_pod_conditions: list[OnPodCondition] | None = Field(
        default=None, description="The rule is for pods that have one of these conditions."
    )

    @model_validator(mode="after")
    def _check_one(self) -> FailureRule:
        if (self.on_exit_codes is None) == (self.on_pod_conditions is None):
            raise ValueError("a rule needs either onExitCodes or onPodConditions, and not both")
        return self


class PodFailurePolicy(CamelModel):
    """What follows from a worker's end, in the manner of a Kubernetes Job."""

    rules: list[FailureRule] = Field(
        description="Looked at in this order; the first that fits decides. If none does, each end other than "
        "0 counts, except disruptions."
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
        description="The job fails when its workers have failed more often than this. On a cluster, each "
        "exit status other than 0 counts, and so do signals and a lack of memory. Disruptions do not: "
        "eviction, preemption, deletion, a lost node. On one machine, scripts that fail count. A "
        "crash, such as a segmentation fault, counts if the same worker's last crash had the same "
        "cause and the worker has trained nothing since. A worker that is killed from outside does "
        "not count.",
    )
    pod_failure_policy: PodFailurePolicy | None = Field(
        default=None,
        description="Rules for a cluster: which ends of a worker count against backoffLimit, which do not, "
        "and which end the job.",
    )
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, description="The job fails when it has run for this many seconds."
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, description="The job is deleted this many seconds after it has finished."
    )
    clean_pod_policy: Literal["Running", "None", "All"] = Field(
        default="Running",
        description="Which pods are deleted when the job has finished: those that still run, none, or all.",
    )


class TrainingJobSpec(CamelModel):
    """What to train, on how many workers, and with which guarantees."""

    entrypoint: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$",
        description="The training function, as module.path:function. Every worker imports and calls it.",
    )
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="Keyword arguments for the entrypoint: plain YAML values."
    )
    image: str | None = Field(
        default=None, description="The container image of all pods. A template may name a different one."
    )
    parameter_server: ParameterServer = Field(default_factory=ParameterServer)
    worker: Worker = Field(default_factory=Worker)
    consistency: Consistency = Field(default_factory=Consistency)
    compression: Compression = Field(default_factory=Compression)
    data: Data = Field(default_factory=Data)
    run_policy: RunPolicy = Field(default_factory=RunPolicy)


class ObjectMeta(BaseModel):
    """The part of Kubernetes' metadata that a job needs; other fields are kept and ignored."""

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
        InvalidJob: a field is wrong. The message has a line for each: where, what was given and expected.
    """
    if not isinstance(document, Mapping):
        raise InvalidJob(f"{source}: expected a TrainingJob (a mapping), got {type(document).__name__}")
    return _validate(TrainingJob, document, source)


def parse_spec(document: Mapping[str, Any], *, source: str) -> TrainingJobSpec:
    """Like `parse_job`, for the `spec` alone."""
    return _validate(TrainingJobSpec, document, source)


class _DuplicateKey(yaml.YAMLError):
    """A mapping has the same key twice. YAML's own loader would drop the first value."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, as `kubectl` does. A mapping may override keys that `<<` merges into it."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _DuplicateKey(
                    f"{key.value!r} is given twice, on line {lines[key.value]} and on line {line}; keep one"
                )
            lines[key.value] = line
        return node


def load_job(path: Path) -> TrainingJob:
    """Read a job from a YAML file.

    Raises:
        InvalidJob: the file cannot be read, is not YAML, gives a key twice, or is not a valid TrainingJob.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidJob(f"cannot read the job file {path}: {reason}") from error
    try:
        document = yaml.load(text, _StrictLoader)
    except _DuplicateKey as error:
        raise InvalidJob(f"{path}: {error}") from None
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
