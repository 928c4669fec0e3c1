from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Caller(_message.Message):
    __slots__ = ("job", "term", "worker", "incarnation", "call")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    job: str
    term: int
    worker: int
    incarnation: int
    call: int
    def __init__(self, job: _Optional[str] = ..., term: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., call: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype", "rule", "group", "aliases", "frozen", "sparse", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    rule: int
    group: int
    aliases: _containers.RepeatedScalarFieldContainer[str]
    frozen: bool
    sparse: bool
    content: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., rule: _Optional[int] = ..., group: _Optional[int] = ..., aliases: _Optional[_Iterable[str]] = ..., frozen: bool = ..., sparse: bool = ..., content: _Optional[str] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("tensor", "start", "length")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    start: int
    length: int
    def __init__(self, tensor: _Optional[int] = ..., start: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("shard", "dtype", "rule", "pieces")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    dtype: str
    rule: int
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    def __init__(self, shard: _Optional[int] = ..., dtype: _Optional[str] = ..., rule: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("tensors", "buckets", "shards")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    shards: int
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., shards: _Optional[int] = ...) -> None: ...

class Optimizer(_message.Message):
    __slots__ = ("name", "groups")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    groups: str
    def __init__(self, name: _Optional[str] = ..., groups: _Optional[str] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("epoch", "start", "stop")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    start: int
    stop: int
    def __init__(self, epoch: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("caller", "pid", "host", "tensors", "optimizer", "again", "instance", "address", "torch", "measures", "link")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    pid: int
    host: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    optimizer: Optimizer
    again: bool
    instance: str
    address: str
    torch: str
    measures: bool
    link: Link
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., again: bool = ..., instance: _Optional[str] = ..., address: _Optional[str] = ..., torch: _Optional[str] = ..., measures: bool = ..., link: _Optional[_Union[Link, _Mapping]] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("rate", "seconds")
    RATE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rate: float
    seconds: float
    def __init__(self, rate: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("term", "incarnation", "version", "layout", "initialise", "lease_ms", "pending", "tuning", "codecs", "measure", "crowded")
    TERM_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    INITIALISE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    TUNING_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    CROWDED_FIELD_NUMBER: _ClassVar[int]
    term: int
    incarnation: int
    version: int
    layout: Layout
    initialise: bool
    lease_ms: int
    pending: bool
    tuning: str
    codecs: _containers.RepeatedScalarFieldContainer[str]
    measure: bool
    crowded: bool
    def __init__(self, term: _Optional[int] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., initialise: bool = ..., lease_ms: _Optional[int] = ..., pending: bool = ..., tuning: _Optional[str] = ..., codecs: _Optional[_Iterable[str]] = ..., measure: bool = ..., crowded: bool = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class InitRequest(_message.Message):
    __slots__ = ("caller", "bucket", "version")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    bucket: int
    version: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., bucket: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class InitStateRequest(_message.Message):
    __slots__ = ("caller", "bucket", "piece", "entries", "version")
    class Entry(_message.Message):
        __slots__ = ("key", "dtype", "scalar")
        KEY_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        SCALAR_FIELD_NUMBER: _ClassVar[int]
        key: str
        dtype: str
        scalar: bool
        def __init__(self, key: _Optional[str] = ..., dtype: _Optional[str] = ..., scalar: bool = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    bucket: int
    piece: int
    entries: _containers.RepeatedCompositeFieldContainer[InitStateRequest.Entry]
    version: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., bucket: _Optional[int] = ..., piece: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[InitStateRequest.Entry, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class InitDoneRequest(_message.Message):
    __slots__ = ("caller", "version", "repeatable")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPEATABLE_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    repeatable: bool
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ..., repeatable: bool = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("duplicate",)
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    def __init__(self, duplicate: bool = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("caller", "records", "epochs", "batch", "wait", "abandoned", "skipped", "early", "data", "epoch", "order")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    records: int
    epochs: int
    batch: int
    wait: bool
    abandoned: bool
    skipped: _containers.RepeatedCompositeFieldContainer[Range]
    early: bool
    data: str
    epoch: int
    order: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., records: _Optional[int] = ..., epochs: _Optional[int] = ..., batch: _Optional[int] = ..., wait: bool = ..., abandoned: bool = ..., skipped: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., early: bool = ..., data: _Optional[str] = ..., epoch: _Optional[int] = ..., order: _Optional[str] = ...) -> None: ...

class TakeReply(_message.Message):
    __slots__ = ("ranges", "version", "finished", "chief", "pending", "stopped")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CHIEF_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    version: int
    finished: bool
    chief: bool
    pending: bool
    stopped: str
    def __init__(self, ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., version: _Optional[int] = ..., finished: bool = ..., chief: bool = ..., pending: bool = ..., stopped: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("caller", "reason")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    reason: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ChiefRequest(_message.Message):
    __slots__ = ("caller", "epoch", "passes")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    epoch: int
    passes: bool
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., epoch: _Optional[int] = ..., passes: bool = ...) -> None: ...

class ChiefReply(_message.Message):
    __slots__ = ("chief",)
    CHIEF_FIELD_NUMBER: _ClassVar[int]
    chief: bool
    def __init__(self, chief: bool = ...) -> None: ...

class ReadStateRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class ReadStateReply(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class WriteStateRequest(_message.Message):
    __slots__ = ("caller", "text", "again")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    text: str
    again: bool
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., text: _Optional[str] = ..., again: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("caller", "abandoned", "skipped", "leaves")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    abandoned: bool
    skipped: _containers.RepeatedCompositeFieldContainer[Range]
    leaves: bool
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., abandoned: bool = ..., skipped: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., leaves: bool = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("caller", "version", "step")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    step: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ("version", "attempt", "pending")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    version: int
    attempt: int
    pending: bool
    def __init__(self, version: _Optional[int] = ..., attempt: _Optional[int] = ..., pending: bool = ...) -> None: ...

class AwaitRequest(_message.Message):
    __slots__ = ("caller", "step", "attempt")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    step: int
    attempt: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class AwaitReply(_message.Message):
    __slots__ = ("made", "compute", "attempt", "pending", "stopped")
    MADE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    made: bool
    compute: bool
    attempt: int
    pending: bool
    stopped: str
    def __init__(self, made: bool = ..., compute: bool = ..., attempt: _Optional[int] = ..., pending: bool = ..., stopped: _Optional[str] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("caller", "version")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class AssignReply(_message.Message):
    __slots__ = ("version", "attempt", "done", "takes_part", "pending")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TAKES_PART_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    version: int
    attempt: int
    done: bool
    takes_part: bool
    pending: bool
    def __init__(self, version: _Optional[int] = ..., attempt: _Optional[int] = ..., done: bool = ..., takes_part: bool = ..., pending: bool = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("codec", "parts", "values")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    codec: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    values: str
    def __init__(self, codec: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., values: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("name", "dtype", "elements")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    elements: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., elements: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("caller", "step", "bucket", "version", "attempt", "weight", "present", "codec", "finish", "runs", "plain", "pull")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    step: int
    bucket: int
    version: int
    attempt: int
    weight: float
    present: _containers.RepeatedScalarFieldContainer[bool]
    codec: str
    finish: FinishRequest
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    plain: bool
    pull: PullRequest
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., bucket: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., weight: _Optional[float] = ..., present: _Optional[_Iterable[bool]] = ..., codec: _Optional[str] = ..., finish: _Optional[_Union[FinishRequest, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., plain: bool = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("caller", "step", "version", "attempt", "samples", "weight", "ranges", "settings", "metrics", "skipped", "assigns", "traffic", "reductions")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ReductionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    REDUCTIONS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    step: int
    version: int
    attempt: int
    samples: int
    weight: float
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    settings: str
    metrics: _containers.ScalarMap[str, float]
    skipped: _containers.RepeatedCompositeFieldContainer[Range]
    assigns: bool
    traffic: Traffic
    reductions: _containers.ScalarMap[str, str]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., samples: _Optional[int] = ..., weight: _Optional[float] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., settings: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., skipped: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., assigns: bool = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., reductions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("caller", "version", "attempt", "barrier", "holds", "broken", "finish", "parts")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    attempt: int
    barrier: int
    holds: bool
    broken: bool
    finish: FinishRequest
    parts: bool
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., barrier: _Optional[int] = ..., holds: bool = ..., broken: bool = ..., finish: _Optional[_Union[FinishRequest, _Mapping]] = ..., parts: bool = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker", "address", "incarnation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker: int
    address: str
    incarnation: int
    def __init__(self, worker: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("version", "attempt", "pending", "together", "lacking", "group", "source", "values_are_here", "send", "settings", "stopped", "all_hold")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VALUES_ARE_HERE_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    ALL_HOLD_FIELD_NUMBER: _ClassVar[int]
    version: int
    attempt: int
    pending: bool
    together: bool
    lacking: bool
    group: _containers.RepeatedCompositeFieldContainer[Peer]
    source: int
    values_are_here: bool
    send: bool
    settings: str
    stopped: str
    all_hold: bool
    def __init__(self, version: _Optional[int] = ..., attempt: _Optional[int] = ..., pending: bool = ..., together: bool = ..., lacking: bool = ..., group: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., source: _Optional[int] = ..., values_are_here: bool = ..., send: bool = ..., settings: _Optional[str] = ..., stopped: _Optional[str] = ..., all_hold: bool = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("pushed_bytes", "pushed_plain_bytes", "pulled_bytes", "pulled_plain_bytes", "encode_seconds", "decode_seconds", "push_seconds", "codec", "hidden_seconds", "overlap")
    PUSHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUSHED_PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULLED_PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    pushed_bytes: int
    pushed_plain_bytes: int
    pulled_bytes: int
    pulled_plain_bytes: int
    encode_seconds: float
    decode_seconds: float
    push_seconds: float
    codec: str
    hidden_seconds: float
    overlap: str
    def __init__(self, pushed_bytes: _Optional[int] = ..., pushed_plain_bytes: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., pulled_plain_bytes: _Optional[int] = ..., encode_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., push_seconds: _Optional[float] = ..., codec: _Optional[str] = ..., hidden_seconds: _Optional[float] = ..., overlap: _Optional[str] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("caller", "version", "buckets", "attempt", "contributor", "held", "draft_settings", "drafts")
    class DraftsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    buckets: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    contributor: bool
    held: int
    draft_settings: str
    drafts: _containers.ScalarMap[int, int]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ..., buckets: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., contributor: bool = ..., held: _Optional[int] = ..., draft_settings: _Optional[str] = ..., drafts: _Optional[_Mapping[int, int]] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("bucket", "attempt", "pending", "done", "version", "settings", "stopped", "unchanged", "encoded", "draft", "stands", "delta", "steps", "last", "standing")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    attempt: int
    pending: bool
    done: bool
    version: int
    settings: str
    stopped: str
    unchanged: bool
    encoded: Run
    draft: int
    stands: bool
    delta: int
    steps: int
    last: bool
    standing: Standing
    def __init__(self, bucket: _Optional[int] = ..., attempt: _Optional[int] = ..., pending: bool = ..., done: bool = ..., version: _Optional[int] = ..., settings: _Optional[str] = ..., stopped: _Optional[str] = ..., unchanged: bool = ..., encoded: _Optional[_Union[Run, _Mapping]] = ..., draft: _Optional[int] = ..., stands: bool = ..., delta: _Optional[int] = ..., steps: _Optional[int] = ..., last: bool = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("version", "steps")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    version: int
    steps: int
    def __init__(self, version: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("caller", "version")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    version: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("caller", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class OptimizerStateRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class OptimizerStateReply(_message.Message):
    __slots__ = ("tensor", "start", "key", "dtype", "scalar", "done")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    start: int
    key: str
    dtype: str
    scalar: bool
    done: bool
    def __init__(self, tensor: _Optional[int] = ..., start: _Optional[int] = ..., key: _Optional[str] = ..., dtype: _Optional[str] = ..., scalar: bool = ..., done: bool = ...) -> None: ...

class GoneRequest(_message.Message):
    __slots__ = ("job", "worker", "instance")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker: int
    instance: str
    def __init__(self, job: _Optional[str] = ..., worker: _Optional[int] = ..., instance: _Optional[str] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("job", "layout", "optimizer", "settings", "term", "load_version", "source", "number", "follows", "mutable")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LOAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    MUTABLE_FIELD_NUMBER: _ClassVar[int]
    job: str
    layout: Layout
    optimizer: str
    settings: str
    term: int
    load_version: int
    source: str
    number: int
    follows: bool
    mutable: str
    def __init__(self, job: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., optimizer: _Optional[str] = ..., settings: _Optional[str] = ..., term: _Optional[int] = ..., load_version: _Optional[int] = ..., source: _Optional[str] = ..., number: _Optional[int] = ..., follows: bool = ..., mutable: _Optional[str] = ...) -> None: ...

class AdvanceRequest(_message.Message):
    __slots__ = ("job", "version", "attempt", "expected", "apply", "checkpoint", "term", "prepare", "state", "next", "source", "number", "last", "rescued_term")
    class ExpectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    RESCUED_TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    version: int
    attempt: int
    expected: _containers.ScalarMap[int, int]
    apply: Apply
    checkpoint: int
    term: int
    prepare: bool
    state: str
    next: AdvanceRequest
    source: str
    number: int
    last: bool
    rescued_term: int
    def __init__(self, job: _Optional[str] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., expected: _Optional[_Mapping[int, int]] = ..., apply: _Optional[_Union[Apply, _Mapping]] = ..., checkpoint: _Optional[int] = ..., term: _Optional[int] = ..., prepare: bool = ..., state: _Optional[str] = ..., next: _Optional[_Union[AdvanceRequest, _Mapping]] = ..., source: _Optional[str] = ..., number: _Optional[int] = ..., last: bool = ..., rescued_term: _Optional[int] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("job", "term", "bucket", "tensor", "start", "key", "dtype", "scalar", "last", "source", "number")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job: str
    term: int
    bucket: int
    tensor: int
    start: int
    key: str
    dtype: str
    scalar: bool
    last: bool
    source: str
    number: int
    def __init__(self, job: _Optional[str] = ..., term: _Optional[int] = ..., bucket: _Optional[int] = ..., tensor: _Optional[int] = ..., start: _Optional[int] = ..., key: _Optional[str] = ..., dtype: _Optional[str] = ..., scalar: bool = ..., last: bool = ..., source: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class SumRequest(_message.Message):
    __slots__ = ("job", "term", "bucket", "version", "attempt", "present")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    job: str
    term: int
    bucket: int
    version: int
    attempt: int
    present: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, job: _Optional[str] = ..., term: _Optional[int] = ..., bucket: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., present: _Optional[_Iterable[bool]] = ...) -> None: ...

class RowsRequest(_message.Message):
    __slots__ = ("job", "term", "what", "version", "attempt", "tables", "source", "number")
    class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PART: _ClassVar[RowsRequest.What]
        WHOLE: _ClassVar[RowsRequest.What]
        MEAN: _ClassVar[RowsRequest.What]
    PART: RowsRequest.What
    WHOLE: RowsRequest.What
    MEAN: RowsRequest.What
    JOB_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job: str
    term: int
    what: RowsRequest.What
    version: int
    attempt: int
    tables: _containers.RepeatedCompositeFieldContainer[PushRowsRequest.Rows]
    source: str
    number: int
    def __init__(self, job: _Optional[str] = ..., term: _Optional[int] = ..., what: _Optional[_Union[RowsRequest.What, str]] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[PushRowsRequest.Rows, _Mapping]]] = ..., source: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("job", "term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    term: int
    def __init__(self, job: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class HeldReply(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[AdvanceRequest]
    def __init__(self, orders: _Optional[_Iterable[_Union[AdvanceRequest, _Mapping]]] = ...) -> None: ...

class Apply(_message.Message):
    __slots__ = ("attempt", "contributors", "weight", "settings", "assigns", "norm", "divisors", "time")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    DIVISORS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    contributors: _containers.RepeatedCompositeFieldContainer[Contributor]
    weight: float
    settings: str
    assigns: bool
    norm: float
    divisors: Divisors
    time: float
    def __init__(self, attempt: _Optional[int] = ..., contributors: _Optional[_Iterable[_Union[Contributor, _Mapping]]] = ..., weight: _Optional[float] = ..., settings: _Optional[str] = ..., assigns: bool = ..., norm: _Optional[float] = ..., divisors: _Optional[_Union[Divisors, _Mapping]] = ..., time: _Optional[float] = ...) -> None: ...

class Divisors(_message.Message):
    __slots__ = ("plain", "adaptive")
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    plain: float
    adaptive: float
    def __init__(self, plain: _Optional[float] = ..., adaptive: _Optional[float] = ...) -> None: ...

class Contributor(_message.Message):
    __slots__ = ("worker", "incarnation", "step")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    step: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class AdvanceReply(_message.Message):
    __slots__ = ("written", "standby", "norm", "queued", "tables")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    written: Written
    standby: int
    norm: float
    queued: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableCounts]
    def __init__(self, written: _Optional[_Union[Written, _Mapping]] = ..., standby: _Optional[int] = ..., norm: _Optional[float] = ..., queued: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[TableCounts, _Mapping]]] = ...) -> None: ...

class TableCounts(_message.Message):
    __slots__ = ("name", "rows", "waiting", "size_bytes", "admitted", "expired", "refused", "looked_up", "hits", "used", "used_ahead")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    USED_AHEAD_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    waiting: int
    size_bytes: int
    admitted: int
    expired: int
    refused: int
    looked_up: int
    hits: int
    used: int
    used_ahead: int
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., waiting: _Optional[int] = ..., size_bytes: _Optional[int] = ..., admitted: _Optional[int] = ..., expired: _Optional[int] = ..., refused: _Optional[int] = ..., looked_up: _Optional[int] = ..., hits: _Optional[int] = ..., used: _Optional[int] = ..., used_ahead: _Optional[int] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("version", "term", "number", "file", "error", "pause", "base")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    version: int
    term: int
    number: int
    file: ShardFile
    error: str
    pause: int
    base: ShardFile
    def __init__(self, version: _Optional[int] = ..., term: _Optional[int] = ..., number: _Optional[int] = ..., file: _Optional[_Union[ShardFile, _Mapping]] = ..., error: _Optional[str] = ..., pause: _Optional[int] = ..., base: _Optional[_Union[ShardFile, _Mapping]] = ...) -> None: ...

class ShardFile(_message.Message):
    __slots__ = ("file", "sha256", "size")
    FILE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    file: str
    sha256: str
    size: int
    def __init__(self, file: _Optional[str] = ..., sha256: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("job", "process", "version", "metrics", "problem")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    job: str
    process: str
    version: int
    metrics: _containers.ScalarMap[str, float]
    problem: str
    def __init__(self, job: _Optional[str] = ..., process: _Optional[str] = ..., version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., problem: _Optional[str] = ...) -> None: ...

class EvaluateReply(_message.Message):
    __slots__ = ("version", "over")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    version: int
    over: bool
    def __init__(self, version: _Optional[int] = ..., over: bool = ...) -> None: ...

class ReadFileRequest(_message.Message):
    __slots__ = ("job", "version", "file")
    JOB_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    job: str
    version: int
    file: str
    def __init__(self, job: _Optional[str] = ..., version: _Optional[int] = ..., file: _Optional[str] = ...) -> None: ...

class Birth(_message.Message):
    __slots__ = ("number", "origin")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    number: int
    origin: int
    def __init__(self, number: _Optional[int] = ..., origin: _Optional[int] = ...) -> None: ...

class Named(_message.Message):
    __slots__ = ("name", "shape", "dtype", "birth")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    birth: Birth
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., birth: _Optional[_Union[Birth, _Mapping]] = ...) -> None: ...

class DeclareTensorRequest(_message.Message):
    __slots__ = ("caller", "instance", "tensor", "above", "lost")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    instance: str
    tensor: Named
    above: int
    lost: Birth
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., instance: _Optional[str] = ..., tensor: _Optional[_Union[Named, _Mapping]] = ..., above: _Optional[int] = ..., lost: _Optional[_Union[Birth, _Mapping]] = ...) -> None: ...

class DeclareTensorReply(_message.Message):
    __slots__ = ("birth", "life", "bring", "pending")
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    BRING_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    birth: Birth
    life: int
    bring: bool
    pending: bool
    def __init__(self, birth: _Optional[_Union[Birth, _Mapping]] = ..., life: _Optional[int] = ..., bring: bool = ..., pending: bool = ...) -> None: ...

class PutTensorRequest(_message.Message):
    __slots__ = ("caller", "instance", "tensor", "start")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    instance: str
    tensor: Named
    start: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., instance: _Optional[str] = ..., tensor: _Optional[_Union[Named, _Mapping]] = ..., start: _Optional[int] = ...) -> None: ...

class PutTensorReply(_message.Message):
    __slots__ = ("later",)
    LATER_FIELD_NUMBER: _ClassVar[int]
    later: bool
    def __init__(self, later: bool = ...) -> None: ...

class PushTensorRequest(_message.Message):
    __slots__ = ("caller", "instance", "number", "name", "birth", "life", "start", "rule")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    instance: str
    number: int
    name: str
    birth: Birth
    life: int
    start: int
    rule: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., instance: _Optional[str] = ..., number: _Optional[int] = ..., name: _Optional[str] = ..., birth: _Optional[_Union[Birth, _Mapping]] = ..., life: _Optional[int] = ..., start: _Optional[int] = ..., rule: _Optional[str] = ...) -> None: ...

class PullTensorRequest(_message.Message):
    __slots__ = ("caller", "name", "birth", "life")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    name: str
    birth: Birth
    life: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., name: _Optional[str] = ..., birth: _Optional[_Union[Birth, _Mapping]] = ..., life: _Optional[int] = ...) -> None: ...

class PullTensorReply(_message.Message):
    __slots__ = ("start", "done")
    START_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    start: int
    done: bool
    def __init__(self, start: _Optional[int] = ..., done: bool = ...) -> None: ...

class FreeTensorRequest(_message.Message):
    __slots__ = ("caller", "name", "birth")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    name: str
    birth: Birth
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., name: _Optional[str] = ..., birth: _Optional[_Union[Birth, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("caller", "table", "held", "life", "version")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    table: str
    held: int
    life: int
    version: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., table: _Optional[str] = ..., held: _Optional[int] = ..., life: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("life", "version", "places")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    life: int
    version: int
    places: int
    def __init__(self, life: _Optional[int] = ..., version: _Optional[int] = ..., places: _Optional[int] = ...) -> None: ...

class PushRowsRequest(_message.Message):
    __slots__ = ("caller", "step", "weight", "tables", "lost")
    class Rows(_message.Message):
        __slots__ = ("table", "rows", "used", "used_ahead")
        TABLE_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        USED_FIELD_NUMBER: _ClassVar[int]
        USED_AHEAD_FIELD_NUMBER: _ClassVar[int]
        table: str
        rows: int
        used: int
        used_ahead: int
        def __init__(self, table: _Optional[str] = ..., rows: _Optional[int] = ..., used: _Optional[int] = ..., used_ahead: _Optional[int] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    step: int
    weight: float
    tables: _containers.RepeatedCompositeFieldContainer[PushRowsRequest.Rows]
    lost: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., step: _Optional[int] = ..., weight: _Optional[float] = ..., tables: _Optional[_Iterable[_Union[PushRowsRequest.Rows, _Mapping]]] = ..., lost: _Optional[_Iterable[int]] = ...) -> None: ...
