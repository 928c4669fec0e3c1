"""Saving the rounds that are on no disk, when a shard has lost them: from the other shards and the standbys.

The version that is saved becomes a checkpoint like any other, and the job continues from it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

from elastic_ps.errors import AskedToEnd, Fenced, RefusalCode, Refused, StorageUnavailable, TransportError
from elastic_ps.server.checkpointer import Checkpointer
from elastic_ps.server.follower import for_standby
from elastic_ps.server.orders import Advance, ShardControl
from elastic_ps.server.patience import retry
from elastic_ps.server.remote import RemoteShard

logger = logging.getLogger(__name__)

GONE = timedelta(seconds=30)
"""A standby is given up, with what it alone has, this long after the first call that it has not answered."""


def held(
    standby: RemoteShard, term: int, *, closing: Callable[[], bool] = lambda: False, gone: timedelta = GONE
) -> list[Advance]:
    """The orders that shard 0's standby can carry out, oldest first; none if it does not answer for `gone`.

    Blocks until it answers.

    Args:
        closing: whether the process was asked to end.

    Raises:
        Fenced: another parameter server has begun a newer term.
        AskedToEnd: the process was asked to end meanwhile. The standby keeps what it has.
    """
    try:
        return retry(partial(standby.held, term), TransportError, patience=gone, over=closing)
    except Refused as refusal:
        raise Fenced(str(refusal)) from refusal
    except TransportError as error:
        if closing():
            raise AskedToEnd(f"asked to end while the standby did not answer: {error}") from error
        logger.warning("the standby does not answer: %s", error)
        return []


def rescue(
    checkpoints: Checkpointer,
    shards: Sequence[ShardControl],
    standbys: Sequence[RemoteShard],
    orders: Sequence[Advance],
    *,
    closing: Callable[[], bool] = lambda: False,
    gone: timedelta = GONE,
) -> bool:
    """Make a checkpoint of the newest of `orders` that the shards, or their standbys, can all carry out.

    Blocks until it is on disk. A standby that does not answer is asked again, until `gone` has passed. May be
    called again.

    Args:
        orders: of one shard 0, oldest first, each with the state of its version.
        closing: whether the process is about to end. Then no silent standby is waited for; see also
            `Checkpointer.await_whole`.

    Returns:
        Whether there is a newer checkpoint now. If not, the job continues from the one before.

    Raises:
        StorageUnavailable: the version is there, but could not be written, or the process is about to end.
            It is not lost: try again.
        Fenced: another parameter server has begun a newer term.
    """
    for order in reversed(orders):
        if checkpoints.durable_version is not None and order.version <= checkpoints.durable_version:
            return False
        try:
            _save(checkpoints, shards, standbys, order, closing=closing, gone=gone)
        except TransportError as error:  # it will not answer to an older order either
            logger.warning("version %d is given up with a standby that has gone: %s", order.version, error)
            return False
        except Refused as refusal:
            if refusal.code is RefusalCode.STALE_TERM:
                raise Fenced(str(refusal)) from refusal
            logger.warning("version %d cannot be saved from the standbys: %s", order.version, refusal)
        else:
            logger.info("version %d was saved from the standbys", order.version)
            return True
    return False


def _save(
    checkpoints: Checkpointer,
    shards: Sequence[ShardControl],
    standbys: Sequence[RemoteShard],
    order: Advance,
    *,
    closing: Callable[[], bool],
    gone: timedelta,
) -> None:
    """Raises TransportError, Refused, StorageUnavailable, Fenced."""
    number = checkpoints.number()
    write = replace(order, checkpoint=number, term=checkpoints.term, expected={}, prepare=False, rescue=True)
    writers = [
        _order(*pair, write, closing=closing, gone=gone) for pair in zip(shards, standbys, strict=True)
    ]
    checkpoints.begin(order.version, time.monotonic(), json.loads(order.state), number=number)
    probe = Advance(order.version, 0, {}, term=checkpoints.term, rescue=True)

    def ask() -> None:
        for index, writer in enumerate(writers):
            checkpoints.part(index, writer.advance(probe).written)

    with suppress(Refused):  # whoever writes it has lost it; `failure` says so, and another one may have it
        checkpoints.await_whole(ask, closing=closing)
    if checkpoints.fenced:
        raise Fenced(checkpoints.failure)
    if checkpoints.durable_version != order.version:
        raise StorageUnavailable(f"version {order.version} cannot be saved yet: {checkpoints.failure}")


def _order(
    shard: ShardControl, standby: RemoteShard, order: Advance, *, closing: Callable[[], bool], gone: timedelta
) -> ShardControl:
    """Have a shard carry `order` out, or its standby if the shard has lost the model. Returns who has.

    Raises:
        Refused: neither can.
        TransportError: one of them has not answered for `gone`, and the other one cannot.
        StorageUnavailable: one of them does not answer, and the process is about to end.
    """

    def first_that_can() -> ShardControl:
        problems: list[Refused | TransportError] = []
        for writer, its in ((shard, order), (standby, for_standby(order))):
            try:
                writer.advance(its)
            except (Refused, TransportError) as error:
                problems.append(error)
            else:
                return writer
        raise next((each for each in reversed(problems) if isinstance(each, TransportError)), problems[-1])

    try:
        return retry(first_that_can, TransportError, patience=gone, over=closing)
    except TransportError as error:
        if not closing():
            raise
        raise StorageUnavailable(f"version {order.version} is left to the standby: {error}") from error
