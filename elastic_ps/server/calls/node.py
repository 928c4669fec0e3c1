"""The shard of a parameter server process: it loads, takes part in rounds and writes parts of checkpoints.

A standby is a node, too. It gets each order one round before it carries the order out.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from elastic_ps.checkpoint.bases import Bases
from elastic_ps.checkpoint.store import Store
from elastic_ps.codec import as_bytes, checksum
from elastic_ps.codec.memory import Scratch
from elastic_ps.codec.optimizers import Optimizers
from elastic_ps.codec.plan import Plan
from elastic_ps.codec.state import CopiedTensor, Snapshot
from elastic_ps.core.partition import Rule
from elastic_ps.core.sequence import PushKey
from elastic_ps.errors import CheckpointError, RefusalCode, Refused
from elastic_ps.process.telemetry import History, Trace
from elastic_ps.server.job.standby import Follower, for_standby
from elastic_ps.server.limits import USUAL, ServerLimits
from elastic_ps.server.orders import Advance, Configuration, Model, OrderId, OrderLog, Report, Written
from elastic_ps.server.shards.shard import Shard
from elastic_ps.transport import messages_pb2 as pb
from elastic_ps.transport.base import Incoming

logger = logging.getLogger(__name__)

BLOCK = 1 << 22
"""The bytes of a checkpoint that are copied, digested and written at a time."""


class Node:
    """The shard of this process, once it is configured, and the thread that writes its checkpoints.

    Args:
        history: records the values that the shard has loaded, made and written. The caller closes it.
        follower: the shard's standby. `close` closes it.
        optimizers, draft_bytes: see `Shard`.
    """

    def __init__(
        self,
        index: int,
        shards: int,
        *,
        store: Store | None,
        trace: Trace,
        history: History | None = None,
        follower: Follower | None = None,
        optimizers: Optimizers | None = None,
        draft_bytes: float = math.inf,
        limits: ServerLimits = USUAL,
    ) -> None:
        self.index, self.shards, self.store, self._limits = index, shards, store, limits
        self._optimizers, self._draft_bytes = optimizers or Optimizers(), draft_bytes
        self._follower, self._trace, self._history = follower, trace, history or History(None, "")
        self._lock = threading.Lock()
        self._shard: Shard | None = None
        self._term = 0
        self._obeys = 0  # the newest term that has given orders
        self._heard = threading.Condition(self._lock)
        self._heard_at = time.monotonic()
        self._released = False  # mutant: equal
        self._orders: list[Advance] = []  # as a standby: the one carried out last, and the next
        self._log = OrderLog()
        self._wanted = threading.Condition(self._lock)
        # Of the checkpoint that was ordered last, until the writer begins it.
        self._snapshot: tuple[Written, Snapshot] | None = None
        self._closing = False
        self._begun = (0, 0)  # term and number of the checkpoint that was ordered last
        self._written: Written | None = None  # its outcome
        self._bases = Bases(store)
        self._writer = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._writer.start()

    @property
    def configured(self) -> bool:
        """Whether the shard knows the model."""
        with self._lock:
            return self._shard is not None

    @property
    def term(self) -> int:
        """The job's term when the shard was configured last; 0 before."""
        with self._lock:
            return self._term

    @property
    def shard(self) -> Shard:
        """Raises Refused (NOT_READY) before the shard knows the model."""
        with self._lock:
            if self._shard is None:
                raise Refused(RefusalCode.NOT_READY, f"shard {self.index} does not know the model yet")
            return self._shard

    def configure(self, configuration: Configuration, order: OrderId | None = None) -> None:
        """See ShardControl. `order`: its number, if it came over the network.

        Raises InvalidModel, CheckpointError, Refused (STALE_TERM), InvalidJob: a codec cannot be imported.
        """
        self._obey(configuration.term)
        if self._log.is_old(order):
            return
        codecs = Plan(configuration.mutable.compression)
        shard = Shard(
            self.index,
            configuration,
            trace=self._trace,
            codecs=codecs,
            optimizers=self._optimizers,
            draft_bytes=self._draft_bytes,
            limits=self._limits,
        )
        if configuration.load_version is not None:
            if self.store is None:
                raise CheckpointError(f"shard {self.index} has no checkpoint directory to load from")
            with self.store.open(configuration.load_version) as stored:
                shard.load(stored, configuration.load_version)
                shard.tables.load(stored)
        with self._lock:
            if not self._log.is_last(order):
                return  # the order was repeated meanwhile
            before, self._shard = self._shard, shard
            self._term, self._orders = configuration.term, []
            self._begun, self._written, self._snapshot = (0, 0), None, None
            self._bases = Bases(self.store)
        said = codecs.compression.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        self._history.record("coding", term=configuration.term, compression=said)
        if configuration.load_version is not None:
            self._record_values(shard)
        if self._follower is not None:
            self._follower.reset(configuration)
        if before is not None:
            before.retire(RefusalCode.STALE_TERM)

    def advance(self, advance: Advance, order: OrderId | None = None) -> Report:
        """See ShardControl. `order`: its number, if it came over the network.

        Raises:
            Refused: see `Shard.advance`; STALE_TERM: a newer term gives the orders now; NOT_READY: the model
                is of another term, the shard lacks the version of which a checkpoint is ordered, or a standby
                that is still catching up is ordered to act for its shard.
        """
        self._obey(advance.term)
        if self._log.is_old(order):
            return self._report()
        shard = self.shard
        if (term := advance.rescued_term or advance.term) and term != shard.term:
            text = f"shard {self.index} has the model of term {shard.term}; the order is of term {term}"
            raise Refused(RefusalCode.NOT_READY, text)
        if advance.next is None and not shard.whole:
            text = f"the standby of shard {self.index} is still catching up"
            raise Refused(RefusalCode.NOT_READY, text)
        to_apply = advance.apply
        if to_apply is not None and not shard.has_to_apply(advance.version, to_apply):
            to_apply = None
        if to_apply is not None and self._follower is not None:
            self._follower.stage(shard, advance)
        if advance.prepare:
            norm = 0.0
            if to_apply is not None and to_apply.clips is not None:
                norm = shard.norm(advance.version, to_apply)
            return replace(self._report(), norm=norm)
        shard.advance(advance.version, advance.attempt, advance.expected, advance.apply)
        if not self._log.is_last(order):
            return self._report()
        if to_apply is not None and not to_apply.elsewhere:
            self._record_values(shard)
        if advance.next is not None:
            with self._lock:
                done = [order for order in self._orders if order.version == advance.version]
                self._orders = [*done, advance.next]
            self._obey(advance.term)  # as in take_sum
        if advance.checkpoint and self.store is not None:
            self._keep(shard, advance)
        if advance.last:
            with self._heard:
                self._released = True
                self._heard.notify_all()
        return self._report()

    def await_release(self, most: timedelta, *, quiet: timedelta) -> None:
        """Block until shard 0 has sent its last order, has sent none for `quiet`, or `most` has passed.

        All shards are asked to end at the same time, and shard 0 needs their parts of the last checkpoint.
        """
        deadline = time.monotonic() + most.total_seconds()
        with self._heard:
            while not self._released:
                left = min(deadline, self._heard_at + quiet.total_seconds()) - time.monotonic()
                if left <= 0:
                    return
                self._heard.wait(left)

    def _obey(self, term: int) -> None:
        with self._heard:
            self._heard_at = time.monotonic()
            self._released = False
            if term and term < self._obeys:
                text = f"this is an order of term {term}; term {self._obeys} gives the orders now"
                raise Refused(RefusalCode.STALE_TERM, text)
            if term > self._obeys:
                self._obeys = term
                self._log.clear()

    def _report(self) -> Report:
        with self._lock:
            written, shard = self._written, self._shard
        standby = self._follower.state if self._follower else None
        if shard is None:
            return Report(written, standby)
        return Report(written, standby, queued=shard.queued, tables=shard.tables.counts())

    def _keep(self, shard: Shard, advance: Advance) -> None:
        """Let the writer write the shard as it is now.

        A snapshot that the writer has not begun is dropped, since its checkpoint was given up. So there are
        two at most, of which one is being written.

        Raises:
            Refused: see `Shard.snapshot`.
        """
        label = (advance.term or self.term, advance.checkpoint)
        with self._lock:
            if label <= self._begun:
                return  # ordered again
            self._snapshot = None
        since = self._bases.version
        base = self._bases.link(since, *label, advance.version) if shard.tables.few_changed(since) else None
        snapshot = shard.snapshot(advance.version, since=since if base is not None else None)
        self._record_values(shard)
        with self._wanted:
            if label <= self._begun:
                return  # ordered again meanwhile; a part that is written twice may be in use by then
            self._begun, self._written = label, None
            self._snapshot = Written(*label, advance.version, None, "", timedelta(0), base), snapshot
            self._wanted.notify_all()

    def _record_values(self, shard: Shard) -> None:
        """Record the checksum of each bucket, as workers get it. The next round is not applied yet."""
        if self._history.enabled:
            version, layout = shard.version, shard.layout
            values = [
                (bucket.index, version, checksum(as_bytes(shard.codecs.as_pulled(layout, bucket, flat))))
                for bucket, flat in shard.values()
                if bucket.rule is not Rule.CONSTANT
            ]
            self._history.record("values", term=shard.term, values=values)

    def take_state(self, term: int, part: CopiedTensor, body: Incoming, order: OrderId | None = None) -> None:
        """On a standby, take one tensor of a bucket over. Blocks while it is received. Raises Refused."""
        self._obey(term)
        # Take the shard first: a `configure` may replace it, and older orders are not for the new one.
        shard = self.shard
        if not self._log.is_old(order):
            shard.take_state(part, body)
            self._obey(term)  # as in take_sum

    def take_rows(self, request: pb.RowsRequest, body: Incoming, order: OrderId) -> None:
        """On a standby, take rows of tables over. Blocks while they are received. Raises Refused."""
        self._obey(request.term)
        shard = self.shard  # as in take_state
        if not self._log.is_old(order):
            shard.tables.follow(request, body)
            self._obey(request.term)

    def take_sum(self, key: PushKey, present: Sequence[bool], body: Incoming) -> None:
        """On a standby, take a bucket's sum over. Blocks while it is received. Raises Refused."""
        self._obey(key.term)
        self.shard.take_sum(key, present, body)
        self._obey(key.term)  # a newer term may have asked meanwhile, and was told that the sum is not here

    def held(self, term: int) -> list[Advance]:
        """On a standby, return the orders that it can carry out, oldest first, each with the whole state.

        Older terms are refused from now on.

        Raises:
            Refused: STALE_TERM; a newer term has asked.
        """
        self._obey(term)
        with self._lock:
            shard, orders = self._shard, list(self._orders)
        if shard is None or not shard.whole:
            return []
        able: list[Advance] = []
        for order in orders:
            following = for_standby(order).apply
            assert following is not None
            with suppress(Refused):  # nothing is raised if it has applied the order, or has all sums for it
                shard.has_to_apply(order.version, following)
                able.append(Model(shard.layout, shard.optimizer).complete(order))
        return able

    def _write(self) -> None:
        scratch = Scratch()
        while (snapshot := self._await_snapshot()) is not None:
            assert self.store is not None
            begun, tensors = snapshot
            place = begun.term, begun.version, self.index, self.shards, tensors.read(scratch, most=BLOCK)
            try:
                file = self.store.write_shard(*place, number=begun.number, described=tensors.described)
                written = replace(begun, file=file)
            except CheckpointError as failure:
                logger.warning("%s", failure)
                written = replace(begun, error=str(failure))
            written = replace(written, pause=tensors.pause)
            del place, tensors, snapshot  # else the shard goes on to copy what it changes
            with self._lock:
                if (begun.term, begun.number) == self._begun:  # else nobody waits for it any more
                    self._written = written
                    if written.file is not None:
                        self._bases.wrote(written.version, written.file, written.base)

    def _await_snapshot(self) -> tuple[Written, Snapshot] | None:
        """Take out what to write next. Blocks until there is something; None at the end."""
        with self._wanted:
            self._wanted.wait_for(lambda: self._closing or self._snapshot is not None)
            snapshot, self._snapshot = self._snapshot, None
            return snapshot

    def retire(self) -> None:
        """Refuse all waiting calls: the process is about to end."""
        if self.configured:
            self.shard.retire(RefusalCode.NOT_READY)

    def close(self) -> None:
        """Write what was ordered, and end the thread. Blocks."""
        with self._wanted:
            self._closing = True
            self._wanted.notify_all()
        self._writer.join()
        if self._follower is not None:
            self._follower.close()
