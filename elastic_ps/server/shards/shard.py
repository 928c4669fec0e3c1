"""One shard: its buckets, the sums of the open round, and the calls that wait for them.

A shard decides nothing about rounds. It adds what `core.sequence` admits, and obeys the coordinator's orders
(`advance`). All methods may be called from any thread.

One lock guards the record of the open round (`pulls.OpenRound`). A thread holds it only to read or change the
record. Each bucket has two locks for its memory: `_adding` for its sum, `_stepping` for its values. So two
threads add to two buckets at the same time, and a bucket is sent while the next one is stepped. A thread that
needs the lock of a bucket and that of the round takes the bucket's first.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property

import torch

from elastic_ps.api.compression import Compression
from elastic_ps.codec.base import Payload, Sparse
from elastic_ps.codec.decoder import Decoder
from elastic_ps.codec.finite import WHAT_TO_DO, require_finite
from elastic_ps.codec.memory import Scratch
from elastic_ps.codec.optimizers import Optimizers
from elastic_ps.codec.plan import Plan
from elastic_ps.codec.rows import Rows
from elastic_ps.codec.state import Beside, Catching, CopiedTensor, Snapshot, Source, Stored, read_state
from elastic_ps.codec.values import ValueEncoder
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.core.sequence import PushKey, PushLog
from elastic_ps.core.settings import Application, clip_divisor
from elastic_ps.core.weights import is_weight
from elastic_ps.embedding.followed import FollowingTables
from elastic_ps.embedding.served import ShardTables
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.process.telemetry import Trace
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Configuration
from elastic_ps.server.shards.pulls import Basis, DraftMaker, OpenRound, Pull, Pulled, Pulls, RestartedAs
from elastic_ps.server.shards.values import BucketValues, TableValues, bytes_of, state_bytes
from elastic_ps.transport.base import Incoming
from elastic_ps.transport.buffers import Buffers
from elastic_ps.transport.memory import shared_if_possible


class Shard:
    """The values and sums of one shard.

    Args:
        index: of this shard.
        configuration: of the job in this term. If it `follows`, the shard is a standby: it gets its state
            bucket by bucket with `take_state`, and steps the buckets that it has.
        codecs: the job's. They choose the buckets of which deltas are sent.
        optimizers: the optimizers that the job may use; torch's if it is None.
        draft_bytes: the size of a second copy for drafts, at most. If the copy would be larger, no drafts are
            made.

    Attributes:
        encoder: encodes the values that workers pull.
        tables: the rows of embedding tables that are on this shard.
    """

    def __init__(
        self,
        index: int,
        configuration: Configuration,
        *,
        trace: Trace,
        codecs: Plan | None = None,
        optimizers: Optimizers | None = None,
        draft_bytes: float = math.inf,
        limits: ServerLimits = USUAL,
    ) -> None:
        self.index, self._limits, self.optimizer = index, limits, configuration.optimizer
        self.layout, consistency = configuration.layout, configuration.mutable.consistency
        layout = self.layout
        self._optimizers = optimizers or Optimizers()
        self.codecs = codecs or Plan(Compression())
        self._decoder, self.encoder = Decoder(self.codecs, layout), ValueEncoder(self.codecs, layout)
        self.tables = (FollowingTables if configuration.follows else ShardTables)(index, layout.shards)
        self._advancing = threading.RLock()
        self._log = PushLog(term=configuration.term, several=consistency.several_steps)
        self._consistency, self._trace, self._configuration = consistency, trace, configuration
        self._receiving: set[tuple[int, int]] = set()
        self._round = OpenRound(self._log, self._make_buckets(layout.of_shard(index)), limits)
        self._lock, self._buckets = self._round.lock, self._round.buckets
        self._adding, self._stepping = self._round.adding, self._round.stepping
        dense = [b for b in layout.of_shard(index) if not layout.width(b)]
        self._drafts = DraftMaker(lambda: self._make_buckets(dense), lambda: self._copy_bytes <= draft_bytes)
        self._pulls = Pulls(self._round, self._drafts, consistency=consistency, limits=limits, trace=trace)
        self._stepped = [
            b for b in layout.pull_order if b.index in self._buckets and b.rule is not Rule.CONSTANT
        ]
        follows = configuration.follows
        self._copied = Catching(set(self._buckets) if follows else set(), anywhere=follows)
        largest = max((bucket.nbytes for bucket in layout.of_shard(index)), default=0)
        self._buffers = Buffers(largest)
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()  # those that a thread may still read

    def _make_buckets(self, buckets: Sequence[Bucket]) -> dict[int, BucketValues]:
        groups = self._configuration.settings.groups
        kinds = self._optimizers.classes_of(self.optimizer, len(groups))
        allocate = shared_if_possible([bucket.nbytes for bucket in buckets])
        made: dict[int, BucketValues] = {}
        for bucket in buckets:
            values: BucketValues
            if width := self.layout.width(bucket):
                values = TableValues(bucket, width=width, allocate=allocate)
            else:
                values = BucketValues(
                    bucket,
                    stale=self._consistency.may_be_stale,
                    allocate=allocate,
                    deltas=self.codecs.of_deltas(self.layout, bucket),
                )
            values.build_optimizer(kinds, groups, self.layout.tensors)
            made[bucket.index] = values
        return made

    @property
    def _copy_bytes(self) -> int:
        settings = self._configuration.settings
        kinds = self._optimizers.classes_of(self.optimizer, len(settings.groups))
        dense = [values for values in self._buckets.values() if values.may_be_drafted]
        return bytes_of(dense, kinds, settings.groups, self.layout.tensors)

    @cached_property
    def model_bytes(self) -> tuple[int, int]:
        """The bytes of the whole model's values, and of its optimizer's state, 0 if that is not known.

        The state includes the float32 values that the optimizer steps if these have half precision.
        """
        layout, groups, state = self.layout, self._configuration.settings.groups, 0
        kinds = self._optimizers.classes_of(self.optimizer, len(groups))
        with suppress(TypeError, ValueError, RuntimeError):
            state = state_bytes(layout.buckets, kinds, groups, layout.tensors)
            state += sum(4 * b.elements for b in layout.buckets if b.rule is Rule.GRADIENT and b.is_half)
        return sum(bucket.nbytes for bucket in layout.buckets), state

    @property
    def term(self) -> int:
        """The job's term when the shard began."""
        return self._log.term

    @property
    def version(self) -> int:
        with self._lock:
            return self._log.version

    @property
    def whole(self) -> bool:
        """Whether the shard has all buckets and rows. Only a standby that is catching up has not."""
        with self._lock:
            return self._copied.whole and self.tables.whole

    @property
    def buckets(self) -> set[int]:
        """The numbers of its buckets."""
        return set(self._buckets)

    def bucket(self, index: int) -> Bucket:
        """Raises Refused (MALFORMED) if the bucket is not one of this shard."""
        try:
            return self._buckets[index].bucket
        except KeyError:
            raise Refused(RefusalCode.MALFORMED, f"bucket {index} is not on shard {self.index}") from None

    def initialise(
        self, index: int, worker: int, incarnation: int, incoming: Incoming, *, version: int | None = None
    ) -> None:
        """Take a bucket's first values from a worker. Blocks while they are received.

        Args:
            version: the current version, if workers have made it and send its values; None: the values are
                the first ones.

        Raises:
            Refused: see `PushLog.check_initialiser` and `check_version`; MALFORMED; NOT_FINITE. Nothing
                changes.
        """
        bucket = self.bucket(index)
        with self._lock:
            self._check_sender(worker, incarnation, version)
        with self._buffers.receive(bucket, incoming, timeout=self._limits.shard_answer) as values:
            if bucket.rule is Rule.GRADIENT and version is None:
                require_finite(values, f"first values of bucket {index}")
            with self._stepping[index]:
                self._keep(index)
                with self._lock:
                    self._check_sender(worker, incarnation, version)
                    self._buckets[index].initialise(values, version=version)

    def _check_sender(self, worker: int, incarnation: int, version: int | None) -> None:
        if version is None:
            self._log.check_initialiser(worker, incarnation)
        else:
            self._log.check_version(version)

    def require_values(self, version: int) -> None:
        """Raise Refused (INVALID) unless workers have sent all values of `version`, the current one."""
        with self._lock:
            self._log.check_version(version)
            missing = [b.index for b in self._stepped if self._buckets[b.index].version != version]
        if missing:
            raise Refused(RefusalCode.INVALID, f"buckets {missing} of version {version} were not sent")

    def initialise_state(
        self,
        index: int,
        piece: int,
        entries: Sequence[tuple[str, str, bool]],
        worker: int,
        incarnation: int,
        incoming: Incoming,
        *,
        version: int | None = None,
    ) -> None:
        """Take the optimizer's state of a piece of a bucket from the worker that brings the model. Blocks.

        Args:
            version: see `initialise`.
            entries: the content of the body, see `read_state`. All entries of the optimizer, except with SGD.

        Raises:
            Refused: as `initialise`. Nothing changes.
        """
        bucket = self.bucket(index)
        with self._lock:
            self._check_sender(worker, incarnation, version)
            usual = self._buckets[index].usual_state(piece)
        state = read_state(bucket, piece, entries, incoming, usual=usual)
        with self._stepping[index], self._lock:
            self._check_sender(worker, incarnation, version)
            self._buckets[index].take_state(piece, state)

    def push(self, key: PushKey, weight: float, sent: Payload, incoming: Incoming) -> bool:
        """Add a worker's bucket to the open round. Returns False if it had been added before.

        A push of a bucket without any gradient may have no body.

        Blocks while the values are received, and in deterministic mode until it is the worker's turn.

        Args:
            sent: the worker's description of the push, without a body.

        Raises:
            Refused: see `PushLog.decide` and `Decoder.open`; MALFORMED; NOT_FINITE; NOT_READY, NOT_YOUR_TURN:
                push again. The sums are unchanged.
        """
        bucket, present = self.bucket(key.bucket), sent.present
        absent = bucket.rule is Rule.GRADIENT and bool(present) and not any(present)
        empty = absent and not incoming.size
        encoded = self._decoder.open(bucket, sent, incoming, worker=key.worker)
        fits = empty or encoded is not None or incoming.size == bucket.nbytes
        if not fits or (present and len(present) != len(bucket.pieces)):
            raise Refused(
                RefusalCode.MALFORMED,
                f"push of {incoming.size} bytes and {len(present)} flags for bucket {key.bucket}, "
                f"which has {bucket.nbytes} bytes and {len(bucket.pieces)} pieces",
            )
        if not is_weight(weight) or bucket.rule is Rule.CONSTANT:
            text = f"bucket {key.bucket} ({bucket.rule.name}) takes no weight {weight}"
            raise Refused(RefusalCode.MALFORMED, text)
        slot = (key.bucket, key.worker)
        with self._lock:
            may_go_on = self._round.wait(
                lambda: slot not in self._receiving and self._may_add(key), on=self._round.added
            )
            if not self._log.decide(key):
                return False
            if not may_go_on:
                whose = f"worker {key.worker} in bucket {key.bucket}"
                if slot in self._receiving:
                    text = f"a push of {whose} is still being received; push again"
                    raise Refused(RefusalCode.NOT_READY, text)
                raise Refused(RefusalCode.NOT_YOUR_TURN, f"it is not the turn of {whose}; push again")
            self._receiving.add(slot)
        try:
            if empty:
                return self._add_by(key, weight, lambda to, first: to.add_nothing(weight, first=first))
            plain = self._buffers.receive(bucket, incoming, timeout=self._limits.shard_answer)
            with encoded or plain as contribution:
                return self._add(key, weight, present, contribution)
        finally:
            with self._lock:
                self._receiving.discard(slot)
                self._round.added.notify_all()  # those that pull would be woken up in vain

    def _add(
        self, key: PushKey, weight: float, present: Sequence[bool], contribution: torch.Tensor | Sparse | Rows
    ) -> bool:
        bucket = self._buckets[key.bucket]
        usual = bucket.values if bucket.bucket.rule in (Rule.MEAN, Rule.BROADCAST) else None
        who = f"worker {key.worker}, step {key.step}, bucket {key.bucket}"
        largest = require_finite(contribution, who, usual=usual, advice=WHAT_TO_DO)

        def add(values: BucketValues, first: bool) -> None:
            values.add(contribution, weight, present, first=first, worker=key.worker, largest=largest)

        return self._add_by(key, weight, add)

    def _add_by(self, key: PushKey, weight: float, add: Callable[[BucketValues, bool], None]) -> bool:
        """Call `add` with the bucket and whether it begins a new sum. See `push`."""
        with self._adding[key.bucket]:
            with self._lock:
                if not self._log.decide(key):  # raises if the round has started again
                    return False
                values, first = self._buckets[key.bucket], not self._log.added.get(key.bucket)
                self._log.begin(key)
            add(values, first)
            with self._lock:
                # A round that was restarted meanwhile has no sum yet: the next push begins one. A worker that
                # was dropped from the same attempt is in the sum, and the log has to record that.
                self._log.require_open(key)
                self._log.add(key, weight=weight)
        return True

    def _may_add(self, key: PushKey) -> bool:
        self._log.decide(key)
        return not self._consistency.deterministic or self._log.takes_turn(key.worker, key.bucket)

    @property
    def queued(self) -> frozenset[int]:
        """In deterministic mode, the workers whose pushes wait for workers of lower index."""
        with self._lock:
            return self._log.queued

    def retire(self, code: RefusalCode) -> None:
        """Refuse all waiting calls: STALE_TERM if another shard replaces this one, NOT_READY at the end."""
        self._round.retire(code)

    def pull(self, asked: Pull) -> Iterator[Pulled | RestartedAs | None]:
        """See `Pulls.pull`. Raises Refused (MALFORMED), too, at once: a bucket is not one of this shard."""
        for index in asked.buckets:
            self.bucket(index)
        return self._pulls.pull(asked)

    def advance(
        self, version: int, attempt: int, expected: Mapping[int, int], apply: Application | None
    ) -> None:
        """Apply the last round if `apply` is given, then open a round or change who takes part in it.

        Idempotent: a round is applied once, and an order that is older than the last one changes nothing.
        Blocks for the optimizer's step.

        Raises:
            Refused: INVALID; the sums do not consist of exactly these contributions. NOT_READY; the shard
                lacks the version to continue from. Nothing was applied.
            Exception: the optimizer failed. The shard has lost the model: NOT_READY from then on.
        """
        with self._advancing:
            if self._round.torn:
                raise Refused(RefusalCode.NOT_READY, f"shard {self.index} has failed in the middle of a step")
            base = version if apply is None else version - 1
            if self._copied.anywhere and apply is None:
                self._copied.anywhere = False
            elif self.version < base:
                raise Refused(
                    RefusalCode.NOT_READY,
                    f"shard {self.index} is at version {self.version}, but was told to continue from {base}",
                )
            if apply is not None and self.version < version and not apply.elsewhere:
                self._apply(version, apply, attempt, expected)
            with self._lock:
                if (version, attempt) >= (self._log.version, self._log.attempt):
                    self._log.open(version=version, attempt=attempt, expected=expected)
                    self._round.wake()

    def _apply(self, version: int, apply: Application, attempt: int, expected: Mapping[int, int]) -> None:
        self._require_complete(version, apply)
        contributors = frozenset(apply.contributors)
        with self._lock:
            self._round.torn = True
        self.tables.apply(version, apply)
        started, stepped = time.monotonic_ns(), self._to_step
        with self._lock:
            for values in self._buckets.values():
                if values.bucket.rule is Rule.CONSTANT:
                    values.version = version
            self._round.torn = bool(stepped)
        basis = Basis(version, apply.attempt, contributors, apply.weight, tuple(apply.settings.groups))
        clip, norm = apply.clips, apply.norm
        divisor = 1.0 if clip is None else clip_divisor(self._norm() if norm is None else norm, clip)
        for bucket in stepped:
            with self._stepping[bucket.index]:
                self._keep(bucket.index)
                with self._lock:
                    values = self._buckets[bucket.index]
                    may_be_drafted = clip is None and not apply.assigns
                    draft = self._drafts.take(values, basis) if may_be_drafted else None
                    if draft is not None:
                        self._buckets[bucket.index] = draft
                if apply.assigns:
                    values.assign(version)
                elif draft is None:
                    values.apply(apply.settings.groups, version, divisor=divisor)
                with self._lock:
                    if bucket is stepped[-1]:
                        # A worker that has pulled the last bucket may push for the next round at once.
                        self._log.open(version=version, attempt=attempt, expected=expected)
                        self._round.torn = False
                    self._round.wake()
        self._trace.complete("apply", started, time.monotonic_ns(), version=version)

    def has_to_apply(self, version: int, apply: Application) -> bool:
        """Whether the shard lacks `version` and has the sums for it. Blocks while a version is being made.

        Raises:
            Refused: INVALID; the sums are others. NOT_READY; the shard lacks the version to continue from.
        """
        with self._advancing:
            if self.version >= version:
                return False
            self._require_complete(version, apply)
            return True

    def norm(self, version: int, apply: Application) -> float:
        """The 2-norm of this shard's part of the mean gradient for `version`; 0 if the version is made.

        Blocks and raises as `has_to_apply`.
        """
        with self._advancing:  # once it is made, the sums are of the next round
            return self._norm() if self.has_to_apply(version, apply) else 0.0

    def _norm(self) -> float:
        return math.hypot(*(self._buckets[bucket.index].norm() for bucket in self._to_step))

    @property
    def _to_step(self) -> list[Bucket]:
        return [bucket for bucket in self._stepped if bucket.index not in self._copied.missing]

    def _require_complete(self, version: int, apply: Application) -> None:
        """Raise Refused unless the sums are those for `version`; see `has_to_apply`."""
        with self._lock:
            if self._round.torn or self._log.version < version - 1:
                raise Refused(
                    RefusalCode.NOT_READY,
                    f"shard {self.index} lacks version {version - 1}, so it cannot make the next one",
                )
            if self._log.version != version - 1 or self._log.attempt != apply.attempt:
                raise Refused(
                    RefusalCode.INVALID,
                    f"shard {self.index} is at version {self._log.version} attempt {self._log.attempt}, "
                    f"asked to apply attempt {apply.attempt} for version {version}",
                )
            if not apply.elsewhere and not self._log.complete(
                [b.index for b in self._to_step], apply.contributors
            ):
                raise Refused(
                    RefusalCode.INVALID, f"shard {self.index} lacks gradients for version {version}"
                )
            weights = () if apply.assigns else map(self._log.weight, self._log.weights)
            if wrong := {weight for weight in weights if weight != apply.weight}:
                raise Refused(
                    RefusalCode.INVALID,
                    f"gradients on shard {self.index} for version {version} weigh {max(wrong):g}, but their "
                    f"steps {apply.weight:g}",
                )
        if not apply.assigns and not apply.elsewhere:
            self.tables.require(version, apply)

    # --- standby

    def sums(self) -> Iterator[BucketValues]:
        """The live buckets with sums of the open round. Nothing may be added to the sums meanwhile."""
        return (self._buckets[bucket.index] for bucket in self._stepped)

    def take_sum(self, key: PushKey, present: Sequence[bool], incoming: Incoming) -> None:
        """On a standby, take the sum of a bucket over from the shard. Blocks while it is received.

        Raises:
            Refused: STALE_TERM, WRONG_VERSION; MALFORMED; NOT_READY: the same sum is being received already.
        """
        self.bucket(key.bucket)
        slot = (key.bucket, key.worker)
        with self._lock:
            self._log.require_open(key)
            if self._log.added.get(key.bucket):
                return
            if slot in self._receiving:
                raise Refused(RefusalCode.NOT_READY, f"the sum of bucket {key.bucket} is being received")
            self._receiving.add(slot)
        try:
            self._buckets[key.bucket].take_sum(incoming, present)
            with self._lock:
                self._log.require_open(key)
                self._log.add(key)
        finally:
            with self._lock:
                self._receiving.discard(slot)

    def stored(self, bucket: int) -> Iterator[Stored]:
        """The live tensors of a bucket. Nothing may be applied meanwhile."""
        return self._buckets[bucket].stored()

    def take_state(self, part: CopiedTensor, incoming: Incoming) -> None:
        """On a standby, take one tensor of a bucket over, at the version of the open round.

        Blocks while it is received. One thread at a time may call it.

        Raises:
            Refused: MALFORMED; NOT_READY: the shard does not wait for that bucket.
        """
        bucket = self.bucket(part.bucket)
        with self._lock:
            arriving = self._copied.begin(bucket)
        arriving.receive(part, incoming)
        if part.last:
            arriving.require_whole()
            with self._stepping[part.bucket], self._lock:
                self._buckets[part.bucket].load(arriving, self._log.version)
                self._copied.end(bucket)

    def load(self, stored: Source, version: int) -> None:
        """Take values and optimizer state over from a checkpoint of `version`. Reads nothing else of it."""
        with self._lock:
            for values in self._buckets.values():
                values.load(stored, version)
            self._log.open(version=version, attempt=0, expected={})
            self._round.wake()

    def snapshot(self, version: int, *, since: int | None = None) -> Snapshot:
        """All tensors at this version, for a checkpoint. Blocks while a version is being made.

        Args:
            since: of tables that grow, only what has changed after this version.

        Raises:
            Refused: NOT_READY; the shard is at another version, so its values must not get this one's name.
        """
        with self._advancing:
            if self.version != version:
                raise Refused(
                    RefusalCode.NOT_READY,
                    f"asked for a checkpoint of version {version}, but shard {self.index} is at version "
                    f"{self.version}",
                )
            patience = self._limits.written
            rows = self.tables.snapshot(version, since=since, patience=patience)
            return self._snapshot(BucketValues.stored, rows, patience=patience)

    def _snapshot(
        self,
        part: Callable[[BucketValues], Iterable[Stored]],
        rows: Beside | None = None,
        *,
        patience: timedelta = timedelta(0),
    ) -> Snapshot:
        """`part` of each bucket, in the order of steps, and `rows`. The caller holds `_advancing`."""
        tensors: dict[int, list[Stored]] = {}
        for index in (b.index for b in self.layout.pull_order if b.index in self._buckets):
            with self._stepping[index]:
                tensors[index] = list(part(self._buckets[index]))
        snapshot = Snapshot(tensors, patience=patience, beside=rows)
        with self._lock:
            self._snapshots.add(snapshot)
        return snapshot

    def _keep(self, bucket: int) -> None:
        """Let snapshots copy a bucket that is about to change. The caller holds its lock of `_stepping`."""
        with self._lock:
            snapshots = list(self._snapshots) if self._snapshots else ()
        for snapshot in snapshots:
            snapshot.keep(bucket)

    def state(self) -> Iterator[Stored]:
        """Copies of the optimizer's state at one version. Blocks while a version is being made."""
        with self._advancing:
            snapshot = self._snapshot(BucketValues.state)
        for entry in snapshot.read(Scratch()):
            yield replace(entry, value=entry.value.clone())

    def values(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The live values. Copy them before the next round is applied."""
        for values in self._buckets.values():
            if values.bucket.index not in self._copied.missing:
                yield values.bucket, values.values
