"""A second process that has every round of a shard before the shard applies it.

The standby holds a shard of its own, one round behind: the sums of the round that is about to be applied
are sent to it, with the order to apply them, and it carries the order out when the next one comes. So it can
give back the version before and the version after, whichever the other shards have, and steps with the same
code on the same sums: its values are the same to the bit. It never takes over by itself. A parameter server
that comes back has it write a checkpoint, and everything goes on as from any other (docs/protocol.md).

This is primary-backup replication (Alsberg and Day 1976): what workers may see, the backup has.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from elastic_ps.codec import as_bytes
from elastic_ps.core.sequence import PushKey
from elastic_ps.errors import RefusalCode, Refused, TransportError
from elastic_ps.server.orders import Advance, Application, Configuration, Standing
from elastic_ps.server.remote import RemoteShard
from elastic_ps.server.shard import BucketSum, Shard

logger = logging.getLogger(__name__)

PROBE = timedelta(milliseconds=500)
"""Between two looks whether a standby is there."""

BACKLOG = 16
"""Rounds that are kept for a standby while it loads; then training waits for it, for at most `PATIENCE`."""

PATIENCE = timedelta(seconds=10)


LEADER = (0, 0, 0)
"""(worker, incarnation, step) of what a standby adds up: its shard's sum, and nothing else."""


def sum_key(term: int, bucket: int, version: int, attempt: int) -> PushKey:
    """A bucket's sum on a standby, in the place of a worker's push."""
    worker, incarnation, step = LEADER
    return PushKey(
        term=term,
        worker=worker,
        incarnation=incarnation,
        step=step,
        bucket=bucket,
        version=version,
        attempt=attempt,
    )


def for_standby(order: Advance) -> Advance:
    """An order as a standby can carry it out: its sums come from the shard that it follows."""
    if order.apply is None:
        return order
    return replace(order, apply=replace(order.apply, contributors=[LEADER]), expected={})


@dataclass(frozen=True)
class _Round:
    """What a standby needs to make a version: the order, the one before it, and the sums."""

    order: Advance
    before: Application | None
    term: int
    sums: list[BucketSum]

    @property
    def attempt(self) -> int:
        assert self.order.apply is not None
        return self.order.apply.attempt


class Follower:
    """A shard's standby, as the shard sees it, and the thread that lets it catch up. Thread-safe.

    Args:
        standby: the way to it; closed by `close`.
        on_disk: whether the checkpoint of a version is whole.
    """

    def __init__(self, standby: RemoteShard, on_disk: Callable[[int], bool]) -> None:
        self._standby = standby
        self._on_disk = on_disk
        self._changed = threading.Condition()
        self._standing = Standing.AWAY
        self._base: Configuration | None = None
        self._backlog: deque[_Round] = deque()
        self._loading = False
        self._before: Application | None = None  # the round that the standby is to apply next
        self._staged: Advance | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @property
    def standing(self) -> Standing:
        with self._changed:
            return self._standing

    def reset(self, base: Configuration) -> None:
        """The shard begins anew; so does its standby, with the same checkpoint or the next one."""
        with self._changed:
            self._before, self._staged = None, None
            self._forget()
            if base.load_version is not None:
                self._base, self._standing = base, Standing.CATCHING_UP
                self._changed.notify_all()

    def begin(self, base: Configuration) -> None:
        """A checkpoint is being written, `base.load_version`: a standby that needs one loads it."""
        with self._changed:
            if self._standing is Standing.EMPTY:
                self._base, self._standing = base, Standing.CATCHING_UP
                self._changed.notify_all()

    def stage(self, shard: Shard, order: Advance) -> None:
        """Give the standby what `order` is about to apply. Blocks until it has it, if it follows.

        A standby that fails is left behind: training goes on without it.

        Raises:
            Refused: STALE_TERM; a newer parameter server has asked for the standby's rounds.
        """
        assert order.apply is not None
        with self._changed:
            staged, self._staged = self._staged, order
            if staged is not None and (staged.version, staged.apply) == (order.version, order.apply):
                return
            if staged is not None and staged.version < order.version:  # else it was withdrawn
                self._before = staged.apply
            before = self._before
            self._make_room()
            standing = self._standing
            if standing is Standing.CATCHING_UP:
                copies = [s._replace(total=s.total.clone()) for s in shard.sums()]
                self._backlog.append(_Round(order, before, shard.term, copies))
                self._changed.notify_all()
        if standing is Standing.FOLLOWING:
            self._try_to_give(_Round(order, before, shard.term, list(shard.sums())))

    def close(self) -> None:
        """End the thread. Blocks for the call that is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._standby.close()
        self._thread.join()

    def _make_room(self) -> None:
        """Wait for a standby that is loading; leave one behind whose checkpoint is not written yet."""

        def settled() -> bool:
            return self._standing is not Standing.CATCHING_UP or len(self._backlog) < BACKLOG

        if self._loading:
            self._changed.wait_for(settled, timeout=PATIENCE.total_seconds())
        if not settled():
            self._leave_behind("it does not catch up")

    def _leave_behind(self, why: object) -> None:
        if self._standing in (Standing.CATCHING_UP, Standing.FOLLOWING) and not self._closing:
            logger.warning("training continues without the standby: %s", why)
        self._forget()

    def _forget(self) -> None:
        self._standing, self._base, self._loading = Standing.AWAY, None, False
        self._backlog.clear()
        self._changed.notify_all()

    def _try_to_give(self, given: _Round) -> bool:
        try:
            self._give(given)
        except (TransportError, Refused) as error:
            with self._changed:
                self._leave_behind(error)
            if isinstance(error, Refused) and error.code is RefusalCode.STALE_TERM:
                raise
            return False
        return True

    def _give(self, given: _Round) -> None:
        """Have the standby apply the round before, and send it this one."""
        version, attempt = given.order.version - 1, given.attempt
        order = Advance(version, attempt, {}, given.before, term=given.order.term, next=given.order)
        self._standby.advance(for_standby(order))
        for part in given.sums:
            self._standby.sum(
                part.bucket,
                as_bytes(part.total),
                part.present,
                term=given.term,
                version=version,
                attempt=attempt,
            )

    def _run(self) -> None:
        def busy() -> bool:
            return self._closing or self._standing is Standing.CATCHING_UP

        while True:
            with self._changed:
                self._changed.wait_for(busy, timeout=PROBE.total_seconds())
                if self._closing:
                    return
                standing, base = self._standing, self._base
            try:
                if standing in (Standing.AWAY, Standing.EMPTY):
                    self._look()
                elif standing is Standing.CATCHING_UP and base is not None:
                    self._catch_up(base)
            except (TransportError, Refused) as error:
                with self._changed:
                    self._leave_behind(error)

    def _look(self) -> None:
        """See whether a standby has come, or has gone again."""
        self._standby.held(0)
        with self._changed:
            if self._standing is Standing.AWAY:
                self._standing = Standing.EMPTY

    def _catch_up(self, base: Configuration) -> None:
        """Have the standby load the checkpoint once it is whole, then give it the rounds since."""
        assert base.load_version is not None
        while not self._on_disk(base.load_version):
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or self._base is not base, timeout=0.02):
                    return
        with self._changed:
            if self._base is not base:
                return
            self._loading = True
        self._standby.configure(base)
        while True:
            with self._changed:
                if self._base is not base:
                    return
                if not self._backlog:
                    self._standing, self._base, self._loading = Standing.FOLLOWING, None, False
                    logger.info("the standby has every round from version %d on", base.load_version)
                    return
                given = self._backlog.popleft()
                self._changed.notify_all()
            if not self._try_to_give(given):
                return
