"""A standby: a second process that gets every round of a shard before the shard applies it.

The standby has its own shard, one round behind. Before a round is applied, the standby gets its sums and the
order to apply them, and it carries that order out when the next one comes. So it can restore the version
before the round or the one after it, whichever the other shards have. It steps with the same code on the same
sums, so its values are the same to the bit. It never takes over by itself. A parameter server that is started
again orders it to write a checkpoint, and continues from that (docs/design/protocol.md).

This is primary-backup replication (Alsberg and Day 1976): the backup has everything that workers may see.

A new standby gets some of the shard's buckets with each round, before the round is applied, and the sums of
the buckets that it has. So neither side keeps past rounds, however far the standby was behind. Rows of tables
come in blocks, too, with those that have changed since their block was sent (`embedding.followed`).

If a shard has lost rounds that are in no checkpoint, `Rescue` saves them from the other shards and the
standbys: it makes a checkpoint of the version, and the job continues from that.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

from elastic_ps.codec import as_bytes
from elastic_ps.codec.state import CopiedTensor
from elastic_ps.core.sequence import PushKey
from elastic_ps.core.settings import Application
from elastic_ps.core.stages import STANDBY_STATES, StandbyEvent, StandbyState
from elastic_ps.embedding.followed import StandbyRows
from elastic_ps.errors import AskedToEnd, Fenced, RefusalCode, Refused, StorageUnavailable, TransportError
from elastic_ps.process.retrying import retry
from elastic_ps.server.job.checkpointer import Checkpointer
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Configuration, RemoteShard, ShardControl
from elastic_ps.server.shards.shard import Shard

logger = logging.getLogger(__name__)

COST = 0.1
"""A standby that fails repeatedly delays training for about this share of the time at most."""

LEADER = (0, 0, 0)
"""(worker, incarnation, step) of the only contribution to a standby's sums: the sum of its shard."""


def sum_key(term: int, bucket: int, version: int, attempt: int) -> PushKey:
    """The key of a bucket's sum on a standby, which replaces a worker's push."""
    return PushKey(term, *LEADER, bucket, version, attempt)


def for_standby(order: Advance) -> Advance:
    """The order for a standby, whose sums come from its shard instead of the workers."""
    if order.apply is None:
        return order
    return replace(order, apply=replace(order.apply, contributors=[LEADER]), expected={})


@dataclass
class _Copy:
    """The part of a model that a standby has; `base` describes the model.

    Attributes:
        state: how far the standby is.
        buckets: the buckets that it has.
        rows: the rows that it has.
        staged: the last order that the shard has got.
        before: the round that the standby has to apply next.
    """

    base: Configuration
    state: StandbyState = StandbyState.AWAY
    buckets: set[int] = field(default_factory=set)
    rows: StandbyRows = field(default_factory=StandbyRows)
    staged: Advance | None = None
    before: Application | None = None

    def note(self, event: StandbyEvent) -> None:
        """Raises ImpossibleTransition."""
        self.state = STANDBY_STATES.after(self.state, event)


class Follower:
    """A shard's view of its standby, and the thread that tries to reach it. Thread-safe.

    Args:
        standby: the connection to it. `close` closes it.
    """

    def __init__(self, standby: RemoteShard, limits: ServerLimits = USUAL) -> None:
        self._standby, self._limits = standby, limits
        self._changed = threading.Condition()
        self._copy: _Copy | None = None  # None: the shard has no model
        self._turn = threading.Lock()  # one order at a time
        self._not_before = 0.0  # time at which a standby that was left behind is tried again
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @property
    def state(self) -> StandbyState:
        """How far the standby is."""
        with self._changed:
            return StandbyState.AWAY if self._copy is None else self._copy.state

    def reset(self, base: Configuration) -> None:
        """The shard has a new model. Its standby has none of it yet."""
        with self._changed:
            self._copy = _Copy(replace(base, load_version=None, follows=True))
            self._changed.notify_all()

    def stage(self, shard: Shard, order: Advance) -> None:
        """Send the standby the round that `order` applies. Blocks until the standby has it, if it follows.

        A standby that is catching up gets some of the shard's buckets, too. If the standby fails, training
        continues without it.

        Raises:
            Refused: STALE_TERM; a newer parameter server has asked for the standby's rounds.
        """
        assert order.apply is not None
        # An order may be repeated while it is carried out. The sums must not change while they are sent.
        with self._turn:
            with self._changed:
                if (copy := self._copy) is None:
                    return
                staged, copy.staged = copy.staged, order
                if staged is not None and (staged.version, staged.apply) == (order.version, order.apply):
                    return
                if staged is not None and staged.version < order.version:  # else it was withdrawn
                    copy.before = staged.apply
                if copy.state is StandbyState.AWAY:
                    return
            started = time.monotonic()
            try:
                self._give(shard, order, copy)
            except (TransportError, Refused) as error:
                self._leave_behind(copy, error, time.monotonic() - started)
                if isinstance(error, Refused) and error.code is RefusalCode.STALE_TERM:
                    raise

    def close(self) -> None:
        """End the thread. Blocks for the present call."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._standby.close()
        self._thread.join()

    def _leave_behind(self, copy: _Copy, why: object, seconds: float) -> None:
        """`seconds`: the time that training has waited for it."""
        with self._changed:
            self._not_before = time.monotonic() + self._limits.probe.total_seconds() + seconds / COST
            if self._copy is copy and not self._closing:
                logger.warning("training continues without the standby: %s", why)
            copy.note(StandbyEvent.LOSE)
            copy.buckets.clear()
            copy.rows = StandbyRows()
            self._changed.notify_all()

    def _give(self, shard: Shard, order: Advance, copy: _Copy) -> None:
        """Have the standby apply the previous round, and send this one. Nothing is applied meanwhile."""
        assert order.apply is not None
        version, attempt = order.version - 1, order.apply.attempt
        behind = None if copy.state is StandbyState.READY else copy.before
        slow = self._slice()
        for request, body in copy.rows.messages(shard.tables, order.version, order.apply, slow):
            self._standby.rows(request, memoryview(body), term=shard.term)
        self._standby.advance(for_standby(Advance(version, attempt, {}, behind, term=order.term, next=order)))
        copy.note(StandbyEvent.ROUND)
        self._send_buckets(shard, copy)
        for values in shard.sums():
            if (index := values.bucket.index) in copy.buckets:
                key = sum_key(shard.term, index, version, attempt)
                self._standby.sum(key, values.sum_bytes, values.present)
        if copy.state is StandbyState.CATCHING_UP and copy.rows.whole and shard.buckets <= copy.buckets:
            logger.info("the standby has every version from %d on", version)
            copy.note(StandbyEvent.COMPLETE)

    def _send_buckets(self, shard: Shard, copy: _Copy) -> None:
        """Send buckets that the standby lacks, for `ServerLimits.slice`, but one at least."""
        slow = self._slice()
        for bucket in sorted(shard.buckets - copy.buckets):
            tensors = list(shard.stored(bucket))
            for stored in tensors:
                where = bucket, stored.tensor, stored.start
                part = CopiedTensor(*where, stored.key, stored.dtype, stored.scalar, stored is tensors[-1])
                self._standby.state(part, as_bytes(stored.value), term=shard.term)
            copy.buckets.add(bucket)
            if slow():
                return

    def _slice(self) -> Callable[[], bool]:
        """Returns whether `ServerLimits.slice` has passed since."""
        end = time.monotonic() + self._limits.slice.total_seconds()
        return lambda: time.monotonic() > end  # mutant: equal

    def _run(self) -> None:
        """Send the standby the configuration as soon as it answers."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or (self._copy is not None and self.state is StandbyState.AWAY)
                )
                if self._closing:
                    return
                if (pause := self._not_before - time.monotonic()) > 0:
                    self._changed.wait(pause)
                    continue
                copy = self._copy
            assert copy is not None
            with self._turn, self._changed:  # an earlier order comes first, and may change the state
                if self._closing or self._copy is not copy or time.monotonic() < self._not_before:
                    continue
            try:
                self._standby.configure(copy.base)
            except (TransportError, Refused) as error:
                logger.debug("the standby does not answer: %s", error)
                with self._changed:
                    self._not_before = time.monotonic() + self._limits.probe.total_seconds()
            else:
                with self._changed:
                    copy.note(StandbyEvent.TELL)


GONE = timedelta(seconds=30)
"""A standby that does not answer for this long is given up, with the rounds that it alone has."""


@dataclass(frozen=True)
class Rescue:
    """Makes checkpoints of versions that are in none.

    Attributes:
        shards, standbys: in the same order.
        closing: whether the process was asked to end. Then a silent standby is not waited for; see also
            `Checkpointer.await_whole`.
        gone: for how long calls to a standby that does not answer are repeated.
    """

    checkpoints: Checkpointer
    shards: Sequence[ShardControl]
    standbys: Sequence[RemoteShard]
    closing: Callable[[], bool] = lambda: False
    gone: timedelta = GONE

    def held(self) -> list[Advance]:
        """The orders that shard 0's standby can carry out, oldest first; [] if it does not answer.

        Blocks for its answer, for `gone` at most.

        Raises:
            Fenced: another parameter server has begun a newer term.
            AskedToEnd: the process was asked to end meanwhile. The standby keeps its rounds.
        """
        ask = partial(self.standbys[0].held, self.checkpoints.term)
        try:
            return retry(ask, TransportError, patience=self.gone, over=self.closing)
        except Refused as refusal:
            raise Fenced(str(refusal)) from refusal
        except TransportError as error:
            if self.closing():
                raise AskedToEnd(f"asked to end while the standby did not answer: {error}") from error
            logger.warning("the standby does not answer: %s", error)
            return []

    def save(self, orders: Sequence[Advance]) -> bool:
        """Make a checkpoint of the newest of `orders` that each shard or its standby can carry out.

        Blocks until it is on disk. May be called again.

        Args:
            orders: of one shard 0, oldest first, each with the state of its version.

        Returns:
            Whether there is a new checkpoint. If not, the job continues from the previous one.

        Raises:
            StorageUnavailable: the version exists, but could not be written, or the process is about to end.
                The version is not lost: try again.
            Fenced: another parameter server has begun a newer term.
        """
        for order in reversed(orders):
            durable = self.checkpoints.durable_version
            if durable is not None and order.version <= durable:
                return False
            try:
                self._save(order)
            except TransportError as error:  # the standby would not answer to an older order either
                logger.warning("version %d is given up, since a standby is silent: %s", order.version, error)
                return False
            except Refused as refusal:
                if refusal.code is RefusalCode.STALE_TERM:
                    raise Fenced(str(refusal)) from refusal
                logger.warning("version %d cannot be saved from the standbys: %s", order.version, refusal)
            else:
                logger.info("version %d was saved from the standbys", order.version)
                return True
        return False

    def _save(self, order: Advance) -> None:
        checkpoints, term = self.checkpoints, self.checkpoints.term
        number = checkpoints.number()
        if "tensors" not in (state := json.loads(order.state)):
            raise Refused(RefusalCode.INVALID, "the standby is of another version than its shard")
        order = replace(order, term=term, expected={}, prepare=False, state="", rescued_term=order.term)
        pairs = [*zip(self.shards, self.standbys, strict=True)]
        for pair in pairs if len(pairs) > 1 else ():  # all vote: one that applies it cannot save an older one
            self._writer(*pair, replace(order, prepare=True))
        writers = [self._writer(*pair, replace(order, checkpoint=number)) for pair in pairs]
        checkpoints.begin(order.version, time.monotonic(), state, number=number)
        probe = Advance(order.version, 0, {}, term=term, rescued_term=order.rescued_term)

        def ask() -> None:
            for index, writer in enumerate(writers):
                checkpoints.part(index, writer.advance(probe))

        with suppress(Refused):  # a writer has lost the version; `failure` says so
            checkpoints.await_whole(ask, closing=self.closing)
        if checkpoints.fenced:
            raise Fenced(checkpoints.failure)
        if checkpoints.durable_version != order.version:
            raise StorageUnavailable(f"version {order.version} cannot be saved yet: {checkpoints.failure}")

    def _writer(self, shard: ShardControl, standby: RemoteShard, order: Advance) -> ShardControl:
        """Have a shard carry `order` out, or its standby if the shard has lost the model; return it."""

        def first_that_can() -> ShardControl:
            problems: list[Refused | TransportError] = []
            for writer, its in ((shard, order), (standby, for_standby(order))):
                try:
                    writer.advance(its)
                    return writer
                except (Refused, TransportError) as error:
                    problems.append(error)
            raise next((e for e in reversed(problems) if isinstance(e, TransportError)), problems[-1])

        try:
            return retry(first_that_can, TransportError, patience=self.gone, over=self.closing)
        except TransportError as error:
            if not self.closing():
                raise
            raise StorageUnavailable(f"version {order.version} is left to the standby: {error}") from error
