"""The spec of a TrainingJob. Some parts have modules of their own, and `status` has the status.

These models are the single definition of the resource. The local launcher reads job files with them, the
operator reads custom resources with them, and the CRD is generated from them. The module imports neither
torch nor a Kubernetes client.

Field names are snake_case in Python and camelCase in YAML. Unknown fields are errors.
"""

from __future__ import annotations

import difflib
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
    ValidationError,
    model_validator,
)

from elastic_ps.api import manifest, rules
from elastic_ps.api.checkpoints import CLAIM, STORAGE, Checkpoint
from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.api.fields import AUTO, CamelModel, Duration, PodTemplate
from elastic_ps.api.policies import RunPolicy
from elastic_ps.errors import InvalidJob

GROUP = "elastic-ps.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"

_ENTRYPOINT = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
ImportPath: TypeAlias = Annotated[str, Field(pattern=_ENTRYPOINT, max_length=253)]
"""A user's class or function, as `module:name`."""

_NAME = r"^[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?$"
_FORMS = {
    _ENTRYPOINT: "expected module:name, such as train:main",
    _NAME: "expected at most 52 characters of a-z, 0-9 and '-', and no '-' at the ends",
    CLAIM: "expected at most 253 characters of a-z, 0-9, '-' and '.', with a letter or digit at the ends",
    STORAGE: "expected a size, such as 500Mi or 10Gi",
}
"""The messages for strings that do not match these patterns."""

_M = TypeVar("_M", bound=BaseModel)


Durability: TypeAlias = Literal["checkpoint", "standby"]
OverlapSetting: TypeAlias = Literal["auto", "always", "never"]

BUCKET_BYTES = 4 * 1024 * 1024
"""The size of a bucket, in bytes, if the job names none and none was chosen."""
SMALLEST_BUCKET = 1024
"""The smallest size of a bucket, in bytes."""


_BUCKETS = rules.Rule(
    cel=f"self.bucketBytes == 0 || self.bucketBytes >= {SMALLEST_BUCKET}",
    message=f"parameterServer.bucketBytes must be 0 or at least {SMALLEST_BUCKET}",
    holds=lambda server: not 0 < server.bucket_bytes < SMALLEST_BUCKET,
    says=lambda server: (
        f"bucketBytes is {server.bucket_bytes}; expected at least {SMALLEST_BUCKET}, or 0 to have the "
        "size chosen when the job begins"
    ),
)
_SHARED = rules.Rule(
    cel="(self.durability != 'standby' && self.replicas == 1) || has(self.checkpoint.volumeClaim) || "
    "has(self.checkpoint.existingClaim) || has(self.checkpoint.resumeFrom)",
    message="a job with several shards or with standbys needs checkpoint.volumeClaim, existingClaim or "
    "resumeFrom, because shards and standbys share a volume",
)


class ParameterServer(CamelModel):
    """The processes that hold the model."""

    replicas: Annotated[int, rules.NEVER] = Field(
        default=1, ge=1, le=64, description="The number of shards. Each holds a part of the model."
    )
    bucket_bytes: Annotated[int, _BUCKETS, rules.NEVER] = Field(
        default=0,
        ge=0,
        le=256 * 1024 * 1024,
        description="The size of a bucket in bytes, at least 1024. Tensors are sent in buckets of about this "
        "size. With 4 MiB or less, a model that would fill fewer than eight buckets gets smaller ones. "
        "With 0 the size is chosen when the job begins: the first worker measures its network. Jobs with "
        "strategy all-reduce, consistency.deterministic or codec powersgd then get 4 MiB.",
    )
    overlap: Annotated[OverlapSetting, rules.NEVER] = Field(
        default="auto",
        description="Whether workers send gradients during backward. With auto they do if the gradients fill "
        "several buckets. If the workers run on the parameter server's host and take every core of it, "
        "buckets have 64 MiB, because nothing can run beside backward there. With always, buckets stay "
        "small. With never, gradients are sent in optimizer.step(), as in modes bounded and async, "
        "and if the script passes overlap=False or several optimizers to session.optimizer. The status "
        "says what a job does, and why.",
    )
    drafts: Annotated[bool, rules.NEW_PODS] = Field(
        default=True,
        description="With true, in mode sync, a parameter server computes and sends the next values of a "
        "bucket (a draft) as soon as it has all gradients of that bucket, while those of other buckets "
        "still arrive. It "
        "keeps the old values until the step is complete, which takes a second copy of values, sums and "
        "optimizer state. No drafts are made for workers on its own host.",
    )
    draft_bytes: Annotated[int, rules.NEW_PODS] = Field(
        default=2 * 1024 * 1024 * 1024,
        ge=0,
        le=2**44,
        description="How many bytes the second copy for drafts may take on each parameter server. If it "
        "would take more, the parameter server makes no drafts, and sends values when the whole step is "
        "complete.",
    )
    optimizers: Annotated[list[ImportPath], rules.NEW_PODS] = Field(
        default_factory=list,
        max_length=16,
        description="Classes of optimizers of your own that scripts may use besides those of torch.optim, as "
        "module:Class. The parameter server imports these and no others, so its image has to have them. "
        "Each must treat every element of a parameter by itself, unless its attribute whole_tensors is "
        "true: then it may treat each parameter as a whole.",
    )
    tensor_bytes: Annotated[int, rules.NEW_PODS] = Field(
        default=1024 * 1024 * 1024,
        ge=0,
        le=2**44,
        description="How many bytes the tensors that scripts keep with session.server may take on each "
        "parameter server. They need memory besides the model and its optimizer's state.",
    )
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    durability: Annotated[Durability, _SHARED, rules.NEVER] = Field(
        default="checkpoint",
        description=(
            "The protection against the loss of a parameter server. With checkpoint, the job goes back to "
            "the newest checkpoint and trains later records again. With standby, each shard has a second "
            "process that receives every version before the workers do, so nothing is trained again."
        ),
    )
    template: Annotated[PodTemplate, rules.PATCH] = Field(
        default_factory=dict,
        description="A PodTemplateSpec. It is merged over the operator's default template.",
    )

    @property
    def slice_bytes(self) -> int:
        """The largest slice of a tensor of `session.server`, in bytes."""
        return self.bucket_bytes or BUCKET_BYTES


MOST_WORKERS = 10_000
"""The largest number of workers: more than a parameter server can serve, and few enough for the operator."""


def _check_any(replicas: object) -> object:
    if replicas == 0 and isinstance(replicas, int):
        raise ValueError(
            "expected 1 or more, got 0. To stop all workers of a job on a cluster until later, set "
            "runPolicy.suspend: true"
        )
    return replicas


class Worker(CamelModel):
    """The processes that compute gradients."""

    replicas: Annotated[
        int,
        BeforeValidator(_check_any),
        rules.AtLeast("min_replicas", do="; set replicas to {bound} or more, or a smaller minReplicas"),
        rules.AtMost("max_replicas", do="; set replicas to {bound} or less, or a larger maxReplicas"),
        rules.SCALE,
    ] = Field(
        default=1,
        ge=1,
        le=MOST_WORKERS,
        description="The number of workers. It may change while the job runs. To have none for a while, set "
        "runPolicy.suspend.",
    )
    min_replicas: Annotated[int, rules.PATCH] = Field(
        default=1,
        ge=1,
        description="The smallest number of workers that replicas may be set to. The job is Running as soon "
        "as this many workers are ready.",
    )
    max_replicas: Annotated[int | None, rules.PATCH] = Field(
        default=None, ge=1, description="The largest number of workers that replicas may be set to."
    )
    processes: Annotated[int, rules.NEW_PODS] = Field(
        default=1,
        ge=1,
        le=64,
        description="How many processes each worker has, on one host. They share each batch, add up their "
        "gradients among themselves, and take part in the job as one worker. So the parameter server serves "
        "one client instead of several. In mode local they make the same local steps. If one "
        "process dies, the whole worker dies.",
    )
    lease_duration: Annotated[Duration, rules.NEW_PODS] = Field(
        default=timedelta(seconds=10),
        description="If a worker sends nothing for this long, it is declared lost, and its records go to "
        "other workers.",
    )
    progress_timeout: Annotated[Duration, rules.NEW_PODS] = Field(
        default=timedelta(minutes=30),
        description="If the other workers wait this long for one worker's step, that worker is declared hung "
        "and replaced. This counts against backoffLimit. Choose a longer time than the longest step takes; "
        "the first step may also compile or download something. With 0s no worker is ever declared hung.",
    )
    template: Annotated[PodTemplate, rules.PATCH] = Field(
        default_factory=dict,
        description="A PodTemplateSpec. It is merged over the operator's default template.",
    )


class Best(CamelModel):
    """Which evaluated checkpoint is the best, and is kept however old it is."""

    metric: str = Field(
        min_length=1, description="A metric that the evaluator reports, for example loss or prec@1."
    )
    mode: Literal["min", "max"] = Field(description="The best value: the lowest (min) or the highest (max).")


class Evaluator(CamelModel):
    """A process that evaluates the checkpoints while the job trains. It takes no part in the training."""

    entrypoint: Annotated[str, rules.NEVER] = Field(
        pattern=_ENTRYPOINT,
        description="The evaluator's function, as module.path:function. It loops over "
        "elastic_ps.checkpoints().",
    )
    arguments: Annotated[dict[str, JsonValue], rules.NEVER] = Field(
        default_factory=dict, description="Keyword arguments for the entrypoint: plain YAML values."
    )
    every: Annotated[int | None, rules.NEVER] = Field(
        default=None,
        ge=1,
        description="Write and evaluate a checkpoint whenever this many versions have been made. If unset, "
        "every checkpoint that parameterServer.checkpoint asks for is evaluated. The last version is "
        "always evaluated.",
    )
    backlog: Annotated[int, rules.NEVER] = Field(
        default=4,
        ge=1,
        description="How many checkpoints may wait for the evaluator. They are kept besides "
        "checkpoint.keep. If there are more, the oldest is not evaluated; the status counts it as missed.",
    )
    best: Annotated[Best | None, rules.NEVER] = Field(
        default=None,
        description="Keep the best checkpoint by a metric. If unset, no checkpoint is kept as the best.",
    )
    finish_timeout: Annotated[Duration, rules.PATCH] = Field(
        default=timedelta(minutes=5),
        description="How long the job waits for the evaluator after the last worker has ended. Then the job "
        "ends without the remaining evaluations.",
    )
    template: Annotated[PodTemplate, rules.PATCH] = Field(
        default_factory=dict,
        description="A PodTemplateSpec. It is merged over the operator's default template.",
    )


_SINGLE = rules.Rule(
    cel="!has(self.blocks) || self.blocks != 1 || self.buffer == 1",
    message="data.order.buffer works only with blocks of several records",
    holds=lambda order: order.blocks != 1 or order.buffer == 1,
    says=lambda order: (
        f"buffer is {order.buffer}, but blocks is 1, so all records are shuffled together; leave buffer out"
    ),
)


class BlockOrder(CamelModel):
    """How blocks of consecutive records stay together when they are shuffled."""

    blocks: int | None = Field(
        default=None,
        ge=1,
        description="The number of consecutive records in a block. Blocks are shuffled, and so are the "
        "records within each. A worker that has begun a block is given the rest of it. If unset, the data "
        "set's method block_sizes() gives the sizes. Without that method, and with 1, there are no blocks.",
    )
    buffer: Annotated[int, _SINGLE] = Field(
        default=1,
        ge=1,
        le=1024,
        description="How many blocks are shuffled together. A worker has that many open at a time.",
    )


class Data(CamelModel):
    """How records are handed out to the workers."""

    shard_records: int = Field(
        default=256, ge=1, description="The largest number of records that a worker is given at once."
    )
    shuffle: bool = Field(default=True, description="If true, each epoch has the records in a new order.")
    order: BlockOrder = Field(default_factory=BlockOrder)
    # A checkpoint's numbers have no more bits.
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="The seed of the records' order.")


_FIXED_SHARES = rules.Rule(
    cel="!oldSelf.consistency.deterministic || has(oldSelf.consistency.globalBatchSize) || "
    "self.worker.replicas == oldSelf.worker.replicas",
    message="worker.replicas cannot change with consistency.deterministic unless globalBatchSize is set: "
    "each worker has a fixed share of the records",
)
_EVALUATOR = rules.Rule(
    cel="has(self.evaluator) == has(oldSelf.evaluator)",
    message="evaluator cannot change: it can be neither added nor removed; create a new job for that",
)


def _refuse_all_reduce(spec: TrainingJobSpec) -> str:
    """Why a field does not go with strategy all-reduce; "" if all do."""
    server, consistency = spec.parameter_server, spec.consistency
    if not spec.all_reduce:
        return ""
    said = consistency.model_dump(by_alias=True, exclude_defaults=True)
    because = "each version is made of one step of every worker"
    if server.replicas > 1:
        given = f"parameterServer.replicas {server.replicas}"
        because = "each worker has the whole model, and makes the step"
    elif server.durability == "standby":
        given = "parameterServer.durability standby"
        because = "the workers have the model, and a lost one costs nothing"
    elif server.overlap != "auto":
        given, because = f"parameterServer.overlap {server.overlap}", "gradients are not sent to it"
    elif consistency.mode != "sync":
        given = f"consistency.mode {consistency.mode}"
    elif said:
        given, because = f"consistency.{next(iter(said))}", f"{because} that is there"
    elif spec.compression != Compression():
        named = ", ".join(spec.compression.model_dump(by_alias=True, exclude_defaults=True))
        given, because = f"compression ({named})", "gradients travel as torch.distributed sends them"
    elif spec.worker.processes > 1:
        given = f"worker.processes {spec.worker.processes}"
        because = "each process makes its own step; use more replicas"
    else:
        return ""
    return (
        f"{given} does not work with strategy all-reduce, where {because}; leave it out, or set strategy: "
        "parameter-server"
    )


# The API server checks what cannot be corrected later.
_ALL_REDUCE = rules.Rule(
    cel="self.strategy != 'all-reduce' || (self.parameterServer.replicas == 1 && "
    "self.parameterServer.durability == 'checkpoint' && self.parameterServer.overlap == 'auto' && "
    "self.consistency.mode != 'local')",
    message="parameterServer.replicas, durability and overlap, and consistency.mode local, do not work with "
    "strategy all-reduce: each worker has the whole model, and makes the step",
    holds=lambda spec: not _refuse_all_reduce(spec),
    says=_refuse_all_reduce,
)


class TrainingJobSpec(CamelModel):
    """What to train, on how many workers, and with which guarantees."""

    entrypoint: Annotated[str, rules.NEVER] = Field(
        pattern=_ENTRYPOINT,
        description="The training function, as module.path:function. Every worker imports and calls it.",
    )
    arguments: Annotated[dict[str, JsonValue], rules.NEVER] = Field(
        default_factory=dict, description="Keyword arguments for the entrypoint: plain YAML values."
    )
    image: Annotated[str | None, rules.PATCH] = Field(
        default=None, description="The container image of all pods. A template may name a different one."
    )
    parameter_server: ParameterServer = Field(default_factory=ParameterServer)
    worker: Annotated[
        Worker,
        _FIXED_SHARES,
        rules.AtMost(
            "consistency.global_batch_size",
            of="replicas",
            because=", so some workers would never have a record",
            do="; set worker.replicas to {bound} or less, or a larger globalBatchSize",
        ),
    ] = Field(default_factory=Worker)
    evaluator: Annotated[Evaluator | None, _EVALUATOR] = Field(
        default=None, description="A process that evaluates the checkpoints. If unset, there is none."
    )
    strategy: Annotated[Literal["parameter-server", "all-reduce"], _ALL_REDUCE, rules.NEVER] = Field(
        default="parameter-server",
        description="How the gradients of a version are added up. With parameter-server, workers send them "
        "to the parameter servers, which make the optimizer's step. With all-reduce, workers add them up "
        "among themselves, through torch.distributed, and each makes the step. The parameter server then "
        "counts the records, decides which workers take part, and gets the values only for checkpoints.",
    )
    unencrypted_all_reduce: Annotated[bool, rules.OnlyWith("strategy", ("all-reduce",)), rules.PATCH] = Field(
        default=False,
        description="Allows strategy all-reduce in a job with TLS certificates, although torch.distributed "
        "does not use them: whoever reaches the workers' ports can read and change gradients and values. If "
        "false, such a job is refused. Calls to the parameter server are encrypted all the same.",
    )
    consistency: Annotated[
        Consistency,
        rules.AtMost(
            "worker.min_replicas",
            of="quorum",
            do=", so the job may have too few workers for a version. Set worker.minReplicas to {given} or "
            "more, or a smaller quorum",
        ),
        rules.SET,
    ] = Field(default_factory=Consistency)
    compression: Annotated[Compression, rules.SET] = Field(default_factory=Compression)
    data: Annotated[Data, rules.NEVER] = Field(default_factory=Data)
    run_policy: Annotated[RunPolicy, rules.PATCH] = Field(default_factory=RunPolicy)

    @property
    def chooses_buckets(self) -> bool:
        """Whether the bucket size is chosen by measured times at the start of the job."""
        named = bool(self.parameter_server.bucket_bytes)
        fixed = self.all_reduce or self.consistency.deterministic or self.compression.wants_whole_matrices
        return not (named or fixed)

    @property
    def all_reduce(self) -> bool:
        """Whether the workers sum gradients among themselves, and make the optimizer steps."""
        return self.strategy == "all-reduce"

    @property
    def steps_on_workers(self) -> bool:
        """Whether the script's own optimizer makes the steps, and its state is on the workers."""
        return self.all_reduce or self.consistency.mode == "local"

    def refuse_unencrypted(self, *, secured: bool) -> str:
        """Why a job must not start whose workers would connect to each other; "" if it may.

        Args:
            secured: whether the job's processes have certificates.
        """
        if not self.all_reduce or self.unencrypted_all_reduce or not secured:
            return ""
        return (
            "with strategy all-reduce the workers speak to each other through torch.distributed, where "
            "nothing is encrypted and nobody is asked for a certificate; but the processes of this job have "
            "certificates. If nobody else reaches the network between the workers, set "
            "unencryptedAllReduce: true; else use strategy: parameter-server"
        )

    def check_replicas(self, replicas: int) -> None:
        """Raise ValueError, which names the limit, if the job cannot change to so many workers."""
        if replicas > MOST_WORKERS:
            raise ValueError(f"replicas is {replicas}; expected at most {MOST_WORKERS}")
        worker = self.worker.model_copy(update={"replicas": replicas})
        rules.check(worker)
        rules.check(self.model_copy(update={"worker": worker}))
        if self.consistency.fixed_workers and replicas != self.worker.replicas:
            raise ValueError(_FIXED_SHARES.message)

    @model_validator(mode="after")
    def _check_momentum(self) -> TrainingJobSpec:
        if self.compression.momentum and self.consistency.mode == "local":
            raise ValueError(
                f"compression has momentum {self.compression.momentum}, which needs gradients, but in "
                "consistency.mode local workers send changes of the model. Leave it out, and set a momentum "
                "in the script's optimizer"
            )
        return self

    @model_validator(mode="after")
    def _check_same_bits(self) -> TrainingJobSpec:
        if self.consistency.deterministic and self.compression.codec == AUTO:
            raise ValueError(
                "compression.codec auto cannot be combined with consistency.deterministic: true, because it "
                "chooses by measured times; name a codec"
            )
        return self


class ObjectMeta(BaseModel):
    """The metadata that a job needs. Other fields of Kubernetes' metadata are kept and ignored."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=_NAME)


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
    """Validate a job given as plain data. `source` (a file's name) begins the error message.

    Raises:
        InvalidJob: a field is wrong. The message has a line for each: where, what was given and expected.
    """
    if not isinstance(document, Mapping):
        got = "nothing: it is empty" if document is None else type(document).__name__
        raise InvalidJob(f"{source}: expected a TrainingJob (a mapping), got {got}")
    return _validate(TrainingJob, document, source)


def parse_spec(document: Mapping[str, Any], *, source: str) -> TrainingJobSpec:
    """Like `parse_job`, for the `spec` alone."""
    return _validate(TrainingJobSpec, document, source)


def load_job(path: Path | str) -> TrainingJob:
    """Read a job from a YAML file.

    Raises:
        InvalidJob: the file cannot be read, is not YAML, gives a key twice, or is not a valid TrainingJob.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidJob(f"cannot read the job file {path}: {reason}") from error
    try:
        document = manifest.read(text)
    except manifest.DuplicateKey as error:
        raise InvalidJob(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        said = str(error).replace('"<unicode string>"', f'"{path}"')
        raise InvalidJob(f"{path} is not valid YAML: {said}") from error
    return parse_job(document, source=str(path))


def _validate(model: type[_M], document: Mapping[str, Any], source: str) -> _M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        lines = [_explain(model, item) for item in error.errors()]
        raise InvalidJob("\n".join(f"{source}: {line}" for line in lines)) from None


def _explain(model: type[BaseModel], item: Any) -> str:
    """The line of an error message for a pydantic error, with the names of the YAML file."""
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known, name = _field_names(model, item["loc"][:-1]), str(item["loc"][-1])
        near = [field.path for field in rules.fields(model) if field.path.rpartition(".")[2] == name]
        near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"known here: {', '.join(sorted(known))}"
        )
        return f"unknown field {location!r}; {hint}"
    if item["type"] == "missing":
        return f"{location} is missing"
    message = item["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    message = _FORMS.get(item.get("ctx", {}).get("pattern"), message)
    said = f"{location or 'job'}: {message[0].lower()}{message[1:]}"
    if item["type"] == "value_error" and (isinstance(item["input"], Mapping) or repr(item["input"]) in said):
        return said  # the sentence names the given values already
    return f"{said}, got {item['input']!r}"[:500]


def _field_names(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The YAML names of the fields at `location`, for suggestions."""
    prefix = "".join(f"{part}." for part in location if isinstance(part, str))
    below = (
        field.path.removeprefix(prefix) for field in rules.fields(model) if field.path.startswith(prefix)
    )
    return [name for name in below if "." not in name]
